"""The torch.compile backend: `torch.compile(model, backend="memfit", options={"budget": "6GiB"})`.

Each graph that Dynamo finds is planned at its concrete sizes when it first runs, within what the budget leaves beside
everything else on the device. After its first whole step it is planned once more, for only then is it known what user
code holds between the halves and beside the graph (the loss, the optimizer's state, other graphs' activations).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.fx

from memfit.budget import format_bytes, parse_budget
from memfit.capture.joint import JointCapture, capture_joint
from memfit.capture.torch_private import (
    backward_keeps_graph,
    boxed,
    fake_mode_of,
    make_boxed_func,
    real_tensors,
    runs_under_ddp,
    trace_joint,
    tree_flatten,
)
from memfit.cost.recorder import allocated_bytes
from memfit.errors import InfeasibleBudgetError, InvalidOptionError, UnsupportedStepError
from memfit.plan import Plan
from memfit.runtime.halves import partitioned
from memfit.runtime.occupancy import bytes_beside
from memfit.runtime.planning import Prepared, Settings, prepare

_log = logging.getLogger("memfit")
_OPTIONS = ("budget", "planner", "time_limit_seconds", "seed", "reserve")
_PLAIN = {"Tensor", "Parameter", "Buffer"}
_ADAM_STATES = 2  # per parameter: exp_avg and exp_avg_sq
_WORTH_PLANNING_AGAIN = 0.01  # of the budget: a smaller change in what is outside does not pay for a second search


def memfit_backend(
    module: torch.fx.GraphModule, example_inputs: Sequence[Any], options: dict[str, Any] | None = None
) -> PlannedGraph:
    """Plan the graphs of a compiled model within `options["budget"]`.

    Options:
        budget: bytes for everything on the device during the step: `"6GiB"`, or an integer. Required.
        reserve: bytes that will come later and belong to nobody yet: the optimizer state that its first step creates.
            By default the sizes that Adam would take, which is said once; 0 for plain SGD.
        planner, time_limit_seconds, seed: as in `memfit.fit`.

    Raises:
        InvalidOptionError, InvalidBudgetError: options that cannot be read.
        InfeasibleBudgetError: no plan fits what the budget leaves.
        UnsupportedStepError: DDP or FSDP; backward with retain_graph=True, before anything is released.
    """
    # Sizes that count are those of a call; and what is raised there reaches the user as it is, not as Dynamo wraps it.
    del example_inputs
    return PlannedGraph(module, options or {})


class _Options:
    def __init__(self, settings: Settings, reserve: int | None) -> None:
        self.settings = settings
        self.reserve = reserve
        self.said = False  # what is set aside for the optimizer


def _read(options: dict[str, Any]) -> _Options:
    for name in options:
        if name not in _OPTIONS:
            raise InvalidOptionError(f"option {name!r} does not exist; backend memfit has {', '.join(_OPTIONS)}")
    if "budget" not in options:
        raise InvalidOptionError('backend memfit needs a budget: options={"budget": "6GiB"}')
    budget, reserve = options["budget"], options.get("reserve")
    if isinstance(budget, str) and budget.strip().endswith("%"):
        raise InvalidOptionError(
            f"budget {budget!r}: a share of the unplanned peak is not known before loss and optimizer are; give "
            "bytes, or use memfit.fit"
        )
    chosen = {name: options[name] for name in ("planner", "time_limit_seconds", "seed") if name in options}
    settings = Settings(budget=parse_budget(budget, 0), stops_on_interrupt=True, **chosen)
    return _Options(settings, None if reserve is None else _read_reserve(reserve))


def _read_reserve(reserve: str | int) -> int:
    return 0 if reserve in (0, "0") else parse_budget(reserve, 0)


class PlannedGraph:
    """One graph of Dynamo's, with a compiled pair of halves for each tuple of concrete sizes."""

    def __init__(self, module: torch.fx.GraphModule, options: dict[str, Any]) -> None:
        self.module = module
        self.given = options
        self.compiled: dict[Any, _Compiled] = {}

    def __call__(self, *inputs: Any) -> Any:
        key = (tuple(_signature(leaf) for leaf in inputs), torch.is_grad_enabled())
        compiled = self.compiled.get(key)
        if compiled is None:
            _refuse_ranks(inputs)
        if compiled is None or compiled.should_plan_again(inputs):
            compiled = self.compiled[key] = _Compiled(self.module, self.options, inputs, compiled)
        returned = compiled.function(*inputs)
        for node in {leaf.grad_fn for leaf in returned if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None}:
            node.register_prehook(_refuse_retained_graph)
        return returned

    @cached_property
    def options(self) -> _Options:
        """The user's options, read."""
        return _read(self.given)

    @property
    def plans(self) -> list[Plan]:
        """The plans in use, one for each tuple of sizes."""
        return [c.prepared.plan for c in self.compiled.values() if c.prepared is not None]


class _Compiled:
    """A graph at concrete sizes: traced by AOTAutograd, planned, lowered to two halves."""

    def __init__(
        self, module: torch.fx.GraphModule, options: _Options, inputs: Sequence[Any], before: _Compiled | None
    ) -> None:
        self.options = options
        self.before = before
        self.asked_again = False
        self.inputs = [leaf for leaf in inputs if isinstance(leaf, torch.Tensor)]
        self.device = _device_of(self.inputs)
        self.prepared: Prepared | None = None
        self.bytes_beside = bytes_beside(self.inputs, self.device)
        self.bytes_reserved = self._reserved()
        self.bytes_outside = 0
        self.bytes_outside_seen: int | None = None
        self._bytes_after_forward = 0
        self.function = trace_joint(
            module,
            inputs,
            partition=self._partition,
            forward_compiler=lambda _module, _inputs: boxed(self._run_forward),
            backward_compiler=lambda _module, _inputs: boxed(self._run_backward),
            inference_compiler=lambda graph, _inputs: make_boxed_func(graph.forward),
        )
        self.inputs = []

    def should_plan_again(self, inputs: Sequence[Any]) -> bool:
        """Whether the first step showed more, or much less, outside of the graph than was assumed. Asked once."""
        if self.bytes_outside_seen is None or self.before is not None or self.asked_again:
            return False
        self.asked_again = True
        beside = bytes_beside([leaf for leaf in inputs if isinstance(leaf, torch.Tensor)], self.device)
        assumed = self.bytes_beside + self.bytes_outside + self.bytes_reserved
        seen = beside + self.bytes_outside_seen
        return abs(seen - assumed) > _WORTH_PLANNING_AGAIN * int(self.options.settings.budget)

    def _partition(
        self, joint: torch.fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        name = f"graph of {len(joint_inputs[0])} inputs"
        capture = capture_joint(joint, forward_outputs=num_fwd_outputs, name=name, device=self.device)
        with real_tensors():
            self.prepared = self._plan(capture)
        mode = fake_mode_of(next(leaf for leaf in tree_flatten(joint_inputs)[0] if isinstance(leaf, torch.Tensor)))
        self._halves = partitioned(capture, self.prepared.program, joint, mode)
        return self._halves.forward_module, self._halves.backward_module

    def _plan(self, capture: JointCapture) -> Prepared:
        """Plan within what the budget leaves beside the graph; the first time, guess what the loss will hold."""
        settings, before = self.options.settings, self.before
        graph = capture.captured.graph
        departing = sum(graph.storages[s].bytes for b in graph.boundaries for s in b.departures)
        seen = before.bytes_outside_seen if before is not None else None
        self.bytes_outside = departing if seen is None else seen
        left = int(settings.budget) - self.bytes_beside - self.bytes_reserved
        settings = settings.within(max(1, left))
        try:
            return prepare(
                capture.captured,
                settings,
                outputs=[capture.forward_outputs, capture.backward_outputs],
                bytes_outside=self.bytes_outside,
            )
        except InfeasibleBudgetError as error:
            raise self._of_all(error) from error

    def _of_all(self, error: InfeasibleBudgetError) -> InfeasibleBudgetError:
        """The error of what the budget leaves, as one of the budget."""
        taken, found = self.bytes_beside + self.bytes_reserved, error.least_budget_found_bytes
        reserved = (
            f" and {format_bytes(self.bytes_reserved)} set aside for the optimizer" if self.bytes_reserved else ""
        )
        needed = "" if found is None else f"; a budget of {taken + found} bytes was reached"
        budget = format_bytes(int(self.options.settings.budget))
        return InfeasibleBudgetError(
            f"of the budget of {budget}, {format_bytes(self.bytes_beside)} are beside this graph{reserved}{needed}; "
            f"in what is left {error}",
            least_budget_found_bytes=None if found is None else taken + found,
            least_budget_bound_bytes=taken + error.least_budget_bound_bytes,
        )

    def _reserved(self) -> int:
        """Bytes that come later; nothing once a whole step has shown them."""
        if self.before is not None:
            return 0
        if self.options.reserve is not None:
            return self.options.reserve
        trained = [t for t in self.inputs if isinstance(t, torch.nn.Parameter) and t.requires_grad]
        reserved = _ADAM_STATES * sum(t.untyped_storage().nbytes() for t in trained)
        if reserved and not self.options.said:
            self.options.said = True
            _log.warning(
                "memfit: %s of the budget is set aside for the optimizer state of the first step, as Adam would take; "
                'options={"reserve": 0} if your optimizer has none',
                format_bytes(reserved),
            )
        return reserved

    def _run_forward(self, arguments: list[Any]) -> list[Any]:
        returned = self._halves.forward(arguments)
        if self.bytes_outside_seen is None:
            self._bytes_after_forward = allocated_bytes(self.device)
        return returned

    def _run_backward(self, arguments: list[Any]) -> list[Any]:
        if self.bytes_outside_seen is None:
            self.bytes_outside_seen = max(0, allocated_bytes(self.device) - self._bytes_after_forward)
        return self._halves.backward(arguments)


def _refuse_retained_graph(_gradients: Any) -> None:
    """Runs before a planned graph's backward: nothing has been released yet."""
    if backward_keeps_graph():
        raise UnsupportedStepError(
            "backward with retain_graph=True: a planned step lets go of activations as backward consumes them; call "
            "backward once, or leave this model out of backend memfit"
        )


def _refuse_ranks(inputs: Sequence[Any]) -> None:
    foreign = {type(leaf).__name__ for leaf in inputs if isinstance(leaf, torch.Tensor)} - _PLAIN
    if runs_under_ddp() or foreign:
        what = f"holds tensors of type {min(foreign)}, as under FSDP" if foreign else "is under DDP"
        raise UnsupportedStepError(
            f"the model {what}; memfit does not plan across ranks yet: compile the bare module, or use another backend"
        )


def _device_of(tensors: Sequence[torch.Tensor]) -> torch.device:
    accelerated = [tensor.device for tensor in tensors if tensor.device.type != "cpu"]
    return accelerated[0] if accelerated else torch.device("cpu")


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return leaf
