"""Chains: runs of ops that a compiler makes one kernel of, as one op each."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from memfit.graph import Graph, Op
from memfit.rebuild import rebuilt

_SMALL = 16  # times fewer bytes than a result: seeds, biases, statistics; a mask of bytes has a quarter of its floats
_DRAWS = "inductor_random"  # takes as long as it computes, wherever its memory goes


def with_chains(graph: Graph, fusible: Sequence[bool]) -> tuple[Graph, tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return `graph` with each chain as one op, what ops each of its ops stands for, and its storages' numbers before.

    A chain is a run of neighbouring fusible ops of one phase, each of which reads something that the run has read or
    written. A mask that is made from a seed is a chain of its own, which a schedule can recompute alone. What only
    the chain reads takes no memory. Constants and ranges take neither memory nor time, and their ops are in no chain. A
    chain takes the seconds of its ops, by the share of their bytes that it still reads and writes.

    Args:
        graph: a step with the seconds of its ops.
        fusible: for each op whether it may be part of a chain. None of these mutates, or draws random numbers.
    """
    members = _chains(graph, fusible)
    inside = _storages_inside(graph, members)
    left = [storage.id for storage in graph.storages if storage.id not in inside]
    position_of = {chain[0]: new for new, chain in enumerate(members)}

    def new_position(position: int) -> int:
        return next((position_of[op] for op in range(position, len(graph.ops)) if op in position_of), len(members))

    ops = [_as_one(graph, chain, inside) for chain in members]
    boundaries = [msgspec.structs.replace(each, position=new_position(each.position)) for each in graph.boundaries]
    return rebuilt(graph, ops, left, boundaries=boundaries), members, tuple(left)


def _chains(graph: Graph, fusible: Sequence[bool]) -> tuple[tuple[int, ...], ...]:
    made_of_nothing = _made_of_nothing(graph, fusible)
    chains: list[_Chain] = []
    for op in graph.ops:
        if op.id in made_of_nothing:
            continue
        if not (chains and fusible[op.id] and chains[-1].takes(op)):
            chains.append(_Chain(graph, is_closed=not fusible[op.id]))
        chains[-1].add(op)
    return tuple(tuple(chain.ops) for chain in chains)


def _made_of_nothing(graph: Graph, fusible: Sequence[bool]) -> set[int]:
    """Return the ops that read nothing but what such ops write, and whose results only fusible ops read."""
    needed = _needed(graph) | {s for op in graph.ops if not fusible[op.id] for s in op.reads}
    written: set[int] = set()
    found: set[int] = set()
    for op in graph.ops:
        if fusible[op.id] and written.issuperset(op.reads) and needed.isdisjoint(op.writes):
            written.update(op.writes)
            found.add(op.id)
    return found


def _needed(graph: Graph) -> set[int]:
    """Return the storages that someone outside of the graph uses."""
    departing = {storage for boundary in graph.boundaries for storage in boundary.departures}
    return departing | {storage.id for storage in graph.storages if storage.required_at_end}


class _Chain:
    """A chain that is being made; one that is closed takes no other op."""

    def __init__(self, graph: Graph, *, is_closed: bool) -> None:
        self.ops: list[int] = []
        self._graph = graph
        self._is_closed = is_closed
        self._written: set[int] = set()
        self._read: set[int] = set()

    def takes(self, op: Op) -> bool:
        if self._is_closed or op.phase != self._graph.ops[self.ops[-1]].phase:
            return False
        sizes = self._graph.storages
        most_bytes = max(sizes[s].bytes for s in (*self._written, *op.writes))
        read, more = ({s for s in each if _SMALL * sizes[s].bytes >= most_bytes} for each in (self._read, op.reads))
        if not read and not self._written.issuperset(more):  # a mask, which can be made again from a seed alone
            return False
        return not self._written.isdisjoint(op.reads) or not read.isdisjoint(more)

    def add(self, op: Op) -> None:
        self.ops.append(op.id)
        self._read.update(s for s in op.reads if s not in self._written)
        self._written.update(op.writes)


def _storages_inside(graph: Graph, members: Sequence[Sequence[int]]) -> set[int]:
    """Return the storages that nobody but their own chain uses, or that are made of nothing."""
    chain_of = {op: number for number, chain in enumerate(members) for op in chain}
    inside = {storage for op in graph.ops if op.id not in chain_of for storage in op.writes}
    users: dict[int, set[int]] = {}
    for op in graph.ops:
        for storage in (*op.reads, *op.mutates, *op.writes):
            users.setdefault(storage, set()).add(chain_of.get(op.id, -1))
    read = {storage for op in graph.ops for storage in op.reads}
    written = {storage for op in graph.ops for storage in op.writes}
    return inside | {s for s in read & written - _needed(graph) if len(users[s]) == 1}


def _as_one(graph: Graph, chain: Sequence[int], inside: Collection[int]) -> Op:
    """Return the op of a chain, with the numbers of the graph's storages."""
    ops = [graph.ops[op] for op in chain]
    if len(ops) == 1:
        return msgspec.structs.replace(ops[0], reuses=())
    written = {s for op in ops for s in op.writes}
    reads = dict.fromkeys(s for op in ops for s in op.reads if s not in inside and s not in written)
    writes = [s for op in ops for s in op.writes if s not in inside]
    all_bytes = sum(graph.storages[s].bytes for op in ops for s in (*op.reads, *op.writes))
    own_bytes = sum(graph.storages[s].bytes for s in (*reads, *writes))
    drawing_seconds = sum(op.seconds for op in ops if op.target.endswith(_DRAWS))
    moving_seconds = sum(op.seconds for op in ops) - drawing_seconds
    return msgspec.structs.replace(
        ops[0],
        name=f"{ops[0].name} to {ops[-1].name}",
        target="+".join(op.target for op in ops),
        reads=tuple(reads),
        writes=tuple(writes),
        mutates=(),
        seconds=moving_seconds * own_bytes / max(all_bytes, 1) + drawing_seconds,
        workspace_bytes=max(op.workspace_bytes or 0 for op in ops),
        recomputable=all(op.recomputable for op in ops),
        reuses=(),
    )
