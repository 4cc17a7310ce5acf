"""How a planned step gets its programs: captured, compared with eager, planned, and planned again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from memfit.binding import Origin
from memfit.capture import Captured, TrainingStep, with_real_results
from memfit.capture.compare import Comparisons
from memfit.capture.later_sizes import CapturedSizes
from memfit.capture.stream import Stream
from memfit.cost.calibration import local_device
from memfit.cost.observations import Corrections
from memfit.memory.host.store import HostStore
from memfit.near_plans import PROVISIONAL
from memfit.plan import Plan
from memfit.planning import Settings
from memfit.step.chunked import make_function_program
from memfit.step.distributed.ranks import Ranks
from memfit.step.eager_peak import with_eager_peak
from memfit.step.near_sizes import NearSizes
from memfit.step.prepare import ANEW, AS_IT_IS
from memfit.step.step_program import StepProgram, make_step_program


class ProgramMaker:
    """Makes the programs of one step.

    Attributes:
        settings: by which the step is planned. The budget is in bytes once there is a program: a share of another
            batch's peak would be another budget.
        capture_seconds: that the first capture took.

    Args:
        step: the step.
        settings: see above.
        ranks: that train together.
        store: for what programs offload.
        sizes: the sizes that are known.
    """

    def __init__(
        self, step: TrainingStep, settings: Settings, *, ranks: Ranks, store: HostStore, sizes: NearSizes
    ) -> None:
        self.settings = self._first_settings = settings
        self.capture_seconds = 0.0
        self._step, self._ranks, self._store, self._sizes = step, ranks, store, sizes
        self._captures = CapturedSizes(step)
        self._comparisons = Comparisons()
        self._first_adds: bool | None = None

    def make(self, batch: Any, beside_bytes: Callable[[], int], plan: Plan | None = None) -> StepProgram:
        """Return the program of the step as it is now, on batches like this one.

        Args:
            batch: an example.
            beside_bytes: returns what is on the device before the step.
            plan: made before; None searches one.

        Raises:
            MemfitError: as `memfit.fit`.
        """
        program = self._ranks.together("preparing the step", lambda: self._made(batch, beside_bytes, plan))
        self._ranks.require_same_plan(program.plan)
        if self._first_adds is None:
            self._first_adds = adds_to_gradients(program.prepared.captured)
            self.settings = self.settings.within(program.plan.budget_bytes)
        return program

    def corrected(self, program: StepProgram, settings: Settings) -> StepProgram:
        """Return a program that allows for what a program's plan mispredicted.

        Args:
            program: whose capture is used: the step has left gradients by now, and a new one would add to them.
            settings: with the budget to plan for.

        Raises:
            InfeasibleBudgetError, TimeLimitError: no plan fits.
        """
        captured = program.prepared.captured
        is_own = program.plan.planner not in PROVISIONAL
        planning = self._ranks.planning(AS_IT_IS if is_own else self._sizes.planning(captured, settings))
        make = partial(make_step_program, self._step, captured, settings, None, self._store, planning)
        return self._ranks.together("correcting the plan", make)

    def with_plan(self, program: StepProgram, plan: Plan) -> StepProgram:
        """Return the program of another plan of the same graph."""
        captured, settings = program.prepared.captured, self.settings.within(plan.budget_bytes)
        return make_step_program(self._step, captured, settings, plan, self._store, AS_IT_IS)

    def _made(self, batch: Any, beside_bytes: Callable[[], int], plan: Plan | None) -> StepProgram:
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
                device = settings.device or local_device(self._store.device)
                settings = with_eager_peak(settings, self._step, captured, device)
            if self._first_adds is None:
                self.capture_seconds += time.perf_counter() - started
            if not self._step.has_backward:
                return make_function_program(self._step, captured, settings, plan, self._store)
            planning = self._ranks.planning(ANEW if plan is not None else self._sizes.planning(captured, settings))
            return make_step_program(self._step, captured, settings, plan, self._store, planning)

        program = with_real_results(make)
        program.arguments(batch)  # or the comparison would write to memory that two of them share
        self.settings.on_stage("comparing with eager's calls")
        limit_bytes = max(0, program.plan.budget_bytes - beside_bytes())
        self._comparisons.require_as_eager(self._step, batch, streams[-1], limit_bytes=limit_bytes)
        return program

    def _settings_for(self, captured: Captured) -> Settings:
        """Return the settings: a budget in percent is a share of each of the two peaks of accumulation."""
        is_other = self._step.optimizer is None and adds_to_gradients(captured) != self._first_adds
        return self._first_settings if is_other else self.settings


def adds_to_gradients(captured: Captured) -> bool:
    """Return whether a step finds gradients that it adds to."""
    return any(resident.origin is Origin.GRADIENT for resident in captured.binding.residents)
