"""Planner `recursive`: segments within segments, k stored results on each path (Chen et al. 2016, section 4.4)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from memfit.papers.options import refuse
from memfit.papers.planners.recompute_counts import CountPlanner, Counts, counts_of
from memfit.planners.engine.retention.instance import Instance
from memfit.planners.engine.starts.forward_part import ForwardPart

_TRIED_STORED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # k where none is given: about evenly spread in log(k)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recursive(CountPlanner):
    """Store k results, which leaves k + 1 paths; when a path is recomputed, store k results on it; and so on.

    Memory grows as g(n) = k + g(n / (k + 1)) = k log_{k+1}(n), time by one forward pass a level. Algorithm 2 carries
    out the recursion: a result stored at level d has the count m(v) = d.

    Where the paper leaves a choice: a layer is a forward op. Results are stored at the candidate places of planner
    `sublinear` that are nearest to an equal division. `levels` ends the recursion early; the paths of the last level
    are then recomputed at once. Without k, several are tried, and the fastest plan that fits is the result.

    Source: Chen et al. 2016, section 4.4, equations 2 and 3; Algorithm 2 with counts above one.
    """

    name: ClassVar[str] = "recursive"
    source: ClassVar[str] = "Chen et al. 2016, section 4.4"

    stored: int | None = field(
        default=None, metadata={"help": "k, the results stored on each path; 1 takes the least memory, O(log n)"}
    )
    levels: int | None = field(default=None, metadata={"help": "most levels of the recursion; no limit if left out"})

    def counts(self, instance: Instance) -> list[Counts]:
        """Return the counts of this k, or of all that are tried.

        Raises:
            InvalidOptionError: `stored` or `levels` below 1.
        """
        for option, value in (("stored", self.stored), ("levels", self.levels)):
            if value is not None and value < 1:
                refuse(self, option, "1 or more")
        tried = _TRIED_STORED if self.stored is None else (self.stored,)
        return [recursive_counts(instance, each, self.levels) for each in tried]


def recursive_counts(instance: Instance, stored: int, levels: int | None = None) -> Counts:
    """Return int64[positions]: the counts of the recursion.

    Args:
        instance: the problem as tables.
        stored: k, the results stored on each path.
        levels: the most levels; None sets no limit.
    """
    forward_part = ForwardPart.of(instance)
    depth_of_place: dict[int, int] = {}
    counts: dict[int, int] = {}
    for path in forward_part.paths(stored, levels):  # inner paths follow those around them
        counts.update(dict.fromkeys(forward_part.ops[path.first : path.end], path.level))
        depth_of_place.update(dict.fromkeys(path.places, path.level))
    writer_of = instance.graph.writer_of
    for depth in sorted(set(depth_of_place.values()), reverse=True):
        places = [place for place, at in depth_of_place.items() if at <= depth]
        for storage in forward_part.crossing(places):
            counts[writer_of[storage]] = min(depth, counts[writer_of[storage]])
    return counts_of(instance, counts)
