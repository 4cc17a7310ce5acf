"""Layouts that are safe when ops run at the same time: the judge, the ways to make them, and threads that prove it."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Sequence

import pytest
import torch
from devices import LINKED
from hypothesis import given, settings
from parallel_runs import Kernel, ParallelArena, execute
from strategies import graphs

from memfit.errors import InvalidLayoutError, InvalidOptionError
from memfit.graph import Graph, Op, Phase, Role, Storage
from memfit.packing.check_parallel import check_parallel
from memfit.packing.parallel import (
    ParallelLayout,
    colour_paths,
    pack_by_ancestors,
    pack_by_paths,
    pack_in_series,
    predecessors_of,
)

SIZE, ROWS = 4 * 64 * 64, 64
BRANCHES, LENGTH = 4, 6


def branched(branches: int = BRANCHES, length: int = LENGTH) -> Graph:
    """x -> `branches` chains of `length` ops -> one sum: ops of two chains may run at the same time."""
    storages = [Storage(id=0, name="x", bytes=SIZE, role=Role.INPUT)]
    ops: list[Op] = []

    def add(name: str, reads: tuple[int, ...], role: Role = Role.ACTIVATION) -> int:
        storages.append(Storage(id=len(storages), name=name, bytes=SIZE, role=role))
        writes = (storages[-1].id,)
        ops.append(Op(id=len(ops), name=name, phase=Phase.FORWARD, reads=reads, writes=writes, seconds=1e-4))
        return storages[-1].id

    ends: list[int] = []
    for branch in range(branches):
        last = 0
        for place in range(length):
            last = add(f"b{branch}.{place}", (last,))
        ends.append(last)
    add("sum", tuple(ends), Role.OUTPUT)
    return Graph.build(name="branched", storages=storages, ops=ops)


WAYS = {
    "ancestors": pack_by_ancestors,
    "paths": pack_by_paths,
    "one path": lambda graph, device: pack_by_paths(graph, device, paths=1),
    "series": lambda graph, device: pack_in_series(graph, device, seconds=0.05),
}


@settings(deadline=None, max_examples=100)
@given(graph=graphs(boundaries=False, collectives=True))
@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_safe(way: str, graph: Graph) -> None:
    check_parallel(graph, WAYS[way](graph, LINKED), LINKED)


def test_ancestors_share_more_than_paths_and_less_than_a_series() -> None:
    graph = branched()
    heights = [
        pack_in_series(graph, LINKED).height_bytes,
        pack_by_ancestors(graph, LINKED).height_bytes,
        pack_by_paths(graph, LINKED, paths=2).height_bytes,
        sum(LINKED.aligned(SIZE) for _ in range(BRANCHES * LENGTH)),
    ]
    assert heights == sorted(heights)
    assert heights[0] < heights[1] == 2 * BRANCHES * SIZE  # two storages of each chain are there at once
    assert heights[1] < heights[2] < heights[3]


def test_colours_are_paths() -> None:
    graph = branched()
    colours = colour_paths(graph, 3)
    needed = predecessors_of(graph)
    for colour in range(3):
        path = [op for op, own in enumerate(colours) if own == colour]
        assert all(a in needed[b] for a, b in itertools.pairwise(path))
    assert [colours.count(colour) for colour in (0, 1, 2, None)] == [LENGTH + 1, LENGTH, LENGTH, LENGTH]


def test_paths_share_along_chains_of_any_length() -> None:
    """20,000 ops. The longest path includes the sum, so the ends of the other chains have users of two colours."""
    graph = branched(branches=10, length=2000)
    layout = pack_by_paths(graph, LINKED, paths=10)
    assert layout.height_bytes == (2 * 10 + 9) * SIZE


def test_the_judge_rejects_what_is_safe_in_series_only() -> None:
    graph = branched()
    layout = pack_in_series(graph, LINKED)
    check_parallel(graph, layout, LINKED)
    with pytest.raises(InvalidLayoutError, match=r"share bytes, but ops \d+ 'b.*' may run at the same time"):
        check_parallel(graph, dataclasses.replace(layout, dependences=()), LINKED)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"height_bytes": 1}, "height is 1, expected"),
        ({"offsets_bytes": {}}, "has no offset"),
        ({"offsets_bytes": {1: 7}}, "offset 7, expected a multiple of 64"),
        ({"dependences": ((5, 2),)}, "dependence of op 2 on op 5"),
    ],
)
def test_the_judge_can_fail(change: dict[str, object], message: str) -> None:
    layout = dataclasses.replace(pack_by_ancestors(branched(), LINKED), **change)
    with pytest.raises(InvalidLayoutError, match=message):
        check_parallel(branched(), layout, LINKED)


def kernels(graph: Graph, late: tuple[int, int] | None = None) -> dict[int, Kernel]:
    """Multiply and tanh along the chains, sum at the end. The first op of `late` reads after the second has ended."""
    ended = threading.Event()

    def chain(op: int) -> Kernel:
        def compute(reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
            if late is not None and op == late[0]:
                assert ended.wait(60)
            torch.mm(reads[0], reads[0] / ROWS + op / 10, out=writes[0])
            writes[0].tanh_()
            if late is not None and op == late[1]:
                ended.set()

        return compute

    def total(reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        writes[0].copy_(reads[0])
        for read in reads[1:]:
            writes[0].add_(read)

    return {op.id: total if op.name == "sum" else chain(op.id) for op in graph.ops}


def run_once(
    graph: Graph, layout: ParallelLayout, late: tuple[int, int] | None = None, threads: int = 4
) -> torch.Tensor:
    like = {storage.id: torch.empty(ROWS, ROWS, device="meta") for storage in graph.storages}
    arena = ParallelArena(graph, layout, kernels(graph, late), like)
    x = torch.linspace(-1, 1, ROWS * ROWS).reshape(ROWS, ROWS)
    result = torch.empty(ROWS, ROWS)
    arena.run({0: x, len(graph.storages) - 1: result}, threads=threads)
    return result


@pytest.mark.parametrize("way", WAYS)
def test_a_hundred_runs_give_the_same_bits(way: str) -> None:
    graph = branched()
    apart = ParallelLayout(
        offsets_bytes={s: (s - 1) * SIZE for s in range(1, BRANCHES * LENGTH + 1)},
        height_bytes=BRANCHES * LENGTH * SIZE,
    )
    expected = run_once(graph, apart, threads=1)
    layout = WAYS[way](graph, LINKED)
    for _ in range(100):
        assert torch.equal(run_once(graph, layout), expected)


def test_a_serial_layout_without_its_dependences_gives_wrong_results() -> None:
    """An op that the layout orders before the writer of its bytes is held back until that writer has ended."""
    graph = branched()
    layout = pack_in_series(graph, LINKED)
    chains = [op.name.partition(".")[0] for op in graph.ops]
    pairs = [(a, b) for a, b in layout.dependences if chains[a] != chains[b] and chains[b] != "sum"]
    right = run_once(graph, layout)
    forced = dataclasses.replace(layout, dependences=())
    assert any(not torch.equal(run_once(graph, forced, late), right) for late in 5 * pairs)  # a busy machine may wait


def test_an_op_that_raises_stops_the_run() -> None:
    begun: list[int] = []

    def run(op: int) -> None:
        begun.append(op)
        if op == 1:
            raise RuntimeError("op 1 fails")

    with pytest.raises(RuntimeError, match="op 1 fails"):
        execute([[], [0], [1]], run, threads=2)
    assert begun == [0, 1]


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="wait for each other"):
        execute([[], [2], [1]], lambda _: None, threads=1)
    with pytest.raises(InvalidOptionError, match="threads is 0"):
        execute([], lambda _: None, threads=0)
    with pytest.raises(InvalidOptionError, match="paths is 0"):
        pack_by_paths(branched(), paths=0)
