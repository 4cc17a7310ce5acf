"""A planned step: a training step within a budget of bytes, called once a batch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from memfit.capture import Captured, TrainingStep
from memfit.capture.placement import step_device
from memfit.cost.observe import doubt
from memfit.errors import InvalidOptionError
from memfit.memory.arena.arena import Arena
from memfit.memory.contract import FIRM, MOST_CORRECTIONS, STEPS_IN_A_ROW, Contract
from memfit.memory.hard_cap import require_cap, tell_of_card
from memfit.memory.host.store import HostStore
from memfit.memory.snapshot import left_as_it_was
from memfit.memory.step_memory import Served, memory_for
from memfit.memory.uncounted import Beside
from memfit.plan import Plan
from memfit.planning import Settings
from memfit.simulate.overlap import Transfers
from memfit.step.cuda_graph import StepGraphs, require_capturable
from memfit.step.distributed.ranks import ranks_of
from memfit.step.host_states import settle
from memfit.step.measure import resident_bytes
from memfit.step.measured import Measured
from memfit.step.programs import Programs
from memfit.step.proof import Proof
from memfit.step.step import Step
from memfit.step.turns import turn_for

_MOST_PREDICTED = 1.5  # seconds of the unplanned step, in those of eager's
_DOUBTED = "The ops were measured in a busy moment: predicted times are too long; the next fit measures them anew."
_ON_RANKS = "the ranks of a step have none"
_MOST_PROVING_STEPS = (MOST_CORRECTIONS + 1) * (STEPS_IN_A_ROW + 1)  # of each plan; a first one may make state


class PlannedStep(Step):
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
        step: the TrainingStep that it carries out, with the latest batch: the first one would stay alive beside those
            of later steps.
        device: the device that the step runs on.
        corrections: the plans of which a step took more than the budget, and what replaced them.
        seconds: how long capture, measurement and planning of the first plan took.
        memory: what serves the calls' requests: an arena, or torch's allocator with the reason why there is no arena.
        arena: that serves the calls' requests, if the settings ask for one.
    """

    def __init__(self, step: TrainingStep, settings: Settings, plan: Plan | None = None) -> None:
        self.step = step = replace(step)
        self._ranks = ranks_of(step)
        settings = self._ranks.start(settings)
        self.device = step_device(step.model, step.batch)
        require_cap(settings, self.device)
        self._memory, settings = memory_for(
            settings, self.device, step.optimizer, refused=_ON_RANKS if step.across is not None else ""
        )
        self._graphs: StepGraphs | None = None
        if settings.cuda_graph:
            require_capturable(settings, step, self.device, self._memory)
            self._graphs = StepGraphs(step, self._memory, self.device)
        self._on_stream = nullcontext if self._graphs is None else self._graphs.stream
        self._store = HostStore(self.device, settings.host_budget_bytes, settings.host_dir)
        self._programs = Programs(
            step,
            settings,
            ranks=self._ranks,
            store=self._store,
            memory=self._memory,
            graphs=self._graphs,
            beside_bytes=lambda batch: resident_bytes(self, batch) + self.held_bytes,
        )
        with self._on_stream(), turn_for(step, self.device, "memfit.fit"):
            self._programs.variants.latest = self._programs.add(step.batch, plan)
        self.settings = self._programs.settings
        contract = Contract(
            self.plan.budget_bytes, is_firm=settings.budget_is == FIRM, most_corrections=MOST_CORRECTIONS
        )
        self._proof = Proof(
            contract,
            self.device,
            self._memory,
            self._ranks,
            self._programs.plan_within,
            Beside(self.device, step.model, step.optimizer) if settings.is_in_bytes else None,
            is_capped=settings.hard,
        )
        self.corrections = self._proof.corrections
        self.seconds: Mapping[str, float] = {
            "capture": self._programs.capture_seconds,
            **self._programs.first.prepared.seconds,
        }
        self.memory: Served = self._memory.served
        self.arena: Arena | None = self._memory.arena
        tell_of_card(self.device, self._programs.first.peak_bytes, "memfit.fit")

    @property
    def plan(self) -> Plan:
        """The plan for the batch that the step was made with."""
        return self._programs.first.plan

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that are kept, in the order in which they were made."""
        return tuple(variant.program.plan for variant in self._programs.variants)

    @property
    def captured(self) -> Captured:
        """The graph and binding of the first plan."""
        return self._programs.first.prepared.captured

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """The generators that the step's code hands to torch."""
        programs = [variant.program for variant in self._programs.variants]
        return tuple(dict.fromkeys(g for program in programs for g in program.prepared.captured.generators))

    @property
    def constants(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the step, as last called, closes over: class weights, say, or a teacher's parameters."""
        latest = self._programs.variants.latest
        residents = latest.program.prepared.captured.binding.residents if latest is not None else ()
        return tuple(resident.constant for resident in residents if resident.constant is not None)

    @property
    def transfers(self) -> Transfers:
        """The copies to the host and back in the last call, and when compute waited for them; not timed on a GPU."""
        return self._store.transfers

    @property
    def source(self) -> str:
        """The Python source that runs the first plan."""
        return self._programs.first.prepared.program.source

    @property
    def held_bytes(self) -> int:
        """The bytes that the step holds between calls, beside its residents: of its arena, and its CUDA graph."""
        return self._memory.held_bytes + (0 if self._graphs is None else self._graphs.held_bytes)

    @property
    def budget_bytes(self) -> int:
        """What a step may take: of a budget in percent, the largest of those of the steps so far."""
        return self._proof.budget_bytes

    @property
    def taken_bytes(self) -> int:
        """The bytes that the latest call that was measured took of the device; 0 before."""
        return self._proof.taken_bytes

    @property
    def is_replayed(self) -> bool:
        """Whether there is a CUDA graph that calls replay (see `cuda_graph` of `memfit.fit`)."""
        return self._graphs is not None and self._graphs.has_graph

    def _run(self, batch: Any) -> Any:
        with self._on_stream():
            variants, variant = self._programs.variants, self._programs.find(batch)
            self._proof.allow(variant.program.plan.budget_bytes)
            takes_workspaces = self._memory.follow_stream()
            if takes_workspaces:
                for each in variants:
                    each.forget_steps()  # what steps take on this stream was not seen
                if self.step.across is None:  # ranks correct a plan together, and this one's stream is its own
                    self._proof.leave_stranded(variant)
            variants.latest, program = variant, variant.program
            settle(self.step.optimizer, program.kept, self.device, self.settings.host_dir)
            self._memory.expect(variant.key, program)
            key, run = self._memory.key(variant.key), partial(self._programs.run, variant, batch)
            is_proved, graphs = key in variant.proved, self._graphs
            if graphs is not None and graphs.prepare(key, program, batch, run, is_proved=is_proved):
                variant.proved.discard(key)  # what a graph takes is proved as well
                variant.judged_key = None
            library_bytes = 0 if takes_workspaces else program.library_bytes
            return self._proof.run(
                variant,
                key,
                run,
                lambda: resident_bytes(self, batch) + variant.gradient_bytes(self.device),
                library_bytes + self.held_bytes,
            )

    def prove(self) -> None:
        """Run steps on the step's own batch until two in a row keep the budget; they leave no trace.

        Raises:
            BudgetNotHeldError: no plan keeps it.
        """
        proof = self._proof
        capped_before, proof.is_capped = proof.is_capped, False
        try:
            with turn_for(self.step, self.device, "`prove`"), left_as_it_was(self.step, self.generators):
                for _ in range(_MOST_PROVING_STEPS):
                    if self.step.optimizer is None:
                        self.step.model.zero_grad(set_to_none=True)
                    self(self.step.batch)
                    if any(variant.proved for variant in self._programs.variants):
                        return
        finally:
            proof.is_capped = capped_before

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a block in which calls add to this rank's gradients only: the first ones of an accumulation.

        Raises:
            InvalidOptionError: the step runs on one rank, or updates the parameters in each call.
        """
        if self.step.across is None or self.step.optimizer is not None:
            raise InvalidOptionError("no_sync is for steps with a process_group and without an optimizer")
        return self.step.across.no_sync()

    def measure(self, batch: Any = None, *, repeats: int | None = None) -> Measured:
        """As of any `Step`; the note also says where the ops were measured in a busy moment.

        Args:
            batch: of all measured steps; None is the one that the step was made with.
            repeats: turns of a planned and an eager step; None takes turns until the spread is small, see
                `Step.measure`.
        """
        measured = super().measure(batch, repeats=repeats)
        predicted, eager = self.plan.unplanned.seconds, measured.baseline_step_seconds
        note = measured.note
        if self.settings.device is None and eager is not None and predicted > _MOST_PREDICTED * eager:
            doubt(self.captured.binding)
            note = f"{note} {_DOUBTED}".strip()
        machine = f"{self.plan.device.name}, torch {self.plan.versions.get('torch', 'unknown')}"
        return replace(measured, machine=machine, note=note)

    def report(self, path: Path | str, *, repeats: int | None = None) -> None:
        """Measure the step beside eager, and write one HTML file with the plan and what was measured.

        Args:
            path: where the page is written.
            repeats: as for `measure`.

        Raises:
            InvalidFileError: the file cannot be written.
        """
        from memfit.report import write_html  # the report stands above; only who asks for a page pays for it

        write_html(self.plan, path, measured=self.noted(self.measure(repeats=repeats)))

    def __repr__(self) -> str:
        return f"PlannedStep({self.plan!r}, {len(self.plans)} plans)"

    def _repr_html_(self) -> str:
        from memfit.report.notebook import plan_html

        return plan_html(self.plan, {"corrected": str(len(self.corrections))} if self.corrections else None)

    def wait_for_searches(self, seconds: float | None = None) -> bool:
        """Wait until no plan is searched behind the steps; return whether that is so.

        Args:
            seconds: how long to wait at most; None waits as long as it takes.
        """
        return self._programs.sizes.behind.wait(seconds)
