"""Planner `drop_cheap`: drop results that are cheap to compute for their bytes (Chen et al. 2016, section 4.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from memfit.papers.options import refuse
from memfit.papers.planners.recompute_counts import CountPlanner, Counts
from memfit.planners.engine.retention.instance import Instance

_TRIED_THRESHOLDS = 24  # where none is given: quantiles of the forward ops' seconds per byte


@dataclass(frozen=True, slots=True, kw_only=True)
class DropCheap(CountPlanner):
    """Keep the results that are expensive to compute for their bytes, and recompute the others.

    The price of an op is its seconds for each byte that it writes. Ops below a threshold are recomputed once, the
    others kept: of convolution, batch normalization and ReLU only the convolution is kept. Without a threshold,
    quantiles of all prices are tried, and the fastest plan that fits is the result.

    Source: Chen et al. 2016, section 4.2, with Algorithm 2.
    """

    name: ClassVar[str] = "drop_cheap"
    source: ClassVar[str] = "Chen et al. 2016, section 4.2"

    threshold: float | None = field(
        default=None,
        metadata={"help": "drop results cheaper a byte than this many times the mean forward op; tried if left out"},
    )

    def counts(self, instance: Instance) -> list[Counts]:
        """Return the counts of this threshold, or of all that are tried.

        Raises:
            InvalidOptionError: a threshold that is negative or no number.
        """
        if self.threshold is not None and not self.threshold >= 0:
            refuse(self, "threshold", "a number of 0 or more")
        thresholds = tried_thresholds(instance) if self.threshold is None else [self.threshold * mean_price(instance)]
        return [cheap_counts(instance, threshold) for threshold in thresholds]


def cheap_counts(instance: Instance, seconds_per_byte: float) -> Counts:
    """Return int64[positions]: 1 for ops cheaper than this for each byte that they write, else 0.

    Args:
        instance: the tables of the graph.
        seconds_per_byte: the threshold.
    """
    return (prices(instance) < seconds_per_byte).astype(np.int64)


def prices(instance: Instance) -> NDArray[np.float64]:
    """Return float64[positions]: seconds per written byte; infinite where nothing is written."""
    seconds = instance.tables.positions["seconds"]
    written = _written_bytes(instance)
    return np.where(written > 0, seconds / np.maximum(written, 1), math.inf)


def mean_price(instance: Instance) -> float:
    """Return the seconds of the forward ops over the bytes that they write."""
    forward = slice(0, instance.backward_start)
    written = int(_written_bytes(instance)[forward].sum())
    return float(instance.tables.positions["seconds"][forward].sum()) / max(1, written)


def tried_thresholds(instance: Instance) -> list[float]:
    """Return the thresholds to try, from the least price of a forward op to above the greatest."""
    found = prices(instance)[: instance.backward_start]
    found = np.unique(found[np.isfinite(found)])
    if len(found) == 0:
        return [0.0]
    picked = found[np.unique(np.linspace(0, len(found) - 1, _TRIED_THRESHOLDS).astype(int))].tolist()
    return [*picked, math.nextafter(picked[-1], math.inf)]


def _written_bytes(instance: Instance) -> NDArray[np.int64]:
    tables = instance.tables
    sizes = tables.storages["size_bytes"][tables.writes["storage"]]
    totals = np.concatenate([[0], np.cumsum(sizes)])
    return totals[tables.positions["write_end"]] - totals[tables.positions["write_start"]]
