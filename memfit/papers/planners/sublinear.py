"""Planner `sublinear`: segments by bytes; only their borders are kept (Chen et al. 2016, Algorithm 3, appendix A)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

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

    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", Algorithms 2 and 3, appendix A.
    """

    name: ClassVar[str] = "sublinear"
    source: ClassVar[str] = "Chen et al. 2016, Algorithm 3 and appendix A"

    def counts(self, instance: Instance) -> list[Counts]:
        """Return the counts of the split; see the class."""
        splits = {split.kept: split for split in appendix_a_splits(instance)}
        return [counts_keeping(instance, split.kept) for split in splits.values()]


def appendix_a_splits(instance: Instance) -> list[Split]:
    """Return the splits of appendix A, for each set of candidates: B = 0, sqrt(x y), and the grid around it."""
    forward_part = ForwardPart.of(instance)
    sets = [forward_part.is_candidate]
    if any(forward_part.is_narrow) and forward_part.is_narrow != forward_part.is_candidate:
        sets.append(forward_part.is_narrow)
    return [split for candidates in sets for split in _searched(forward_part, candidates)]


def _searched(forward_part: ForwardPart, candidates: tuple[bool, ...]) -> list[Split]:
    first = forward_part.split(0, candidates)
    middle = math.sqrt(first.between_bytes * first.stage_bytes)
    grid = np.linspace(middle / math.sqrt(2), middle * math.sqrt(2), _GRID_POINTS).tolist()
    return [first, *(forward_part.split(int(budget), candidates) for budget in (middle, *grid))]
