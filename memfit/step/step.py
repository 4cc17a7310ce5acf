"""Step: what all planned steps have in common, whatever runs them: a graph's program, Inductor's code, checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

from memfit.planning import Settings
from memfit.step.measure import MeasurableStep, measure_step
from memfit.step.measured import Measured
from memfit.step.proof import Correction
from memfit.step.turns import turn_for
from memfit.step.uncopied import Uncopied
from memfit.step.verify import require_same


class Step(Uncopied, MeasurableStep):
    """A training step inside its budget: call it with a batch, get the loss.

    Attributes:
        step: the TrainingStep that is carried out.
        settings: the budget, in bytes, and how plans are searched.
        device: the device that the step runs on.
        corrections: the plans of which a step took more than the budget, and what replaced them, as far as they are
            listed.
    """

    settings: Settings
    corrections: Sequence[Correction] = ()
    _is_recorded: ClassVar[bool] = True  # a call runs what was recorded once, and not the user's Python code

    @property
    def budget_bytes(self) -> int:
        """What a step may take."""
        return int(self.settings.budget)

    def __call__(self, batch: Any) -> Any:
        """Run one step on `batch`; return the loss, detached. The step of a function returns its next state.

        Raises:
            InfeasibleBudgetError, TimeLimitError: a batch of a new shape, or a changed step, for which no plan fits.
            BudgetNotHeldError: the step took more than a firm budget, and no plan takes less; the step is complete.
            InvalidOptionError: no batch.
            UnsupportedStepError: the call is inside torch.no_grad or torch.autocast, a changed step cannot be captured
                or compiled, or another thread runs a planned step on the device.
        """
        with self._turn("the planned step", self):
            return self._run(batch)

    @abstractmethod
    def _run(self, batch: Any) -> Any:
        """Run one step, while no other thread's runs."""

    def _turn(self, what: str, planned: object | None = None) -> AbstractContextManager[None]:
        return turn_for(self.step, self.device, what, planned)

    def _unjudged(self) -> AbstractContextManager[None]:
        """Return a block with copies of the state, which are no fault of the plan."""
        return nullcontext()

    def verify(self, batch: Any = None) -> None:
        """Run one eager and one planned step from the same state, and another pair from changed parameters.

        All leave no trace. Where the user's Python code runs in each step, nothing is frozen, and one pair is enough.

        Raises:
            VerificationError: a loss, gradient, parameter, buffer, optimizer state or generator differs in its bits.
        """
        with self._turn("`verify`"), self._unjudged():
            require_same(self, self.step.batch if batch is None else batch, is_recorded=self._is_recorded)

    def measure(self, batch: Any = None, *, repeats: int | None = None) -> Measured:
        """Measure peak bytes and seconds of planned and eager steps, in turns; both leave no trace.

        Args:
            batch: of the steps; its own if None.
            repeats: how many turns; None takes as many as it takes to know the overhead to two percentage points, five
                at least, within 10 seconds.
        """
        with self._turn("`measure`"), self._unjudged():
            return measure_step(self, self.step.batch if batch is None else batch, repeats=repeats)

    def noted(self, measured: Measured) -> Measured:
        """Return a measurement that also notes which plans were corrected."""
        sentences = [measured.note, *(correction.sentence for correction in self.corrections)]
        return replace(measured, note=" ".join(filter(None, sentences)))

    def wait_for_searches(self, seconds: float | None = None) -> bool:
        """Wait until no plan is searched behind the steps; return whether that is so.

        Args:
            seconds: how long to wait at most; None waits as long as it takes.
        """
        del seconds
        return True
