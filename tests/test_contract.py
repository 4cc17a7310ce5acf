"""The judge of a budget: hand-made windows, and runs that were recorded."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from memfit.errors import BudgetNotHeldError, InvalidBudgetError
from memfit.memory.contract import (
    MOST_PLANS,
    WINDOWS_BEFORE_LARGER,
    Aim,
    Contract,
    Held,
    Refused,
    Standing,
    Unused,
    Usage,
    Warnings,
    WindowKind,
)


def took(taken_bytes: int, kind: WindowKind = WindowKind.FIRST) -> Usage:
    return Usage(taken_bytes=taken_bytes, live_bytes=taken_bytes, kind=kind)


def test_a_window_over_budget_tightens_at_once_by_the_error_of_the_prediction() -> None:
    standing = Standing()
    standing.replace_plan(is_least=False, is_most=False)
    assert Contract(1000).judge(standing, took(1040), predicted_bytes=1000) == Aim(960, is_larger=False)


def test_the_budget_itself_is_kept() -> None:
    assert Contract(1000).judge(Standing(), took(1000), predicted_bytes=1000) == Held(0)


def test_a_larger_plan_is_tried_after_some_windows_and_only_so_often() -> None:
    contract, standing = Contract(1000), Standing()
    seen = []
    for _ in range(MOST_PLANS + 2):
        standing.replace_plan(is_least=False, is_most=False)
        seen += [contract.judge(standing, took(900), predicted_bytes=990) for _ in range(WINDOWS_BEFORE_LARGER)]
    grown = [index for index, verdict in enumerate(seen) if verdict == Aim(1000, is_larger=True)]
    assert grown == [WINDOWS_BEFORE_LARGER * (n + 1) - 1 for n in range(MOST_PLANS - 1)]


@pytest.mark.parametrize(("spare", "grows"), [(20, False), (21, True)])
def test_little_to_spare_is_no_reason_for_another_plan(spare: int, grows: bool) -> None:
    contract, standing = Contract(1000), Standing(plans=1)
    verdicts = [
        contract.judge(standing, took(1000 - spare), predicted_bytes=1000) for _ in range(WINDOWS_BEFORE_LARGER)
    ]
    assert isinstance(verdicts[-1], Aim) == grows


def test_pages_of_the_allocator_are_never_spare() -> None:
    contract, standing = Contract(1000, page_bytes=60), Standing(plans=1)
    verdicts = [contract.judge(standing, took(900), predicted_bytes=1000) for _ in range(WINDOWS_BEFORE_LARGER)]
    assert verdicts[-1] == Held(100)


def test_the_plan_that_keeps_most_is_not_replaced_by_a_larger_one() -> None:
    standing = Standing(is_most=True, plans=1)
    verdicts = [Contract(1000).judge(standing, took(1), predicted_bytes=1) for _ in range(5)]
    assert verdicts == [Held(999)] * 5


def test_the_error_of_an_earlier_plan_limits_later_ones() -> None:
    contract, standing = Contract(1000), Standing()
    standing.replace_plan(is_least=False, is_most=False)
    assert contract.judge(standing, took(1100), predicted_bytes=1000) == Aim(900, is_larger=False)
    standing.replace_plan(is_least=False, is_most=False)
    verdicts = [contract.judge(standing, took(850), predicted_bytes=900) for _ in range(WINDOWS_BEFORE_LARGER)]
    assert verdicts == [Held(150), Held(150), Aim(900, is_larger=True)]


def test_the_least_plan_is_refused_with_the_figure() -> None:
    contract, standing = Contract(1000), Standing()
    standing.replace_plan(is_least=True, is_most=False)
    verdict = contract.judge(standing, took(1300), predicted_bytes=1200)
    assert verdict == Refused(1300, 300)
    error = contract.refusal(verdict, "every block is recomputed")
    assert isinstance(error, BudgetNotHeldError) and error.over_bytes == 300
    assert "1300 bytes" in str(error) and "every block is recomputed" in str(error)


def test_a_percentage_is_of_what_is_told_later() -> None:
    contract = Contract("70%")
    assert not contract.is_resolved
    contract.resolve(2000)
    assert contract.budget_bytes == 1400
    plain = Contract("2000")
    plain.resolve(7)
    assert plain.budget_bytes == 2000


def test_what_is_no_budget_is_refused_at_once() -> None:
    with pytest.raises(InvalidBudgetError):
        Contract("much")


def test_words_of_windows_that_were_over() -> None:
    contract = Contract("1KiB")
    assert "planned for less" in contract.over_text(took(2048, WindowKind.LATER))
    assert "evaluation" in contract.over_text(took(2048, WindowKind.EVALUATION))


def test_the_first_warnings_of_each_kind_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    warnings = Warnings()
    with caplog.at_level(logging.WARNING, "memfit"):
        for number in range(5):
            warnings.warn(f"over {number}", "over")
            warnings.warn(f"once {number}", "once", most=1)
    logged = [record.getMessage() for record in caplog.records]
    assert logged == [
        "memfit: over 0",
        "memfit: once 0",
        "memfit: over 1",
        "memfit: over 2; later ones are counted in report()",
    ]


MIB = 1 << 20
# (taken, predicted) in MiB of the windows of runs, the budget, and the verdicts
RECORDED = {
    "reserved bytes of eight blocks on CUDA": (
        [(1012.0, 975.6), *[(936.0, 922.6)] * 3],
        997.2,
        ["Aim", "Held", "Held", "Aim larger"],
    ),
    "GPT-2, whose update was predicted twice as large": (
        [*[(98.149, 130.158)] * 3, (144.664, 144.664), *[(98.149, 130.158)] * 3],
        129.063,
        ["Held", "Held", "Aim larger", "Aim", "Held", "Held", "Aim larger"],
    ),
    "GPT-2 within 70%": ([(128.758, 128.758)] * 5, 129.063, ["Held"] * 5),
    "bfloat16, where a larger plan took more than predicted": (
        [*[(93.67, 95.7)] * 3, (96.66, 96.3), (96.3, 96.3)],
        96.46,
        ["Held", "Held", "Aim larger", "Aim", "Held"],
    ),
}


def test_a_larger_plan_leaves_pages_free_that_an_allocator_may_take() -> None:
    plain, paged = Contract(1000 * MIB), Contract(1000 * MIB, page_bytes=2 * MIB)
    for contract, taken, wanted in ((plain, 970, True), (paged, 960, False), (paged, 940, True)):
        standing = Standing()
        standing.replace_plan(is_least=False, is_most=False)
        verdicts = [contract.judge(standing, took(taken * MIB), taken * MIB) for _ in range(3)]
        assert isinstance(verdicts[-1], Aim) == wanted
        if isinstance(verdicts[-1], Aim):
            assert verdicts[-1].aim_bytes == 1000 * MIB - contract.margin_bytes
    assert plain.margin_bytes == 0
    assert paged.margin_bytes == 25 * MIB


@pytest.mark.parametrize("run", RECORDED)
def test_recorded_runs(run: str) -> None:
    windows, budget, expected = RECORDED[run]
    contract, standing, seen = Contract(int(budget * MIB)), Standing(), []
    standing.replace_plan(is_least=False, is_most=False)
    for taken, predicted in windows:
        verdict = contract.judge(standing, took(int(taken * MIB)), int(predicted * MIB))
        seen.append(type(verdict).__name__ + (" larger" if isinstance(verdict, Aim) and verdict.is_larger else ""))
        if isinstance(verdict, Aim):
            standing.replace_plan(is_least=False, is_most=False)
    assert seen == expected


def test_its_verdicts_need_no_torch() -> None:
    code = "import sys, memfit.memory.contract; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unused_memory_is_returned_where_evaluations_and_steps_alternate_and_may_not_fit_both() -> None:
    unused = Unused()
    assert unused.evaluation_begins(held_bytes=10, live_bytes=10, budget_bytes=1000), "what it takes is not known"
    assert not unused.evaluation_begins(900, 10, 1000), "another one was before it"
    unused.evaluations_end(live_bytes=210)
    assert unused.more_bytes == 200
    assert not unused.step_begins(held_bytes=700, more_bytes=300, budget_bytes=1000)
    assert not unused.step_begins(900, 300, 1000), "another step was before it"
    unused.evaluations_end(900)
    assert unused.more_bytes == 200, "of a step"
    assert not unused.evaluation_begins(800, 10, 1000) and unused.step_begins(701, 300, 1000)
    assert unused.evaluation_begins(801, 10, 1000)


def test_unused_memory_is_returned_where_sizes_alternate_and_may_not_fit_both() -> None:
    unused = Unused()
    assert not unused.step_begins(held_bytes=700, more_bytes=300, budget_bytes=1000, size=8)
    assert not unused.step_begins(900, 300, 1000, size=8)
    assert not unused.step_begins(700, 300, 1000, size=3)
    assert unused.step_begins(701, 300, 1000, size=8)
    assert unused.evaluation_begins(10, 10, 1000, size=8)
    unused.evaluations_end(live_bytes=210)
    assert unused.evaluation_begins(400, 10, 1000, size=9), "what it takes is not known"
    assert not unused.evaluation_begins(900, 10, 1000, size=9)
    assert not unused.evaluation_begins(800, 10, 1000, size=8) and unused.evaluation_begins(801, 10, 1000, size=9)
