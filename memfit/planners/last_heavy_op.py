"""What is on the device when the last of a step's heavy ops is computed: the proved least budget of large outputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memfit.device import Device
from memfit.graph import Graph
from memfit.planners.cuts import Flags, Integers, minimum_cut

_UNBOUNDED = 1 << 55  # a capacity that no minimum cut pays
_MOST_LEVELS = 24  # sets of heavy ops that are tried
_WORK = 150_000  # ops of the graph times minimum cuts: a quarter of a second or so


def least_at_last_heavy_op(
    graph: Graph, device: Device, needs: Sequence[int], *, above_bytes: int = 0
) -> tuple[int, tuple[int, ...]]:
    """Return (aligned bytes beside the residents, ops): some op needs so much, in every legal schedule without a host.

    Proof. Let H be a set of ops, and t the one of them that is computed last of all. While it runs, the device holds
    what t itself needs, and a set K of other storages. From then on no op of H is computed again. Whatever the step
    requires at its end, then, is in K, or read or written by t, or written later by an op outside H; and so is
    whatever such an op reads. The least bytes of a K with these properties are a minimum cut, for ops outside H cost
    nothing. The least over all t of H is a bound for H, and the greatest over any sets H is a bound. Arrivals at a
    boundary are taken to come for nothing; a storage that is mutated, to be there in any version: both leave less to
    hold.

    The sets that are tried are those of all ops that need at least so many bytes, for a few levels.

    Args:
        graph: the step.
        device: its alignment counts.
        needs: of each op, the bytes that are there while it runs because of itself.
        above_bytes: what is proved already; a set that proves no more is left as soon as that shows.

    Returns:
        The bound, and the ops of H that reach it; `above_bytes` and no op where no more is proved.
    """
    cuts = _Cuts(graph, device)
    best, left = above_bytes, _WORK // max(1, len(graph.ops))
    holding: tuple[int, ...] = ()
    need = np.array(needs, np.int64)
    levels = np.unique(need)[::-1]
    chosen = np.unique(np.linspace(0, len(levels) - 1, min(len(levels), _MOST_LEVELS)).astype(np.int64))
    for level in levels[chosen].tolist():
        heavy = need >= level
        least: dict[int, int] = {}
        for op in np.flatnonzero(heavy).tolist():
            if left == 0:
                return best, holding
            left -= 1
            least[op] = int(need[op]) + cuts.least_kept_bytes(op, heavy)
            if least[op] <= best:
                break
        else:
            best = min(least.values())
            holding = tuple(op for op, held in least.items() if held == best)
    return best, holding


class _Cuts:
    """The minimum cuts of one graph: a node for each storage and for each op, wanted or not."""

    def __init__(self, graph: Graph, device: Device) -> None:
        storages = graph.storages
        self.first_op = len(storages)
        self.source = len(storages) + len(graph.ops)
        roots = [s.id for s in storages if s.required_at_end and s.id in graph.writer_of and not s.resident]
        self.roots = np.array(roots, np.int64)
        self.own: list[set[int]] = []
        written: list[tuple[int, int]] = []
        read: list[tuple[int, int]] = []
        for op in graph.ops:
            reads = [s for s, _ in graph.read_versions[op.id] if s in graph.writer_of and not storages[s].resident]
            writes = [s for s in op.writes if not storages[s].resident]
            self.own.append({*reads, *writes})
            written += [(storage, op.id) for storage in writes]
            read += [(op.id, storage) for storage in reads]
        self.written: Integers = np.array(written, np.int64).reshape(-1, 2)
        self.read: Integers = np.array(read, np.int64).reshape(-1, 2)
        self.sizes = np.array([device.aligned(storages[s].bytes) for s, _ in written], np.int64)
        every_op = np.arange(len(graph.ops))
        self.tails = np.concatenate(
            [
                np.full(len(self.roots), self.source),
                self.written[:, 0],
                self.read[:, 0] + self.first_op,
                every_op + self.first_op,
            ]
        )
        self.heads = np.concatenate(
            [self.roots, self.written[:, 1] + self.first_op, self.read[:, 1], np.full(len(every_op), self.source + 1)]
        )

    def least_kept_bytes(self, op: int, heavy: Flags) -> int:
        """Return the least bytes that are kept beside `op`'s own, where no heavy op is computed afterwards."""
        is_own = np.isin(self.written[:, 0], list(self.own[op]))
        capacities = np.concatenate(
            [
                np.full(len(self.roots), _UNBOUNDED),
                np.where(is_own, 0, self.sizes),
                np.full(len(self.read), _UNBOUNDED),
                np.where(heavy, _UNBOUNDED, 0),
            ]
        )
        value, _ = minimum_cut(self.tails, self.heads, capacities, self.source)
        return value
