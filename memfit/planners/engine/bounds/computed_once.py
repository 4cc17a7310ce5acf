"""A bound on the least budget: results that may not be recomputed stay until their last read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memfit.device import Device
from memfit.graph import Graph
from memfit.planners.engine.order import earlier_ops
from memfit.planners.engine.tables import Flags

_MOST_OPS = 20_000  # the sets of ops before and after each op take 100 MB then, and a second or two


def least_beside_computed_once(graph: Graph, device: Device, needs: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Return (aligned bytes beside the residents, ops): some op needs so many in every legal schedule without a host.

    Proof. A storage whose op is computed exactly once is on the device from then until its last read, as it could not
    be written again. The same holds for a storage from its first mutation on, as an op that mutates is computed once.
    Consider the first computation of op t. If the op that writes (or first mutates) the storage must be computed before
    t, and some op that reads it must be computed after t, or the step requires it at its end, then the storage is on
    the device while t runs, beside what t itself needs.

    Args:
        graph: the step.
        device: gives the alignment.
        needs: int[ops], bytes that each op itself needs while it runs.

    Returns:
        The bound and the ops that reach it; 0 and no op for a graph of more ops than are worth the time.
    """
    count = len(graph.ops)
    spans = _spans(graph)
    if count > _MOST_OPS or not spans:
        return 0, ()
    before, after = _order(graph)
    held = np.array(needs, np.int64)
    for storage, (first, readers) in spans.items():
        among = after[first]
        if not graph.storages[storage].required_at_end:
            ends = 0
            for reader in readers:
                ends |= before[reader]
            among &= ends
        if among:
            beside = _members(among, count)
            own = [op for op in readers if beside[op]]
            held[beside] += device.aligned(graph.storages[storage].bytes)
            held[own] -= device.aligned(graph.storages[storage].bytes)
    best = int(held.max())
    return best, tuple(np.flatnonzero(held == best).tolist())


def _spans(graph: Graph) -> dict[int, tuple[int, list[int]]]:
    """Return storage -> (the op from which on it cannot be written again, the ops that read it afterwards)."""
    first: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for op in graph.ops:
        for storage, _ in graph.read_versions[op.id]:
            if storage in first:
                readers[storage].append(op.id)
        once = [*op.mutates, *(op.writes if op.computed_once and not op.saves_generator else ())]
        for storage in once:
            if storage not in first and not graph.storages[storage].resident:
                first[storage] = op.id
                readers[storage] = []
    return {storage: (op, readers[storage]) for storage, op in first.items()}


def _order(graph: Graph) -> tuple[list[int], list[int]]:
    """Return for each op the ops that must be computed before it, and those after it, as the bits of a number."""
    count = len(graph.ops)
    earlier = earlier_ops(graph)
    before, after = [0] * count, [0] * count
    positions = [boundary.position for boundary in graph.boundaries]
    for op in range(count):
        crossed = max((position for position in positions if position <= op), default=0)
        before[op] = (1 << crossed) - 1
        for other in earlier[op]:
            before[op] |= before[other] | 1 << other
    everything = (1 << count) - 1
    for op in reversed(range(count)):
        crossed = min((position for position in positions if position > op), default=count)
        after[op] |= everything >> crossed << crossed
        for other in earlier[op]:
            after[other] |= after[op] | 1 << op
    return before, after


def _members(bits: int, count: int) -> Flags:
    """Return bool[count]: the bits of a number."""
    content = np.frombuffer(bits.to_bytes(-(-count // 8), "little"), np.uint8)
    return np.unpackbits(content, count=count, bitorder="little").astype(np.bool_)
