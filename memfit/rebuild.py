"""Rebuilding a graph: other ops over some of its storages, numbered anew."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from memfit.graph import Boundary, Graph, Op


def rebuilt(
    graph: Graph, ops: Iterable[Op], left: Sequence[int], *, boundaries: Iterable[Boundary] = (), name: str = ""
) -> Graph:
    """Return a graph of these ops, in this order, over the storages that are left.

    Args:
        graph: whose storages, device and source are taken.
        ops: with the numbers of its storages; what is not left is dropped from them.
        left: ids of storages, in their new order.
        boundaries: at positions among the new ops, with the numbers of `graph`'s storages.
        name: of the new graph; the old one's if it is empty.

    Raises:
        InvalidGraphError: an op reads a storage before it is written, say; see `Graph.verify`.
    """
    number = {old: new for new, old in enumerate(left)}

    def renumbered(storages: Iterable[int]) -> tuple[int, ...]:
        return tuple(number[storage] for storage in storages if storage in number)

    return Graph.build(
        name=name or graph.name,
        storages=[msgspec.structs.replace(graph.storages[old], id=new) for old, new in number.items()],
        ops=[
            msgspec.structs.replace(
                op,
                id=new,
                reads=renumbered(op.reads),
                writes=renumbered(op.writes),
                mutates=renumbered(op.mutates),
                reuses=tuple(pair for pair in map(renumbered, op.reuses) if len(pair) == 2),
            )
            for new, op in enumerate(ops)
        ],
        boundaries=[
            msgspec.structs.replace(each, arrivals=renumbered(each.arrivals), departures=renumbered(each.departures))
            for each in boundaries
        ],
        device=graph.device,
        source=graph.source,
    )
