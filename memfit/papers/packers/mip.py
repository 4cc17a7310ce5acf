"""Packer `mip`: the mixed integer program of Sekiyama et al., solved exactly."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from memfit.errors import InvalidOptionError
from memfit.packing.best_fit import fill_lines
from memfit.packing.blocks import Layout, PackingProblem, make_layout
from memfit.packing.sections import Sections, sections_of
from memfit.system.worker import run_aside

_SEED_MODULUS = 1 << 31  # the solver's seeds are 31 bits
_PAIRS_A_LOOK = 1000  # between two readings of the clock while the model is built: ten milliseconds
_UNITS = 1 << 40  # the most units that the solver's sums can hold with room to spare


@dataclass(frozen=True, slots=True, kw_only=True)
class Mip:
    """Equations 1-6: an offset for each block, and for each pair that is live together a bit for which one is below.

    OR-tools' CP-SAT solves them in whole numbers, in units of the greatest common divisor of the sizes. It begins from
    the layout of `best_fit`, whose height is the paper's W. At the time limit it returns the best layout so far.

    Source: Sekiyama et al. 2018, section 3.1, which used CPLEX.
    """

    name: ClassVar[str] = "mip"
    source: ClassVar[str] = "Sekiyama et al. 2018, section 3.1, equations 1-6, by OR-tools' CP-SAT"

    most_pairs: int = field(default=200_000, metadata={"help": "pairs of blocks that meet; more are refused"})

    def pack(self, problem: PackingProblem) -> Layout:
        """Return the best layout; it is proven if the solver has proved it.

        Raises:
            InvalidOptionError: more pairs meet than `most_pairs`, or sizes need more than 40 bits in common units.
        """
        blocks, sections = problem.blocks, sections_of(problem.blocks)
        first = make_layout(blocks, fill_lines(blocks, sections), packer=self.name)
        if first.proven:
            return first
        unit = int(np.gcd.reduce(blocks.sizes_bytes))
        pairs = _meeting_pairs(sections)
        if len(pairs) > self.most_pairs:
            raise InvalidOptionError(
                f"{len(pairs)} pairs of blocks meet, packer 'mip' takes {self.most_pairs}; use another packer, "
                "or raise most_pairs"
            )
        if first.height_bytes // unit > _UNITS:
            raise InvalidOptionError(
                f"packer 'mip' works in units of {unit} bytes here, and {first.height_bytes} bytes are more than "
                f"{_UNITS} of them; use another packer"
            )
        return _solve(problem, first, pairs, unit)


def _meeting_pairs(sections: Sections) -> NDArray[np.int64]:
    """Return the pairs (i, j), i < j, of blocks that are live together: the paper's E."""
    count = len(sections.firsts)
    rows: list[NDArray[np.int64]] = []
    for i in range(count):
        after = np.arange(i + 1, count)
        meets = (sections.firsts[after] < sections.lasts[i]) & (sections.firsts[i] < sections.lasts[after])
        rows.append(np.stack([np.full(int(meets.sum()), i), after[meets]], axis=1))
    return np.concatenate(rows) if rows else np.zeros((0, 2), np.int64)


def _solve(problem: PackingProblem, first: Layout, pairs: NDArray[np.int64], unit: int) -> Layout:
    from ortools.sat.python import cp_model  # its import takes longer than that of memfit

    blocks, started = problem.blocks, problem.clock()
    sizes = (blocks.sizes_bytes // unit).tolist()
    most = first.height_bytes // unit
    model: Any = cp_model.CpModel()
    u = model.new_int_var(first.lower_bound_bytes // unit, most, "u")
    x = [model.new_int_var(0, most - size, f"x{i}") for i, size in enumerate(sizes)]
    for offset, size, hint in zip(x, sizes, (first.offsets_bytes // unit).tolist(), strict=True):
        model.add(offset + size <= u)
        model.add_hint(offset, hint)
    for place, (i, j) in enumerate(pairs.tolist()):
        if place % _PAIRS_A_LOOK == 0 and problem.clock() - started >= problem.time_limit_seconds:
            return first
        z = model.new_bool_var(f"z{i},{j}")
        model.add(x[i] + sizes[i] <= x[j] + z * most)
        model.add(x[j] + sizes[j] <= x[i] + (1 - z) * most)
        model.add_hint(z, int(first.offsets_bytes[i] > first.offsets_bytes[j]))
    model.minimize(u)
    solver: Any = cp_model.CpSolver()
    solver.parameters.num_workers = 1  # with several, the answer would depend on their timing
    solver.parameters.random_seed = problem.seed % _SEED_MODULUS
    solver.parameters.max_time_in_seconds = max(problem.time_limit_seconds - (problem.clock() - started), 0.01)
    solver.parameters.catch_sigint_signal = False
    status = run_aside(lambda: solver.solve(model), solver.stop_search)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return first
    offsets = np.array([solver.value(offset) for offset in x], np.int64) * unit
    return make_layout(blocks, offsets, packer=Mip.name, proven=status == cp_model.OPTIMAL)
