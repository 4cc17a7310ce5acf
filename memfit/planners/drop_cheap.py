"""Planner `drop_cheap`: drop the results that are cheap to compute for their bytes (Chen 2016, section 4.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from memfit.errors import InvalidOptionError
from memfit.plan import Problem, Result
from memfit.planners.answer import answer
from memfit.planners.mirrored import Counts, evaluate_mirror
from memfit.planners.order import update_at_once_order
from memfit.planners.program import Program, build_program

_TRIED_THRESHOLDS = 24  # where none is given: quantiles of the forward ops' seconds per byte


@dataclass(frozen=True, slots=True, kw_only=True)
class DropCheap:
    """Keep the results that are time consuming to compute, drop those of low cost operations.

    The price of an op is its seconds for each byte that it writes. Below a threshold it has mirror count 1, above it 0:
    of a convolution, batch normalization and ReLU only the convolution is kept. Where no threshold is given, quantiles
    of all prices are tried, and the fastest plan that fits is taken.

    Source: Chen et al. 2016, section 4.2, with Algorithm 2.
    """

    name: ClassVar[str] = "drop_cheap"
    source: ClassVar[str] = "Chen et al. 2016, section 4.2"

    threshold: float | None = field(
        default=None,
        metadata={
            "help": "drop what costs less for a byte than so many times the mean forward op; tried where left out"
        },
    )

    def plan(self, problem: Problem) -> Result:
        """Return the plan of this threshold, or the fastest of all that fits.

        Raises:
            InvalidOptionError: a threshold that is negative or no number, a pin that cannot be honoured.
        """
        if self.threshold is not None and not self.threshold >= 0:
            raise InvalidOptionError(
                f"planner 'drop_cheap': option threshold is {self.threshold}, expected a number of 0 or more"
            )
        started_seconds = problem.clock()
        program = build_program(problem, update_at_once_order(problem.graph))
        thresholds = tried_thresholds(program) if self.threshold is None else [self.threshold * mean_price(program)]
        found = [evaluate_mirror(program, cheap_counts(program, threshold)) for threshold in thresholds]
        return answer(program, found, planner=self.name, started_seconds=started_seconds)


def cheap_counts(program: Program, seconds_per_byte: float) -> Counts:
    """Return mirror count 1 for every position that costs less than this for a byte that it writes, else 0."""
    return (prices(program) < seconds_per_byte).astype(np.int64)


def prices(program: Program) -> NDArray[np.float64]:
    """Return the seconds per written byte of each position; infinite where it writes nothing."""
    seconds = program.tables.positions["seconds"]
    written = _written_bytes(program)
    return np.where(written > 0, seconds / np.maximum(written, 1), math.inf)


def mean_price(program: Program) -> float:
    """Return the seconds of the forward ops over the bytes that they write."""
    forward = slice(0, program.backward_start)
    written = int(_written_bytes(program)[forward].sum())
    return float(program.tables.positions["seconds"][forward].sum()) / max(1, written)


def tried_thresholds(program: Program) -> list[float]:
    """Return thresholds from below the cheapest forward op to above the dearest."""
    found = prices(program)[: program.backward_start]
    found = np.unique(found[np.isfinite(found)])
    if len(found) == 0:
        return [0.0]
    picked = found[np.unique(np.linspace(0, len(found) - 1, _TRIED_THRESHOLDS).astype(int))].tolist()
    return [*picked, math.nextafter(picked[-1], math.inf)]


def _written_bytes(program: Program) -> NDArray[np.int64]:
    tables = program.tables
    sizes = tables.storages["size_bytes"][tables.writes["storage"]]
    totals = np.concatenate([[0], np.cumsum(sizes)])
    return totals[tables.positions["write_end"]] - totals[tables.positions["write_start"]]
