"""`fit_function`: an iterative function of a state, within a budget of bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

from memfit.capture.function_step import FunctionStep
from memfit.doors.step import fit_step
from memfit.options import FunctionOptions, require_options, settings_from
from memfit.plan import Plan
from memfit.step.measured import Measured
from memfit.step.planned_step import PlannedStep
from memfit.step.uncopied import Uncopied


def fit_function(
    function: Callable[[Any, Any], Any],
    state: Any,
    batch: Any = None,
    *,
    budget: str | int,
    plan: Plan | Path | str | None = None,
    verify: bool = False,
    **options: Unpack[FunctionOptions],
) -> PlannedFunction:
    """Plan one iteration `state = function(state, batch)` within `budget`; no autograd is needed.

        >>> import torch, memfit
        >>> def power(vector, matrix):
        ...     longer = matrix @ vector
        ...     return longer / longer.norm()
        >>> matrix, vector = torch.randn(64, 64), torch.randn(64)
        >>> planned = memfit.fit_function(power, vector, matrix, budget="1MiB")
        >>> for _ in range(10):
        ...     vector = planned(vector, matrix)

    Results are recomputed or offloaded, and chains of ops that work row by row are run on some rows at a time, where
    this gives the same bits (see `memfit.capture.row_chunks`).

    Args:
        function: of a state and a batch; returns the next state, nested as the one given, of tensors of the same shapes
            and dtypes. It may close over tensors and modules.
        state: an example of a state: tensors in nested tuples, lists and dicts.
        batch: an example of what each call gets beside the state: the data, say.
        budget: the bytes that a call may use on its device, state and batch included: `"6GiB"`, `"60%"` of the
            function's own peak, `"90% of the card"`, or an integer.
        plan: a plan made before (or its file), used instead of searching.
        verify: compare planned and eager calls, and raise at the first leaf of the state that differs.
        options: how plans are searched and calls are run; see `memfit.options.FunctionOptions`. Planners that plan by
            forward and backward find nothing to do here.

    Raises:
        InvalidOptionError: an option that does not exist, or a value that it cannot have.
        InfeasibleBudgetError: no plan fits. The error has the least budget found and the least that any plan could
            reach.
        TimeLimitError: the planner found no plan that fits, and nothing proves that there is none.
        InvalidTargetError: no function, or a state that holds something else than tensors.
        GraphBreakError: the function depends on a tensor's value: take that decision between two calls.
        CaptureError: the function cannot be captured, or returns another kind of state.
        VerificationError: the planned function's bits differ from eager's.
        MemfitError: any other bad input; each message says what to do.
    """
    require_options(options, FunctionOptions, "memfit.fit_function")
    settings = settings_from(budget, options)
    planned = fit_step(FunctionStep.of(function, state, batch), settings, plan=plan, verify=verify)
    assert isinstance(planned, PlannedStep)
    return PlannedFunction(planned)


class PlannedFunction(Uncopied):
    """A function of a state inside its budget: call it with a state and a batch, get the next state.

    Attributes:
        step: the planned step that runs it; it takes the pair of both, and has the plan, the source, and what was
            corrected.
    """

    def __init__(self, step: PlannedStep) -> None:
        self.step = step

    @property
    def plan(self) -> Plan:
        """The plan for the example that the function was planned with."""
        return self.step.plan

    def __call__(self, state: Any, batch: Any = None) -> Any:
        """Return the next state.

        Args:
            state: nested like the one that the function was planned with. Another shape is planned at its first call.
            batch: likewise.

        Raises:
            InfeasibleBudgetError: other shapes, for which no plan fits the budget.
        """
        return self.step((state, batch))

    def verify(self) -> None:
        """Compare planned and eager calls on the example: from its state, and from the state after one call.

        Raises:
            VerificationError: a leaf of the next state differs in its bits.
        """
        self.step.verify()

    def measure(self, *, repeats: int | None = None) -> Measured:
        """Measure peak bytes and seconds of planned and eager calls on the example, interleaved.

        Args:
            repeats: how many calls of each count; None as for `PlannedStep.measure`.
        """
        return self.step.measure(repeats=repeats)
