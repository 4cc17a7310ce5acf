"""The fate of each storage under a schedule, and why: kept, rematerialized, offloaded, or freed at once."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from memfit.graph import Graph, Op, Phase
from memfit.report.formatting import seconds_text, times_text
from memfit.report.live import LiveRange, Run
from memfit.schedule import Code


class Kind(enum.StrEnum):
    """The kinds of fates."""

    RESIDENT = "resident"
    KEPT = "kept"
    REMATERIALIZED = "rematerialized"
    OFFLOADED = "offloaded"
    FREED = "freed at once"


MEANING = {
    Kind.RESIDENT: "on the device for the whole step; no plan can change that",
    Kind.KEPT: "stays on the device from one part of the step to the next, as it would without a plan",
    Kind.REMATERIALIZED: "dropped, and recomputed when it is needed",
    Kind.OFFLOADED: "copied to the host's memory, dropped, and copied back when it is needed",
    Kind.FREED: "dropped in the part of the step that made it, as it would be without a plan",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """The fate of one storage.

    Attributes:
        storage: its id.
        rematerialized, offloaded: how often.
        extra_seconds: of recomputing it; the seconds of an op are shared evenly by all storages that it writes.
        held_seconds: on the device, all stays together.
        why: in words.
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
    offloads = [0] * len(run.graph.storages)
    for storage in run.schedule.operands[run.schedule.codes == Code.OFFLOAD].tolist():
        offloads[storage] += 1
    readers: list[list[Op]] = [[] for _ in run.graph.storages]
    for op in run.graph.ops:
        for storage in dict.fromkeys(op.reads + op.mutates):
            readers[storage].append(op)
    return [_fate(run, storage.id, offloads[storage.id], readers[storage.id]) for storage in run.graph.storages]


def totals(of: Sequence[Fate], graph: Graph) -> list[Total]:
    """Return the count and bytes of each fate that occurs, in the order of `Kind`.

    Args:
        of: fates of storages.
        graph: gives their bytes.
    """
    members = {kind: [graph.storages[fate.storage].bytes for fate in of if fate.kind == kind] for kind in Kind}
    return [Total(kind=kind, count=len(sizes), bytes=sum(sizes)) for kind, sizes in members.items() if sizes]


def _fate(run: Run, storage: int, offloaded: int, readers: list[Op]) -> Fate:
    stays = run.stays[storage]
    # The op may be recomputed for another storage that it writes; then nothing reads this one, and it does not count.
    end = len(run.schedule)
    recomputed = [s for s in stays[1:] if s.begun_by == Code.COMPUTE and (s.reads or s.last == end)]
    kind = _kind(run.graph, storage, len(recomputed), offloaded, readers)
    writer = run.graph.writer(storage)
    clock = run.clock_seconds
    return Fate(
        storage=storage,
        kind=kind,
        rematerialized=len(recomputed),
        offloaded=offloaded,
        extra_seconds=len(recomputed) * writer.seconds / len(writer.writes) if writer else 0.0,
        held_seconds=float(sum(clock[stay.last] - clock[stay.first] for stay in stays)),
        why=_why(run, storage, kind, readers),
    )


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


def _phase_made(graph: Graph, storage: int) -> Phase | None:
    """Return the part of the step in which the storage is made; None for one that is there from the start."""
    writer = graph.writer(storage)
    if writer is not None:
        return writer.phase
    position = next((b.position for b in graph.boundaries if storage in b.arrivals), len(graph.ops))
    return graph.ops[position].phase if position < len(graph.ops) else None


def _why(run: Run, storage: int, kind: Kind, readers: list[Op]) -> str:
    writer = run.graph.writer(storage)
    if kind == Kind.RESIDENT:
        mutating = next((reader for reader in readers if storage in reader.mutates), None)
        return f"{run.graph.storages[storage].role}, there for the whole step" + (
            f"; updated in place by {mutating.name}" if mutating else ""
        )
    if kind == Kind.KEPT:
        return _why_kept(run.graph, storage, writer, readers)
    if kind == Kind.FREED:
        return f"last read by {readers[-1].name}" if readers else "nothing reads it"
    absence = _longest_absence(run, run.stays[storage])
    if kind == Kind.OFFLOADED:
        return absence or "copied to the host, and never dropped on the device"
    assert writer is not None, "only the writes of an op are recomputed"
    return f"{absence}; computing it takes {seconds_text(writer.seconds)} each time"


def _why_kept(graph: Graph, storage: int, writer: Op | None, readers: list[Op]) -> str:
    if graph.storages[storage].required_at_end:
        return "handed to you at the end of the step"
    phase = _phase_made(graph, storage)
    reader = next(reader for reader in readers if reader.phase != phase)
    need = f"read in {reader.phase} by {reader.name}"
    if writer is None:
        return f"{need}; it arrives from outside, and no op here can recompute it"
    if writer.computed_once:
        return f"{need}; {writer.name} can only be computed once"
    return f"{need}; recomputing it would take {seconds_text(writer.seconds)} if its inputs are on the device"


def _longest_absence(run: Run, stays: Sequence[LiveRange]) -> str:
    """Return between which ops the storage is off the device for the longest, and how long; empty if it never is."""
    if len(stays) < 2:
        return ""
    clock = run.clock_seconds if run.timeline.makespan_seconds else range(len(run.schedule) + 1)
    left, back = max(pairwise(stays), key=lambda pair: clock[pair[1].first] - clock[pair[0].last])
    duration = f" {seconds_text(float(clock[back.first] - clock[left.last]))}" if run.timeline.makespan_seconds else ""
    before, after = _reader_name(run, left.reads[-1:]), _reader_name(run, back.reads[:1])
    return f"off the device{duration} between {before} and {'its recomputation' if before == after else after}"


def _reader_name(run: Run, positions: list[int]) -> str:
    """Return the name of the op at the position given; a stay that nothing reads begins and ends with its own
    computation.
    """
    return run.graph.ops[int(run.schedule.operands[positions[0]])].name if positions else "its own computation"
