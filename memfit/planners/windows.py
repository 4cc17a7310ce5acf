"""Decisions as windows: what is evaluated, repaired where an op may not be computed again, and built from kept sets.

See `memfit.planners.program` for what a window is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memfit.errors import InvalidOptionError
from memfit.planners import kernels
from memfit.planners.program import DROPPED, FREE, KEPT, Integers, Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """One window for each gap of a program: release int32[gaps], hold int32[gaps]."""

    release: Integers
    hold: Integers

    def copy(self) -> Windows:
        """Return windows that share no memory with these."""
        return Windows(release=self.release.copy(), hold=self.hold.copy())


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What decisions lead to: positions in the order of computation, seconds, peak bytes (residents included).

    `excess_bytes` sums the bytes above the budget over the sequence; `peak_at` is the position for whose sake the peak is.
    """

    sequence: NDArray[np.int32]
    seconds: float
    peak_bytes: int
    peak_at: int
    excess_bytes: float


def keep_everything(program: Program) -> Windows:
    """Return the windows that keep every storage to its last use, but for those pinned to be rematerialized."""
    count = len(program.arrays.gap_start)
    windows = Windows(release=np.zeros(count, np.int32), hold=np.zeros(count, np.int32))
    return _drop(program, windows, program.arrays.gap_rule == DROPPED)


def keep_only(program: Program, kept: Collection[int]) -> Windows:
    """Return the windows of a kept set: forward storages (by id) that are not in `kept` are dropped and rematerialized.

    A storage that is not kept is dropped after its last forward use, rematerialized in backward when an op wants it, and
    then held to its last use. Pins, and ops that may not be computed again, are honoured.

    Source: `memfit`'s own (DESIGN.md, section 4); Chen 2016, Algorithm 2 with mirror counts of 0 and 1 is a special case.
    """
    arrays, start = program.arrays, program.backward_start
    dropped = np.array([storage not in kept for storage in program.storage_of], np.bool_)
    crosses = (arrays.gap_start < start) & (arrays.gap_end >= start)
    return repaired(program, _drop(program, keep_everything(program), dropped[arrays.gap_storage] & crosses))


def _drop(program: Program, windows: Windows, gaps: NDArray[np.bool_]) -> Windows:
    arrays = program.arrays
    chosen = gaps & (arrays.gap_rule != KEPT)
    return Windows(
        release=np.where(chosen, arrays.gap_start, windows.release).astype(np.int32),
        hold=np.where(chosen, arrays.gap_start + 1, windows.hold).astype(np.int32),
    )


def repaired(program: Program, windows: Windows) -> Windows:
    """Return `windows`, and where they ask for a computation that is not allowed, keep what it would give.

    Raises:
        InvalidOptionError: a pin asks for that computation.
    """
    arrays, scratch = program.arrays, kernels.make_scratch(program)
    fixed = windows.copy()
    while True:
        count, _ = kernels.unroll(arrays, fixed.release, fixed.hold, scratch, np.inf)
        if count != kernels.NOT_AGAIN:
            return fixed
        blocked = int(scratch.blocked[0])
        slots = slice(arrays.write_start[blocked], arrays.write_start[blocked + 1])
        gaps = np.isin(arrays.gap_storage, arrays.writes[slots])
        if (arrays.gap_rule[gaps] == DROPPED).any():
            op = program.graph.ops[program.op_at[blocked]]
            raise InvalidOptionError(
                f"pinned wants op {op.id} {op.name!r} rematerialized, but what it reads is mutated before its results are "
                f"wanted again; expected a pin of True, or none"
            )
        assert (arrays.gap_rule[gaps] == FREE).any(), "what may never be computed again is always kept"
        fixed.release[gaps] = 0
        fixed.hold[gaps] = 0


def evaluate(program: Program, windows: Windows) -> Evaluation | None:
    """Return what `windows` lead to, or None where the sequence is not allowed or grows beyond all use."""
    scratch = kernels.make_scratch(program)
    count, seconds = kernels.unroll(program.arrays, windows.release, windows.hold, scratch, np.inf)
    if count < 0:
        return None
    peak, index, excess = kernels.measure(program.arrays, scratch, count, program.budget_bytes)
    return Evaluation(
        sequence=scratch.sequence[:count].copy(),
        seconds=seconds,
        peak_bytes=peak + program.base_bytes,
        peak_at=int(scratch.anchor[index]),
        excess_bytes=excess,
    )
