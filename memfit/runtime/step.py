"""`fit`, and the planned step that it returns: a training step within a budget of bytes, called once a batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from memfit.binding import Origin
from memfit.capture import Captured, TrainingStep, with_real_results
from memfit.capture.compare import Comparisons
from memfit.capture.data_parallel import data_parallel
from memfit.capture.guards import Difference
from memfit.capture.later_sizes import CapturedSizes
from memfit.capture.placement import step_device
from memfit.capture.step_check import check_step, require_training_context
from memfit.capture.stream import Stream
from memfit.cost.calibration import local_device
from memfit.cost.observations import Corrections
from memfit.errors import (
    GraphBreakError,
    InfeasibleBudgetError,
    InvalidDeviceError,
    InvalidOptionError,
    TimeLimitError,
    UnsupportedStepError,
)
from memfit.near_plans import PROVISIONAL
from memfit.plan import Plan, Progress
from memfit.planning import DEFAULT_PLANNER, DEFAULT_TIME_LIMIT_SECONDS, FIRM, Settings, ignored
from memfit.runtime.arena.arena import Arena
from memfit.runtime.chunked import make_function_program
from memfit.runtime.compile.backend import EAGER, INDUCTOR, read_kernels
from memfit.runtime.distributed.ranks import ranks_of
from memfit.runtime.eager_peak import with_eager_peak
from memfit.runtime.first_step import (
    MOST_CORRECTIONS,
    STEPS_IN_A_ROW,
    Correction,
    Meter,
    needed_correction,
    not_held,
)
from memfit.runtime.hard_cap import capped, require_cap
from memfit.runtime.host.store import HostStore
from memfit.runtime.inductor_step import InductorStep, refuse_with_inductor
from memfit.runtime.measure import measure_step, resident_bytes
from memfit.runtime.measured import Measured
from memfit.runtime.near_sizes import NearSizes
from memfit.runtime.parts import PartlyPlannedStep
from memfit.runtime.prepare import ANEW, AS_IT_IS
from memfit.runtime.signature import batch_signature
from memfit.runtime.state import left_as_it_was, saying_what_is_left
from memfit.runtime.step_memory import StepMemory
from memfit.runtime.step_program import StepProgram, make_step_program, set_gradients
from memfit.runtime.uncopied import Uncopied
from memfit.runtime.variants import Variant, Variants
from memfit.runtime.verify import require_same
from memfit.simulate.overlap import Transfers
from memfit.system.budget import parse_host_budget
from memfit.system.recorder import empty_cache, records_at_once, taken_bytes
from memfit.system.spill_file import parse_host_dir
from memfit.torch_private import tree_flatten, tree_unflatten

_log = logging.getLogger(__name__)
_MOST_PROVING_STEPS = (MOST_CORRECTIONS + 1) * (STEPS_IN_A_ROW + 1)  # of each plan; a first one may make state


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
    host_dir: Path | str | None = None,
    arena: bool = False,
    carry_over: bool = True,
    search_behind: bool = True,
    budget_is: str = FIRM,
    hard: bool = False,
    process_group: torch.distributed.ProcessGroup | None = None,
    kernels: str = EAGER,
    on_stage: Callable[[str], None] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> PlannedStep | PartlyPlannedStep | InductorStep:
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
        model: see `TrainingStep`, also for the next two arguments.
        loss: of the model and a batch.
        batch: an example of the later batches.
        budget: the bytes that the step may use on its device, everything included: `"6GiB"`, `"60%"` of the peak of the
            step as it is written, with checkpointed regions (of the measured eager peak, if the step depends on a
            tensor's value), or an integer.
        optimizer: see `TrainingStep`, also for the next two arguments.
        clip_norm: the largest global norm of the gradients of the optimizer's parameters.
        scaler: scales the loss and guards the update.
        planner: one of `memfit planners`.
        options: of the planner.
        time_limit_seconds: how long the planner may search.
        seed: the same seed and the same limits give the same plan.
        plan: a plan made before (or its file), used instead of searching.
        verify: run a planned and an eager step from the same state, and another pair from changed parameters, and raise
            at the first tensor that differs.
        host_budget: the bytes that storages may be offloaded to, as text or an integer: host memory for a step on a
            GPU, which is pinned, so that no other program can use it meanwhile; a file for a step on a CPU. The
            default 0 offloads nothing. A given `plan` has a host budget of its own; it is refused if it needs more
            than this one.
        host_dir: a directory on the disk that a CPU offloads to; by default the system's temporary one. The file has no
            name there, and is gone with the process.
        arena: serve the requests of each call from memory that is laid out after the first call of its signature; see
            `memfit.arena`. On CUDA call `memfit.arena(device="cuda")` before anything is put on the device.
        carry_over: plan a batch of another size from the plans of the sizes that were there before, where one fits;
            False searches a plan for each size. Only for planners that search.
        search_behind: search such plans further on a thread while steps run, and run what is found.
        budget_is: `"firm"`: a step that took more than the budget is an error where three corrections of its plan have
            not helped, or no plan fits what it took; `"soft"`: it is a warning.
        hard: on a GPU, cap the process at the budget while a step runs, so that an allocation beyond it fails. `fit`
            then runs steps until two in a row keep the budget, and puts everything back. Not with an arena.
        process_group: the ranks that train the model together, each on its own batches: gradients are averaged as
            DistributedDataParallel does. All ranks call `fit` and the step at the same time. A model that is wrapped in
            DistributedDataParallel brings its group along.
        kernels: `"eager"`: those that eager calls, to the bit; `"inductor"`: generated, as `torch.compile` does, for
            forward, loss and backward. Such a step is compiled and planned when it is first called.
        on_stage: called with the name of each stage when it begins.
        progress: called by the planner while it searches.

    Raises:
        InfeasibleBudgetError: no plan fits. The error has the least budget found and the least that any plan could
            reach.
        TimeLimitError: the planner found no plan that fits, and nothing proves that there is none.
        CaptureError: the step cannot be captured, or what was captured is not what eager runs; the message names the
            user's line.
        VerificationError: the planned step's bits differ from eager's; the message names the first differing tensor.
        HostMemoryError: the host, or the disk, has no room for what the plan offloads; or a copy failed during a step.
        BudgetNotHeldError: a step took more than a firm budget, and no other plan helps; raised after the step.
        RankError: another rank failed, or has another model, batch or setting.
        ArenaUnavailableError: there can be no arena on this machine, for example without a C++ compiler.
        MemfitError: any other bad input; each message says what to do.

    Guarantees: outputs, gradients, buffers and random streams are those of the unplanned step, wherever kernels are
    deterministic. A step whose Python code depends on a tensor's value is not one graph: the graphs around that line
    are planned, and a warning names the line and its cost. With an optimizer every `.grad` is
    None after the step; without one gradients are added to `.grad`.
    """
    settings = Settings(
        budget=budget,
        planner=planner,
        options=options or {},
        time_limit_seconds=time_limit_seconds,
        seed=seed,
        host_budget_bytes=parse_host_budget(host_budget),
        host_dir=parse_host_dir(host_dir),
        arena=arena,
        carry_over=carry_over,
        search_behind=search_behind,
        budget_is=budget_is,
        hard=hard,
        stops_on_interrupt=True,
        on_stage=on_stage or ignored,
        progress=progress or ignored,
    )
    bare, across = data_parallel(model, process_group)
    step = TrainingStep(
        model=bare, loss=loss, batch=batch, optimizer=optimizer, clip_norm=clip_norm, scaler=scaler, across=across
    )
    check_step(step, "memfit.fit")
    if read_kernels(kernels, settings) == INDUCTOR:
        refuse_with_inductor(settings, plan=plan, verify=verify, process_group=across is not None)
        return InductorStep(step, settings)
    return fit_step(step, settings, plan=plan, verify=verify)


def fit_step(
    step: TrainingStep, settings: Settings, *, plan: Plan | Path | str | None = None, verify: bool = False
) -> PlannedStep | PartlyPlannedStep:
    """Plan a TrainingStep by Settings, as `fit` does.

    Args:
        step: the step.
        settings: the budget, and how plans are searched.
        plan: a plan made before (or its file), used instead of searching.
        verify: compare one planned with one eager step, and raise at the first tensor that differs.

    Raises:
        MemfitError: as `fit`.
    """
    given = plan if plan is None or isinstance(plan, Plan) else Plan.load(plan)
    planned: PlannedStep | PartlyPlannedStep
    try:
        planned = PlannedStep(step, settings, given)
    except GraphBreakError as broken:
        if given is not None or not step.has_backward:
            raise
        if step.across is not None:
            raise UnsupportedStepError(f"{broken}; but the graphs around it are not planned across ranks") from broken
        planned = PartlyPlannedStep(step, settings, broken)
    if verify:
        settings.on_stage("verifying against eager")
        planned.verify()
    if settings.hard and isinstance(planned, PlannedStep):
        settings.on_stage("running steps until two in a row keep the budget")
        planned.prove()
    return planned


class PlannedStep(Uncopied):
    """A training step inside its budget: call it with a batch, get the loss.

    A batch of another shape has a program of its own within the same budget, and so has each change of what the step
    took from Python at capture: a model switched between training and evaluation, gradients that are there already, a
    number that the loss reads. Guards find such a change before each step. The program is made at the first such call,
    and kept for later ones. Steps are measured until two in a row keep the budget, without the optimizer's state and
    with it; those after them as far as it costs microseconds. If one takes more than the budget, a warning says so, and
    its plan is replaced by one for a budget that is smaller by the error of the prediction, at most three times.
    Without an optimizer, a budget in percent is a share of the unplanned peak of a step that finds no gradients for
    such steps, and of one that adds to gradients for those.

    Attributes:
        step: the TrainingStep that it carries out.
        settings: the budget, in bytes, and how plans are searched.
        device: the device that the step runs on.
        corrections: the plans of which a step took more than the budget, and what replaced them.
    """

    def __init__(self, step: TrainingStep, settings: Settings, plan: Plan | None = None) -> None:
        self.step = step
        self._ranks = ranks_of(step)
        settings = self.settings = self._ranks.start(step, settings)
        self.device = step_device(step.model, step.batch)
        require_cap(settings, self.device)
        self.corrections: list[Correction] = []
        arena = Arena(device=self.device, seed=settings.seed) if settings.arena else None
        self._memory = StepMemory(arena, step.optimizer)
        self._store = HostStore(self.device, settings.host_budget_bytes, settings.host_dir)
        self._variants = Variants()
        self._captures = CapturedSizes(step)
        self._sizes = NearSizes()
        self._comparisons = Comparisons()
        self._resident_bytes: dict[tuple[Hashable, int], int] = {}  # before a step, by the memory's key of its call
        self._kept: dict[tuple[Hashable, int], int] = {}  # likewise: how many steps in a row kept the budget
        self._meter = Meter(self.device)
        self._is_capped = settings.hard
        self._capture_seconds = 0.0
        self._first_settings = settings
        self._first_adds: bool | None = None
        self._latest: StepProgram | None = None
        first = self._make_program(step.batch, plan)
        self._first_adds = _adds_to_gradients(first.prepared.captured)
        variant, _ = self._variants.add(self._signature(step.batch), first)
        self._latest = first
        # From here on the budget is in bytes: a share of another batch's peak would be another budget.
        self.settings = settings.within(first.plan.budget_bytes)
        self._sizes.add(variant.key, first.prepared, self.settings)

    @property
    def plan(self) -> Plan:
        """The plan for the batch that the step was made with."""
        return self._first.plan

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that are kept, in the order in which they were made."""
        return tuple(variant.program.plan for variant in self._variants)

    @property
    def captured(self) -> Captured:
        """The graph and binding of the first plan."""
        return self._first.prepared.captured

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """The generators that the step's code hands to torch."""
        programs = [variant.program for variant in self._variants]
        return tuple(dict.fromkeys(g for program in programs for g in program.prepared.captured.generators))

    @property
    def constants(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the step, as last called, closes over: class weights, say, or a teacher's parameters."""
        residents = self._latest.prepared.captured.binding.residents if self._latest else ()
        return tuple(resident.constant for resident in residents if resident.constant is not None)

    @property
    def transfers(self) -> Transfers:
        """The copies to the host and back in the last call, and when compute waited for them; not timed on a GPU."""
        return self._store.transfers

    @property
    def source(self) -> str:
        """The Python source that runs the first plan."""
        return self._first.prepared.program.source

    @property
    def seconds(self) -> Mapping[str, float]:
        """How long capture, measurement and planning of the first plan took."""
        return {"capture": self._capture_seconds, **self._first.prepared.seconds}

    @property
    def arena(self) -> Arena | None:
        """The arena that serves the calls' requests, if the settings ask for one."""
        return self._memory.arena

    @property
    def held_bytes(self) -> int:
        """The bytes that the step holds between calls, beside its residents: its arena's."""
        return self._memory.held_bytes

    def __call__(self, batch: Any) -> Any:
        """Run one step on `batch`; return the loss, detached. The step of a function returns its next state.

        Raises:
            InfeasibleBudgetError: a batch of a new shape, or a changed step, for which no plan fits the budget.
            InvalidOptionError: no batch.
            UnsupportedStepError: the call is inside torch.no_grad or torch.autocast, or a changed step cannot be
                captured.
        """
        variant = self._variant(batch)
        self._take_better(variant)
        self._latest = variant.program
        key = self._memory.key(variant.key)
        is_proved = self._kept.get(key, 0) >= STEPS_IN_A_ROW
        is_measured = not is_proved or self._is_capped or records_at_once(self.device)
        if key not in self._resident_bytes:  # before the call, which may make state that the recorder counts
            self._resident_bytes[key] = resident_bytes(self, batch) + self._gradient_bytes(variant)
        loss, measured_bytes = (
            self._measured(variant, batch, self._resident_bytes[key], is_proved=is_proved)
            if is_measured
            else (self._run(variant, batch), 0)
        )
        measured_bytes = self._ranks.most_bytes(measured_bytes)
        correction = needed_correction(variant.program.plan, variant.budget_bytes, measured_bytes)
        if correction is not None:
            self._kept.pop(key, None)
            if self.settings.budget_is == FIRM or measured_bytes > variant.told_bytes:
                self._correct(variant, correction)
        elif is_measured and not self._memory.is_settled:
            del self._resident_bytes[key]
        elif not is_proved:
            self._kept[key] = self._kept.get(key, 0) + 1
            if self._kept[key] == STEPS_IN_A_ROW:
                variant.corrections, variant.given_up = 0, ""
        return loss

    def _measured(self, variant: Variant, batch: Any, residents: int, *, is_proved: bool) -> tuple[Any, int]:
        """Run a step; return what it returns, and the bytes that it took, with `residents` bytes before it."""
        bytes_before = residents + self.held_bytes + variant.program.library_bytes
        cap = capped(self.device, variant.budget_bytes, bytes_before) if self._is_capped else nullcontext()
        with cap:
            return self._meter.run(partial(self._run, variant, batch), bytes_before, is_proved=is_proved)

    def prove(self) -> None:
        """Run steps on the step's own batch until two in a row keep the budget; they leave no trace.

        Raises:
            BudgetNotHeldError: no plan keeps it.
        """
        capped_before, self._is_capped = self._is_capped, False
        try:
            with left_as_it_was(self.step, self.generators):
                for _ in range(_MOST_PROVING_STEPS):
                    if self.step.optimizer is None:
                        self.step.model.zero_grad(set_to_none=True)
                    self(self.step.batch)
                    if STEPS_IN_A_ROW in self._kept.values():
                        return
        finally:
            self._is_capped = capped_before

    def verify(self, batch: Any = None) -> None:
        """Run one eager and one planned step from the same state; both leave no trace.

        Raises:
            VerificationError: a loss, gradient, parameter, buffer, optimizer state or generator differs in its bits.
        """
        require_same(self, self.step.batch if batch is None else batch)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a block in which calls add to this rank's gradients only: the first ones of an accumulation.

        Raises:
            InvalidOptionError: the step runs on one rank, or updates the parameters in each call.
        """
        if self.step.across is None or self.step.optimizer is not None:
            raise InvalidOptionError("no_sync is for steps with a process_group and without an optimizer")
        return self.step.across.no_sync()

    def measure(self, batch: Any = None, *, repeats: int = 3) -> Measured:
        """Measure peak bytes and seconds of planned and eager steps, interleaved; both leave no trace."""
        return measure_step(self, self.step.batch if batch is None else batch, repeats=repeats)

    def wait_for_searches(self, seconds: float | None = None) -> bool:
        """Wait until no plan is searched behind the steps; return whether that is so.

        Args:
            seconds: how long to wait at most; None waits as long as it takes.
        """
        return self._sizes.wait(seconds)

    def op_seconds(self, batch: Any = None) -> tuple[float, ...]:
        """Run one step, and return the seconds of each op of the plan's graph in its place; it leaves no trace.

        Ops that are measured one by one find other caches and other free memory. Only for a CPU, and for a plan that
        offloads nothing.

        Args:
            batch: of the step; its own if None.

        Raises:
            InvalidDeviceError: the step runs on another device.
            InvalidOptionError: the plan offloads.
        """
        batch = self.step.batch if batch is None else batch
        if self.device.type != "cpu":
            raise InvalidDeviceError(f"the step runs on {self.device}, expected a CPU: there ops only start in order")
        program = self._variant(batch).program
        if program.plan.offloaded_bytes:
            raise InvalidOptionError("the plan offloads, so that copies would count with the ops; plan without a host")
        with left_as_it_was(self.step, self.generators):
            return program.op_seconds(batch)

    @property
    def _first(self) -> StepProgram:
        return next(iter(self._variants)).program

    def _variant(self, batch: Any) -> Variant:
        """Return the variant whose guards hold; capture and plan one if there is none."""
        variant: Variant | None = None
        difference: Difference | None = None

        def find() -> int | None:
            nonlocal variant, difference
            if batch is None and self.step.batch is not None:
                raise InvalidOptionError(
                    "the step was called with None, expected a batch like the one that it was made with"
                )
            variant, difference = self._variants.find(self._signature(batch), batch)
            if variant is None:
                require_training_context("the step was called", self.step)
            return None if variant is None else variant.number

        if self._ranks.found(find, batch):
            assert variant is not None
            return variant
        if difference is not None:
            self._variants.notify(difference)
        with self._sizes.paused():
            program = self._make_program(batch)
        variant, dropped = self._variants.add(self._signature(batch), program)
        for old in dropped:
            self._forget(old)
            self._sizes.forget(old.key)
        self._sizes.add(variant.key, variant.program.prepared, self.settings)
        return variant

    def _take_better(self, variant: Variant) -> None:
        """Replace a variant's program if a better plan was found behind the steps."""
        better = self._sizes.better(variant.key, variant.program.plan)
        if better is None:
            return
        captured = variant.program.prepared.captured
        settings = self.settings.within(better.budget_bytes)
        program = make_step_program(self.step, captured, settings, better, self._store, AS_IT_IS)
        self._replace(variant, program)

    def _gradient_bytes(self, variant: Variant) -> int:
        """Return the bytes of the gradients that the variant adds to."""
        if not _adds_to_gradients(variant.program.prepared.captured):
            return 0
        gradients = [parameter.grad for parameter in variant.guards.parameters.values()]
        return sum(taken_bytes(each.untyped_storage().nbytes(), self.device) for each in gradients if each is not None)

    def _forget(self, variant: Variant) -> None:
        """Drop what is known of the memory of a variant's steps."""
        self._memory.forget(variant.key)
        self._resident_bytes = {key: held for key, held in self._resident_bytes.items() if key[0] != variant.key}
        self._kept = {key: count for key, count in self._kept.items() if key[0] != variant.key}

    def _compare(self, batch: Any, program: StepProgram, stream: Stream | None) -> None:
        """Compare what was captured with eager's calls, within what the budget leaves beside the residents."""
        self.settings.on_stage("comparing with eager's calls")
        limit_bytes = program.plan.budget_bytes - resident_bytes(self, batch) - self.held_bytes
        self._comparisons.require_as_eager(self.step, batch, stream, limit_bytes=max(0, limit_bytes))

    def _signature(self, batch: Any) -> Hashable:
        return batch_signature(batch), self._ranks.key()

    def _make_program(self, batch: Any, plan: Plan | None = None) -> StepProgram:
        program = self._ranks.together("preparing the step", lambda: self._made_program(batch, plan))
        self._ranks.require_same_plan(program.plan)
        return program

    def _made_program(self, batch: Any, plan: Plan | None) -> StepProgram:
        streams: list[Stream | None] = []

        def make(corrections: Corrections) -> StepProgram:
            self.settings.on_stage("capturing the step")
            started = time.perf_counter()
            captured = self._captures.capture(batch, corrections)
            assert captured.guards is not None
            captured.guards.arm()
            streams.append(captured.stream)
            captured = replace(captured, stream=None)  # long, and of no use once it is compared
            settings = self._settings_for(captured)
            if plan is None:
                settings = with_eager_peak(settings, self.step, captured, settings.device or local_device(self.device))
            if self._first_adds is None:
                self._capture_seconds += time.perf_counter() - started
            if not self.step.has_backward:
                return make_function_program(self.step, captured, settings, plan, self._store)
            planning = self._ranks.planning(ANEW if plan is not None else self._sizes.planning(captured, settings))
            return make_step_program(self.step, captured, settings, plan, self._store, planning)

        program = with_real_results(make)
        self._compare(batch, program, streams[-1])
        return program

    def _settings_for(self, captured: Captured) -> Settings:
        """Return the settings: a budget in percent is a share of each of the two peaks of accumulation."""
        is_other = self.step.optimizer is None and _adds_to_gradients(captured) != self._first_adds
        return self._first_settings if is_other else self.settings

    def _run(self, variant: Variant, batch: Any) -> Any:
        parameters = variant.guards.parameters
        with saying_what_is_left(parameters.values()), self._memory.call(variant.key):
            self._ranks.before_step()
            outputs = variant.program.run(batch)
        if not self.step.has_backward:
            return tree_unflatten(list(outputs.values()), tree_flatten(batch[0])[1])
        set_gradients(outputs, parameters)
        if self.step.optimizer is not None:
            # A scheduler warns if the optimizer's own `step` was not called; the program updates each parameter itself.
            self.step.optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
        return outputs["loss"]

    def _correct(self, variant: Variant, correction: Correction) -> None:
        """Replace a variant's program by one that allows for what its plan mispredicted, if there is one."""
        assert correction.aim_bytes is not None
        if variant.corrections >= MOST_CORRECTIONS:
            return self._give_up(variant, correction, variant.given_up or f"so did {MOST_CORRECTIONS} plans before it")
        settings = self.settings.within(correction.aim_bytes)
        try:
            # The same capture: the step has left gradients by now, and a new capture would add to them.
            captured = variant.program.prepared.captured
            is_own = variant.program.plan.planner not in PROVISIONAL
            planning = self._ranks.planning(ANEW if is_own else self._sizes.planning(captured, settings))
            make = partial(make_step_program, self.step, captured, settings, store=self._store, planning=planning)
            corrected = self._ranks.together("correcting the plan", make)
        except (InfeasibleBudgetError, TimeLimitError) as error:
            return self._give_up(variant, correction, str(error).partition(";")[0])
        variant.corrections += 1
        self.corrections.append(correction)
        _log.warning("%s", correction)
        return self._replace(variant, corrected)

    def _give_up(self, variant: Variant, correction: Correction, why: str) -> None:
        """Say that a step takes more than the budget, whatever its plan: as an error if the budget is firm."""
        variant.corrections, variant.given_up = MOST_CORRECTIONS, why
        if correction.measured_bytes > variant.told_bytes:
            self.corrections.append(replace(correction, aim_bytes=None))
            variant.told_bytes = correction.measured_bytes
        if self.settings.budget_is == FIRM:
            raise not_held(correction.measured_bytes, correction.budget_bytes, why)
        _log.warning("%s: %s", self.corrections[-1], why)

    def _replace(self, variant: Variant, program: StepProgram) -> None:
        """Give a variant another program, whose steps may take other memory."""
        self._forget(variant)
        self._sizes.forget(variant.key)
        empty_cache(self.device)
        variant.program = program
        self._sizes.add(variant.key, program.prepared, self.settings)


def _adds_to_gradients(captured: Captured) -> bool:
    return any(resident.origin is Origin.GRADIENT for resident in captured.binding.residents)
