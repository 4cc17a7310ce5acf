"""A planned step: a training step within a budget of bytes, called once a batch."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from memfit.capture import Captured, TrainingStep
from memfit.capture.guards import Difference
from memfit.capture.placement import step_device
from memfit.capture.step_check import require_training_context
from memfit.errors import (
    InfeasibleBudgetError,
    InvalidDeviceError,
    InvalidOptionError,
    TimeLimitError,
)
from memfit.memory.arena.arena import Arena
from memfit.memory.contract import FIRM, MOST_CORRECTIONS, STEPS_IN_A_ROW, Aim, Contract, Held, Refused, Usage
from memfit.memory.footprint import footprint
from memfit.memory.hard_cap import capped, require_cap
from memfit.memory.host.store import HostStore
from memfit.memory.snapshot import left_as_it_was
from memfit.memory.step_memory import Served, memory_for
from memfit.memory.what_is_left import saying_what_is_left
from memfit.plan import Plan
from memfit.planning import Settings
from memfit.simulate.overlap import Transfers
from memfit.step.cuda_graph import StepGraphs, require_capturable
from memfit.step.distributed.ranks import ranks_of
from memfit.step.first_step import Correction, Meter
from memfit.step.measure import measure_step, resident_bytes
from memfit.step.measured import Measured
from memfit.step.near_sizes import NearSizes
from memfit.step.program_maker import ProgramMaker, adds_to_gradients
from memfit.step.signature import batch_signature
from memfit.step.step_program import StepProgram, set_gradients
from memfit.step.turns import turn_for
from memfit.step.uncopied import Uncopied
from memfit.step.variants import Variant, Variants
from memfit.step.verify import require_same
from memfit.system.recorder import empty_cache, records_at_once
from memfit.torch_private.tensors import tree_flatten, tree_unflatten

_log = logging.getLogger(__name__)
_ON_RANKS = "the ranks of a step have none"
_MOST_PROVING_STEPS = (MOST_CORRECTIONS + 1) * (STEPS_IN_A_ROW + 1)  # of each plan; a first one may make state


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
        step: the TrainingStep that it carries out, with the latest batch of the size that it was made with: the first
            one would stay alive beside those of later steps.
        device: the device that the step runs on.
        corrections: the plans of which a step took more than the budget, and what replaced them.
    """

    def __init__(self, step: TrainingStep, settings: Settings, plan: Plan | None = None) -> None:
        self.step = step = replace(step)
        self._ranks = ranks_of(step)
        settings = self._ranks.start(step, settings)
        self.device = step_device(step.model, step.batch)
        require_cap(settings, self.device)
        self.corrections: list[Correction] = []
        self._memory, settings = memory_for(
            settings, self.device, step.optimizer, refused=_ON_RANKS if step.across is not None else ""
        )
        self._graphs: StepGraphs | None = None
        if settings.cuda_graph:
            require_capturable(settings, step, self.device, self._memory)
            self._graphs = StepGraphs(step, self._memory, self.device)
        self._store = HostStore(self.device, settings.host_budget_bytes, settings.host_dir)
        self._variants = Variants()
        self._sizes = NearSizes()
        self._maker = ProgramMaker(step, settings, ranks=self._ranks, store=self._store, sizes=self._sizes)
        self._resident_bytes: dict[tuple[Hashable, int], int] = {}  # before a step, by the memory's key of its call
        self._proved: set[tuple[Hashable, int]] = set()  # likewise: of which two steps in a row kept the budget
        self._meter = Meter(self.device)
        self._is_capped = settings.hard
        self._latest: StepProgram | None = None
        with self._on_stream(), turn_for(step, self.device, "memfit.fit"):
            first = self._maker.make(step.batch, partial(self._beside_bytes, step.batch), plan)
        self._own_signature = self._signature(step.batch)
        variant, _ = self._variants.add(self._own_signature, first)
        self._contract = self._contract_of(first.plan.budget_bytes)
        self._latest = first
        self._sizes.add(variant.key, first.prepared, self.settings)

    @property
    def settings(self) -> Settings:
        """The budget, in bytes, and how plans are searched."""
        return self._maker.settings

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
        return {"capture": self._maker.capture_seconds, **self._first.prepared.seconds}

    @property
    def arena(self) -> Arena | None:
        """The arena that serves the calls' requests, if the settings ask for one."""
        return self._memory.arena

    @property
    def memory(self) -> Served:
        """What serves the calls' requests: an arena, or torch's allocator with the reason why there is no arena."""
        return self._memory.served

    @property
    def held_bytes(self) -> int:
        """The bytes that the step holds between calls, beside its residents: of its arena, and its CUDA graph."""
        return self._memory.held_bytes + (0 if self._graphs is None else self._graphs.held_bytes)

    @property
    def is_replayed(self) -> bool:
        """Whether there is a CUDA graph that calls replay (see `cuda_graph` of `memfit.fit`)."""
        return self._graphs is not None and self._graphs.has_graph

    def __call__(self, batch: Any) -> Any:
        """Run one step on `batch`; return the loss, detached. The step of a function returns its next state.

        Raises:
            InfeasibleBudgetError: a batch of a new shape, or a changed step, for which no plan fits the budget.
            InvalidOptionError: no batch.
            UnsupportedStepError: the call is inside torch.no_grad or torch.autocast, a changed step cannot be captured,
                or another thread runs a planned step on the device.
        """
        with self._on_stream(), turn_for(self.step, self.device, "the planned step", self):
            return self._call(batch)

    def _on_stream(self) -> AbstractContextManager[None]:
        return nullcontext() if self._graphs is None else self._graphs.stream()

    def _call(self, batch: Any) -> Any:
        variant = self._variant(batch)
        self._take_better(variant)
        takes_workspaces = self._memory.follow_stream()
        if takes_workspaces:
            self._proved.clear()  # what steps take on this stream was not seen
            for each in self._variants:
                each.judged_key = None
            self._leave_stranded(variant)
        self._latest = variant.program
        self._memory.expect(variant.key, variant.program)
        key = self._memory.key(variant.key)
        is_proved = key in self._proved
        if self._graphs is not None:
            run = partial(self._run, variant, batch)
            if self._graphs.prepare(key, variant.program, batch, run, is_proved=is_proved):
                self._proved.discard(key)  # what a graph takes is proved as well
                variant.judged_key, is_proved = None, False
        is_measured = not is_proved or self._is_capped or records_at_once(self.device)
        if key not in self._resident_bytes:  # before the call, which may make state that the recorder counts
            self._resident_bytes[key] = resident_bytes(self, batch) + self._gradient_bytes(variant)
        there_bytes = self._resident_bytes[key] + (0 if takes_workspaces else variant.program.library_bytes)
        loss, measured_bytes = (
            self._measured(variant, batch, there_bytes, is_proved=is_proved)
            if is_measured
            else (self._run(variant, batch), 0)
        )
        measured_bytes = self._ranks.most_bytes(measured_bytes)
        if measured_bytes > self._contract.budget_bytes or (is_measured and self._memory.is_settled):
            self._judge(variant, key, measured_bytes)
        elif is_measured:
            del self._resident_bytes[key]
        return loss

    def _leave_stranded(self, variant: Variant) -> None:
        """Plan for less, if there is such a plan, where what stays on another stream would not fit beside the plan.

        On several ranks the step shows what it takes: they correct a plan together, and this one's stream is its own.
        """
        if self.step.across is not None:
            return
        program, left_bytes = variant.program, self._contract.budget_bytes - self._memory.stranded_bytes
        if max(program.plan.predicted.peak_bytes, program.predicted_bytes) > left_bytes:
            with suppress(InfeasibleBudgetError, TimeLimitError):  # the step shows what it takes
                self._replace(variant, self._maker.corrected(program, self.settings.within(max(1, left_bytes))))

    def _judge(self, variant: Variant, key: tuple[Hashable, int], measured_bytes: int) -> None:
        """Hold a step against the budget; plan the variant for less if it took more.

        Raises:
            BudgetNotHeldError: the budget is firm, and no plan keeps it.
        """
        program, standing = variant.program, variant.standing
        if key != variant.judged_key:
            variant.judged_key, standing.kept_in_a_row = key, 0
        usage = Usage(taken_bytes=measured_bytes, live_bytes=measured_bytes)
        predicted_bytes = max(program.plan.predicted.peak_bytes, program.predicted_bytes)
        verdict = self._contract.judge(standing, usage, predicted_bytes)
        if isinstance(verdict, Held) or (isinstance(verdict, Aim) and verdict.is_larger):
            if standing.kept_in_a_row == STEPS_IN_A_ROW:
                self._proved.add(key)
                variant.given_up = ""
            return
        self._proved.discard(key)
        correction = Correction(
            budget_bytes=self._contract.budget_bytes,
            predicted_bytes=predicted_bytes,
            measured_bytes=measured_bytes,
            aim_bytes=max(1, verdict.aim_bytes) if isinstance(verdict, Aim) else None,
        )
        if self._contract.is_firm or measured_bytes > variant.told_bytes:
            self._correct(variant, correction)

    def _contract_of(self, budget_bytes: int) -> Contract:
        is_firm = self.settings.budget_is == FIRM
        return Contract(budget_bytes, is_firm=is_firm, most_corrections=MOST_CORRECTIONS)

    def _measured(self, variant: Variant, batch: Any, there_bytes: int, *, is_proved: bool) -> tuple[Any, int]:
        """Run a step; return what it returns, and the bytes that it took, with `there_bytes` beside the memory held."""
        bytes_before = there_bytes + self.held_bytes
        cap = capped(self.device, self._contract.budget_bytes, bytes_before) if self._is_capped else nullcontext()
        with cap:
            return self._meter.run(partial(self._run, variant, batch), bytes_before, is_proved=is_proved)

    def prove(self) -> None:
        """Run steps on the step's own batch until two in a row keep the budget; they leave no trace.

        Raises:
            BudgetNotHeldError: no plan keeps it.
        """
        capped_before, self._is_capped = self._is_capped, False
        try:
            with turn_for(self.step, self.device, "`prove`"), left_as_it_was(self.step, self.generators):
                for _ in range(_MOST_PROVING_STEPS):
                    if self.step.optimizer is None:
                        self.step.model.zero_grad(set_to_none=True)
                    self(self.step.batch)
                    if self._proved:
                        return
        finally:
            self._is_capped = capped_before

    def verify(self, batch: Any = None) -> None:
        """Run one eager and one planned step from the same state; both leave no trace.

        Raises:
            VerificationError: a loss, gradient, parameter, buffer, optimizer state or generator differs in its bits.
        """
        with turn_for(self.step, self.device, "`verify`"):
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
        with turn_for(self.step, self.device, "`measure`"):
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
        with turn_for(self.step, self.device, "`op_seconds`"):
            program = self._variant(batch).program
            if program.plan.offloaded_bytes:
                raise InvalidOptionError(
                    "the plan offloads, so that copies would count with the ops; plan without a host"
                )
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
            signature = self._signature(batch)
            if signature == self._own_signature and self.step.has_backward:
                object.__setattr__(self.step, "batch", batch)
            variant, difference = self._variants.find(signature, batch)
            if variant is None:
                require_training_context("the step was called", self.step)
            return None if variant is None else variant.number

        if self._ranks.found(find, batch):
            assert variant is not None
            return variant
        if difference is not None:
            self._variants.notify(difference)
        self._memory.vacate()  # ops are measured beside what is held
        with self._sizes.paused():
            program = self._maker.make(batch, partial(self._beside_bytes, batch))
        variant, dropped = self._variants.add(self._signature(batch), program)
        if program.plan.budget_bytes > self._contract.budget_bytes:  # a share of its own peak; both use one memory
            self._contract = self._contract_of(program.plan.budget_bytes)
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
        self._replace(variant, self._maker.with_plan(variant.program, better))

    def _gradient_bytes(self, variant: Variant) -> int:
        """Return the bytes of the gradients that the variant adds to; several may share a bucket."""
        if not adds_to_gradients(variant.program.prepared.captured):
            return 0
        gradients = (parameter.grad for parameter in variant.guards.parameters.values())
        return sum(footprint(gradients, self.device).values())

    def _forget(self, variant: Variant) -> None:
        """Drop what is known of the memory of a variant's steps."""
        self._memory.forget(variant.key)
        if self._graphs is not None:
            self._graphs.forget(variant.program)
        self._resident_bytes = {key: held for key, held in self._resident_bytes.items() if key[0] != variant.key}
        self._proved = {key for key in self._proved if key[0] != variant.key}
        variant.judged_key = None

    def _beside_bytes(self, batch: Any) -> int:
        """Return what is on the device before a step."""
        return resident_bytes(self, batch) + self.held_bytes

    def _signature(self, batch: Any) -> Hashable:
        return batch_signature(batch), self._ranks.key()

    def _run(self, variant: Variant, batch: Any) -> Any:
        parameters = variant.guards.parameters
        outputs = None if self._graphs is None else self._graphs.outputs()
        if outputs is None:
            written = parameters.values(), variant.guards.tensors, self.step.optimizer
            with saying_what_is_left(*written), self._memory.call(variant.key):
                self._ranks.before_step()
                outputs = variant.program.run(batch)
        variant.guards.take_left()
        if not self.step.has_backward:
            return tree_unflatten(list(outputs.values()), tree_flatten(batch[0])[1])
        set_gradients(outputs, parameters)
        if self.step.optimizer is not None:
            # A scheduler warns if the optimizer's own `step` was not called; the program updates each parameter itself.
            self.step.optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
        return outputs["loss"]

    def _correct(self, variant: Variant, correction: Correction) -> None:
        """Replace a variant's program by one that allows for what its plan mispredicted, if there is one."""
        if correction.measured_bytes <= correction.predicted_bytes:
            return self._give_up(variant, correction, "no plan that was found takes less as its bytes are placed")
        if correction.aim_bytes is None:
            return self._give_up(variant, correction, variant.given_up or f"so did {MOST_CORRECTIONS} plans before it")
        try:
            corrected = self._maker.corrected(variant.program, self.settings.within(correction.aim_bytes))
        except (InfeasibleBudgetError, TimeLimitError) as error:
            return self._give_up(variant, correction, str(error).partition(";")[0])
        self.corrections.append(correction)
        _log.warning("%s", correction)
        return self._replace(variant, corrected)

    def _give_up(self, variant: Variant, correction: Correction, why: str) -> None:
        """Say that a step takes more than the budget, whatever its plan: as an error if the budget is firm."""
        variant.standing.corrections, variant.given_up = MOST_CORRECTIONS, why
        if correction.measured_bytes > variant.told_bytes:
            self.corrections.append(replace(correction, aim_bytes=None))
            variant.told_bytes = correction.measured_bytes
        if self._contract.is_firm:
            over_bytes = correction.measured_bytes - correction.budget_bytes
            raise self._contract.refusal(Refused(correction.measured_bytes, over_bytes), why)
        _log.warning("%s: %s", self.corrections[-1], why)

    def _replace(self, variant: Variant, program: StepProgram) -> None:
        """Give a variant another program, whose steps may take other memory."""
        self._forget(variant)
        self._sizes.forget(variant.key)
        empty_cache(self.device)
        variant.program = program
        variant.standing.replace_plan(is_least=False, is_most=False)
        self._sizes.add(variant.key, program.prepared, self.settings)
