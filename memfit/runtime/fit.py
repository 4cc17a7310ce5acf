"""`fit`: a training step that stays inside a budget of bytes, as an object that is called once a batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from memfit.binding import Value
from memfit.budget import format_bytes, parse_budget
from memfit.capture import Captured, TrainingStep, capture
from memfit.capture.placement import step_device
from memfit.capture.step_check import check_step
from memfit.capture.torch_private import tree_flatten
from memfit.capture.training_step import plain
from memfit.cost.recorder import empty_cache, record
from memfit.errors import (
    GraphBreakError,
    InfeasibleBudgetError,
    InvalidOptionError,
    TimeLimitError,
    UnsupportedStepError,
)
from memfit.plan import Plan, Progress
from memfit.runtime.arena import Arena
from memfit.runtime.measure import Measurement, measure_step, resident_bytes
from memfit.runtime.parts import PartlyPlannedStep
from memfit.runtime.planning import (
    DEFAULT_PLANNER,
    DEFAULT_TIME_LIMIT_SECONDS,
    Prepared,
    Settings,
    prepare,
    unheard,
)
from memfit.runtime.residents import Fetch, make_fetchers
from memfit.runtime.verify import require_same

_GRADIENT = "grad:"

_log = logging.getLogger(__name__)


def fit(
    model: torch.nn.Module,
    loss: Callable[..., torch.Tensor],
    batch: Any,
    *,
    budget: str | int,
    optimizer: torch.optim.Optimizer | None = None,
    clip_norm: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    planner: str = DEFAULT_PLANNER,
    options: Mapping[str, object] | None = None,
    time_limit_seconds: float = DEFAULT_TIME_LIMIT_SECONDS,
    seed: int = 0,
    plan: Plan | Path | str | None = None,
    verify: bool = False,
    host_budget: str | int = 0,
    arena: bool = False,
    on_stage: Callable[[str], None] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> PlannedStep | PartlyPlannedStep:
    """Plan a training step within `budget` and return it, ready to be called with batches.

        >>> import torch, memfit
        >>> def loss(model, batch):
        ...     inputs, labels = batch
        ...     return torch.nn.functional.cross_entropy(model(inputs), labels)
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
        >>> batch = torch.randn(32, 8), torch.randint(0, 2, (32,))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = memfit.fit(model, loss, batch, optimizer=optimizer, budget="1MiB")
        >>> loss_value = step(batch)

    Args:
        model, loss, batch, optimizer, clip_norm, scaler: see `TrainingStep`.
        budget: bytes that the step may use on its device, everything included: `"6GiB"`, `"60%"` of the unplanned peak,
            or an integer.
        planner, options: one of `memfit planners`, and its options.
        time_limit_seconds: how long the planner may search.
        seed: the same seed and the same limits give the same plan.
        plan: a plan made before (or its file), used instead of searching.
        verify: run one planned and one eager step from the same state and refuse on the first tensor that differs.
        host_budget: bytes of the host's memory that storages may be copied to while the step runs, as text or an
            integer, where the device has a link to it. 0, the default, copies nothing: that memory is pinned, so that
            nothing else on the host can have it, and how much is free there is no part of a plan.
        arena: serve what each call requests from memory that was laid out after the first call of its kind; see
            `memfit.arena`. On CUDA call `memfit.arena(device="cuda")` before anything is put on the device.
        on_stage, progress: told what is being done, and how the search goes.

    Raises:
        InfeasibleBudgetError: no plan fits; carries the least budget found and the least that any plan could reach.
        CaptureError: the step cannot be captured; names the user's line.
        VerificationError: the planned step's bits differ from eager's; names the first differing tensor.
        ArenaUnavailableError: an arena was asked for and cannot be had, because there is no C++ compiler, say.
        MemfitError: any other bad input; each message says what to do.

    Guarantees: outputs, gradients, buffers and random streams are those of the unplanned step, wherever kernels are
    deterministic. A step that looks at a tensor's value is not one graph: with a budget in bytes the graphs around
    that line are planned, and a warning says which line it was and what it costs. With an optimizer every `.grad` is
    None after the step, without one gradients are added to `.grad`.
    """
    settings = Settings(
        budget=budget,
        planner=planner,
        options=options or {},
        time_limit_seconds=time_limit_seconds,
        seed=seed,
        host_budget_bytes=parse_budget(host_budget, 0) if host_budget else 0,
        arena=arena,
        stops_on_interrupt=True,
        on_stage=on_stage or unheard,
        progress=progress or unheard,
    )
    step = TrainingStep(model=model, loss=loss, batch=batch, optimizer=optimizer, clip_norm=clip_norm, scaler=scaler)
    check_step(step, "memfit.fit")
    return fit_step(step, settings, plan=plan, verify=verify)


def fit_step(
    step: TrainingStep, settings: Settings, *, plan: Plan | Path | str | None = None, verify: bool = False
) -> PlannedStep | PartlyPlannedStep:
    """As `fit`, of a TrainingStep and Settings."""
    given = plan if plan is None or isinstance(plan, Plan) else Plan.load(plan)
    planned: PlannedStep | PartlyPlannedStep
    try:
        planned = PlannedStep(step, settings, given)
    except GraphBreakError as broken:
        if given is not None or not settings.is_in_bytes:
            raise
        if settings.arena:
            raise UnsupportedStepError(
                f"{broken}; a step of several graphs has no arena of its own: leave arena=True out, and wrap the step "
                "that you get in memfit.arena(step)"
            ) from broken
        planned = PartlyPlannedStep(step, settings, broken)
    if verify:
        settings.on_stage("verifying against eager")
        planned.verify()
    return planned


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    prepared: Prepared
    fetchers: tuple[Fetch, ...]
    gradients: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A plan whose first step took more than its budget.

    `aim_bytes` is the budget, less what was mispredicted, that a plan in its place was made for; None where no plan
    fits that, so that the first one goes on.
    """

    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int
    aim_bytes: int | None

    def __str__(self) -> str:
        took = (
            f"the first step took {format_bytes(self.measured_bytes)}, more than its budget of "
            f"{format_bytes(self.budget_bytes)} and the {format_bytes(self.predicted_bytes)} that were predicted"
        )
        if self.aim_bytes is None:
            return f"{took}; a plan that allows for it was not found"
        return f"{took}; later steps run a plan made for {format_bytes(self.aim_bytes)}"


class PlannedStep:
    """A training step inside its budget: call it with a batch, get the loss.

    A batch of another shape, a model switched between train and eval, gradients that are there already: each gets a
    plan of its own within the same budget the first time, and that plan is kept. The first step of each plan is
    measured: where it takes more than its budget, a warning says so, and the plan is made again for as much less.

    Attributes:
        step: the TrainingStep it carries out.
        settings: the budget and how plans are searched.
        arena: what serves the calls' requests, if the settings ask for one.
        corrections: the plans whose first step took more than its budget, and what they became.
    """

    def __init__(self, step: TrainingStep, settings: Settings, plan: Plan | None = None) -> None:
        self.step = step
        self.settings = settings
        self.device = step_device(step.model, step.batch)
        self.arena = _arena_for(self.device, settings)
        self.corrections: list[Correction] = []
        self._ready: dict[Any, _Ready] = {}
        self._measured: set[Any] = set()  # signatures whose first step was measured against the budget
        self._modules = list(step.model.modules())
        self._parameters = dict(step.model.named_parameters())
        self._first = self._prepare(step.batch, plan)
        self._ready[self._signature(step.batch)] = self._first
        # From here on the budget is bytes: a share of another batch's peak would be another budget.
        self.settings = settings.within(self._first.prepared.plan.budget_bytes)

    @property
    def plan(self) -> Plan:
        """The plan for the batch that the step was made with."""
        return self._first.prepared.plan

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All plans made so far, one for each signature of batch and model."""
        return tuple(ready.prepared.plan for ready in self._ready.values())

    @property
    def captured(self) -> Captured:
        """The graph and binding of the first plan."""
        return self._first.prepared.captured

    @property
    def source(self) -> str:
        """The Python source that runs the first plan."""
        return self._first.prepared.program.source

    @property
    def seconds(self) -> Mapping[str, float]:
        """How long capture, measurement and planning of the first plan took."""
        return self._first.prepared.seconds

    def __call__(self, batch: Any) -> torch.Tensor:
        """Run one step on `batch`; return the loss, detached.

        Raises:
            InfeasibleBudgetError: a batch of a new shape for which no plan fits the budget.
        """
        if batch is None and self.step.batch is not None:
            raise InvalidOptionError(
                "the step was called with None, expected a batch like the one that it was made with"
            )
        signature = self._signature(batch)
        ready = self._ready.get(signature)
        if ready is None:
            ready = self._ready[signature] = self._prepare(batch, None)
        if signature in self._measured:
            return self._run(ready, batch, signature)
        there_before = resident_bytes(self, batch) + self.held_bytes  # less than after: a first step makes state
        empty_cache(self.device)
        with record(self.device) as usage:
            loss = self._run(ready, batch, signature)
        if self._correct(ready, signature, there_before + usage.taken_bytes) or self._is_settled():
            self._measured.add(signature)
        return loss

    @property
    def held_bytes(self) -> int:
        """The bytes that the step holds between calls beside its residents: its arena's."""
        return 0 if self.arena is None else self.arena.held_bytes

    def _is_settled(self) -> bool:
        """Whether the next step will take what the last one did: with an arena the first is only recorded."""
        return self.arena is None or self.arena.last_step.recorded == 0

    def _run(self, ready: _Ready, batch: Any, signature: Any) -> torch.Tensor:
        leaves = tree_flatten(batch)[0]
        (half,) = ready.prepared.program.halves
        with nullcontext() if self.arena is None else self.arena.step(key=self._arena_key(signature)):
            loss, *gradients = half.function([fetch(leaves) for fetch in ready.fetchers])
        for name, gradient in zip(ready.gradients, gradients, strict=True):
            parameter = self._parameters[name]
            if parameter.grad is None:
                parameter.grad = gradient
        if self.step.optimizer is not None:
            # A scheduler warns where the optimizer's own `step` was not called; ours ran it parameter by parameter.
            self.step.optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
        return loss

    def _arena_key(self, signature: Any) -> tuple[Any, int]:
        # an optimizer's first step makes its state, so that the second requests other memory than it
        return signature, 0 if self.step.optimizer is None else len(self.step.optimizer.state)

    def _correct(self, ready: _Ready, signature: Any, measured_bytes: int) -> bool:
        """Plan again where the first step of a plan took more than its budget: by as much less as it was mispredicted.

        A library may choose other workspaces when it runs than when its ops were measured. On CUDA what counts is what
        the allocator had to hold of the device, blocks that nothing fits into with it; with an arena, all of the
        arena. Returns whether the budget was exceeded.
        """
        plan = ready.prepared.plan
        # The recorder of a CPU counts copies on the host as well: they are the same memory.
        copies_bytes = plan.predicted.host_peak_bytes if self.device.type == "cpu" else 0
        if measured_bytes <= plan.budget_bytes + copies_bytes:
            return False
        aim_bytes = max(1, plan.budget_bytes - (measured_bytes - plan.predicted.peak_bytes))
        correction = Correction(
            budget_bytes=plan.budget_bytes,
            predicted_bytes=plan.predicted.peak_bytes,
            measured_bytes=measured_bytes,
            aim_bytes=aim_bytes,
        )
        try:
            # Of the same capture: by now the step has left gradients, which another one would add to.
            corrected = self._plan(ready.prepared.captured, None, self.settings.within(aim_bytes))
        except (InfeasibleBudgetError, TimeLimitError) as error:
            self.corrections.append(replace(correction, aim_bytes=None))
            _log.warning("%s: %s", self.corrections[-1], error)
            return True
        self.corrections.append(correction)
        _log.warning("%s", correction)
        if self.arena is not None:
            for key in [key for key in self.arena.plans if cast("tuple[Any, int]", key)[0] == signature]:
                self.arena.forget(key)
        empty_cache(self.device)
        self._ready[signature] = corrected
        if ready is self._first:
            self._first = corrected
        return True

    def verify(self, batch: Any = None) -> None:
        """Run one eager and one planned step from the same state; both leave no trace.

        Raises:
            VerificationError: a loss, gradient, parameter, buffer, optimizer state or generator differs in its bits.
        """
        require_same(self, self.step.batch if batch is None else batch)

    def measure(self, batch: Any = None, *, repeats: int = 3) -> Measurement:
        """Measure peak bytes and seconds of planned and eager steps, interleaved; both leave no trace."""
        return measure_step(self, self.step.batch if batch is None else batch, repeats=repeats)

    def _signature(self, batch: Any) -> Any:
        leaves, structure = tree_flatten(batch)
        return (
            structure,
            tuple(_leaf_signature(leaf) for leaf in leaves),
            tuple(module.training for module in self._modules),
            tuple((p.requires_grad, p.grad is None) for p in self._parameters.values()),
        )

    def _prepare(self, batch: Any, plan: Plan | None) -> _Ready:
        started = time.perf_counter()
        self.settings.on_stage("capturing the step")
        captured = capture(self.step, batch)
        return self._plan(captured, plan, self.settings, capture=time.perf_counter() - started)

    def _plan(self, captured: Captured, plan: Plan | None, settings: Settings, **seconds: float) -> _Ready:
        outputs: list[Value] = list(captured.binding.outputs.values())
        prepared = prepare(captured, settings, outputs=[outputs], plan=plan).with_seconds(**seconds)
        (half,) = prepared.program.halves
        names = tuple(captured.binding.outputs)
        assert names[0] == "loss", names
        return _Ready(
            prepared=prepared,
            fetchers=tuple(make_fetchers(self.step.model, captured.binding.residents, half.takes)),
            gradients=tuple(name.removeprefix(_GRADIENT) for name in names[1:]),
        )


def _arena_for(device: torch.device, settings: Settings) -> Arena | None:
    if not settings.arena:
        return None
    return Arena(device=device, seed=settings.seed)


def _leaf_signature(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), repr(plain(leaf))
