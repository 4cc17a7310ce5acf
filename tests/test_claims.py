"""The rows of the five papers' claims: each stands somewhere, something shows it, and its verdict is what is stored."""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memfit.device import GENERIC
from memfit.graph import Graph, Op, Phase, Role, Storage
from memfit.papers.planners.division_tree import solve_graph
from memfit.plan import Problem
from memfit.planners.engine.results import unplanned_schedule

ROOT = Path(__file__).parents[1]
MACHINE = "cpu-2core"
sys.path.insert(0, str(ROOT / "benchmarks"))  # the scripts import one another as scripts do

import _claim  # noqa: E402
import _claims  # noqa: E402
import _record  # noqa: E402
import evidence  # noqa: E402
import offloading_planners  # noqa: E402
import tables  # noqa: E402
from _claim import Claim, Verdict  # noqa: E402
from _claims import CLAIMS, claim_named, found_of  # noqa: E402

EACH = pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.row)


@functools.cache
def stored(script: str) -> tables.Stored:
    return tables.results_of(script, MACHINE)


@functools.cache
def names_of_tests(path: Path) -> set[str]:
    """Return the names of a file's tests, without importing it."""
    return {each.name for each in ast.parse(path.read_text()).body if isinstance(each, ast.FunctionDef)}


@EACH
def test_what_a_row_names_is_there(claim: Claim) -> None:
    assert re.fullmatch(r"[a-z0-9-]+", claim.row)
    assert (ROOT / claim.module).is_file() and claim.module.startswith("memfit/")
    assert claim.claim and claim.against
    if claim.command:
        path, _, name = claim.command[0].partition("::")
        assert (ROOT / path).is_file(), path
        assert path.startswith("tests/test_" if claim.is_test else "benchmarks/")
        assert not claim.is_test or name in names_of_tests(ROOT / path), name
        options = [word for word in claim.command[1:] if word.startswith("--")]
        assert all(f'"{option}"' in (ROOT / path).read_text() for option in options), "the script has its options"
    assert (claim.measure is not None) == (bool(claim.command) and not claim.is_test), "a script's figure is read"
    assert bool(claim.command) or claim.verdict in (Verdict.NOT, Verdict.NOTHING), "nothing shows it"


@EACH
def test_the_verdict_is_what_is_stored(claim: Claim) -> None:
    text, verdict = found_of(claim, stored)
    assert text and _claims.NOT_AS_WRITTEN not in verdict, f"{text}: {verdict}"
    assert bool(claim.why) == (claim.verdict is not Verdict.REPRODUCED), "every other verdict has a reason"
    assert "|" not in "".join([text, verdict, claim.claim, claim.against]), "it would end the cell of the table"


def test_rows_have_names_of_their_own_and_cover_every_paper() -> None:
    assert len({claim.row for claim in CLAIMS}) == len(CLAIMS)
    papers = [paper for paper, _ in itertools.groupby(claim.paper for claim in CLAIMS)]
    assert papers == [_claim.CHEN, _claim.FENG, _claim.NOTE, _claim.SEKIYAMA, _claim.DQN]


def test_a_figure_that_contradicts_its_verdict_is_told() -> None:
    claim = claim_named("chen-figure-5")
    found = tables.results_of("chen_figures", MACHINE)
    found["chen_figures"]["5"]["points"]["1024"]["bytes"]["sublinear"] = 8_000_000_000
    assert found_of(claim, lambda _: found) == ("45.5 to 8.0 GB", f"{_claims.NOT_AS_WRITTEN}, which is: reproduced")
    refused = dataclasses.replace(claim, verdict=Verdict.NOT, why="more")
    assert found_of(refused, lambda _: found)[1] == "not reproduced: more"
    assert _claims.NOT_AS_WRITTEN in found_of(refused, stored)[1]


def test_the_table_has_each_row_and_is_the_one_in_the_document() -> None:
    table = tables.render("evidence", MACHINE)
    assert table is not None
    assert [line.split(" | ")[0].strip("| `") for line in table.splitlines()[2 : 2 + len(CLAIMS)]] == [
        claim.row for claim in CLAIMS
    ]
    body = table.partition("\n\n")[0]
    again = "`python benchmarks/tables.py --into docs/papers.md` writes it anew"
    assert f"<!-- table: evidence -->\n{body}\n\n" in (ROOT / "docs" / "papers.md").read_text(), again
    assert tables.render("evidence", "no-such-machine") is None


def test_an_unknown_row_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["evidence.py", "chen-figure-9"])
    assert evidence.main() == 2
    assert capsys.readouterr().err.splitlines() == [
        f"evidence: no row is called 'chen-figure-9'; `make evidence` lists the {len(CLAIMS)} that there are"
    ]


def test_a_row_runs_its_command_and_tells_what_came_of_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["evidence.py", "mxnet-trap"])
    assert evidence.main() == 0
    printed = capfd.readouterr().out
    assert "::test_the_trap_is_not_stepped_into" in printed and "1 passed" in printed
    assert printed.splitlines()[-1].split() == ["verdict", "reproduced"]


def test_a_command_that_fails_gives_no_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evidence, "words_of", lambda _claim: [sys.executable, "-c", "raise SystemExit(3)"])
    monkeypatch.setattr(sys, "argv", ["evidence.py", "mxnet-trap"])
    assert evidence.main() == 3
    printed = capsys.readouterr()
    assert "verdict" not in printed.out
    assert printed.err == "evidence: what shows 'mxnet-trap' ended with status 3: no verdict\n"


def test_what_is_stored_is_told_without_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["evidence.py", "chen-figure-5", "--stored", "--machine", MACHINE])
    assert evidence.main() == 0
    printed = capsys.readouterr().out
    assert "45.5 to 3.3 GB" in printed and "48 to 7 GB" in printed
    monkeypatch.setattr(sys, "argv", ["evidence.py", "chen-figure-5", "--stored", "--machine", "nowhere"])
    assert evidence.main() == 0
    assert "nothing is stored for nowhere" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["evidence.py"])
    assert evidence.main() == 0
    assert len(capsys.readouterr().out.splitlines()) == len(CLAIMS)


def test_points_that_are_stored_are_planned_again_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, float]] = []

    def plan_point(_step: object, curve: str, share: float, _file: Path) -> dict[str, Any]:
        asked.append((curve, share))
        return {"status": "feasible", "overhead": 0.25, "plan_seconds": 0.0}

    def keep(name: str, payload: Any) -> Path:
        return _record.store(name, payload, folder=tmp_path)

    monkeypatch.setattr(offloading_planners, "plan_point", plan_point)
    monkeypatch.setattr(offloading_planners, "store", keep)
    monkeypatch.setattr(offloading_planners, "result_path", lambda name: _record.result_path(name, folder=tmp_path))
    step = SimpleNamespace(graphs=[SimpleNamespace(ops=())])
    monkeypatch.setattr(offloading_planners, "costed", lambda _network, _machine: step)
    points = len(offloading_planners.SHARES)
    for again, planned in ((False, points), (False, points), (True, 2 * points)):
        offloading_planners.run("vgg16", "h100", ["tflms"], again=again)
        assert len(asked) == planned


# What no other file tests


def total_bytes(stored: set[int], costs: list[int], readers: list[list[int]]) -> int:
    """Equation 1 of Feng and Huang 2018: the stored bytes, and those of the largest part that is connected."""
    left, largest = set(range(len(readers))) - stored, 0
    beside = {v: {*readers[v], *(u for u, each in enumerate(readers) if v in each)} for v in range(len(readers))}
    while left:
        part = waiting = {left.pop()}
        while waiting:
            waiting = set[int]().union(*(beside[v] for v in waiting)) & left
            part, left = part | waiting, left - waiting
        largest = max(largest, sum(costs[v] for v in part))
    return sum(costs[v] for v in stored) + largest


def test_another_stored_set_can_be_better() -> None:
    """Feng's Theorem 1: 2 stored leaves {1} and {3}, of which the second is beside three stored vertices."""
    readers, costs = [[1, 3], [2], [3], [4], []], [0, 1, 1, 1, 0]
    split = solve_graph(costs, readers)
    assert split.total_bytes == total_bytes(set(split.stored), costs, readers) == 3
    assert total_bytes({0, 2, 4}, costs, readers) == 2


def test_a_result_that_backward_does_not_read_is_freed_in_forward() -> None:
    """The note's figure: C = A op B and F = op(C); d(C) reads neither C nor F, so that both are freed before it."""
    names = ["A", "C", "F", "d(C)", "d(A)"]
    storages = [
        Storage(id=at, name=name, bytes=64, role=Role.ACTIVATION if at < 3 else Role.GRADIENT, required_at_end=at == 4)
        for at, name in enumerate(names)
    ]
    reads = [(), (0,), (1,), (), (0, 3)]
    ops = [
        Op(
            id=at,
            name=name,
            phase=Phase.FORWARD if at < 3 else Phase.BACKWARD,
            reads=reads[at],
            writes=(at,),
            seconds=1.0,
        )
        for at, name in enumerate(names)
    ]
    graph = Graph.build(name="prune", storages=storages, ops=ops)
    lines = unplanned_schedule(Problem(graph=graph, device=GENERIC, budget_bytes=0)).lines()
    forward = lines[: lines.index("compute 3")]
    assert "drop 1" in forward and "drop 2" in forward
    assert "drop 0" not in forward
