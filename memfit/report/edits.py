"""A plan with one decision changed: what else it changes follows, and is simulated exactly.

A plan's schedule is taken apart into *events*: computations, copies and boundaries in their order. Its drops follow
from them, each right after the last use. An edit keeps storages that the plan drops, or puts computations and copies in
between; what nobody wants any more then goes, and the rest is simulated.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memfit.checker import check
from memfit.errors import InvalidScheduleError
from memfit.graph import Graph, Op
from memfit.in_place import takes_over
from memfit.plan import Plan
from memfit.report.edits_loop import AGAIN, FIRST, Events, Rules, Settled, settle
from memfit.report.live import LiveRange, Run, play
from memfit.schedule import Code, Compute, DropHost, Instruction, Offload, Prefetch, Schedule, Wait
from memfit.simulate import Timeline, arrays_of, simulate

_COPIES = (Code.OFFLOAD, Code.WAIT, Code.PREFETCH, Code.DROP_HOST)
_COPY_CODE = {Offload: Code.OFFLOAD, Wait: Code.WAIT, Prefetch: Code.PREFETCH, DropHost: Code.DROP_HOST}

Insertions = Sequence[tuple[int, Instruction]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edited:
    """What an edit leads to.

    Attributes:
        schedule: legal on the plan's graph.
        timeline: what the simulator says of it, without what is outside of a graph that has no boundary.
        places: int64[events], where the plan's own events stand in it; -1 for those that are left out.
    """

    schedule: Schedule
    timeline: Timeline
    places: NDArray[np.int64]

    @property
    def seconds(self) -> float:
        """How long the step takes."""
        return self.timeline.makespan_seconds

    @property
    def computations(self) -> int:
        """How many ops are computed, those computed again counted each time."""
        return int((self.schedule.codes == Code.COMPUTE).sum())


class Edits:
    """A plan as events, and what changes of it lead to.

    Attributes:
        base: the plan itself, put together again from its events: the plan's own schedule wherever that drops each
            storage right after its last use, as memfit's planners do.
        run: `base`, taken apart.
        peak_event: the event at which `base` holds most.
        event_seconds: float64[events + 1], when the compute stream of `base` reaches each, and the end of the step.
        uses: for each managed storage, the event that brings it first, and those that read, hand out or copy it, in
            order; the end of the step, where it is required there, is one past the last event.
        boundary_events: where the boundaries are.
        mutated_at: for each storage that ops mutate, the events at which they do, in order.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.graph = plan, plan.graph
        graph = plan.graph
        self._arrays = arrays_of(graph, plan.device.alignment_bytes)
        self._events = _events(plan.schedule)
        self._rules = _rules(plan)
        self._there_at_end = np.array([s.resident or s.required_at_end for s in graph.storages], np.uint8)
        starts = self._arrays.read_starts.astype(np.int64), self._arrays.write_starts.astype(np.int64)
        self._touched = np.diff(starts[0]) + np.diff(starts[1])
        # What the step mutates and does not keep all along has versions, which only the checker follows.
        self._has_versions = any(graph.last_version[s.id] for s in graph.storages if not s.resident)
        self.base = self.edited(checked=True)
        self.run: Run = play(graph, self.base.schedule, plan.device)
        self.event_seconds = _event_seconds(self.base, self.run)
        self.peak_event = int(np.searchsorted(_later_places(self.base), self.base.timeline.peak_position))
        self.uses = _uses(graph, self._events, self.base.places)
        self.boundary_events = np.flatnonzero(self._events.codes == Code.BOUNDARY).tolist()
        self.mutated_at = _mutations(graph, self._events)
        self.stays: list[list[LiveRange]] = [[] for _ in graph.storages]
        for stay in self.run.ranges:
            self.stays[stay.storage].append(stay)

    def is_there(self, storage: int, event: int) -> bool:
        """Whether a storage is on the device right before an event of `base`, or before the end of the step."""
        place = int(self.base.places[event]) if event < len(self.base.places) else len(self.base.schedule)
        return any(stay.first < place <= stay.last or stay.begun_by is None for stay in self.stays[storage])

    def edited(
        self,
        *,
        kept: Collection[int] = (),
        uncopied: Collection[int] = (),
        inserted: Insertions = (),
        left_on_host: bool = False,
        checked: bool = False,
    ) -> Edited:
        """Return the plan with some storages kept, and some instructions put in.

        Args:
            kept: storages that are held from their first computation to their last use.
            uncopied: storages whose copies to the host and back are left out; those that are `kept` always are.
            inserted: (event, instruction): computations again and copies to put right before an event, in this order.
            left_on_host: whether copies on the host stay there to the end of the step.
            checked: whether the checker looks at it as well.

        Raises:
            InvalidScheduleError: nothing legal comes of it.
        """
        events, source = self._with({*kept, *uncopied}, inserted, left_on_host)
        computed = events.operands[events.codes == Code.COMPUTE]
        room = 2 * len(events.codes) + int(self._touched[computed].sum()) + len(self._there_at_end)
        settled = Settled(
            codes=np.empty(room, np.int8),
            operands=np.empty(room, np.int32),
            extras=np.empty(room, np.int64),
            places=np.empty(len(events.codes), np.int64),
            needed=self._there_at_end.copy(),
            dying=np.empty(len(self._there_at_end) + 1, np.int32),
        )
        flags = self._rules.kept
        flags[list(kept)] = 1
        start = settle(events, self._arrays, self._rules, settled)
        flags[list(kept)] = 0
        schedule = Schedule(settled.codes[start:], settled.operands[start:], settled.extras[start:])
        if checked or self._has_versions:
            check(self.graph, schedule)
        places = np.full(len(self._events.codes), -1, np.int64)
        own = source >= 0
        places[source[own]] = np.where(settled.places[own] >= 0, settled.places[own] - start, -1)
        return Edited(schedule=schedule, timeline=simulate(self.graph, schedule, self.plan.device), places=places)

    def attempt(
        self, *, kept: Collection[int] = (), uncopied: Collection[int] = (), inserted: Insertions = ()
    ) -> Edited | None:
        """Return what `edited` does, or None where nothing legal comes of it."""
        # The op that a prefetch was for may be gone, so that the host's copy cannot go where it did; it takes no time.
        for left_on_host in (False, True):
            try:
                return self.edited(
                    kept=kept, uncopied=uncopied, inserted=inserted, left_on_host=left_on_host, checked=left_on_host
                )
            except InvalidScheduleError:
                continue
        return None

    def _with(
        self, uncopied: Collection[int], inserted: Insertions, left_on_host: bool
    ) -> tuple[Events, NDArray[np.int64]]:
        """Return the events of an edit, and which of the plan's own events each is, -1 for those put in."""
        codes, operands, extras = self._events
        source = np.arange(len(codes))
        if left_on_host:
            own = codes != Code.DROP_HOST
            codes, operands, extras, source = codes[own], operands[own], extras[own], source[own]
        if uncopied and np.isin(codes, _COPIES).any():
            own = ~(np.isin(codes, _COPIES) & np.isin(operands, list(uncopied)))
            codes, operands, extras, source = codes[own], operands[own], extras[own], source[own]
        if inserted:
            at = np.searchsorted(source, [event for event, _ in inserted])
            rows = [_row(instruction) for _, instruction in inserted]
            codes = np.insert(codes, at, [code for code, _, _ in rows])
            operands = np.insert(operands, at, [operand for _, operand, _ in rows])
            extras = np.insert(extras, at, [extra for _, _, extra in rows])
            source = np.insert(source, at, -1)
        return Events(codes, operands, extras), source


def _row(instruction: Instruction) -> tuple[int, int, int]:
    if isinstance(instruction, Compute):
        return Code.COMPUTE, instruction.op, AGAIN
    assert isinstance(instruction, Offload | Wait | Prefetch | DropHost), instruction
    return _COPY_CODE[type(instruction)], instruction.storage, -1


def _events(schedule: Schedule) -> Events:
    own = schedule.codes != Code.DROP
    codes, operands, extras = schedule.codes[own], schedule.operands[own], schedule.extras[own].copy()
    computed = np.flatnonzero(codes == Code.COMPUTE)
    _, first = np.unique(operands[computed], return_index=True)
    extras[computed] = AGAIN
    extras[computed[first]] = FIRST
    return Events(codes, operands, extras)


def _rules(plan: Plan) -> Rules:
    graph, count = plan.graph, len(plan.graph.storages)
    user_from = np.full(count, len(graph.boundaries), np.int64)
    for number in reversed(range(len(graph.boundaries))):
        user_from[list(graph.boundaries[number].departures)] = number
    # A plan that never writes over what it reads was made without that, and is asked its prices without it.
    taken = (plan.schedule.codes == Code.COMPUTE) & (plan.schedule.extras >= 0)
    over = {op.id for op in graph.ops if takes_over(op)} if taken.any() else set[int]()
    taking: list[int] = plan.schedule.operands[taken].tolist()
    over.update(op for op in taking if _pairs_stay(graph.ops[op]))
    return Rules(
        kept=np.zeros(count, np.uint8),
        user_from=user_from,
        writes_over=np.array([op.id in over for op in graph.ops], np.uint8),
    )


def _pairs_stay(op: Op) -> bool:
    """Whether what `op` mutates is nothing that a write of it may take over."""
    return not {read for read, _ in op.reuses} & set(op.mutates)


def _later_places(base: Edited) -> NDArray[np.int64]:
    """Return the place of each event, or of the next one that is not left out."""
    places = np.where(base.places >= 0, base.places, len(base.schedule))
    return np.minimum.accumulate(places[::-1])[::-1]


def _event_seconds(base: Edited, run: Run) -> NDArray[np.float64]:
    return run.clock_seconds[np.append(_later_places(base), len(base.schedule))]


def _rows(events: Events) -> list[tuple[int, int, int]]:
    return list(zip(events.codes.tolist(), events.operands.tolist(), events.extras.tolist(), strict=True))


def _uses(graph: Graph, events: Events, places: NDArray[np.int64]) -> list[list[int]]:
    uses: list[list[int]] = [[] for _ in graph.storages]
    for event, (code, operand, extra) in enumerate(_rows(events)):
        if places[event] < 0:
            continue
        touched = [operand]
        if code == Code.COMPUTE:
            touched = [storage for storage, _ in graph.read_versions[operand]]
            touched += graph.ops[operand].writes if extra == FIRST else ()
        elif code == Code.BOUNDARY:
            touched = [*graph.boundaries[operand].departures, *graph.boundaries[operand].arrivals]
        for storage in touched:
            uses[storage].append(event)
    for storage in graph.storages:
        if storage.required_at_end:
            uses[storage.id].append(len(events.codes))
    return uses


def _mutations(graph: Graph, events: Events) -> dict[int, list[int]]:
    mutated_at: dict[int, list[int]] = {}
    for event, (code, operand, _) in enumerate(_rows(events)):
        if code == Code.COMPUTE:
            for storage in graph.ops[operand].mutates:
                mutated_at.setdefault(storage, []).append(event)
    return mutated_at
