"""Contract: what was taken of a device, against a budget and a prediction. The one judge of a budget.

    >>> from memfit.memory.contract import Contract, Standing, Usage
    >>> contract, standing = Contract("1000"), Standing()
    >>> contract.judge(standing, Usage(taken_bytes=1100, live_bytes=1100), predicted_bytes=990)
    Aim(aim_bytes=890, is_larger=False)

It measures nothing and plans nothing: a door gives it the usage of each window, and carries out its verdict.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter
from dataclasses import dataclass

from memfit.errors import BudgetNotHeldError, InvalidOptionError, MemfitError
from memfit.system.budget import format_bytes, is_share, parse_budget

_log = logging.getLogger("memfit")

FIRM, SOFT = "firm", "soft"
WINDOWS_BEFORE_LARGER = 3
"""Windows of one plan in a row that keep the budget, before a larger plan is tried."""
MOST_PLANS = 6
"""Plans of one standing, after which no larger one is tried."""
STEPS_IN_A_ROW = 2
"""Windows within the budget, after which earlier ones over it no longer count, and the plan is proved."""
MOST_CORRECTIONS = 3
"""Of plans for which less was aimed at, before a further window over the budget is refused."""
_LEAST_SPARE = 50  # a spare part of the budget below 1/50 is no reason for another plan
_LEAST_SPARE_IN_PAGES = 20  # the same where an allocator takes pages, of which another plan may leave more unused
_PAGES_MARGIN = 40
_SPARE_PAGES = 2
_MOST_WARNINGS = 3  # of one kind


def read_firm(budget_is: str) -> bool:
    """Return whether a step that takes more than the budget is an error (`firm`), and not a warning (`soft`).

    Raises:
        InvalidOptionError: neither.
    """
    if budget_is not in (FIRM, SOFT):
        raise InvalidOptionError(f"budget_is is {budget_is!r}, expected {FIRM!r} or {SOFT!r}")
    return budget_is == FIRM


class WindowKind(enum.Enum):
    """What a window holds.

    Attributes:
        FIRST: forward and backward of the first micro-batch of a step, with what follows before the next window.
        LATER: the same of a later micro-batch, when gradients are there already.
        EVALUATION: a call of the model without gradients, with what follows before the next window.
    """

    FIRST = "first"
    LATER = "later"
    EVALUATION = "evaluation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one window took of the device.

    Attributes:
        taken_bytes: counted against the budget: live bytes on a CPU; on CUDA reserved ones, with library workspaces.
        live_bytes: the most bytes that were live at once.
        kind: of the window.
        start_bytes: that were live when it began, if that is known.
    """

    taken_bytes: int
    live_bytes: int
    kind: WindowKind = WindowKind.FIRST
    start_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Held:
    """The budget was kept, and the plan stays."""

    spare_bytes: int


@dataclass(frozen=True, slots=True)
class Aim:
    """The plan is replaced by one that is predicted to take at most `aim_bytes`."""

    aim_bytes: int
    is_larger: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """The plan that takes the least was over: no plan keeps the budget."""

    needed_bytes: int
    over_bytes: int


Verdict = Held | Aim | Refused


@dataclass(slots=True, kw_only=True)
class Standing:
    """What the windows of one kind of step have shown so far; `Contract.judge` keeps it.

    Attributes:
        is_least: whether the present plan is the one that takes the least.
        is_most: whether it is the one that takes the most, so that nothing is gained by a larger one.
        expected_error_bytes: assumed until a window was measured.
        error_bytes: the most that a window took above its prediction, negative if below; None before the first.
        worst_bytes: the most that a window took since the present plan.
        windows: since the present plan.
        plans: so far.
        over: windows that took more than the budget.
        kept_in_a_row: windows within the budget.
        corrections: windows that took more, since two in a row were within it.
    """

    is_least: bool = False
    is_most: bool = False
    expected_error_bytes: int = 0
    error_bytes: int | None = None
    worst_bytes: int = 0
    windows: int = 0
    plans: int = 0
    over: int = 0
    kept_in_a_row: int = 0
    corrections: int = 0

    def replace_plan(self, *, is_least: bool, is_most: bool) -> None:
        """Begin to count windows of another plan.

        Args:
            is_least: whether no plan takes less.
            is_most: whether no plan takes more.
        """
        self.is_least, self.is_most = is_least, is_most
        self.worst_bytes, self.windows = 0, 0
        self.plans += 1


class Contract:
    """The budget of one device.

    Args:
        budget: bytes as text or integer, or a percentage of a peak that `resolve` tells later.
        page_bytes: the allocator's step in taking memory: less is never spare.
        is_firm: whether `Refused` is an error; otherwise it is a warning.
        most_corrections: after so many, without two windows in a row that kept the budget, a further one is refused;
            None if only the plan that takes the least can be.

    Raises:
        InvalidBudgetError: no size.
    """

    def __init__(
        self, budget: str | int, *, page_bytes: int = 0, is_firm: bool = True, most_corrections: int | None = None
    ) -> None:
        self._text, self._page_bytes, self.is_firm = budget, page_bytes, is_firm
        self._most_corrections = most_corrections
        self.is_share = is_share(budget)
        checked_bytes = parse_budget(budget, 1 << 50)
        self._budget_bytes = None if self.is_share else checked_bytes

    @property
    def is_resolved(self) -> bool:
        """Whether the budget is known in bytes."""
        return self._budget_bytes is not None

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes; of a percentage, once `resolve` was called."""
        assert self._budget_bytes is not None
        return self._budget_bytes

    def resolve(self, whole_bytes: int) -> None:
        """Set the bytes of 100%; of a budget in bytes nothing changes."""
        if self.is_share:
            self._budget_bytes = parse_budget(self._text, whole_bytes)

    @property
    def share_text(self) -> str:
        """The percentage that it was given as; empty of a budget in bytes."""
        return str(self._text) if self.is_share else ""

    def of_budget(self, budget_bytes: int) -> Contract:
        """Return the same with another budget."""
        return Contract(
            budget_bytes,
            page_bytes=self._page_bytes,
            is_firm=self.is_firm,
            most_corrections=self._most_corrections,
        )

    @property
    def margin_bytes(self) -> int:
        """What a plan leaves free that replaces another one: an allocator takes whole pages, and other ones for it."""
        return self.budget_bytes // _PAGES_MARGIN if self._page_bytes else 0

    def aim_bytes(self, standing: Standing) -> int:
        """Return the bytes that the next plan may be predicted to take.

        What a plan took less than predicted is not given to the next one, which may take all that is predicted.
        """
        error_bytes = standing.expected_error_bytes if standing.error_bytes is None else standing.error_bytes
        return self.budget_bytes - max(0, error_bytes)

    def judge(self, standing: Standing, usage: Usage, predicted_bytes: int) -> Verdict:
        """Return the verdict on one window, which `standing` counts.

        Args:
            standing: of this kind of step.
            usage: of the window.
            predicted_bytes: what the plan was predicted to take of a window that begins as this one did.
        """
        error_bytes = usage.taken_bytes - predicted_bytes
        standing.error_bytes = error_bytes if standing.error_bytes is None else max(standing.error_bytes, error_bytes)
        standing.worst_bytes = max(standing.worst_bytes, usage.taken_bytes)
        standing.windows += 1
        spare_bytes = self.budget_bytes - standing.worst_bytes
        if usage.taken_bytes > self.budget_bytes:
            standing.over += 1
            standing.kept_in_a_row, standing.corrections = 0, standing.corrections + 1
            is_hopeless = self._most_corrections is not None and standing.corrections > self._most_corrections
            if standing.is_least or is_hopeless:
                return Refused(usage.taken_bytes, usage.taken_bytes - self.budget_bytes)
            return Aim(self.aim_bytes(standing) - self.margin_bytes, is_larger=False)
        standing.kept_in_a_row += 1
        if standing.kept_in_a_row == STEPS_IN_A_ROW:
            standing.corrections = 0
        least_spare = _LEAST_SPARE_IN_PAGES if self._page_bytes else _LEAST_SPARE
        is_worth_it = spare_bytes > max(self.budget_bytes // least_spare, _SPARE_PAGES * self._page_bytes)
        may_grow = standing.windows >= WINDOWS_BEFORE_LARGER and standing.plans < MOST_PLANS and not standing.is_most
        if is_worth_it and may_grow:
            return Aim(self.aim_bytes(standing) - self.margin_bytes, is_larger=True)
        return Held(spare_bytes)

    def refusal(
        self, refused: Refused, what: str, instead: str = "", *, holding_bytes: int | None = 0
    ) -> BudgetNotHeldError:
        """Return the error of a window that no plan keeps within the budget.

        Args:
            refused: the verdict.
            what: the plan does, as a clause: `every block is recomputed`.
            instead: another door that may hold it, as a clause: `try eager mode`.
            holding_bytes: the most that any step took whose plan takes the least; None if none was seen as a whole.
        """
        raised = "Make"
        if holding_bytes is not None:
            raised = f"Raise the budget to {max(refused.needed_bytes, holding_bytes)} bytes for steps like this, make"
        return BudgetNotHeldError(
            f"a step took {format_bytes(refused.needed_bytes)} ({refused.needed_bytes} bytes), "
            f"{format_bytes(refused.over_bytes)} ({refused.over_bytes} bytes) more than its budget of "
            f"{format_bytes(self.budget_bytes)}, and {what}; the step is complete. {raised} the batch "
            f"smaller, {instead and instead + ', '}or give budget_is='soft' to go on with a warning",
            over_bytes=refused.over_bytes,
        )

    def refuse(self, error: MemfitError) -> None:
        """Raise an error about the budget; of a soft one it is a warning."""
        if self.is_firm:
            raise error
        _log.warning("memfit: %s", error)

    def over_text(self, usage: Usage) -> str:
        """Return what to say of a window that took more than the budget."""
        took = f"took {format_bytes(usage.taken_bytes)}, more than the budget of {format_bytes(self.budget_bytes)}"
        if usage.kind is WindowKind.EVALUATION:
            return (
                f"a call without gradients {took}: nothing is saved for backward there that a plan could drop; make "
                "the batch of the evaluation smaller"
            )
        return f"a step {took}; the next one is planned for less"

    def between_text(self, live_bytes: int, taken_bytes: int) -> str:
        """Return what to say where code between two steps took more than the budget.

        Args:
            live_bytes: of tensors, the most that there were.
            taken_bytes: by the allocator, the most.
        """
        where = "in an update, an average of the weights, an evaluation outside of the model"
        budget = f"more than the budget of {format_bytes(self.budget_bytes)}"
        live = f"{format_bytes(live_bytes)} were live"
        if live_bytes > self.budget_bytes:
            return f"between two steps {live}, {budget}: {where}; no plan of forward and backward changes that"
        return (
            f"between two steps PyTorch's allocator held {format_bytes(taken_bytes)}, of which {live}, {budget}: "
            f"{where}; from now on what is unused is returned to the device after each backward pass, which takes time"
        )

    def measuring_text(self, taken_bytes: int) -> str:
        """Return what to say where measuring the ops of a new graph took more than the budget.

        Args:
            taken_bytes: with what is on the device.
        """
        return (
            f"measuring the ops of a new graph took {format_bytes(taken_bytes)}, more than the budget of "
            f"{format_bytes(self.budget_bytes)}: each is run by itself, beside what is on the device; its cost is "
            "kept, so that it is not measured again"
        )


@dataclass(slots=True)
class Unused:
    """What a window leaves unused may serve none of the tensors of another sort of window.

    Sorts are calls without gradients, steps, and batches of other sizes. What is unused is returned to the device where
    one follows another and both together may be more than the budget.

    Attributes:
        more_bytes: the most that a call without gradients had live above what was live before it; None before one.
    """

    more_bytes: int | None = None
    _largest: int = -1
    _before_bytes: int = 0
    _last: tuple[bool, int] = (False, 0)  # whether it was a call without gradients, and its size

    def evaluation_begins(self, held_bytes: int, live_bytes: int, budget_bytes: int, size: int = 0) -> bool:
        """Begin a call without gradients; return whether unused memory is returned before it.

        Args:
            held_bytes: by the allocator.
            live_bytes: of them.
            budget_bytes: of both.
            size: of its batch.
        """
        self._before_bytes = min(live_bytes, self._before_bytes) if self._last[0] else live_bytes
        is_larger, self._largest = size > self._largest, max(size, self._largest)
        more_bytes = budget_bytes if is_larger or self.more_bytes is None else self.more_bytes
        return self._follows_other((True, size)) and held_bytes + more_bytes > budget_bytes

    def evaluations_end(self, live_bytes: int) -> None:
        """End all calls without gradients since the last step.

        Args:
            live_bytes: the most during them, and what the loop made of them.
        """
        if self._last[0]:
            self.more_bytes = max(self.more_bytes or 0, live_bytes - self._before_bytes)

    def step_begins(self, held_bytes: int, more_bytes: int, budget_bytes: int, size: int = 0) -> bool:
        """Begin a step; return whether unused memory is returned before it.

        Args:
            held_bytes: by the allocator.
            more_bytes: that the step is predicted to take beside what is live.
            budget_bytes: of both.
            size: of its batch.
        """
        return self._follows_other((False, size)) and held_bytes + more_bytes > budget_bytes

    def _follows_other(self, sort: tuple[bool, int]) -> bool:
        before, self._last = self._last, sort
        return before != sort


class Warnings:
    """Warnings of one door, the first few of each kind.

    Attributes:
        are_on: whether there are any: not in steps that a door takes by itself.
    """

    def __init__(self) -> None:
        self.are_on = True
        self._count: Counter[str] = Counter()

    def warn(self, text: str, kind: str, most: int = _MOST_WARNINGS) -> None:
        """Log a warning, unless there were enough of its kind.

        Args:
            text: of it.
            kind: that is counted.
            most: of this kind that are logged.
        """
        if not self.are_on or self._count[kind] >= most:
            return
        self._count[kind] += 1
        last = "; later ones are counted in report()" if self._count[kind] == most > 1 else ""
        _log.warning("memfit: %s%s", text, last)
