"""Habits as users write them (`habits.py`) at each door: eager's bits within the budget, the model left as it was."""

from __future__ import annotations

from functools import cache
from typing import Any

import habit_runs
import pytest
from habits import HABITS

# PyTorch's own compiler reads a NumPy number in an attribute as a tensor of float64, and so the loss is one.
OF_COMPILERS = {("annealed", "backend"), ("annealed", "compile")}
CASES = [(name, door) for name in HABITS for door in habit_runs.DOORS]


@cache
def bare_of(name: str) -> dict[str, Any]:
    return habit_runs.bare_of(name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "door"), CASES)
def test_a_habit_keeps_its_bits_and_its_budget_or_is_refused(name: str, door: str) -> None:
    if door not in habit_runs.doors_of(name) or (name, door) in OF_COMPILERS:
        pytest.skip("the loop runs a step of its own, or PyTorch's compiler another one")
    share = habit_runs.SHARES[(CASES.index((name, door)) // len(habit_runs.DOORS)) % 2]
    kind, text = habit_runs.ended(name, door, share, bare_of(name))
    assert kind in ("held", "refused"), (kind, text)


def test_each_way_to_end_is_told_from_the_others() -> None:
    bare = {"losses": ["0x1p0"], "left": {"weight": "1"}, "peaks_bytes": [100]}
    held = bare | {"said": [], "unlike": [], "peaks_bytes": [90]}
    changes: dict[str, dict[str, Any]] = {
        "held": {},
        "changed": {"unlike": ["weight"]},
        "error": {"error": "TypeError"},
        "refused": {"refused": "InfeasibleBudgetError"},
        "unsaid": {"peaks_bytes": [101]},
        "over": {"peaks_bytes": [90, 90, 90, 101], "said": ["a step took more than the budget"]},
    }
    assert {kind: habit_runs.judged(held | change, bare, 100)[0] for kind, change in changes.items()} == {
        kind: kind for kind in changes
    }
    for other in ({"losses": ["0x1p1"]}, {"left": {"weight": "2"}}, {"left": {}}):
        assert habit_runs.judged(held | other, bare, 100)[0] == "other bits"
