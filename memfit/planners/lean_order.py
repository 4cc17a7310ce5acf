"""The order of first computations that the searches use: ops move within their dependences where the peak falls."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memfit.device import Device
from memfit.graph import Graph, Phase
from memfit.planners.order import ordered_by, update_at_once_order

Order = tuple[int, ...]
_ONCE = "once"  # ties ops that may not be computed again, as generators' names tie what draws from them


def lean_order(graph: Graph, device: Device) -> Order:
    """Return op ids in the order with the least peaks of a few: updates at once, and two list schedules made from it.

    One list schedule goes forward, and computes what frees bytes as soon as it can be computed; the other goes
    backward, and computes as late as it can what holds more bytes than it frees. So the independent branches of a step
    are computed one after the other, and what they share no earlier than needed.

    An order is taken only where neither of two peaks is higher and one is lower: with all storages kept to their last
    use, and with those of the forward pass dropped in between, as plans for small budgets do. Ties go to the order
    that is nearer to the original one.

    Guarantees: those of `update_at_once_order`; forward ops stay before all others; ops that may not be computed again
    keep their order.

    Source: list scheduling (Graham 1966), with freed bytes as priority.
    """
    sizes = [0 if s.resident else device.aligned(s.bytes) for s in graph.storages]
    best = update_at_once_order(graph)
    least = _peaks(graph, sizes, best)
    for schedule in (_forward, _backward):
        order = schedule(graph, sizes, best)
        peaks = _peaks(graph, sizes, order)
        if peaks != least and all(new <= old for new, old in zip(peaks, least, strict=True)):
            best, least = order, peaks
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ties:
    """What must stand before what, and the uses of each storage; ops are numbered by their places in a legal order.

    `earlier` and `later` are places, `readers` those that read each storage, `segment` never falls along the order.
    """

    reads: list[list[int]]
    writes: list[list[int]]
    readers: dict[int, list[int]]
    earlier: list[list[int]]
    later: list[list[int]]
    segment: list[int]

    @staticmethod
    def of(graph: Graph, order: Order) -> _Ties:
        place_of = {op: place for place, op in enumerate(order)}
        reads = [[storage for storage, _ in graph.read_versions[op]] for op in order]
        readers: dict[int, list[int]] = {}
        earlier: list[list[int]] = []
        later: list[list[int]] = [[] for _ in order]
        last: dict[int | str, int] = {}
        for place, op in enumerate(order):
            keys = ordered_by(graph, graph.ops[op])
            if not graph.ops[op].recomputable:
                keys.append(_ONCE)
            before = {place_of[graph.writer_of[storage]] for storage in reads[place] if storage in graph.writer_of}
            before.update(last[key] for key in keys if key in last)
            last.update(dict.fromkeys(keys, place))
            earlier.append(sorted(before))
            for other in before:
                later[other].append(place)
            for storage in reads[place]:
                readers.setdefault(storage, []).append(place)
        writes = [list(graph.ops[op].writes) for op in order]
        return _Ties(
            reads=reads, writes=writes, readers=readers, earlier=earlier, later=later, segment=_segments(graph, order)
        )

    def reversed(self) -> _Ties:
        """Return the ties of the reversed order, its places numbered from the end."""
        end = len(self.segment) - 1
        return _Ties(
            reads=self.reads[::-1],
            writes=self.writes[::-1],
            readers={storage: [end - place for place in places] for storage, places in self.readers.items()},
            earlier=[[end - place for place in places] for places in reversed(self.later)],
            later=[[end - place for place in places] for places in reversed(self.earlier)],
            segment=[-segment for segment in reversed(self.segment)],
        )


def _segments(graph: Graph, order: Order) -> list[int]:
    """Return the segment of each place; what stands in one stays in it: between boundaries, and forward or not."""
    segments: list[int] = []
    forward = True
    for op in order:
        forward = forward and graph.ops[op].phase == Phase.FORWARD
        segments.append(sum(boundary.position <= op for boundary in graph.boundaries) + (not forward))
    return list(itertools.accumulate(segments, max))


def _forward(graph: Graph, sizes: Sequence[int], order: Order) -> Order:
    """Take, of the ops that can come next, the first that frees as many bytes as it allocates; or else the first."""
    ties = _Ties.of(graph, order)
    left = Counter(storage for reads in ties.reads for storage in reads)
    left.update(storage.id for storage in graph.storages if storage.required_at_end)

    def is_wanted(place: int) -> bool:
        freed = sum(sizes[storage] for storage in ties.reads[place] if left[storage] == 1)
        return freed >= sum(sizes[storage] for storage in ties.writes[place])

    def take(place: int) -> list[int]:
        left.subtract(ties.reads[place])
        return [storage for storage in ties.reads[place] if left[storage] == 1]

    return tuple(order[place] for place in _list_schedule(ties, is_wanted, take))


def _backward(graph: Graph, sizes: Sequence[int], order: Order) -> Order:
    """Take, of the ops that can come last, the last that writes as many bytes as it is the last to read; or else the
    last.
    """
    ties = _Ties.of(graph, order).reversed()
    is_live = [storage.required_at_end for storage in graph.storages]

    def is_wanted(place: int) -> bool:
        written = sum(sizes[storage] for storage in ties.writes[place] if is_live[storage])
        return written >= sum(sizes[storage] for storage in ties.reads[place] if not is_live[storage])

    def take(place: int) -> list[int]:
        new = [storage for storage in ties.reads[place] if not is_live[storage]]
        for storage in new:
            is_live[storage] = True
        return new

    taken = [len(order) - 1 - place for place in _list_schedule(ties, is_wanted, take)]
    return tuple(order[place] for place in reversed(taken))


def _list_schedule(ties: _Ties, is_wanted: Callable[[int], bool], take: Callable[[int], list[int]]) -> list[int]:
    """Return all places in a legal order: wanted ones as soon as they are ready, others by their numbers.

    Args:
        is_wanted: whether a place should be taken as soon as it is ready.
        take: takes a place, and returns the storages whose readers may be wanted from now on.
    """
    waiting_for = [len(earlier) for earlier in ties.earlier]
    taken: list[int] = []
    is_taken = [False] * len(waiting_for)
    for _, places in itertools.groupby(range(len(waiting_for)), key=ties.segment.__getitem__):
        ready = [place for place in places if waiting_for[place] == 0]
        wanted = [place for place in ready if is_wanted(place)]
        while ready:
            place = heapq.heappop(wanted or ready)
            if is_taken[place]:
                continue
            is_taken[place] = True
            taken.append(place)
            news = [reader for storage in take(place) for reader in ties.readers[storage]]
            for later in ties.later[place]:
                waiting_for[later] -= 1
                if waiting_for[later] == 0 and ties.segment[later] == ties.segment[place]:
                    heapq.heappush(ready, later)
                    news.append(later)
            for new in news:
                is_ready = waiting_for[new] == 0 and ties.segment[new] == ties.segment[place]
                if is_ready and not is_taken[new] and is_wanted(new):
                    heapq.heappush(wanted, new)
    return taken


def _peaks(graph: Graph, sizes: Sequence[int], order: Order) -> tuple[int, int]:
    """Return the bytes at the peak with all storages kept, and with those of the forward pass dropped over the turn."""
    turn = next((place for place, op in enumerate(order) if graph.ops[op].phase != Phase.FORWARD), len(order))
    uses: dict[int, list[int]] = {}
    for boundary in graph.boundaries:
        here = next((place for place, op in enumerate(order) if op >= boundary.position), len(order) - 1)
        uses.update((storage, [here]) for storage in boundary.arrivals)
    for place, op in enumerate(order):
        for storage in (*graph.ops[op].writes, *(read for read, _ in graph.read_versions[op])):
            uses.setdefault(storage, []).append(place)
    for storage in graph.storages:
        if storage.required_at_end and storage.id in uses:
            uses[storage.id].append(len(order))
    kept = [(storage, places[0], places[-1]) for storage, places in uses.items()]
    dropped: list[tuple[int, int, int]] = []
    for storage, places in uses.items():
        parts = [place for place in places if place < turn], [place for place in places if place >= turn]
        dropped += [(storage, part[0], part[-1]) for part in parts if part]
    return _peak(graph, sizes, order, kept), _peak(graph, sizes, order, dropped)


def _peak(graph: Graph, sizes: Sequence[int], order: Order, spans: Sequence[tuple[int, int, int]]) -> int:
    """Return the bytes at the peak where storages live over `spans`: storage, first place, last place."""
    changes = [0] * (len(order) + 2)
    dying: set[tuple[int, int]] = set()
    for storage, first, last in spans:
        changes[first] += sizes[storage]
        changes[last + 1] -= sizes[storage]
        dying.add((storage, last))
    peak = live = 0
    for place, change in enumerate(changes[: len(order)]):
        op = graph.ops[order[place]]
        taken = max((sizes[read] for read, _ in op.reuses if (read, place) in dying), default=0)
        live += change
        peak = max(peak, live + (op.workspace_bytes or 0) - (0 if op.mutates else taken))
    return peak
