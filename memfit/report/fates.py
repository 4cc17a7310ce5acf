"""What a schedule does with each storage, and why: kept, rematerialized, offloaded, or freed at once."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from memfit.graph import Graph, Op, Phase
from memfit.report.live import LiveRange, Run
from memfit.report.words import seconds_text, times_text
from memfit.schedule import Code


class Kind(enum.StrEnum):
    """A storage's fate in one word or three."""

    RESIDENT = "resident"
    KEPT = "kept"
    REMATERIALIZED = "rematerialized"
    OFFLOADED = "offloaded"
    FREED = "freed at once"


MEANING = {
    Kind.RESIDENT: "on the device for the whole step; no plan can change that",
    Kind.KEPT: "stays on the device from one part of the step to the next, as it would without a plan",
    Kind.REMATERIALIZED: "dropped, and computed again when it is needed",
    Kind.OFFLOADED: "copied to the host's memory, dropped, and copied back when it is needed",
    Kind.FREED: "dropped in the part of the step that made it, as it would be without a plan",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What happens to one storage.

    `rematerialized` and `offloaded` count; `extra_seconds` is the compute that rematerializing it costs, shared evenly
    with what the same op writes; `held_seconds` is how long it is on the device, all stays together.
    """

    storage: int
    kind: Kind
    rematerialized: int
    offloaded: int
    extra_seconds: float
    held_seconds: float
    why: str

    @property
    def text(self) -> str:
        """The fate with its counts: `rematerialized twice`."""
        if self.kind == Kind.OFFLOADED and self.rematerialized:
            return f"offloaded {times_text(self.offloaded)}, rematerialized {times_text(self.rematerialized)}"
        count = {Kind.OFFLOADED: self.offloaded, Kind.REMATERIALIZED: self.rematerialized}.get(self.kind)
        return f"{self.kind} {times_text(count)}" if count else str(self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """All storages of one fate together."""

    kind: Kind
    count: int
    bytes: int


def fates(run: Run) -> list[Fate]:
    """Return the fate of every storage of the run's graph, in order of id."""
    stays: list[list[LiveRange]] = [[] for _ in run.graph.storages]
    for stay in run.ranges:
        stays[stay.storage].append(stay)
    offloads = [0] * len(run.graph.storages)
    for storage in run.schedule.operands[run.schedule.codes == Code.OFFLOAD].tolist():
        offloads[storage] += 1
    readers: list[list[Op]] = [[] for _ in run.graph.storages]
    for op in run.graph.ops:
        for storage in dict.fromkeys(op.reads + op.mutates):
            readers[storage].append(op)
    return [_fate(run, storage.id, stays[storage.id], offloads, readers) for storage in run.graph.storages]


def totals(of: Sequence[Fate], graph: Graph) -> list[Total]:
    """Return the count and bytes of each fate that occurs, in the order of `Kind`."""
    members = {kind: [graph.storages[fate.storage].bytes for fate in of if fate.kind == kind] for kind in Kind}
    return [Total(kind=kind, count=len(sizes), bytes=sum(sizes)) for kind, sizes in members.items() if sizes]


def _fate(run: Run, storage: int, stays: list[LiveRange], offloads: list[int], readers: list[list[Op]]) -> Fate:
    # A second computation for another write of the same op brings this one along unread; that is not its fate.
    again = [s for s in stays[1:] if s.begun_by == Code.COMPUTE and (s.last_read is not None or _to_the_end(run, s))]
    kind = _kind(run.graph, storage, len(again), offloads[storage], readers[storage])
    writer = _writer(run.graph, storage)
    clock = run.clock_seconds
    return Fate(
        storage=storage,
        kind=kind,
        rematerialized=len(again),
        offloaded=offloads[storage],
        extra_seconds=len(again) * writer.seconds / len(writer.writes) if writer else 0.0,
        held_seconds=float(sum(clock[stay.last] - clock[stay.first] for stay in stays)),
        why=_why(run, storage, kind, stays, again, readers[storage]),
    )


def _to_the_end(run: Run, stay: LiveRange) -> bool:
    return stay.last == len(run.schedule)


def _kind(graph: Graph, storage: int, rematerialized: int, offloaded: int, readers: list[Op]) -> Kind:
    if graph.storages[storage].resident:
        return Kind.RESIDENT
    if offloaded:
        return Kind.OFFLOADED
    if rematerialized:
        return Kind.REMATERIALIZED
    phase = _phase_made(graph, storage)
    crosses = any(reader.phase != phase for reader in readers)
    return Kind.KEPT if crosses or graph.storages[storage].required_at_end else Kind.FREED


def _writer(graph: Graph, storage: int) -> Op | None:
    op = graph.writer_of.get(storage)
    return None if op is None else graph.ops[op]


def _phase_made(graph: Graph, storage: int) -> Phase | None:
    """The part of the step in which the storage comes; None for what is there from the start."""
    writer = _writer(graph, storage)
    if writer is not None:
        return writer.phase
    position = next((b.position for b in graph.boundaries if storage in b.arrivals), len(graph.ops))
    return graph.ops[position].phase if position < len(graph.ops) else None


def _why(run: Run, storage: int, kind: Kind, stays: list[LiveRange], again: list[LiveRange], readers: list[Op]) -> str:
    writer = _writer(run.graph, storage)
    if kind == Kind.RESIDENT:
        mutating = next((reader for reader in readers if storage in reader.mutates), None)
        return f"{run.graph.storages[storage].role}, there for the whole step" + (
            f"; updated in place by {mutating.name}" if mutating else ""
        )
    if kind == Kind.KEPT:
        return _why_kept(run.graph, storage, writer, readers)
    if kind == Kind.FREED:
        return f"last read by {readers[-1].name}" if readers else "nothing reads it"
    gap = _longest_gap(run, stays)
    if kind == Kind.OFFLOADED:
        return gap or "a copy goes to the host; it never leaves the device"
    assert writer is not None and again, "only what an op writes is computed again"
    return f"{gap}; computing it takes {seconds_text(writer.seconds)} each time"


def _why_kept(graph: Graph, storage: int, writer: Op | None, readers: list[Op]) -> str:
    if graph.storages[storage].required_at_end:
        return "handed to you at the end of the step"
    phase = _phase_made(graph, storage)
    reader = next(reader for reader in readers if reader.phase != phase)
    need = f"read in {reader.phase} by {reader.name}"
    if writer is None:
        return f"{need}; it arrives from outside, and nothing here can compute it again"
    if writer.computed_once:
        return f"{need}; {writer.name} can only be computed once"
    return f"{need}; computing it again would take {seconds_text(writer.seconds)} where its inputs are at hand"


def _longest_gap(run: Run, stays: list[LiveRange]) -> str:
    """Say where the storage is away for the longest, and how long; nothing where it never leaves."""
    if len(stays) < 2:
        return ""
    clock = run.clock_seconds if run.timeline.makespan_seconds else range(len(run.schedule) + 1)
    left, back = max(pairwise(stays), key=lambda pair: clock[pair[1].first] - clock[pair[0].last])
    away = f" {seconds_text(float(clock[back.first] - clock[left.last]))}" if run.timeline.makespan_seconds else ""
    return f"away{away} between {_name_at(run, left.last_read)} and {_name_at(run, back.first_read)}"


def _name_at(run: Run, position: int | None) -> str:
    """Name the op at a position; a stay that nothing read ends or begins with its own computation."""
    if position is None:
        return "its own computation"
    return run.graph.ops[int(run.schedule.operands[position])].name
