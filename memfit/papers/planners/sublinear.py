"""Planner `sublinear`: segments by bytes; only their borders are kept (Chen et al. 2016, Algorithm 3, appendix A)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from memfit.papers.planners.drop_cheap import prices, tried_thresholds
from memfit.papers.planners.recompute_counts import CountPlanner, Counts, counts_keeping
from memfit.planners.engine.retention.instance import Instance
from memfit.planners.engine.starts.forward_part import ForwardPart, Split

_GRID_POINTS = 6  # appendix A: "using a size 6 grid on [B/sqrt 2, sqrt 2 B]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sublinear(CountPlanner):
    """Keep the borders of segments, recompute the results inside, and search the size of the segments.

    Algorithm 3 walks the forward ops and adds up the bytes that they write. Where the sum exceeds B at a candidate, it
    splits: there m(v) = 0, x grows by the bytes of v, and y is the largest sum so far; everywhere else m(v) = 1. B is
    first 0, which gives x and y; then sqrt(x y); then six points on [B / sqrt 2, B sqrt 2]. Algorithm 2 makes a
    sequence of each (`memfit.papers.planners.recompute_counts`), of which the exact peak is known. Static allocation
    reaches that peak within 0.2% on the paper's networks (docs/papers.md). The fastest plan that fits is the result.

    Where the paper leaves a choice: on a graph of ops, the result of a split is all storages that cross it (one on a
    chain; the hidden and the cell state of an LSTM). The candidates C are an input of the algorithm. It runs with two
    sets of them: all places where the bytes that later forward ops read are at a local minimum; and those of them that
    a single storage crosses, as in the paper (between the units of a ResNet, not within). Each set has its own grid of
    equal steps, as in the code of the authors (mxnet-memonger). As in the paper, y leaves out the stage after the last
    split.

    The paper says that the algorithm can be generalized "by considering the cost to run each operation to try to keep
    time consuming operations when possible", and leaves it there. Option `costly` does so: results that take more
    seconds for each byte than a threshold have m(v) = 0, too, and are not added up within a stage; all of the above is
    then done for each threshold (those of planner `drop_cheap`).

    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", Algorithms 2 and 3, appendix A.
    """

    name: ClassVar[str] = "sublinear"
    source: ClassVar[str] = "Chen et al. 2016, Algorithm 3 and appendix A"

    costly: bool = field(
        default=False, metadata={"help": "also keep what takes the most seconds a byte, where that fits (section 4.3)"}
    )

    def counts(self, instance: Instance) -> list[Counts]:
        """Return the counts of the splits; see the class."""
        kept = dict.fromkeys(split.kept for split in appendix_a_splits(ForwardPart.of(instance)))
        if self.costly:
            kept |= dict.fromkeys(_with_costly(instance))
        return [counts_keeping(instance, storages) for storages in kept]


def _with_costly(instance: Instance) -> Iterator[frozenset[int]]:
    """Yield the kept sets of the splits between the costly results of each threshold, with these."""
    forward_part, price_at = ForwardPart.of(instance), prices(instance)
    price_of = {op: float(price) for op, price in zip(instance.op_at, price_at, strict=True)}
    for threshold in tried_thresholds(instance):
        costly = [price_of[op] >= threshold for op in forward_part.ops]
        written = zip(forward_part.written_bytes, costly, strict=True)
        cheap = replace(forward_part, written_bytes=tuple(0 if stays else size for size, stays in written))
        stored = frozenset(
            storage
            for op, stays in zip(forward_part.ops, costly, strict=True)
            for storage in (instance.graph.ops[op].writes if stays else ())
        )
        for split in appendix_a_splits(cheap):
            yield split.kept | stored


def appendix_a_splits(forward_part: ForwardPart) -> list[Split]:
    """Return the splits of appendix A, for each set of candidates: B = 0, sqrt(x y), and the grid around it.

    Args:
        forward_part: of a step.
    """
    sets = [forward_part.is_candidate]
    if any(forward_part.is_narrow) and forward_part.is_narrow != forward_part.is_candidate:
        sets.append(forward_part.is_narrow)
    return [split for candidates in sets for split in _searched(forward_part, candidates)]


def _searched(forward_part: ForwardPart, candidates: tuple[bool, ...]) -> list[Split]:
    first = forward_part.split(0, candidates)
    middle = math.sqrt(first.between_bytes * first.stage_bytes)
    grid = np.linspace(middle / math.sqrt(2), middle * math.sqrt(2), _GRID_POINTS).tolist()
    return [first, *(forward_part.split(int(budget), candidates) for budget in (middle, *grid))]
