"""Copies beside compute: how long compute waited for them, and how long both worked at once; measured or simulated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from memfit.graph import Graph
from memfit.schedule import Code, Schedule
from memfit.simulate.simulator import Timeline, on_compute

Span = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """The copies of one step; spans are (start, end) in seconds, on one clock.

    Attributes:
        to_host, to_device: the copies in each direction, in order.
        stalls: when compute waited for copies.
    """

    to_host: tuple[Span, ...] = ()
    to_device: tuple[Span, ...] = ()
    stalls: tuple[Span, ...] = ()

    def since(self, start_seconds: float) -> Transfers:
        """Return the same with times counted from `start_seconds`."""

        def moved(spans: tuple[Span, ...]) -> tuple[Span, ...]:
            return tuple((start - start_seconds, end - start_seconds) for start, end in spans)

        return Transfers(to_host=moved(self.to_host), to_device=moved(self.to_device), stalls=moved(self.stalls))

    @property
    def stall_seconds(self) -> float:
        """How long compute waited."""
        return sum(end - start for start, end in self.stalls)

    @property
    def overlap_seconds(self) -> float:
        """How long something was copied while compute did not wait."""
        copying = _union([*self.to_host, *self.to_device])
        return sum(end - start for start, end in copying) - _common_seconds(copying, _union(self.stalls))


def simulated_transfers(timeline: Timeline, graph: Graph, schedule: Schedule) -> Transfers:
    """Return the copies and stalls of a simulated schedule.

    Args:
        timeline: of the schedule.
        graph: the step.
        schedule: its instructions.
    """
    codes, starts, ends = schedule.codes, timeline.start_seconds, timeline.end_seconds

    def spans(code: Code) -> tuple[Span, ...]:
        return tuple((float(starts[p]), float(ends[p])) for p in np.flatnonzero(codes == code))

    stalls: list[Span] = []
    now = 0.0
    for position in np.flatnonzero(on_compute(graph, schedule)):
        is_compute = codes[position] == Code.COMPUTE
        until = float(starts[position] if is_compute else ends[position])
        if until > now:
            stalls.append((now, until))
        now = float(ends[position])
    return Transfers(to_host=spans(Code.OFFLOAD), to_device=spans(Code.PREFETCH), stalls=tuple(stalls))


def _union(spans: Iterable[Span]) -> list[Span]:
    """Return spans that cover the same times, in order and without overlap."""
    union: list[Span] = []
    for start, end in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def _common_seconds(left: Sequence[Span], right: Sequence[Span]) -> float:
    """Return how long both cover; each without overlaps, in order."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in left for b in right)
