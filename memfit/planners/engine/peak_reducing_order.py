"""The order of first computations that the searches use: ops move within their dependences where the peak falls."""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memfit.device import Device
from memfit.graph import Graph, Phase
from memfit.planners.engine.order import earlier_ops, original_order, update_at_once_order
from memfit.planners.engine.parts import Parts

Order = tuple[int, ...]


def search_order(graph: Graph, device: Device, parts: Parts) -> Order:
    """Return the order of first computations of a search: the peak-reducing one, unless it is switched off.

    Args:
        graph: a step.
        device: gives the alignment.
        parts: the search's.
    """
    return peak_reducing_order(graph, device) if parts.peak_reducing_order else original_order(graph)


def peak_reducing_order(graph: Graph, device: Device) -> Order:
    """Return op ids in the order with the lowest peaks of three: updates at once, and two list schedules made from it.

    One list schedule is built from the start: an op that frees bytes is computed as soon as possible. The other is
    built from the end: an op that allocates more bytes than it frees is computed as late as possible. The independent
    branches of a step are thus computed one after the other, and storages that they share no earlier than needed.

    Two peaks of each order are compared: with all storages kept to their last use, and with forward storages dropped
    before backward, as in plans for small budgets. An order replaces another if one of its peaks is lower and none is
    higher.

    Guarantees: those of `update_at_once_order`; forward ops stay before all others; ops that may not be recomputed
    keep their order.

    Args:
        graph: the step.
        device: gives the alignment.

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
    """The dependences of ops and the uses of storages; ops are numbered by their places in a legal order.

    Attributes:
        reads, writes: of each place, the storages.
        readers: storage -> the places that read it.
        earlier, later: of each place, the places that must stand before it, and behind it.
        segment: of each place; ascending along the order.
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
        tied, once = earlier_ops(graph), list[int]()  # ops that are computed once keep their order
        for place, op in enumerate(order):
            before = {place_of[each] for each in tied[op]}
            if not graph.ops[op].recomputable:
                before.update(once)
                once = [place]
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
    """Return the segment of each place: ops stay between their boundaries, and on their side of backward's start."""
    segments: list[int] = []
    forward = True
    for op in order:
        forward = forward and graph.ops[op].phase == Phase.FORWARD
        segments.append(sum(boundary.position <= op for boundary in graph.boundaries) + (not forward))
    return list(itertools.accumulate(segments, max))


def _forward(graph: Graph, sizes: Sequence[int], order: Order) -> Order:
    """Return the order built from the start: next is the first ready op that frees what it allocates, or the first."""
    ties = _Ties.of(graph, order)
    left = Counter(storage for reads in ties.reads for storage in reads)
    left.update(storage.id for storage in graph.storages if storage.required_at_end)

    def is_urgent(place: int) -> bool:
        freed = sum(sizes[storage] for storage in ties.reads[place] if left[storage] == 1)
        return freed >= sum(sizes[storage] for storage in ties.writes[place])

    def take(place: int) -> list[int]:
        left.subtract(ties.reads[place])
        return [storage for storage in ties.reads[place] if left[storage] == 1]

    return tuple(order[place] for place in _list_schedule(ties, is_urgent, take))


def _backward(graph: Graph, sizes: Sequence[int], order: Order) -> Order:
    """Return the order built from the end, by the same rule on reversed dependences."""
    ties = _Ties.of(graph, order).reversed()
    is_live = [storage.required_at_end for storage in graph.storages]

    def is_urgent(place: int) -> bool:
        written = sum(sizes[storage] for storage in ties.writes[place] if is_live[storage])
        return written >= sum(sizes[storage] for storage in ties.reads[place] if not is_live[storage])

    def take(place: int) -> list[int]:
        new = [storage for storage in ties.reads[place] if not is_live[storage]]
        for storage in new:
            is_live[storage] = True
        return new

    taken = [len(order) - 1 - place for place in _list_schedule(ties, is_urgent, take)]
    return tuple(order[place] for place in reversed(taken))


def _list_schedule(ties: _Ties, is_urgent: Callable[[int], bool], take: Callable[[int], list[int]]) -> list[int]:
    """Return all places in a legal order: urgent ones as soon as they are ready, others by their numbers.

    Args:
        ties: the dependences.
        is_urgent: whether a place should be taken as soon as it is ready.
        take: takes a place, and returns the storages whose readers may now be urgent.
    """
    waiting_for = [len(earlier) for earlier in ties.earlier]
    taken: list[int] = []
    is_taken = [False] * len(waiting_for)
    for _, places in itertools.groupby(range(len(waiting_for)), key=ties.segment.__getitem__):
        ready = [place for place in places if waiting_for[place] == 0]
        urgent = [place for place in ready if is_urgent(place)]
        while ready:
            place = heapq.heappop(urgent or ready)
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
                if is_ready and not is_taken[new] and is_urgent(new):
                    heapq.heappush(urgent, new)
    return taken


def _peaks(graph: Graph, sizes: Sequence[int], order: Order) -> tuple[int, int]:
    """Return the bytes at the peak with all storages kept, and with forward ones dropped before backward."""
    backward_start = next((place for place, op in enumerate(order) if graph.ops[op].phase != Phase.FORWARD), len(order))
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
        middle = bisect.bisect_left(places, backward_start)
        dropped += [(storage, part[0], part[-1]) for part in (places[:middle], places[middle:]) if part]
    return _peak(graph, sizes, order, kept), _peak(graph, sizes, order, dropped)


def _peak(graph: Graph, sizes: Sequence[int], order: Order, spans: Sequence[tuple[int, int, int]]) -> int:
    """Return the peak bytes if storages are live over `spans`: (storage, first place, last place)."""
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
