"""Minimum cuts with a price for bytes: the storages best kept while one op runs, and a bound for every schedule.

While op t is computed for the first time, all its ancestors have been computed, and none of its descendants. A storage
that an ancestor wrote and a descendant reads is then on the device, or it is recomputed later. To recompute it,
everything that its op reads must be on the device or be recomputed, too. The cheapest choice, at a price for
each byte, is a minimum cut: one node for each op (recomputed or not) and one for each storage (needed or not).

The price that makes the kept bytes fit (a Lagrange multiplier) gives a lower bound on the seconds of all schedules. The
kept sets at several prices are families of retention from which searches start.

Source: torch chooses what to save by a minimum cut (`min_cut_rematerialization_partition`), without seconds, price or
bound. The maximum over prices is Lagrangian duality (Geoffrion 1974). A cut of 1,170 ops takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.device import Device
from memfit.graph import Graph, Phase
from memfit.system.records import Flags, Integers

UNBOUNDED = 1 << 55
"""A capacity that no minimum cut pays."""
_UNITS = float(1 << 40)  # the seconds of the whole step in units of capacity, rounded down
_MOST_PRICES = 24  # cuts at one op; the bound is exact after five to ten
_MOST_RAISES = 8  # times that the price is raised eightfold until the kept storages fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The storages kept while `op` is first computed, at one price.

    Attributes:
        kept: storages that stay on the device, beside what `op` itself reads and writes.
        kept_bytes: their aligned bytes.
        recompute_seconds: of the ops that must be recomputed for the storages that are not kept.
        cost_seconds: the value of the minimum cut: `recompute_seconds`, and `kept_bytes` times the price.
        past: storages without remaining readers once `op` runs.
    """

    op: int
    kept: tuple[int, ...]
    kept_bytes: int
    recompute_seconds: float
    cost_seconds: float
    past: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A lower bound on the seconds of recomputation of every schedule, and the op (by id) that proves it.

    `seconds` is infinite where no schedule fits.
    """

    op: int | None
    seconds: float


NO_BOUND = Bound(op=None, seconds=0.0)


class Cuts:
    """The minimum cuts of one graph on one device.

    Holds the graph as arrays: which op reads and writes which managed storage. Residents are left out.
    """

    def __init__(self, graph: Graph, device: Device) -> None:
        self.graph = graph
        self.sizes = np.array([device.aligned(storage.bytes) for storage in graph.storages], np.int64)
        self.resident_bytes = int(sum(self.sizes[s.id] for s in graph.storages if s.resident))
        self.seconds = np.array([op.compute_seconds for op in graph.ops], np.float64)
        self.units = _UNITS / max(float(self.seconds.sum()), 1e-12)
        self.reads = [tuple(s for s, _ in graph.read_versions[op.id] if self._is_managed(s)) for op in graph.ops]
        self.writes = [tuple(s for s in op.writes if self._is_managed(s)) for op in graph.ops]
        self.read_op, self.read_storage = _pairs(self.reads)
        self.write_op, self.write_storage = _pairs(self.writes)
        self.writer = np.full(len(graph.storages), -1, np.int64)
        self.writer[self.write_storage] = self.write_op
        self.at_end = np.array([s.required_at_end and not s.resident for s in graph.storages], np.bool_)
        once = np.array([op.computed_once for op in graph.ops], np.bool_)
        self.recompute_units = np.where(once, UNBOUNDED, (self.seconds * self.units).astype(np.int64))

    def at(self, op: int) -> OpCuts:
        """Return the cuts at one op."""
        return OpCuts(self, op)

    def _is_managed(self, storage: int) -> bool:
        return not self.graph.storages[storage].resident

    def ancestors(self, op: int) -> Flags:
        """Return bool[ops]: the ops that must be computed before `op`.

        These are its dependences, and all ops before the last boundary before it.
        """
        found = np.zeros(len(self.graph.ops), np.bool_)
        found[: max((b.position for b in self.graph.boundaries if b.position <= op), default=0)] = True
        waiting = list(self.reads[op])
        while waiting:
            writer = int(self.writer[waiting.pop()])
            if writer >= 0 and not found[writer]:
                found[writer] = True
                waiting.extend(self.reads[writer])
        return found

    def descendants(self, op: int) -> Flags:
        """Return bool[ops]: the ops that can only be computed after `op`.

        These are its dependents, and all ops behind the next boundary.
        """
        found = np.zeros(len(self.graph.ops), np.bool_)
        reached = np.zeros(len(self.graph.storages), np.bool_)
        reached[list(self.writes[op])] = True
        fence = min((b.position for b in self.graph.boundaries if b.position > op), default=len(found))
        for later in range(op + 1, fence):
            if any(reached[storage] for storage in self.reads[later]):
                found[later] = True
                reached[list(self.writes[later])] = True
        found[fence:] = True
        return found


class OpCuts:
    """The minimum cuts at one op, for any price.

    Attributes:
        once_seconds: of all ops, once each.
        not_after_seconds: of all ops but this one and those that can only be computed after it, once each.
        not_before_seconds: of all ops but those that must be computed before it, once each.
    """

    def __init__(self, cuts: Cuts, op: int) -> None:
        self.cuts, self.op = cuts, op
        ops, storages = len(cuts.graph.ops), len(cuts.graph.storages)
        before, after = cuts.ancestors(op), cuts.descendants(op)
        self.once_seconds = float(cuts.seconds.sum())
        self.not_after_seconds = float(cuts.seconds[~after].sum() - cuts.seconds[op])
        self.not_before_seconds = float(cuts.seconds[~before].sum())
        self.own = np.zeros(storages, np.bool_)
        self.own[[*cuts.reads[op], *cuts.writes[op]]] = True
        needed = cuts.at_end.copy()
        needed[cuts.read_storage[after[cuts.read_op]]] = True
        written_before = np.zeros(storages, np.bool_)
        written_before[cuts.write_storage[before[cuts.write_op]]] = True
        needed &= written_before
        self.past = tuple(np.flatnonzero(written_before & ~needed & ~self.own).tolist())
        self.source, sink = ops + storages, ops + storages + 1
        roots, earlier = np.flatnonzero(needed), np.flatnonzero(before)
        reading, writing = before[cuts.read_op], before[cuts.write_op]
        reading &= cuts.writer[cuts.read_storage] >= 0
        self.kept_storages = cuts.write_storage[writing]
        self.sizes = np.where(self.own[self.kept_storages], 0, cuts.sizes[self.kept_storages])
        self.tails = np.concatenate(
            [np.full(len(roots), self.source), earlier + storages, cuts.read_op[reading] + storages, self.kept_storages]
        )
        to_sink = np.full(len(earlier), sink)
        self.heads = np.concatenate([roots, to_sink, cuts.read_storage[reading], cuts.write_op[writing] + storages])
        unbounded = np.full(len(roots), UNBOUNDED), np.full(int(reading.sum()), UNBOUNDED)
        self.fixed = np.concatenate([unbounded[0], cuts.recompute_units[earlier], unbounded[1]])
        self.needed_bytes = int(cuts.sizes[needed & ~self.own].sum())

    def cut(self, seconds_per_byte: float) -> Cut:
        """Return the minimum cut at a price."""
        cuts, storages = self.cuts, len(self.cuts.graph.storages)
        priced = np.minimum(self.sizes * (seconds_per_byte * cuts.units), UNBOUNDED / 2).astype(np.int64)
        value, chosen = minimum_cut(self.tails, self.heads, np.concatenate([self.fixed, priced]), self.source)
        recomputed = chosen[storages : self.source]
        kept = self.kept_storages[chosen[self.kept_storages] & ~recomputed[cuts.writer[self.kept_storages]]]
        kept = kept[~self.own[kept]]
        return Cut(
            op=self.op,
            kept=tuple(kept.tolist()),
            kept_bytes=int(cuts.sizes[kept].sum()),
            recompute_seconds=float(cuts.seconds[recomputed].sum()),
            cost_seconds=value / cuts.units,
            past=self.past,
        )

    def bound_seconds(self, room_bytes: int) -> float:
        """Return the greatest bound of any price on the seconds of recomputation, if kept storages have `room_bytes`.

        The value of the cut is a concave, piecewise linear function of the price. Between a price at which the kept
        storages do not fit and one at which they do, the next price is where the two lines meet (Eisner and Severance
        1976).
        """
        if self.needed_bytes <= room_bytes:
            return 0.0
        best, low_seconds, low_bytes = 0.0, 0.0, self.needed_bytes  # at price 0, everything is kept
        price = float(self.cuts.seconds.sum()) / max(1, self.needed_bytes)
        for _ in range(_MOST_RAISES):
            high = self.cut(price)
            best = max(best, high.cost_seconds - price * room_bytes)
            if high.kept_bytes <= room_bytes:
                break
            low_seconds, low_bytes = high.recompute_seconds, high.kept_bytes
            price *= 8
        else:
            return best
        for _ in range(_MOST_PRICES):
            if low_bytes <= high.kept_bytes:
                break
            price = (high.recompute_seconds - low_seconds) / (low_bytes - high.kept_bytes)
            middle = self.cut(price)
            best = max(best, middle.cost_seconds - price * room_bytes)
            if middle.kept_bytes in (low_bytes, high.kept_bytes):
                break
            if middle.kept_bytes <= room_bytes:
                high = middle
            else:
                low_seconds, low_bytes = middle.recompute_seconds, middle.kept_bytes
        return best


def kept_at(graph: Graph, cut: Cut) -> frozenset[int]:
    """Return the storages, by id, that a cut keeps over the forward/backward boundary.

    Storages that the cut's op reads or writes are added, and those that backward has used before it.

    Args:
        graph: the cut's.
        cut: of one op of backward.
    """
    used_before = {
        storage for op in graph.ops[: cut.op] if op.phase != Phase.FORWARD for storage, _ in graph.read_versions[op.id]
    }
    touched = {storage for storage, _ in graph.read_versions[cut.op]} | set(graph.ops[cut.op].writes)
    return frozenset(cut.kept) | touched | (used_before & set(cut.past))


def _pairs(of_ops: Sequence[Sequence[int]]) -> tuple[Integers, Integers]:
    """Return the ops and the storages of a relation between them, as two arrays."""
    ops = [op for op, storages in enumerate(of_ops) for _ in storages]
    return np.array(ops, np.int64), np.array([s for storages in of_ops for s in storages], np.int64)


def minimum_cut(tails: Integers, heads: Integers, capacities: Integers, source: int) -> tuple[int, Flags]:
    """Return the value of the minimum cut between `source` and the sink, and bool[nodes]: the nodes on its source side.

    Args:
        tails: int64[arcs], the node in which each arc starts.
        heads: int64[arcs], the node in which it ends.
        capacities: int64[arcs].
        source: the last node but one; the sink is the last.
    """
    from ortools.graph.python import max_flow  # importing it takes a tenth of a second

    flow: Any = max_flow.SimpleMaxFlow()  # ortools leaves its arrays' types out
    flow.add_arcs_with_capacity(tails, heads, capacities)
    status = flow.solve(source, source + 1)
    assert status == flow.OPTIMAL, status
    side = np.zeros(source + 2, np.bool_)
    side[flow.get_source_side_min_cut()] = True
    return int(flow.optimal_flow()), side
