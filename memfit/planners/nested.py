"""Windows of recursive checkpointing: where searches for small budgets begin."""

from __future__ import annotations

import bisect
import itertools

import numpy as np
from numpy.typing import NDArray

from memfit.planners.program import KEPT, NOT_AN_OP, Program
from memfit.planners.recursive import divide
from memfit.planners.sublinear import Frontier
from memfit.planners.windows import Windows, keep_everything


def nested_windows(program: Program, stored: int) -> Windows:
    """Return the windows that keep `stored` results of the forward pass, and that many again on each path between them
    from where backward comes to that path; and so on, until nothing is left to divide.

    Source: Chen et al. 2016, section 4.4, which `memfit.planners.recursive` carries out by mirror counts.
    """
    frontier = Frontier.of(program)
    candidates: list[int] = np.flatnonzero(frontier.is_candidate).tolist()
    turns = _turns(program, frontier)
    hold_of: dict[int, int] = {}
    paths = [(0, len(frontier.ops), 0)]  # forward ops, and from where on what is stored among them is there again
    for first, end, hold in paths:
        inside = candidates[bisect.bisect_left(candidates, first) : bisect.bisect_left(candidates, end - 1)]
        places = divide(inside, first, end, stored)
        if places:
            here = frontier.crossing(places)
            borders = [first, *(place + 1 for place in places), end]
            paths += [(begin, stop, int(turns[begin:stop].min())) for begin, stop in itertools.pairwise(borders)]
        else:
            here = (storage for op in frontier.ops[first:end] for storage in program.graph.ops[op].writes)
        for storage in here:
            hold_of.setdefault(storage, hold)
    gaps, everything = program.tables.gaps, keep_everything(program)
    hold = np.array([hold_of.get(storage, 0) for storage in program.storage_of], np.int64)[gaps["storage"]]
    crosses = (gaps["start"] < program.backward_start) & (gaps["end"] >= program.backward_start)
    dropped = crosses & (gaps["rule"] != KEPT) & (hold > 0)
    return Windows(
        release=np.where(dropped, gaps["start"], everything.release),
        hold=np.where(dropped, np.clip(hold, gaps["start"] + 1, gaps["end"]), everything.hold),
    )


def _turns(program: Program, frontier: Frontier) -> NDArray[np.int64]:
    """For each forward op, the first position of backward that reads what it writes; the last one if none does."""
    first = np.full(len(program.graph.ops), len(program.op_at) - 1, np.int64)
    for position in range(len(program.op_at) - 1, program.backward_start - 1, -1):
        if program.op_at[position] != NOT_AN_OP:
            for storage, _ in program.graph.read_versions[program.op_at[position]]:
                writer = program.graph.writer_of.get(storage)
                if writer is not None:
                    first[writer] = position
    return first[list(frontier.ops)]
