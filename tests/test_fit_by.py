"""The loop that plans for less until what is placed fits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memfit.errors import NoPlanError
from memfit.memory.fit_by import Fitted, SamePlanError, Sizes, fit_by

MIB = 1 << 20


def fitted(
    taken: Callable[[int], int],
    budget_bytes: int,
    *,
    leanest_bytes: int = 0,
    most_plans: int = 6,
    closely: bool = False,
) -> tuple[Fitted[int], list[int]]:
    """Fit plans that take `taken` of the bytes that they are made for; return what fits, and all that were made for."""
    aims: list[int] = []

    def make(aim_bytes: int) -> int:
        aims.append(aim_bytes)
        return max(aim_bytes, leanest_bytes)

    def sizes_of(planned_bytes: int) -> Sizes:
        return Sizes(planned_bytes=planned_bytes, taken_bytes=taken(planned_bytes), budget_bytes=budget_bytes)

    return fit_by(make, sizes_of, budget_bytes, most_plans=most_plans, closely=closely), aims


def test_what_fits_is_the_only_one() -> None:
    found, aims = fitted(lambda planned: planned, 1000)
    assert (found.made, found.plans, aims) == (1000, 1, [1000])


def test_a_plan_is_made_for_so_much_less_that_a_page_is_left_out() -> None:
    found, aims = fitted(lambda planned: 2 * MIB - planned // (-20 * MIB) * 20 * MIB, 340 * MIB)
    assert found.sizes.taken_bytes == 322 * MIB
    assert [aim // MIB for aim in aims] == [340, 338, 334, 326, 310]


def test_larger_plans_are_tried_until_little_is_left_and_never_more() -> None:
    found, aims = fitted(lambda planned: planned * 7 // 10, 1000, closely=True)
    assert 980 <= found.sizes.taken_bytes <= 1000
    assert len(aims) == 2


def test_what_takes_more_is_planned_for_less() -> None:
    found, aims = fitted(lambda planned: planned * 11 // 10, 1000, closely=True)
    assert found.fits
    assert 850 < aims[1] < 910


def test_the_leanest_plan_is_the_last() -> None:
    found, aims = fitted(lambda planned: planned, 1000, leanest_bytes=1400, closely=True)
    assert not found.fits
    assert (found.sizes.taken_bytes, aims) == (1400, [1000])


def test_what_takes_the_fewest_bytes_is_found_where_nothing_fits() -> None:
    taken = {1000: 1200, 800: 1100, 700: 1150}
    found, aims = fitted(lambda planned: taken.get(planned, 1300), 1000, most_plans=3)
    assert (found.made, found.fits, aims) == (800, False, [1000, 800, 700])


def test_where_there_is_no_plan_the_next_one_is_made_for_the_middle() -> None:
    aims: list[int] = []

    def make(aim_bytes: int) -> int:
        aims.append(aim_bytes)
        if aim_bytes < 900:
            raise NoPlanError("too little", least_budget_found_bytes=None, least_budget_bound_bytes=850)
        return aim_bytes

    found = fit_by(
        make, lambda made: Sizes(planned_bytes=made, taken_bytes=made + 200, budget_bytes=1000), 1000, most_plans=4
    )
    assert aims == [1000, 800, 925, 887]
    assert (found.made, found.plans) == (925, 3)


def test_where_no_plan_is_leaner_those_in_between_are_tried() -> None:
    """What an allocator takes need not grow with the plan."""

    def make(aim_bytes: int) -> int:
        if aim_bytes < 780:
            raise NoPlanError("too little", least_budget_found_bytes=800, least_budget_bound_bytes=700)
        return aim_bytes

    def sizes_of(made: int) -> Sizes:
        return Sizes(planned_bytes=made, taken_bytes=990 if 850 < made < 950 else 1200, budget_bytes=1000)

    found = fit_by(make, sizes_of, 1000, most_plans=6)
    assert found.fits
    assert 850 < found.made < 950


def test_a_plan_that_was_placed_before_ends_the_search() -> None:
    def make(aim_bytes: int) -> int:
        if aim_bytes < 1000:
            raise SamePlanError
        return aim_bytes

    found = fit_by(
        make, lambda made: Sizes(planned_bytes=made, taken_bytes=made + 100, budget_bytes=1000), 1000, most_plans=4
    )
    assert not found.fits


def test_the_first_plan_has_to_be_there() -> None:
    def make(_: int) -> int:
        raise NoPlanError("none", least_budget_found_bytes=None, least_budget_bound_bytes=0)

    with pytest.raises(NoPlanError, match="none"):
        fit_by(make, lambda made: Sizes(planned_bytes=made, taken_bytes=made, budget_bytes=1), 1, most_plans=4)
