"""The bytes that torch's CUDA allocator takes from the device for a schedule: its live bytes, and what lies unused."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from memfit.graph import Graph
from memfit.schedule import Code, Schedule
from memfit.simulate.allocator_trace import Event, EventKind, Replay, replay
from memfit.simulate.cuda_allocator import AllocatorSettings
from memfit.simulate.live_ranges import LiveRange, live_ranges

ARENA, EXPANDABLE, DEFAULT = "arena", "expandable segments", "torch's allocator"
"""What may serve a step on a GPU: the best first."""

POOL_BYTES = 1 << 20
"""Beside an arena: what torch's allocator has for requests that the layout does not know, as one block of its pool of
small ones."""

STEPS = 3
"""Steps that are replayed unless said otherwise: the second may take more than the first, whose blocks it splits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """What a schedule takes from the device over several steps, residents included.

    Attributes:
        resident_bytes: reserved when the residents are there, before the first step.
        resident_unused_bytes: of these the bytes that lie beside the residents in their segments.
        allocated_peak_bytes: the most bytes in live blocks.
        step_peaks_bytes: the most bytes reserved in each step.
        is_refused: whether a request ran out of memory, under a capacity or a cap.
    """

    resident_bytes: int
    resident_unused_bytes: int
    allocated_peak_bytes: int
    step_peaks_bytes: tuple[int, ...]
    is_refused: bool

    @property
    def peak_bytes(self) -> int:
        """The most bytes reserved in any step."""
        return max(self.step_peaks_bytes)

    @property
    def fragmentation_bytes(self) -> int:
        """Bytes reserved at the peak beyond the most that are allocated."""
        return self.peak_bytes - self.allocated_peak_bytes


def reserved(
    graph: Graph,
    schedule: Schedule,
    settings: AllocatorSettings | None = None,
    *,
    steps: int = STEPS,
    arena_bytes: int | None = None,
    outside_bytes: int = 0,
) -> Reserved:
    """Return what torch's CUDA allocator takes for `schedule`, from an empty cache on.

        >>> from memfit.graph import Graph, Op, Phase, Role, Storage
        >>> graph = Graph.build(
        ...     name="double",
        ...     storages=[
        ...         Storage(id=0, name="x", bytes=3 << 20, role=Role.INPUT),
        ...         Storage(id=1, name="y", bytes=11 << 20, role=Role.OUTPUT),
        ...     ],
        ...     ops=[Op(id=0, name="pad", phase=Phase.FORWARD, reads=(0,), writes=(1,), seconds=1e-6)],
        ... )
        >>> found = reserved(graph, Schedule.parse("compute 0"))
        >>> [each >> 20 for each in (found.resident_bytes, found.allocated_peak_bytes, found.peak_bytes)]
        [20, 14, 20]

    Args:
        graph: gives sizes; workspace that is not known counts as none.
        schedule: legal on `graph`.
        settings: the allocator's; torch's defaults if None.
        steps: how often the step is run.
        arena_bytes: the height of an arena, which is one block; beside it are residents, what outlives a step, and
            `POOL_BYTES`. None is no arena.
        outside_bytes: what is there that is not the graph's, and is never freed. With expandable segments it shares
            pages with the arena and with storages; else its segments are its own.
    """
    is_paged = settings is not None and settings.expandable_segments
    beside_bytes = 0 if is_paged else outside_bytes
    events, begins = schedule_events(
        graph, schedule, steps=steps, arena_bytes=arena_bytes, outside_bytes=outside_bytes - beside_bytes
    )
    found: Replay = replay(events, settings)
    ends = [*begins[1:], len(events)]
    parts = [found.reserved_bytes[max(first - 1, 0) : end] for first, end in zip(begins, ends, strict=True)]
    resident_bytes = int(found.reserved_bytes[begins[0] - 1]) if begins[0] else 0
    return Reserved(
        resident_bytes=beside_bytes + resident_bytes,
        resident_unused_bytes=resident_bytes - sum(event.size_bytes for event in events[: begins[0]]),
        allocated_peak_bytes=beside_bytes + found.peak_allocated_bytes,
        step_peaks_bytes=tuple(beside_bytes + int(part.max(initial=0)) for part in parts),
        is_refused=bool(found.refused),
    )


def schedule_events(
    graph: Graph, schedule: Schedule, *, steps: int = 1, arena_bytes: int | None = None, outside_bytes: int = 0
) -> tuple[list[Event], list[int]]:
    """Return what a schedule requests and frees, and where in the events each step begins.

    Residents are requested first, in the order of their ids. An op requests its writes, second copies of writes that
    are live, and its workspace, which is freed with the copies when it ends. What a step leaves is freed before the
    next. All is on one stream: copies to and from the host take the compute stream's memory.

    Args:
        graph: gives sizes.
        schedule: legal on `graph`.
        steps: how often the step is run.
        arena_bytes: of an arena, which is requested after the residents.
        outside_bytes: of one more block, which is requested after the residents and stays.
    """
    trace = _Trace(graph, schedule, has_arena=arena_bytes is not None)
    events = [_request(storage.id, storage.bytes) for storage in graph.storages if storage.resident]
    first = len(graph.storages) + steps * trace.blocks
    if outside_bytes:
        events.append(_request(first + 2, outside_bytes))
    if arena_bytes is not None:
        events += [_request(first, POOL_BYTES), _request(first + 1, arena_bytes)]
    begins: list[int] = []
    for step in range(steps):
        begins.append(len(events))
        events += trace.step_events(step * trace.blocks)
    return events, begins


class _Trace:
    """The events of one step; its blocks are numbered after the storages, whose numbers the residents have."""

    def __init__(self, graph: Graph, schedule: Schedule, *, has_arena: bool) -> None:
        found = live_ranges(graph, schedule)
        self._graph, self._length = graph, len(schedule)
        self._begun: dict[int, list[tuple[int, int]]] = defaultdict(list)  # position -> (block, bytes)
        self._freed: dict[int, list[int]] = defaultdict(list)
        self._passing: dict[int, list[int]] = defaultdict(list)  # position -> bytes that live for that instruction
        self._add_stays(found.ranges, has_arena=has_arena)
        for position, storage in found.second_copies if not has_arena else ():
            self._passing[position].append(graph.storages[storage].bytes)
        for position, op in found.workspaces if not has_arena else ():
            self._passing[position].append(graph.ops[op].workspace_bytes or 0)
        self.blocks = len(found.ranges)
        extras: list[int] = schedule.extras.tolist()
        for position, code in enumerate(schedule.codes.tolist()):
            if code == Code.BOUNDARY and extras[position]:  # held by user code to the end of the step
                self._begun[position].append((self.blocks, extras[position]))
                self._freed[self._length].append(self.blocks)
                self.blocks += 1
        self._first_passing = self.blocks
        self.blocks += max((len(each) for each in self._passing.values()), default=0)

    def step_events(self, offset: int) -> list[Event]:
        """Return the events of a step, whose blocks are numbered from `offset` on."""
        first = len(self._graph.storages) + offset
        events: list[Event] = []
        for position in range(self._length):
            events += [Event(EventKind.FREE, first + block) for block in self._freed[position]]
            events += [_request(first + block, size) for block, size in self._begun[position]]
            passing = list(enumerate(self._passing[position], first + self._first_passing))
            events += [_request(block, size) for block, size in passing]
            events += [Event(EventKind.FREE, block) for block, _ in reversed(passing)]
        return events + [Event(EventKind.FREE, first + block) for block in self._freed[self._length]]

    def _add_stays(self, ranges: tuple[LiveRange, ...], *, has_arena: bool) -> None:
        """Note where blocks begin and end; a range that reuses memory in place carries on another's block.

        In an arena is all that neither comes from the user nor outlives the step.
        """
        taken = {stay.memory_of for stay in ranges}
        block_of: list[int] = []
        outside: set[int] = set()
        for index, stay in enumerate(ranges):
            block_of.append(index if stay.memory_of is None else block_of[stay.memory_of])
            outlives = stay.last == self._length and self._graph.storages[stay.storage].required_at_end
            if outlives or stay.begun_by == Code.BOUNDARY:
                outside.add(block_of[index])
        for index, stay in enumerate(ranges):
            storage = self._graph.storages[stay.storage]
            if storage.resident or (has_arena and block_of[index] not in outside):
                continue
            if stay.memory_of is None:
                self._begun[stay.first].append((index, storage.bytes))
            if index not in taken:
                self._freed[stay.last].append(block_of[index])


def _request(block: int, size_bytes: int) -> Event:
    return Event(EventKind.ALLOCATE, block, size_bytes)
