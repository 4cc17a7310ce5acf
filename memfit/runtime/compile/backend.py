"""The torch.compile backend: `torch.compile(model, backend="memfit", options={"budget": "6GiB"})`.

Each graph of Dynamo is planned at its concrete sizes when it first runs, within the bytes that the budget leaves beside
everything else on the device. After its first whole step it is planned once more: only then are the bytes known that
user code holds between the halves and beside the graph (the loss, the optimizer's state, other graphs' activations).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
import torch.fx

from memfit.binding import Origin, Value
from memfit.capture import with_real_results
from memfit.capture.corrected_fakes import corrected_fakes
from memfit.capture.dropout import with_eagers_dropout
from memfit.capture.joint import BetweenHalves, JointCapture, capture_joint
from memfit.capture.numbers import numbers_read, with_numbers_as_tensors
from memfit.cost.calibration import linked_device
from memfit.cost.observations import Corrections
from memfit.cost.views import on_its_own
from memfit.errors import InvalidOptionError, NoPlanError, UnsupportedStepError
from memfit.graph import Graph
from memfit.plan import Plan
from memfit.planners.none import KeepEverything
from memfit.planning import Settings, make_plan
from memfit.runtime.compile.account import Account
from memfit.runtime.compile.halves import partitioned
from memfit.runtime.compile.inductor import Compiled, Planning, Unplanned, compile_within
from memfit.runtime.compile.inputs import (
    overlapping,
    refuse_casts_inside,
    refuse_other_autocast,
    refuse_other_hooks,
    refuse_ranks,
    refuse_retained_graph,
    signatures,
)
from memfit.runtime.compile.occupancy import bytes_beside, bytes_of
from memfit.runtime.compile.settings import INDUCTOR, GraphSettings, read_options, settings_of
from memfit.runtime.prepare import Prepared, prepare, with_costs
from memfit.runtime.turns import turn_on
from memfit.system.budget import format_bytes
from memfit.system.recorder import allocated_bytes
from memfit.torch_private.aot import boxed, trace_joint
from memfit.torch_private.autograd import any_autocast
from memfit.torch_private.dynamo import times_compiled
from memfit.torch_private.modules import hooks_on_all_modules
from memfit.torch_private.tensors import (
    DATA_DEPENDENT_ERRORS,
    fake_mode_of,
    is_plain_dense,
    make_boxed_func,
    real_tensors,
    tensors_in,
)

_log = logging.getLogger("memfit")
_ADAM_STATES = 2  # per parameter: exp_avg and exp_avg_sq
_HEADROOM = 0.005  # of the budget: logged losses and the like, which come and go between steps
_NUMBER_BYTES = 8  # an output of no more is the loss itself, from which user code computes nothing large
_MANY_TIMES = 64  # Dynamo takes eight for a sign of an integer that differs in each call, and goes on in eager
_WORTH_PLANNING_AGAIN = 0.01  # of the budget: a smaller change of the bytes outside is not worth a second search


def memfit_backend(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> PlannedGraph:
    """Plan the graphs of a compiled model within `options["budget"]`.

    Options:
        budget: bytes for everything on the device during the step: `"6GiB"`, or an integer. Required.
        host_budget, host_dir, planner, options, time_limit_seconds, seed, budget_is: as in `memfit.fit`.
        reserve: bytes that something else will take later: the optimizer state that the first step creates. By default
            the bytes of Adam's state, and a warning says so; 0 for plain SGD.
        kernels: `"eager"`, whose bits the step then has, or `"inductor"`, which generates code.

    Args:
        module: one graph of Dynamo's.
        example_inputs: not read; the sizes of the first call count.
        options: as above.
        mode: of `torch.compile`, which is Inductor's own; refused.

    Raises:
        InvalidOptionError, InvalidBudgetError: options that cannot be read.
        InfeasibleBudgetError, TimeLimitError: no plan was found for the bytes that the budget leaves.
        UnsupportedStepError: DDP or FSDP; backward with retain_graph=True, before anything is released; a forward pass
            that runs again before its backward, and a host budget that has no room for it.
    """
    # Options are read when the graph is first called: an error raised here would reach the user wrapped by Dynamo.
    del example_inputs
    if times_compiled() == _MANY_TIMES:
        _log.warning(
            "memfit: a function was compiled %d times by now, and each takes seconds and memory: an integer that "
            "it reads, such as a counter in an attribute, may differ in each call; make it a tensor or a float",
            _MANY_TIMES,
        )
    return PlannedGraph(module, lambda: _read(options or {}, mode))


def _read(options: dict[str, Any], mode: str | None) -> GraphSettings:
    if mode is not None:
        raise InvalidOptionError(
            f"torch.compile: mode={mode!r} is of PyTorch's own backend; memfit's takes "
            """options={"budget": ...}, with "kernels": "inductor" for generated code"""
        )
    return read_options(options)


class PlannedGraph:
    """One graph of Dynamo's, with a compiled pair of halves for each tuple of concrete sizes.

    Args:
        module: the graph.
        read: returns the settings; called once, at the first call.

    Attributes:
        called: of the class: whether any graph was called in this process.
    """

    called: ClassVar[bool] = False

    def __init__(self, module: torch.fx.GraphModule, read: Callable[[], GraphSettings]) -> None:
        self.module = with_numbers_as_tensors(module)
        self.compiled: dict[Any, CompiledGraph] = {}
        self.has_warned = False  # of the bytes that are set aside for the optimizer
        self.has_warned_of_strides = False
        self.awaiting = 0  # backward passes of calls so far
        self._has_warned_of_sums = False
        self._has_own_account = False
        self._read = read
        self._hooks = hooks_on_all_modules()

    def __call__(self, *inputs: Any) -> Any:
        PlannedGraph.called = True
        refuse_other_hooks(self._hooks)
        device = _device_of(inputs)
        with turn_on(device).of(self, "the forward pass of a graph that memfit's backend compiled"):
            self._measure_on(device)
            return self._call(inputs)

    def _measure_on(self, device: torch.device) -> None:
        """Measure forward, loss and backward: what eager code beside the graph saves for backward is seen only so."""
        options = self.options
        if options.account is None and not options.is_part:
            account = Account(int(options.settings.budget), device, options.settings.budget_is)
            self.options, self._has_own_account = replace(options, account=account), True
        if self._has_own_account and self.options.account is not None and torch.is_grad_enabled():
            self.options.account.begin()

    def _call(self, inputs: Sequence[Any]) -> Any:
        key = (signatures(inputs), torch.is_grad_enabled())
        compiled = self.compiled.get(key)
        if compiled is None:
            refuse_ranks(inputs)
        account = self.options.account
        if compiled is None or compiled.should_plan_again(inputs):
            compiled = self.compiled[key] = self.compile(inputs, compiled)
            if account is not None:
                account.compiled += 1
        if compiled.plan is not None:
            self._warn_of_sums(inputs)
            self.awaiting += 1
        returned = self._run(compiled, inputs)
        for node in {leaf.grad_fn for leaf in returned if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None}:
            node.register_prehook(compiled.check_gradients)
        return returned

    def _warn_of_sums(self, inputs: Sequence[Any]) -> None:
        """Warn where eager would sum a parameter's gradients use by use, over calls that one backward pass is for."""
        if not self.awaiting or self._has_warned_of_sums or self.options.is_part:
            return
        places = zip(inputs, (node for node in self.module.graph.nodes if node.op == "placeholder"), strict=False)
        if any(isinstance(given, torch.nn.Parameter) and len(node.users) > 1 for given, node in places):
            self._has_warned_of_sums = True
            _log.warning(
                "memfit: a graph that uses a parameter several times (tied embeddings, say) was called again before "
                "the backward pass of its last call: if one backward pass is for both, each call's gradients are "
                "summed first, eager's use by use, and last bits may differ; memfit.fit has eager's"
            )

    def _run(self, compiled: CompiledGraph, inputs: Sequence[Any]) -> Any:
        """Run a compiled graph; one without a backward half has no plan, and is held to the budget by measurement."""
        account = self.options.account
        if compiled.plan is None and account is not None:
            return account.evaluate(lambda: compiled.function(*inputs))
        if account is not None:
            account.ran += 1
        return compiled.function(*inputs)

    def compile(self, inputs: Sequence[Any], before: CompiledGraph | None) -> CompiledGraph:
        """Return the compiled graph at the sizes of `inputs`.

        Args:
            inputs: of the graph.
            before: what was compiled for these sizes before, if anything.

        Raises:
            UnsupportedStepError: the graph depends on the value of a number or of a tensor.
        """
        try:
            return CompiledGraph(self, inputs, before)
        except DATA_DEPENDENT_ERRORS as error:
            raise UnsupportedStepError(
                "the model computes with a number that changes from call to call (or under dynamic=True might), such "
                "as an attribute or what `item` gave, otherwise than by +, -, * and / with a tensor of floats: hand it "
                "in as a tensor, or memfit.fit the step (it reads "
                f"{numbers_read(self.module) or 'a number from a tensor'})"
            ) from error

    @cached_property
    def options(self) -> GraphSettings:
        """How the graph is planned."""
        return self._read()

    @property
    def plans(self) -> list[Plan]:
        """The plans in use, one for each tuple of sizes."""
        return [c.plan for c in self.compiled.values() if c.plan is not None]


class CompiledGraph:
    """A graph at concrete sizes: traced by AOTAutograd, planned, lowered to two halves.

    Args:
        graph: where it is from.
        inputs: of the graph, at these sizes.
        before: what was compiled for these sizes before, if anything.
    """

    between: BetweenHalves | None = None

    def __init__(self, graph: PlannedGraph, inputs: Sequence[Any], before: CompiledGraph | None) -> None:
        self.graph = graph
        self.before = before
        self.asked_again = False
        self.inputs = tensors_in(inputs)
        self.device = _device_of(self.inputs)
        self.prepared: Prepared | None = None
        self.plan: Plan | None = None
        self.room_bytes = 0  # that the plan leaves of its budget
        self._by_inductors: Compiled | None = None
        self._unplanned = Unplanned() if before is None or graph.awaiting else before._unplanned
        self.budget_bytes = int(graph.options.settings.budget)
        self.bytes_beside = self.bytes_reserved = self.bytes_outside = self.bytes_exceeded = 0
        self.count_bytes()
        self._bytes_at_start = allocated_bytes(self.device)
        self.bytes_outside_seen: int | None = None  # between the halves
        self.bytes_held_seen: int | None = None  # when the backward half begins; less than 0 where results were let go
        self._bytes_departing = 0  # of the graph's outputs
        self._bytes_after_forward = 0
        self._is_in_autocast = any_autocast()  # while AOTAutograd traces, it is off
        shared = overlapping(inputs)
        examples = [
            on_its_own(leaf) if is_plain_dense(leaf) and place not in shared else leaf
            for place, leaf in enumerate(inputs)
        ]
        self._written_by_others = {n for n, leaf in enumerate(inputs) if not isinstance(leaf, torch.nn.Parameter)}
        self.function = self._by_inductor(examples) if graph.options.kernels == INDUCTOR else self._by_eager(examples)
        self.inputs = []

    def _by_eager(self, examples: Sequence[Any]) -> Callable[..., Any]:
        def traced(corrections: Corrections) -> Callable[..., Any]:
            with corrected_fakes(corrections):
                return trace_joint(
                    self.graph.module,
                    examples,
                    partition=partial(self._partition, corrections),
                    forward_compiler=lambda _module, _inputs: boxed(self.run_forward),
                    backward_compiler=lambda _module, _inputs: boxed(self.run_backward),
                    inference_compiler=lambda module, _inputs: make_boxed_func(with_eagers_dropout(module).forward),
                    backward_autocast=self.graph.options.backward_autocast,
                )

        return with_real_results(traced)

    def _by_inductor(self, examples: Sequence[Any]) -> Callable[..., Any]:
        options = self.graph.options

        def plan(graph: Graph, budget_bytes: int | None) -> Plan:
            outside = self.bytes_outside if self.before is None else max(0, self.before.bytes_held_seen or 0)
            settings = settings_of(options, graph).within(budget_bytes) if budget_bytes else _as_it_is(graph, outside)
            return make_plan(graph, linked_device(self.device, 0), settings, outside)

        planning = Planning(
            with_costs=lambda captured: with_costs(captured, options.settings),
            left_bytes=self._left_bytes,
            between_bytes=lambda: self.bytes_outside,
            plan=plan,
            run=self._run_half,
            held_bytes=self._held_bytes,
            headroom_bytes=self._headroom_bytes,
            decided=self._take_plan,
        )
        try:
            compiled = compile_within(
                self.graph.module, examples, device=self.device, planning=planning, unplanned=self._unplanned
            )
        except NoPlanError as error:
            raise self._of_whole_budget(error) from error
        if not isinstance(compiled, Compiled):
            return compiled
        self._take_plan(compiled)
        return compiled.function

    def _take_plan(self, compiled: Compiled) -> None:
        self.plan, self.room_bytes = compiled.plan, compiled.left_bytes - compiled.peak_bytes
        self._by_inductors = compiled

    def count_bytes(self) -> None:
        """Count what is on the device beside the graph's inputs."""
        account = self.graph.options.account
        if account is None:
            self.bytes_beside = bytes_beside(self.inputs, self.device)
        else:  # it also counts tensors that have no Python object
            self.bytes_beside = max(0, account.live_bytes - bytes_of(self.inputs, self.device))
        self.bytes_reserved = self._reserved()

    def should_plan_again(self, inputs: Sequence[Any]) -> bool:
        """Return whether the plan has no room for what is outside of the graph now, as steps so far have shown it.

        Gradients that a micro-batch left, the optimizer's state, activations of other graphs. Once, after the first
        step, also whether much less is outside than was assumed.
        """
        del inputs
        if self.bytes_outside_seen is None or self.plan is None:
            return False
        account = self.graph.options.account
        grown = self._grown_between()
        grown += allocated_bytes(self.device) - self._bytes_at_start
        grown += self._still_to_come() - self.bytes_reserved
        if account is not None and account.excess_bytes > self.bytes_exceeded:
            return True
        if grown > self.room_bytes + self._headroom_bytes:
            return True
        if self.before is not None or self.asked_again or self._is_unchanged:
            return False
        self.asked_again = True
        return -grown > _WORTH_PLANNING_AGAIN * self.budget_bytes

    @property
    def _is_unchanged(self) -> bool:
        """Whether no plan can be faster."""
        code = self._by_inductors
        return code.is_own if code is not None else self.plan is not None and self.plan.overhead <= 0

    def _grown_between(self) -> int:
        """Return by how much more the step takes than was planned for, with what was seen between the halves."""
        seen, code = self.bytes_outside_seen or 0, self._by_inductors
        if code is None:
            return seen - self.bytes_outside
        held = self.bytes_held_seen
        return code.peak_with(seen, None if held is None else max(held, self._bytes_departing)) - code.peak_bytes

    def _held_bytes(self) -> int | None:
        """Return by how much more is live when the backward half begins than at the forward half's end, as was seen.

        A loop that let the outputs go may keep them at any later step, so that these count in any case.
        """
        seen = None if self.before is None else self.before.bytes_held_seen
        return None if seen is None else max(seen, self._bytes_departing)

    def _still_to_come(self) -> int:
        """Return the bytes of state that a known optimizer has yet to make."""
        account = self.graph.options.account
        return 0 if account is None else account.bytes_to_come()

    @property
    def _headroom_bytes(self) -> int:
        return int(_HEADROOM * self.budget_bytes)

    def _partition(
        self,
        corrections: Corrections,
        joint: torch.fx.GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        **_: Any,
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        refuse_casts_inside(joint, self.graph.module, self._is_in_autocast)
        with_eagers_dropout(joint)
        name = f"graph of {len(joint_inputs[0])} inputs"
        mode = fake_mode_of(tensors_in(joint_inputs)[0])

        capture = capture_joint(
            joint,
            forward_outputs=num_fwd_outputs,
            name=name,
            device=self.device,
            corrections=corrections,
            between=self.between,
            written_by_others=self._written_by_others,
        )
        with real_tensors():
            self.prepared = self.prepare(capture)
        residents = self.prepared.captured.binding.residents
        self._assumed = [resident.value for resident in residents if resident.origin is Origin.TANGENT]
        self.plan = self.prepared.plan
        self.room_bytes = self.plan.budget_bytes - self.plan.predicted.peak_bytes
        self.halves = partitioned(capture, self.prepared.program, joint, mode)
        return self.halves.forward_module, self.halves.backward_module

    def check_gradients(self, gradients: Sequence[Any]) -> None:
        """Check what a backward pass hands to the backward half, before anything is released.

        AOTAutograd copies a gradient of other strides than it had assumed, where eager's kernels see the strides.

        Args:
            gradients: of the graph's outputs; None for one that has none.

        Raises:
            UnsupportedStepError: the graph is to be retained, or autocast is on or off as it should not be.
        """
        refuse_retained_graph()
        if self.graph.options.kernels != INDUCTOR:
            refuse_other_autocast(self._is_in_autocast and self.graph.options.backward_autocast)
        if self.prepared is None or self.graph.has_warned_of_strides:
            return
        given = [gradient for gradient in gradients if isinstance(gradient, torch.Tensor)]
        if len(given) == len(self._assumed) and any(map(_differ_in_strides, given, self._assumed)):
            self.graph.has_warned_of_strides = True
            _log.warning(
                "memfit: a gradient at a graph break has other strides than PyTorch assumed when it compiled the %s, "
                "and is copied; kernels that choose by strides then give other bits than eager (memfit.fit's "
                "verify=True compares them)",
                self.prepared.captured.graph.name,
            )

    def prepare(self, capture: JointCapture) -> Prepared:
        """Plan within the bytes that the budget leaves beside the graph.

        Before the first step, the bytes that user code will hold between the halves are taken to be those of the
        graph's outputs.
        """
        graph = capture.captured.graph
        left = self._left_bytes(graph)
        try:
            return prepare(
                capture.captured,
                settings_of(self.graph.options, graph).within(left),
                outputs=[capture.forward_outputs, capture.backward_outputs],
                bytes_outside=self.bytes_outside,
            )
        except NoPlanError as error:
            raise self._of_whole_budget(error) from error

    def _left_bytes(self, graph: Graph) -> int:
        """Return the bytes that the budget leaves for a graph, 1 or more, having counted what is outside of it."""
        before = self.before
        departing = (graph.storages[storage].bytes for each in graph.boundaries for storage in each.departures)
        self._bytes_departing = sum(size for size in departing if size > _NUMBER_BYTES)
        seen = before.bytes_outside_seen if before is not None else None  # the most so far
        self.bytes_outside = self._bytes_departing if seen is None else seen
        self.bytes_exceeded = self.graph.options.account.excess_bytes if self.graph.options.account else 0
        taken = self.bytes_beside + self.bytes_reserved + self.bytes_exceeded + self._headroom_bytes
        return max(1, self.budget_bytes - taken)

    def _of_whole_budget(self, error: NoPlanError) -> NoPlanError:
        """Return the error about the bytes that the budget leaves as one about the budget."""
        taken = self.bytes_beside + self.bytes_reserved + self.bytes_exceeded
        found = error.least_budget_found_bytes
        if found is not None:  # the headroom is a share of the budget
            found = math.ceil((taken + found) / (1 - _HEADROOM)) + 1
        reserved = (
            f" and {format_bytes(self.bytes_reserved)} set aside for the optimizer" if self.bytes_reserved else ""
        )
        needed = "" if found is None else f"; a budget of {found} bytes was reached"
        return type(error)(
            f"of the budget of {format_bytes(self.budget_bytes)}, {format_bytes(self.bytes_beside)} are beside this "
            f"graph{reserved}{needed}; in what is left {error}",
            least_budget_found_bytes=found,
            least_budget_bound_bytes=taken + error.least_budget_bound_bytes,
        )

    def _reserved(self) -> int:
        """Return the bytes that something else will take later; unless told, 0 after a step, which has shown them."""
        account = self.graph.options.account
        if account is not None and account.knows_optimizer:
            return account.bytes_to_come()
        if self.before is not None:
            return 0
        if self.graph.options.reserve_bytes is not None:
            return self.graph.options.reserve_bytes
        trained = [t for t in self.inputs if isinstance(t, torch.nn.Parameter) and t.requires_grad]
        reserved = _ADAM_STATES * sum(t.untyped_storage().nbytes() for t in trained)
        if reserved and not self.graph.has_warned:
            self.graph.has_warned = True
            _log.warning(
                "memfit: %s of the budget is set aside for the optimizer state of the first step, as Adam would take; "
                'options={"reserve": 0} if your optimizer has none',
                format_bytes(reserved),
            )
        return reserved

    def run_forward(self, arguments: list[Any]) -> list[Any]:
        """Run the forward half; `arguments` is emptied."""
        return self._run_half(self.halves.forward, arguments, is_backward=False)

    def run_backward(self, arguments: list[Any]) -> list[Any]:
        """Run the backward half; `arguments` is emptied."""
        return self._run_half(self.halves.backward, arguments, is_backward=True)

    def _run_half(self, half: Callable[[list[Any]], list[Any]], arguments: list[Any], is_backward: bool) -> list[Any]:
        if is_backward:
            self.graph.awaiting -= 1
            with turn_on(self.device).of(self, "the backward pass of a graph that memfit's backend compiled"):
                self._end_loss()
                return half(arguments)
        returned = half(arguments)
        self._bytes_after_forward = allocated_bytes(self.device)
        self._meter.begin_loss()
        return returned

    @cached_property
    def _meter(self) -> Account:
        """What measures the user's code between the halves."""
        return self.graph.options.account or Account(self.budget_bytes, self.device)

    def _end_loss(self) -> None:
        """Count what user code holds outside of the graph, before the backward half begins."""
        held = allocated_bytes(self.device) - self._bytes_after_forward
        outside = max(held, self._meter.end_loss() - self._bytes_after_forward)
        self.bytes_held_seen = held if self.bytes_held_seen is None else max(held, self.bytes_held_seen)
        if self.graph.options.account is not None:
            known = self.bytes_outside if self.bytes_outside_seen is None else self.bytes_outside_seen
            self.graph.options.account.expect_end(max(0, outside - known))
        self.bytes_outside_seen = max(outside, self.bytes_outside_seen or 0)


def _as_it_is(graph: Graph, bytes_outside: int) -> Settings:
    """Return settings by which a graph is left as it is: within all storages together, twice."""
    other_bytes = max((op.workspace_bytes or 0 for op in graph.ops), default=0) + bytes_outside
    budget_bytes = 2 * sum(storage.bytes for storage in graph.storages) + other_bytes
    return Settings(budget=budget_bytes, planner=KeepEverything.name)


def _differ_in_strides(gradient: torch.Tensor, assumed: Value) -> bool:
    strides = zip(gradient.shape, gradient.stride(), assumed.stride, strict=False)
    return tuple(gradient.shape) == assumed.shape and any(size > 1 and mine != other for size, mine, other in strides)


def _device_of(inputs: Sequence[Any]) -> torch.device:
    accelerated = [each.device for each in inputs if isinstance(each, torch.Tensor) and each.device.type != "cpu"]
    return accelerated[0] if accelerated else torch.device("cpu")
