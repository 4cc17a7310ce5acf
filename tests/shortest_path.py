"""The fastest schedule of a small graph, proved: a shortest path over the states of the step.

A state is the set of computed ops, and the set of storages on the device. From one state to the next some storages are
dropped and one op is computed, for the first time or again, in any order that the rules of schedules allow. A path's
length is the seconds of its ops, so that Dijkstra's algorithm finds the fastest schedule.

Storages are dropped only where an op would not fit otherwise, and then no more than it takes: a state with more
storages on the device reaches all that one with fewer reaches, after dropping the others.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from memfit.graph import Graph
from memfit.plan import Problem

_MOST_STATES = 100_000
_LARGEST_OPS, _LARGEST_STORAGES = 12, 24  # more have too many states; sets of what to drop double with each storage

State = tuple[int, int]  # ops that have been computed, storages that are on the device; as bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Fastest:
    """The ops of the fastest schedule in order, and its seconds; `ops` is None where no schedule fits."""

    ops: tuple[int, ...] | None
    seconds: float


def fastest_schedule(problem: Problem) -> Fastest | None:
    """Return the fastest schedule within the budget, or None where there are too many states to tell.

    None as well for graphs with boundaries, for mutated storages that are not resident, and for copies on the host.
    """
    if problem.host_budget_bytes > 0 or not is_small(problem):
        return None
    return _Search(problem).run()


def is_small(problem: Problem) -> bool:
    """Return whether a problem is of the kind that is proved: few ops, no boundaries, pins or mutated storages."""
    graph = problem.graph
    mutated = any(graph.last_version[s.id] for s in graph.storages if not s.resident)
    managed = sum(not storage.resident for storage in graph.storages)
    few = len(graph.ops) <= _LARGEST_OPS and managed <= _LARGEST_STORAGES
    return few and not mutated and not graph.boundaries and not problem.pinned


class SmallGraph:
    """A small problem's graph, its sets of ops and storages as bits.

    Attributes:
        sizes: aligned bytes of each storage; 0 for residents, which are always there.
        room_bytes: the budget, less the residents and the bytes outside of the graph.
        reads, writes: of each op, the storages that are not resident.
        at_end: the storages that are required at the end.
    """

    def __init__(self, problem: Problem) -> None:
        graph, device = problem.graph, problem.device
        self.graph = graph
        self.sizes = [0 if s.resident else device.aligned(s.bytes) for s in graph.storages]
        resident_bytes = sum(device.aligned(s.bytes) for s in graph.storages if s.resident)
        self.room_bytes = problem.budget_bytes - resident_bytes - problem.bytes_outside
        managed = [not storage.resident for storage in graph.storages]
        self.reads = [bits_of(s for s, _ in graph.read_versions[op.id] if managed[s]) for op in graph.ops]
        self.writes = [bits_of(s for s in op.writes if managed[s]) for op in graph.ops]
        self.at_end = bits_of(s.id for s in graph.storages if s.required_at_end and not s.resident)
        self.before, self.until = _order(graph)

    def computable(self, done: int, live: int) -> Iterator[int]:
        """Every op that can be computed next, for the first time or to some effect again."""
        for op in range(len(self.graph.ops)):
            is_first = not done >> op & 1
            if self.reads[op] & ~live or (is_first and self.before[op] & ~done):
                continue
            if not is_first and (self.graph.ops[op].computed_once or self.until[op] & done):
                continue
            if is_first or self.writes[op] & ~live:
                yield op

    def bytes_of(self, storages: int) -> int:
        """The bytes that a set of storages takes on the device."""
        return sum(self.sizes[s] for s in members(storages))


class _Search(SmallGraph):
    def run(self) -> Fastest | None:
        """Dijkstra's algorithm, from nothing computed to everything."""
        everything = (1 << len(self.graph.ops)) - 1
        start: State = (0, 0)
        reached: dict[State, float] = {start: 0.0}
        came: dict[State, tuple[State, int]] = {}
        ties = itertools.count()
        heap: list[tuple[float, int, State]] = [(0.0, next(ties), start)]
        while heap:
            seconds, _, state = heapq.heappop(heap)
            if seconds > reached[state]:
                continue
            if state[0] == everything and state[1] & self.at_end == self.at_end:
                return Fastest(ops=_path(came, state), seconds=seconds)
            if len(reached) > _MOST_STATES:
                return None
            for op, following in self._steps(state):
                total = seconds + self.graph.ops[op].seconds
                if total < reached.get(following, float("inf")):
                    reached[following] = total
                    came[following] = (state, op)
                    heapq.heappush(heap, (total, next(ties), following))
        return Fastest(ops=None, seconds=float("inf"))

    def _steps(self, state: State) -> Iterator[tuple[int, State]]:
        """Every op that can be computed next, and the states that this leads to."""
        done, live = state
        for op in self.computable(done, live):
            for dropped, taken in self._made_room(op, live):
                yield op, (done | 1 << op, (live & ~dropped & ~taken) | self.writes[op])

    def _made_room(self, op: int, live: int) -> Iterator[tuple[int, int]]:
        """The smallest sets of storages whose dropping makes `op` fit, each with what it writes over."""
        needed = self.bytes_of(live) + self.bytes_of(self.writes[op])
        needed += self.graph.ops[op].workspace_bytes or 0
        others = [s for s in members(live & ~self.reads[op]) if self.sizes[s] > 0]
        overs = [0] + [
            1 << read
            for read, written in self.graph.ops[op].reuses
            if live >> read & 1 and not live >> written & 1 and self.sizes[read] == self.sizes[written] > 0
        ]
        for taken in overs:
            excess = needed - self.room_bytes - sum(self.sizes[s] for s in members(taken))
            if taken and needed <= self.room_bytes:
                continue  # there is room: keeping is no worse
            for dropped in smallest(others, self.sizes, excess):
                yield dropped, taken


def smallest(storages: list[int], sizes: list[int], excess: int) -> Iterator[int]:
    """Yield the sets, as bits, that free `excess` bytes and of which nothing can be left out."""
    if excess <= 0:
        yield 0
        return
    for count in range(1, len(storages) + 1):
        for chosen in itertools.combinations(storages, count):
            freed = sum(sizes[s] for s in chosen)
            if freed >= excess and freed - min(sizes[s] for s in chosen) < excess:
                yield bits_of(chosen)


def _order(graph: Graph) -> tuple[list[int], list[int]]:
    """For each op, the ops that have to come before its first computation, and those after which it may not be again.

    Ops that touch the same mutated storage, draw from the same generator, or run between the same ranks keep their
    order; what reads a version
    cannot be computed once that is overwritten.
    """
    before, until = [0] * len(graph.ops), [0] * len(graph.ops)
    for op in graph.ops:
        versions = dict(graph.read_versions[op.id])
        for other in graph.ops[: op.id]:
            theirs = dict(graph.read_versions[other.id])
            shared = [s for s in versions.keys() & theirs.keys() if graph.last_version[s]]
            if shared or not set(op.kept_in_order).isdisjoint(other.kept_in_order):
                before[op.id] |= 1 << other.id
            if any(s in op.mutates for s in shared):
                until[other.id] |= 1 << op.id
    return before, until


def _path(came: dict[State, tuple[State, int]], state: State) -> tuple[int, ...]:
    ops: list[int] = []
    while state in came:
        state, op = came[state]
        ops.append(op)
    return tuple(reversed(ops))


def bits_of(numbers: Iterable[int]) -> int:
    """Return a set of numbers as bits."""
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return bits


def members(bits: int) -> Iterator[int]:
    """Yield the numbers of a set, ascending."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
