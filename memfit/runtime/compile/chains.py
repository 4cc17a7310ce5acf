"""Chains: runs of ops that a compiler makes one kernel of, as one op each."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from memfit.graph import Graph, Op


def with_chains(graph: Graph, fusible: Sequence[bool]) -> tuple[Graph, tuple[tuple[int, ...], ...]]:
    """Return `graph` with each chain as one op, and for each op of it the ops that it stands for.

    A chain is a run of neighbouring fusible ops of one phase, each of which reads something that the run has written.
    What only the chain reads takes no memory. A chain takes the seconds of its ops, by the share of their bytes that it
    still reads and writes.

    Args:
        graph: a step with the seconds of its ops.
        fusible: for each op whether it may be part of a chain. None of these mutates, or draws random numbers.
    """
    members = _chains(graph, fusible)
    inside = _storages_inside(graph, members)
    left = [storage.id for storage in graph.storages if storage.id not in inside]
    renumbered = {old: new for new, old in enumerate(left)}
    position_of = {chain[0]: new for new, chain in enumerate(members)}

    def new_position(position: int) -> int:
        return next((position_of[op] for op in range(position, len(graph.ops)) if op in position_of), len(members))

    return (
        Graph.build(
            name=graph.name,
            storages=[msgspec.structs.replace(graph.storages[old], id=new) for new, old in enumerate(left)],
            ops=[_as_one(graph, number, chain, renumbered) for number, chain in enumerate(members)],
            boundaries=[
                msgspec.structs.replace(
                    boundary,
                    position=new_position(boundary.position),
                    arrivals=tuple(renumbered[s] for s in boundary.arrivals if s in renumbered),
                    departures=tuple(renumbered[s] for s in boundary.departures),
                )
                for boundary in graph.boundaries
            ],
            device=graph.device,
            source=graph.source,
        ),
        members,
    )


def _chains(graph: Graph, fusible: Sequence[bool]) -> tuple[tuple[int, ...], ...]:
    chains: list[list[int]] = []
    written: set[int] = set()
    for op in graph.ops:
        goes_on = fusible[op.id] and bool(written.intersection(op.reads)) and op.phase == graph.ops[op.id - 1].phase
        if goes_on:
            chains[-1].append(op.id)
        else:
            chains.append([op.id])
            written = set()
        if fusible[op.id]:
            written.update(op.writes)
    return tuple(map(tuple, chains))


def _storages_inside(graph: Graph, members: Sequence[Sequence[int]]) -> set[int]:
    """Return the storages that nobody but their own chain uses."""
    inside: set[int] = set()
    chain_of = {op: number for number, chain in enumerate(members) for op in chain}
    users: dict[int, set[int]] = {}
    for op in graph.ops:
        for storage in (*op.reads, *op.mutates, *op.writes):
            users.setdefault(storage, set()).add(chain_of[op.id])
    departing = {storage for boundary in graph.boundaries for storage in boundary.departures}
    read = {storage for op in graph.ops for storage in op.reads}
    for op in graph.ops:
        for storage in op.writes:
            is_needed = graph.storages[storage].required_at_end or storage in departing
            if len(users[storage]) == 1 and storage in read and not is_needed:
                inside.add(storage)
    return inside


def _as_one(graph: Graph, number: int, chain: Sequence[int], renumbered: dict[int, int]) -> Op:
    ops = [graph.ops[op] for op in chain]
    if len(ops) == 1:
        (op,) = ops
        return msgspec.structs.replace(
            op,
            id=number,
            reads=tuple(renumbered[s] for s in op.reads),
            writes=tuple(renumbered[s] for s in op.writes if s in renumbered),
            mutates=tuple(renumbered[s] for s in op.mutates),
            reuses=(),
        )
    written = {s for op in ops for s in op.writes}
    reads = dict.fromkeys(s for op in ops for s in op.reads if s not in written)
    writes = [s for op in ops for s in op.writes if s in renumbered]
    all_bytes = sum(graph.storages[s].bytes for op in ops for s in (*op.reads, *op.writes))
    own_bytes = sum(graph.storages[s].bytes for s in (*reads, *writes))
    return msgspec.structs.replace(
        ops[0],
        id=number,
        name=f"{ops[0].name} to {ops[-1].name}",
        target="+".join(op.target for op in ops),
        reads=tuple(renumbered[s] for s in reads),
        writes=tuple(renumbered[s] for s in writes),
        mutates=(),
        seconds=sum(op.seconds for op in ops) * own_bytes / max(all_bytes, 1),
        workspace_bytes=max(op.workspace_bytes or 0 for op in ops),
        recomputable=all(op.recomputable for op in ops),
        reuses=(),
    )
