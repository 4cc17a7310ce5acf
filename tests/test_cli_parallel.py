"""The door to parallel-safe sharing: options of `memfit pack` and `memfit estimate`."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from memfit.cli import main
from memfit.graph import Graph, Op, Phase, Role, Storage
from memfit.packing.check_parallel import check_parallel
from memfit.packing.parallel import ParallelLayout, implicit_dependences

SIZE = 100
CHAINS = ("a", "b")


def two_chains() -> Graph:
    """x -> two chains of three ops -> their sum.

    In series three storages are live at once: the end of the first chain, and two of the second. In parallel two
    storages of each chain are.
    """
    storages = [Storage(id=0, name="x", bytes=SIZE, role=Role.INPUT)]
    ops: list[Op] = []

    def add(name: str, reads: tuple[int, ...], role: Role = Role.ACTIVATION) -> int:
        written = len(storages)
        storages.append(Storage(id=written, name=name, bytes=SIZE, role=role))
        ops.append(Op(id=len(ops), name=name, phase=Phase.FORWARD, reads=reads, writes=(written,), seconds=1e-3))
        return written

    ends: list[int] = []
    for chain in CHAINS:
        last = 0
        for place in range(3):
            last = add(f"{chain}{place}", (last,))
        ends.append(last)
    add("sum", tuple(ends), Role.OUTPUT)
    return Graph.build(name="two chains", storages=storages, ops=ops)


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    path = tmp_path / "chains.graph.json"
    two_chains().save(path)
    return path


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, object]:
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("way", "height"), [("ancestors", 4), ("paths", 5), ("series", 3)])
def test_pack_shares_as_asked(way: str, height: int, graph_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = graph_file.with_name("offsets.csv")
    keys = answer(capsys, "pack", graph_file, "--parallel-safe", way, "--output", out, "-t", 0.1)
    assert (keys["height"], keys["parallel_safe"]) == (height * SIZE, way)
    rows = csv.DictReader(out.read_text().splitlines())
    offsets = {int(row["id"]): int(row["offset"]) for row in rows}
    layout = ParallelLayout(
        offsets_bytes=offsets,
        height_bytes=height * SIZE,
        dependences=tuple((earlier, later) for earlier, later in keys["dependences"]),  # pyright: ignore
    )
    check_parallel(two_chains(), layout)
    assert bool(layout.dependences) == (way == "series")
    if way == "series":
        assert layout.dependences == implicit_dependences(two_chains(), offsets)


def test_fewer_paths_share_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two chains of four ops from one input, and an op that joins them: along a path, every second result shares."""
    storages = [Storage(id=0, name="x", bytes=SIZE, role=Role.INPUT)]
    storages += [Storage(id=at, name=f"r{at}", bytes=SIZE, role=Role.ACTIVATION) for at in range(1, 10)]
    reads = [(0,), (1,), (2,), (3,), (0,), (5,), (6,), (7,), (4, 8)]
    ops = [
        Op(id=at, name=f"op{at}", phase=Phase.FORWARD, reads=each, writes=(at + 1,), seconds=0.0)
        for at, each in enumerate(reads)
    ]
    file = tmp_path / "chains.graph.json"
    Graph.build(name="chains", storages=storages, ops=ops).save(file)
    asked = ["pack", file, "--parallel-safe", "paths", "-t", 0.1]
    assert answer(capsys, *asked, "--paths", 1)["height"] > answer(capsys, *asked)["height"]


def test_offsets_are_multiples_of_the_alignment(graph_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = answer(capsys, "pack", graph_file, "--parallel-safe", "ancestors", "--align", 64)
    assert keys["height"] == 4 * 128


def test_pack_draws_the_layout(graph_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = graph_file.with_name("layout.html")
    assert main(["pack", str(graph_file), "--parallel-safe", "series", "--picture", str(page), "--timeline"]) == 0
    text = capsys.readouterr().out
    assert "shared by" in text
    assert "beside those of the graph" in text
    assert page.stat().st_size > 1000


def test_estimate_compares_the_ways(graph_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = answer(capsys, "estimate", graph_file, "--parallel-safe")
    parallel = keys["parallel"]
    assert isinstance(parallel, dict)
    dependences = parallel.pop("series_dependences")
    outside = 2 * SIZE  # the input and the sum
    assert parallel == {
        "apart": outside + 6 * SIZE,
        "ancestors": outside + 4 * SIZE,
        "paths": outside + 5 * SIZE,
        "series": outside + 3 * SIZE,
    }
    assert dependences > 0
    assert "parallel" not in answer(capsys, "estimate", graph_file)
    assert main(["estimate", str(graph_file), "--parallel-safe"]) == 0
    assert "safe when ops run at the same time" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trace.csv", "--parallel-safe", "ancestors"], "trace.csv has none; give a graph file"),
        (["x.graph.json"], "x.graph.json is a graph file: give --parallel-safe (ancestors|paths|series)"),
        (["x.graph.json", "--parallel-safe", "series", "--paths", "2"], "--paths is for --parallel-safe paths"),
        (["x.graph.json", "--parallel-safe", "lines"], "'lines', expected one of ancestors, paths, series"),
        (["x.graph.json", "--parallel-safe", "paths", "-p", "exact"], "leave out --packer and --option"),
        (["x.graph.json", "--parallel-safe", "paths", "--option", "work=1"], "leave out --packer and --option"),
    ],
)
def test_what_cannot_be_packed_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pack", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", ["pack", "estimate"])
def test_help_shows_how(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("--parallel-safe") >= 2
