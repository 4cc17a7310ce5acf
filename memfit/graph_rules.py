"""The rules of a graph, each with the error of one that breaks it: what is wrong, and where in the graph's file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from memfit.errors import InvalidGraphError

if TYPE_CHECKING:
    from memfit.graph import Boundary, Graph, Op, Storage

_MOST_BYTES = 1 << 60  # so that sums of live bytes stay far below the limit of int64


def verify(graph: Graph) -> None:
    """Raise InvalidGraphError at the first rule that a graph breaks; see `Graph.verify`."""
    _verify_storages(graph)
    present = [storage.resident for storage in graph.storages]
    boundaries = list(enumerate(graph.boundaries))
    for index, op in enumerate(graph.ops):
        if op.id != index:
            _fail(f"ops[{index}].id", f"op {op.name!r} has id {op.id}, expected {index}")
        while boundaries and boundaries[0][1].position <= index:
            _verify_boundary(graph, *boundaries.pop(0), present, index)
        _verify_op(graph, op, present)
    for number, boundary in boundaries:
        _verify_boundary(graph, number, boundary, present, len(graph.ops))
    for storage in graph.storages:
        if not present[storage.id]:
            _fail(f"storages[{storage.id}]", f"storage {storage.name!r} is not resident and nothing writes it")


def _fail(place: str, message: str) -> NoReturn:
    raise InvalidGraphError(f"{message} - at `$.{place}`")


def _verify_storages(graph: Graph) -> None:
    for index, storage in enumerate(graph.storages):
        if storage.id != index:
            _fail(f"storages[{index}].id", f"storage {storage.name!r} has id {storage.id}, expected {index}")
        if storage.bytes < 0:
            _fail(f"storages[{index}].bytes", f"storage {storage.name!r} has {storage.bytes} bytes, expected 0 or more")
    total = sum(storage.bytes for storage in graph.storages)
    if total > _MOST_BYTES:
        _fail("storages", f"all storages together have {total} bytes, expected at most {_MOST_BYTES}")


def _verify_op(graph: Graph, op: Op, present: list[bool]) -> None:
    place = f"ops[{op.id}]"
    for field, storages in (("reads", op.reads), ("mutates", op.mutates)):
        for where, storage in _known(graph, f"{place}.{field}", f"op {op.name!r}", storages):
            if not present[storage.id]:
                before = "before any op wrote it (a cycle or wrong order)"
                _fail(where, f"op {op.name!r} needs storage {storage.id} {storage.name!r} {before}")
    if len(set(op.mutates)) < len(op.mutates):
        _fail(f"{place}.mutates", f"op {op.name!r} mutates a storage twice, expected each once: {list(op.mutates)}")
    for where, storage in _known(graph, f"{place}.writes", f"op {op.name!r}", op.writes):
        if present[storage.id]:
            why = "resident (say `mutates`)" if storage.resident else "written before, or arrives at a boundary"
            _fail(where, f"op {op.name!r} writes storage {storage.id} {storage.name!r}, which is {why}")
        present[storage.id] = True
    if not 0 <= op.seconds < math.inf:
        _fail(f"{place}.seconds", f"op {op.name!r} has {op.seconds} seconds, expected a number from 0")
    if not 0 <= (op.workspace_bytes or 0) <= _MOST_BYTES:
        message = f"op {op.name!r} has {op.workspace_bytes} workspace bytes, expected 0 to {_MOST_BYTES}"
        _fail(f"{place}.workspace_bytes", message)
    _verify_reuses(graph, op)


def _verify_reuses(graph: Graph, op: Op) -> None:
    for index, (read, written) in enumerate(op.reuses):
        place = f"ops[{op.id}].reuses[{index}]"
        if read not in op.reads or written not in op.writes:
            _fail(place, f"op {op.name!r} reuses {read} -> {written}, expected a read and a write of it")
        sizes = graph.storages[read].bytes, graph.storages[written].bytes
        if sizes[0] != sizes[1]:
            both = f"of {sizes[0]} and {sizes[1]} bytes"
            _fail(place, f"op {op.name!r} reuses {read} -> {written} {both}, expected equal")


def _verify_boundary(graph: Graph, number: int, boundary: Boundary, present: list[bool], position: int) -> None:
    place = f"boundaries[{number}]"
    if boundary.position != position:
        _fail(
            f"{place}.position",
            f"boundary stands at {boundary.position}, expected {position}: in order, and within the ops",
        )
    for where, storage in _known(graph, f"{place}.departures", "boundary", boundary.departures):
        if not present[storage.id]:
            _fail(where, f"storage {storage.id} {storage.name!r} departs before any op wrote it")
    for where, storage in _known(graph, f"{place}.arrivals", "boundary", boundary.arrivals):
        if present[storage.id]:
            _fail(where, f"storage {storage.id} {storage.name!r} arrives but is there already")
        present[storage.id] = True


def _known(graph: Graph, place: str, who: str, storages: Sequence[int]) -> Iterator[tuple[str, Storage]]:
    """Yield each storage with its place in the file; fail at an id that is not in the graph."""
    for index, storage in enumerate(storages):
        if not 0 <= storage < len(graph.storages):
            _fail(f"{place}[{index}]", f"{who} names storage {storage}, expected 0 to {len(graph.storages) - 1}")
        yield f"{place}[{index}]", graph.storages[storage]
