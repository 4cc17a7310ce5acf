"""Compiled graph: a graph of Dynamo's at concrete sizes, planned, and lowered to a forward and a backward half."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from memfit.binding import Origin, Value
from memfit.capture import with_real_results
from memfit.capture.corrected_fakes import corrected_fakes
from memfit.capture.eager_draws import with_eagers_draws
from memfit.capture.joint import JointCapture, capture_joint
from memfit.cost.calibration import linked_device
from memfit.cost.observations import Corrections
from memfit.dynamo.inputs import (
    overlapping,
    refuse_casts_inside,
    refuse_other_autocast,
    refuse_retained_graph,
)
from memfit.dynamo.settings import INDUCTOR, settings_of
from memfit.errors import NoPlanError
from memfit.graph import Graph
from memfit.kernels.halves import partitioned
from memfit.kernels.inductor import Compiled, Planning, compile_within
from memfit.memory.footprint import footprint
from memfit.memory.place import on_its_own
from memfit.plan import Plan
from memfit.planners.none import KeepEverything
from memfit.planning import Settings, make_plan
from memfit.step.prepare import Prepared, prepare, with_costs
from memfit.step.turns import turn_on
from memfit.system.budget import format_bytes
from memfit.system.recorder import allocated_bytes
from memfit.torch_private.aot import boxed, trace_joint
from memfit.torch_private.autograd import any_autocast
from memfit.torch_private.tensors import (
    fake_mode_of,
    is_plain_dense,
    make_boxed_func,
    real_tensors,
    tensors_in,
)

if TYPE_CHECKING:
    from memfit.dynamo.backend import PlannedGraph

_log = logging.getLogger("memfit")
_ADAM_STATES = 2  # per parameter: exp_avg and exp_avg_sq
_HEADROOM = 0.005  # of the budget: logged losses and the like, which come and go between steps
_NUMBER_BYTES = 8  # an output of no more is the loss itself, from which user code computes nothing large
_WORTH_PLANNING_AGAIN = 0.01  # of the budget: a smaller change of the bytes outside is not worth a second search


class CompiledGraph:
    """A graph at concrete sizes: traced by AOTAutograd, planned, lowered to two halves.

    Args:
        graph: where it is from.
        inputs: of the graph, at these sizes.
        before: what was compiled for these sizes before, if anything.
    """

    def __init__(self, graph: PlannedGraph, inputs: Sequence[Any], before: CompiledGraph | None) -> None:
        self.graph = graph
        self.before = before
        self.asked_again = False
        self.inputs = tensors_in(inputs)
        self.device = device_of(self.inputs)
        self.prepared: Prepared | None = None
        self.plan: Plan | None = None
        self.room_bytes = 0  # that the plan leaves of its budget
        self._by_inductors: Compiled | None = None
        # Inductor's code that no plan divides
        self._unplanned: dict[float | None, Any] = {} if before is None or graph.awaiting else before._unplanned
        self.account = graph.account
        self.budget_bytes = int(graph.options.settings.budget)
        self._bytes_at_start = self.account.live_bytes
        self.bytes_beside = max(0, self._bytes_at_start - sum(footprint(self.inputs, self.device).values()))
        self.bytes_reserved = self._reserved()
        self.bytes_outside = self.bytes_exceeded = 0
        self.bytes_outside_seen: int | None = None  # between the halves
        self.bytes_held_seen: int | None = None  # when the backward half begins; less than 0 where results were freed
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
                    inference_compiler=lambda module, _inputs: make_boxed_func(with_eagers_draws(module).forward),
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

    def should_plan_again(self) -> bool:
        """Return whether the plan has no room for what is outside of the graph now, as steps so far have shown it.

        Gradients that a micro-batch left, the optimizer's state, activations of other graphs. Once, after the first
        step, also whether much less is outside than was assumed.
        """
        if self.bytes_outside_seen is None or self.plan is None:
            return False
        account = self.account
        grown = self._grown_between() + account.live_bytes - self._bytes_at_start
        grown += account.optimizers.bytes_to_come() - self.bytes_reserved
        if account.excess_bytes != self.bytes_exceeded:
            return account.excess_bytes > self.bytes_exceeded or not self._is_unchanged
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
        with_eagers_draws(joint)
        name = f"graph of {len(joint_inputs[0])} inputs"
        mode = fake_mode_of(tensors_in(joint_inputs)[0])

        capture = capture_joint(
            joint,
            forward_outputs=num_fwd_outputs,
            name=name,
            device=self.device,
            corrections=corrections,
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

        def within(left_bytes: int) -> Prepared:
            return prepare(
                capture.captured,
                settings_of(self.graph.options, graph).within(left_bytes),
                outputs=[capture.forward_outputs, capture.backward_outputs],
                bytes_outside=self.bytes_outside,
            )

        left_bytes = self._left_bytes(graph)
        try:
            return within(left_bytes)
        except NoPlanError as error:
            found_bytes = error.least_budget_found_bytes
            if found_bytes is None or found_bytes > left_bytes + self.bytes_exceeded:
                raise self._of_whole_budget(error) from error
            self.account.standing.is_least = True  # whether it keeps the budget, the next step shows
            return within(found_bytes)

    def _left_bytes(self, graph: Graph) -> int:
        """Return the bytes that the budget leaves for a graph, 1 or more, having counted what is outside of it."""
        before = self.before
        departing = (graph.storages[storage].bytes for each in graph.boundaries for storage in each.departures)
        self._bytes_departing = sum(size for size in departing if size > _NUMBER_BYTES)
        seen = before.bytes_outside_seen if before is not None else None  # the most so far
        self.bytes_outside = self._bytes_departing if seen is None else seen
        self.bytes_exceeded = self.account.excess_bytes
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
        if self.account.optimizers.followed:
            return self.account.optimizers.bytes_to_come()
        if self.before is not None:
            return 0
        if self.graph.options.reserve_bytes is not None:
            return self.graph.options.reserve_bytes
        trained = [t for t in self.inputs if isinstance(t, torch.nn.Parameter) and t.requires_grad]
        reserved = _ADAM_STATES * sum(footprint(trained, self.device).values())
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
        self.account.begin_loss()
        return returned

    def _end_loss(self) -> None:
        """Count what user code holds outside of the graph, before the backward half begins."""
        held = allocated_bytes(self.device) - self._bytes_after_forward
        outside = max(held, self.account.end_loss() - self._bytes_after_forward)
        self.bytes_held_seen = held if self.bytes_held_seen is None else max(held, self.bytes_held_seen)
        known = self.bytes_outside if self.bytes_outside_seen is None else self.bytes_outside_seen
        self.account.expect_end(max(0, outside - known))
        self.bytes_outside_seen = max(outside, self.bytes_outside_seen or 0)


def _as_it_is(graph: Graph, bytes_outside: int) -> Settings:
    """Return settings by which a graph is left as it is: within all storages together, twice."""
    other_bytes = max((op.workspace_bytes or 0 for op in graph.ops), default=0) + bytes_outside
    budget_bytes = 2 * sum(storage.bytes for storage in graph.storages) + other_bytes
    return Settings(budget=budget_bytes, planner=KeepEverything.name)


def _differ_in_strides(gradient: torch.Tensor, assumed: Value) -> bool:
    strides = zip(gradient.shape, gradient.stride(), assumed.stride, strict=False)
    return tuple(gradient.shape) == assumed.shape and any(size > 1 and mine != other for size, mine, other in strides)


def device_of(inputs: Sequence[Any]) -> torch.device:
    accelerated = [each.device for each in inputs if isinstance(each, torch.Tensor) and each.device.type != "cpu"]
    return accelerated[0] if accelerated else torch.device("cpu")
