"""Packer `auto`: a portfolio that answers at once, and improves until the lower bound or the time limit."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from memfit.packing.best_fit import BestFit
from memfit.packing.blocks import Layout, PackingProblem, Progress
from memfit.packing.first_fit import ORDERS, FirstFit
from memfit.packing.local_search import LocalSearch


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """Try the quick packers, then search; the answer is never worse than the best of the parts that have run."""

    name: ClassVar[str] = "auto"
    source: ClassVar[str] = "memfit: a portfolio of its own packers"

    def pack(self, problem: PackingProblem) -> Layout:
        """Return the best layout of all parts; it stops at the lower bound."""
        started, best = problem.clock(), None
        for part in (*(FirstFit(by=by) for by in ORDERS), BestFit(), LocalSearch()):  # pyright: ignore
            left = problem.time_limit_seconds - (problem.clock() - started)
            if best is not None and (best.proven or left <= 0):
                break
            layout = part.pack(dataclasses.replace(problem, time_limit_seconds=max(left, 0.0)))
            if best is None or layout.height_bytes < best.height_bytes:
                best = layout
                seconds = problem.clock() - started
                problem.progress(Progress(seconds=seconds, height_bytes=best.height_bytes, packer=part.name))
        assert best is not None
        return best
