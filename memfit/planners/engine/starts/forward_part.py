"""The forward part of a step: the places between its ops, the bytes that cross each, and divisions at them."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from memfit.planners.engine.retention.instance import Instance
from memfit.system.records import Integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A division of the forward part: the storages kept at its places, and x and y of Chen's Algorithm 3.

    Attributes:
        kept: storages that cross a place, by id.
        between_bytes: x, the bytes that cross the places, summed.
        stage_bytes: y, the most bytes that one segment writes.
    """

    kept: frozenset[int]
    between_bytes: int
    stage_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A path of recursive checkpointing: forward ops, by place.

    Attributes:
        first, end: the path is `[first, end)`.
        level: the number of divisions around it.
        places: at which it is divided in turn; none in a path that is recomputed at once.
    """

    first: int
    end: int
    level: int
    places: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPart:
    """The forward part of a step, with one place behind each op.

    Attributes:
        ops: the op of each place.
        written_bytes: aligned bytes that each op writes.
        crossing_bytes: aligned bytes, written up to each place, that later forward ops read; reads by ops that are
            computed once do not count.
        is_candidate: whether a segment may end at the place: no fewer bytes cross the places beside it.
        is_narrow: whether it is a candidate that a single storage crosses.
        storages: the storages that cross any place, by id, and the first and the last place that each crosses.
    """

    ops: tuple[int, ...]
    written_bytes: tuple[int, ...]
    crossing_bytes: tuple[int, ...]
    is_candidate: tuple[bool, ...]
    is_narrow: tuple[bool, ...]
    storages: Integers
    first_place: Integers
    last_place: Integers

    @staticmethod
    def of(instance: Instance) -> ForwardPart:
        """Return the forward part of an instance."""
        graph, device = instance.graph, instance.problem.device
        ops = [graph.ops[op] for op in instance.op_at[: instance.backward_start] if op >= 0]
        recomputable = [(place, op) for place, op in enumerate(ops) if not op.computed_once]
        last_read = {storage: place for place, op in recomputable for storage in op.reads}
        size = {s: device.aligned(graph.storages[s].bytes) for op in ops for s in op.writes}
        spans = [
            (s, place, last_read[s] - 1)
            for place, op in enumerate(ops)
            for s in op.writes
            if last_read.get(s, -1) > place
        ]
        change, more = np.zeros(len(ops) + 1, np.int64), np.zeros(len(ops) + 1, np.int64)
        for storage, first, last in spans:
            change[first] += size[storage]
            change[last + 1] -= size[storage]
            more[first] += 1
            more[last + 1] -= 1
        totals: list[int] = np.cumsum(change)[: len(ops)].tolist()
        crossing: list[int] = np.cumsum(more)[: len(ops)].tolist()
        around = [math.inf, *totals[:-1], math.inf, -math.inf]  # behind the last op there is nothing to split
        may_end = [around[place] >= around[place + 1] <= around[place + 2] for place in range(len(totals))]
        columns = np.array(spans, np.int64).reshape(-1, 3)
        return ForwardPart(
            ops=tuple(op.id for op in ops),
            written_bytes=tuple(sum(size[s] for s in op.writes) for op in ops),
            crossing_bytes=tuple(totals),
            is_candidate=tuple(may_end),
            is_narrow=tuple(may and count == 1 for may, count in zip(may_end, crossing, strict=True)),
            storages=columns[:, 0],
            first_place=columns[:, 1],
            last_place=columns[:, 2],
        )

    def crossing(self, places: Iterable[int]) -> frozenset[int]:
        """Return the storages that cross any of these places."""
        is_chosen = np.zeros(len(self.ops) + 1, np.int64)
        is_chosen[list(places)] = 1
        before = np.concatenate([[0], np.cumsum(is_chosen)])
        crosses = before[self.last_place + 1] > before[self.first_place]
        return frozenset(self.storages[crosses].tolist())

    def split(self, budget_bytes: int, candidates: Sequence[bool] | None = None) -> Split:
        """Divide greedily: end a segment at the first candidate at which it has written more than the budget.

        Args:
            budget_bytes: B, of one segment, approximately.
            candidates: bool[places]; by default `is_candidate`.

        Source: Chen et al. 2016, Algorithm 3.
        """
        may_end = self.is_candidate if candidates is None else candidates
        in_stage, between, largest = 0, 0, 0
        places: list[int] = []
        for place, written in enumerate(self.written_bytes):
            in_stage += written
            if may_end[place] and in_stage > budget_bytes:
                places.append(place)
                between += self.crossing_bytes[place]
                largest = max(largest, in_stage)
                in_stage = 0
        return Split(kept=self.crossing(places), between_bytes=between, stage_bytes=largest)

    def paths(self, stored: int, levels: int | None = None) -> Iterator[Path]:
        """Yield the paths of recursive checkpointing, the outer ones first: the first path is the whole forward part.

        Args:
            stored: k, the most places that divide a path.
            levels: maximum number of divisions around a path; None sets no limit.

        Source: Chen et al. 2016, section 4.4.
        """
        candidates: list[int] = np.flatnonzero(self.is_candidate).tolist()
        ahead = [(0, len(self.ops), 0)]
        for first, end, level in ahead:
            inside = candidates[bisect.bisect_left(candidates, first) : bisect.bisect_left(candidates, end - 1)]
            places = divide(inside, first, end, stored) if levels is None or level < levels else []
            yield Path(first=first, end=end, level=level, places=places)
            if places:
                borders = [first, *(place + 1 for place in places), end]
                ahead += [(begin, stop, level + 1) for begin, stop in itertools.pairwise(borders)]


def divide(candidates: Sequence[int], first: int, end: int, stored: int) -> list[int]:
    """Return the candidates nearest to the places that divide a path of forward ops into equal parts.

    Args:
        candidates: the places that are allowed, ascending.
        first: the first op of the path, by place.
        end: one past its last op.
        stored: maximum number of places.

    Source: Chen et al. 2016, section 4.4: k results stored leave k + 1 paths.
    """
    if not candidates:
        return []
    length = end - first
    ends = [first + round(number * length / (stored + 1)) - 1 for number in range(1, stored + 1)]
    return sorted({_nearest(candidates, place) for place in ends})


def _nearest(candidates: Sequence[int], place: int) -> int:
    """Return the one of the ascending `candidates` that is nearest to `place`; of two, the earlier."""
    index = bisect.bisect_left(candidates, place)
    around = candidates[max(0, index - 1) : index + 1]
    return min(around, key=lambda candidate: (abs(candidate - place), candidate))
