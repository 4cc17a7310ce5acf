"""A bound on the least budget: the bytes on the device during the last computation of any op of a set."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memfit.device import Device
from memfit.graph import Graph
from memfit.planners.engine.bounds.minimum_cuts import UNBOUNDED, Cuts, minimum_cut
from memfit.system.records import Flags

_MOST_LEVELS = 24  # sets of large ops that are tried
_WORK = 150_000  # ops of the graph times minimum cuts: a quarter of a second or so


def least_at_last_large_op(
    graph: Graph, device: Device, needs: Sequence[int], *, above_bytes: int = 0
) -> tuple[int, tuple[int, ...]]:
    """Return (aligned bytes beside the residents, ops): some op needs so many in every legal schedule without a host.

    Proof. Let H be a set of ops, and t the op of H that is computed last. While t runs, the device holds the storages
    that t itself needs, and a set K of others. Afterwards no op of H is recomputed. Each storage that the step requires
    at its end is therefore in K, or read or written by t, or written later by an op outside H. The same holds for each
    storage that such an op reads. The least bytes of a K with these properties are the value of a minimum cut, because
    ops outside H cost nothing. The least value over all t in H is a bound for H, and the greatest bound over several
    sets H is a bound. Arrivals at a boundary are assumed to cost nothing, and any version of a mutated storage is
    assumed to be as good as another: both make the bound lower.

    The sets tried are those of all ops that need at least n bytes, for a few values of n.

    Args:
        graph: the step.
        device: gives the alignment.
        needs: int[ops], bytes that each op itself needs while it runs.
        above_bytes: a bound that is proved already; only higher ones matter.

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
        large = need >= level
        least: dict[int, int] = {}
        for op in np.flatnonzero(large).tolist():
            if left == 0:
                return best, holding
            left -= 1
            least[op] = int(need[op]) + cuts.least_kept_bytes(op, large)
            if least[op] <= best:
                break
        else:
            best = min(least.values())
            holding = tuple(op for op, held in least.items() if held == best)
    return best, holding


class _Cuts:
    """The minimum cuts of one graph: a node for each storage and for each op, needed later or not."""

    def __init__(self, graph: Graph, device: Device) -> None:
        self.cuts = cuts = Cuts(graph, device)
        first_op, every_op = len(graph.storages), np.arange(len(graph.ops))
        self.source = first_op + len(graph.ops)
        self.roots = np.flatnonzero(cuts.at_end)
        from_roots, to_sink = np.full(len(self.roots), self.source), np.full(len(every_op), self.source + 1)
        self.tails = np.concatenate([from_roots, cuts.write_storage, cuts.read_op + first_op, every_op + first_op])
        self.heads = np.concatenate([self.roots, cuts.write_op + first_op, cuts.read_storage, to_sink])

    def least_kept_bytes(self, op: int, large: Flags) -> int:
        """Return the least bytes kept beside `op`'s own storages if no large op is computed afterwards.

        Args:
            op: the op's id.
            large: bool[ops].
        """
        cuts = self.cuts
        is_own = np.isin(cuts.write_storage, [*cuts.reads[op], *cuts.writes[op]])
        kept_bytes = np.where(is_own, 0, cuts.sizes[cuts.write_storage])
        unbounded = np.full(len(self.roots), UNBOUNDED), np.full(len(cuts.read_op), UNBOUNDED)
        capacities = np.concatenate([unbounded[0], kept_bytes, unbounded[1], np.where(large, UNBOUNDED, 0)])
        value, _ = minimum_cut(self.tails, self.heads, capacities, self.source)
        return value
