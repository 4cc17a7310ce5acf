"""The one loop that plans for less until what is placed fits: a layout, an allocator's pages, generated code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

from memfit.errors import MemfitError, NoPlanError

Made = TypeVar("Made")

_CLOSE = 0.02  # of the budget: what fits so closely is not replaced by more
_MARGIN = 0.005  # of the bytes: where the next plan is aimed below them
_NONE = 1 << 60


class SamePlanError(MemfitError):
    """A plan that was placed before: there is no other one near."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is known of a plan that was made and placed.

    Attributes:
        planned_bytes: by the plan itself, no more than it was made for unless it is the leanest.
        taken_bytes: as it is placed.
        budget_bytes: for these.
        is_most: whether a larger plan gains nothing.
    """

    planned_bytes: int
    taken_bytes: int
    budget_bytes: int
    is_most: bool = False

    @property
    def excess_bytes(self) -> int:
        """What it takes too much; negative if it fits."""
        return self.taken_bytes - self.budget_bytes


@dataclass(frozen=True, slots=True)
class Fitted(Generic[Made]):
    """What fits, the largest of these; or what takes the fewest bytes, if nothing does.

    Attributes:
        made: the plan, its code, or whatever was made.
        sizes: of it.
        plans: how many were made.
    """

    made: Made
    sizes: Sizes
    plans: int

    @property
    def fits(self) -> bool:
        """Whether it takes no more than its budget."""
        return self.sizes.excess_bytes <= 0


def fit_by(
    make: Callable[[int], Made],
    sizes_of: Callable[[Made], Sizes],
    first_bytes: int,
    *,
    most_plans: int,
    closely: bool = False,
) -> Fitted[Made]:
    """Return the first plan that fits as it is placed, or the one that takes the fewest bytes.

    Each plan is made for as much less as the one before took too much, or for twice as much less where that one took no
    less than its own predecessor: an allocator takes pages. With `closely` it is made by the ratio, for code takes a
    share more or less than its plan. Where there is no plan for that, or one is known to be too large, the next one is
    made for the middle; and where none can be made for less, in the middle of the widest gap between those that were
    made: what an allocator takes for a larger plan may be less.

    Args:
        make: makes a plan for so many bytes.
        sizes_of: places it.
        first_bytes: that the first plan is made for.
        most_plans: to make, those included that are not found.
        closely: try larger plans once one fits, until it takes nearly all of the budget.

    Raises:
        NoPlanError: as `make`, for the first plan.
        MemfitError: as `make`; a SamePlanError after the first plan ends the search.
    """
    made = make(first_bytes)
    sizes = sizes_of(made)
    best = Fitted(made, sizes, 1)
    floor_bytes, too_large_bytes, power = 0, _NONE, 1
    too_large: list[int] = []
    is_leanest = sizes.planned_bytes > first_bytes
    for plans in range(2, most_plans + 1):
        fits, near_bytes = sizes.excess_bytes <= 0, _CLOSE * sizes.budget_bytes
        if fits and (not closely or sizes.is_most or -sizes.excess_bytes <= near_bytes):
            break
        if not fits and is_leanest:
            break
        if fits:
            floor_bytes = max(floor_bytes, sizes.planned_bytes)
        else:
            too_large_bytes = min(too_large_bytes, sizes.planned_bytes)
            too_large.append(sizes.planned_bytes)
        aim_bytes = sizes.planned_bytes - power * sizes.excess_bytes
        if closely:
            aim_bytes = int(sizes.planned_bytes * sizes.budget_bytes / max(1, sizes.taken_bytes) * (1 - _MARGIN))
        if not floor_bytes < aim_bytes < too_large_bytes:
            aim_bytes = (floor_bytes + min(too_large_bytes, sizes.planned_bytes)) // 2
        if too_large_bytes - floor_bytes <= near_bytes and not best.fits:
            aim_bytes = _in_widest_gap(floor_bytes, too_large, near_bytes)
        is_narrow = best.fits and too_large_bytes - floor_bytes <= near_bytes
        if aim_bytes <= floor_bytes or is_narrow:
            break
        try:
            made = make(max(1, aim_bytes))
        except NoPlanError as error:
            floor_bytes = max(
                floor_bytes, aim_bytes, error.least_budget_bound_bytes, error.least_budget_found_bytes or 0
            )
            continue
        except SamePlanError:
            break
        before_bytes, sizes = sizes.taken_bytes, sizes_of(made)
        is_leanest = sizes.planned_bytes > aim_bytes
        power = 2 * power if sizes.taken_bytes == before_bytes else 1
        best = max(best, Fitted(made, sizes, plans), key=_worth)
    return best


def _in_widest_gap(floor_bytes: int, made_bytes: list[int], near_bytes: float) -> int:
    """Return the middle of the widest gap between plans that were made, 0 if none is wider than `near_bytes`."""
    edges = sorted({floor_bytes, *(size for size in made_bytes if size > floor_bytes)})
    width, lower = max(((upper - lower, lower) for lower, upper in pairwise(edges)), default=(0, 0))
    return lower + width // 2 if width > near_bytes else 0


def _worth(fitted: Fitted[Made]) -> tuple[bool, int]:
    return fitted.fits, fitted.sizes.planned_bytes if fitted.fits else -fitted.sizes.taken_bytes
