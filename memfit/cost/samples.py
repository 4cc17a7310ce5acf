"""Samples: the seconds that the ops of a structure took at some sizes, and estimates for other sizes."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from memfit.binding import Binding, Call
from memfit.cost.observations import Observation
from memfit.cost.rooflines import bytes_moved, flops_of
from memfit.graph import Graph, Op, Storage

_MOST_RATIO = 2.0  # of an op's work to the nearest sample on its only side: the seconds of a kernel are not linear


@dataclass(slots=True, kw_only=True)
class Samples:
    """Seconds of ops by the work that they do, for graphs of one structure.

    Attributes:
        points: number of an op -> (work, seconds), in order of work.
    """

    points: dict[int, list[tuple[int, float]]] = field(default_factory=dict[int, list[tuple[int, float]]])

    @staticmethod
    def of(graph: Graph, binding: Binding, observed: tuple[Observation | None, ...]) -> Samples:
        """Return the samples of one observed graph.

        Args:
            graph: a captured graph.
            binding: its calls.
            observed: by op.
        """
        samples = Samples()
        for op, call, seen in zip(graph.ops, binding.calls, observed, strict=True):
            if seen is not None:
                samples.add(op.id, work_of(call, op, graph.storages), seen.seconds)
        return samples

    def add(self, op: int, work: int, seconds: float) -> None:
        """Add one sample.

        Args:
            op: its number in the graph.
            work: floating-point operations or bytes, as `work_of` counts them.
            seconds: of one run.
        """
        bisect.insort(self.points.setdefault(op, []), (work, seconds))

    def estimate(self, op: int, work: int) -> float | None:
        """Return the seconds of an op at another size, or None if no sample is near.

        Between two samples the seconds are linear in the work; beyond the outermost one they are proportional to it.

        Args:
            op: its number.
            work: at that size.
        """
        points = self.points.get(op, [])
        place = bisect.bisect_left(points, (work, 0.0))
        below, above = points[place - 1] if place else None, points[place] if place < len(points) else None
        if below is not None and above is not None:
            share = (work - below[0]) / max(1, above[0] - below[0])
            return below[1] + share * (above[1] - below[1])
        nearest = below or above
        if nearest is None:
            return None
        ratio = work / max(1, nearest[0])
        return nearest[1] * ratio if 1 / _MOST_RATIO <= ratio <= _MOST_RATIO else None


def work_of(call: Call, op: Op, storages: tuple[Storage, ...]) -> int:
    """Return what an op's seconds are taken to be proportional to: floating point operations, or else bytes moved.

    Args:
        call, op: the op, as called and as in the graph.
        storages: those of the graph.
    """
    return flops_of(call) or bytes_moved(call, op, storages)
