"""Decisions as windows: built from kept sets, simulated, repaired where an op may not be computed again.

See `memfit.planners.program` for what a window is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memfit.errors import InvalidOptionError
from memfit.planners.incremental import BUCKET_BITS, State, make_state
from memfit.planners.program import DROPPED, FREE, KEPT, Program
from memfit.planners.spans import weigh
from memfit.planners.stages import rebuild

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """One window for each gap of a program: release int32[gaps], hold int32[gaps]."""

    release: Integers
    hold: Integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What windows lead to: all positions in the order of computation, seconds, peak bytes with residents included."""

    sequence: tuple[int, ...]
    seconds: float
    peak_bytes: int


def keep_everything(program: Program) -> Windows:
    """Return the windows that keep every storage to its last use, but for those pinned to be rematerialized."""
    nothing = np.zeros(len(program.tables.gaps), np.int64)
    return _drop(program, Windows(release=nothing, hold=nothing), program.tables.gaps["rule"] == DROPPED)


def keep_only(program: Program, kept: Collection[int]) -> Windows:
    """Return the windows of a kept set: forward storages (by id) that are not in `kept` are dropped and rematerialized.

    A storage that is not kept is dropped after its last forward use, rematerialized in backward when an op wants it,
    and then held to its last use. Pins are honoured. See `repaired` for ops that may not be computed again.

    Source: DESIGN.md, section 4; Chen 2016, Algorithm 2 with mirror counts of 0 and 1 is the same.
    """
    gaps, start = program.tables.gaps, program.backward_start
    dropped = np.array([storage not in kept for storage in program.storage_of], np.bool_)
    crosses = (gaps["start"] < start) & (gaps["end"] >= start)
    return _drop(program, keep_everything(program), dropped[gaps["storage"]] & crosses)


def waiting(program: Program, windows: Windows, least_bytes: int) -> Windows:
    """Return windows in which what backward writes for a single reader, and has so many bytes, waits for it.

    Gradients that add up, as those of a weight that every step of a recurrent network uses, are then added when the
    sum is wanted, by when what forward wrote has made room. Nothing is computed twice for that.
    """
    storages, positions = program.tables.storages, program.tables.positions
    first, writer = storages["first_gap"], storages["writer"]
    is_single = positions["write_end"][writer] == positions["write_start"][writer] + 1
    chosen = (storages["last_gap"] == first + 1) & (storages["size_bytes"] >= least_bytes) & is_single
    chosen &= (writer >= program.backward_start) & positions["may_wait"][writer]
    found = np.zeros(len(program.tables.gaps), np.bool_)
    found[first[chosen]] = True
    return _drop(program, windows, found)


def joined(program: Program, early: Windows, late: Windows, place: int) -> Windows:
    """Return `early` for what the forward ops before position `place` write and their backward ops do, else `late`."""
    gaps, start = program.tables.gaps, program.backward_start
    writer = program.tables.storages["writer"][gaps["storage"]]
    mirrored = (len(program.op_at) - writer) * start / max(1, len(program.op_at) - start)
    is_early = np.where(writer < start, writer, mirrored) < place
    return Windows(
        release=np.where(is_early, early.release, late.release), hold=np.where(is_early, early.hold, late.hold)
    )


def free_gaps(program: Program) -> int:
    """Return how many gaps there are in which something can be gained by dropping."""
    gaps = program.tables.gaps
    size = program.tables.storages["size_bytes"][gaps["storage"]]
    return int(((gaps["rule"] != KEPT) & (gaps["end"] - gaps["start"] > 1) & (size > 0)).sum())


def _drop(program: Program, windows: Windows, chosen: Flags) -> Windows:
    gaps = program.tables.gaps
    dropped = chosen & (gaps["rule"] != KEPT)
    return Windows(
        release=np.where(dropped, gaps["start"], windows.release).astype(np.int64),
        hold=np.where(dropped, gaps["start"] + 1, windows.hold).astype(np.int64),
    )


def simulated(program: Program, windows: Windows) -> State:
    """Return the state that `windows` lead to; where they ask for a computation that is not allowed, more is kept.

    Raises:
        InvalidOptionError: a pin asks for that computation.
    """
    state, tables = make_state(program), program.tables
    state.gaps["release"] = windows.release
    state.gaps["hold"] = windows.hold
    while not rebuild(tables, state):
        blocked = int(state.totals[0]["blocked"])
        if blocked < 0:  # no room: an op is computed again more often than is of any use
            choice = (state.gaps["hold"] > tables.gaps["start"] + 1) & (tables.gaps["rule"] == FREE)
            assert choice.any(), "windows of one position compute no op again so often"
            state.gaps["hold"][choice] = tables.gaps["start"][choice] + 1
            continue
        op = program.graph.ops[program.op_at[blocked]]
        wanted = np.isin(
            tables.gaps["storage"], [s for s, number in enumerate(program.storage_of) if number in op.writes]
        )
        if (tables.gaps["rule"][wanted] == DROPPED).any():
            raise InvalidOptionError(
                f"pinned wants op {op.id} {op.name!r} rematerialized, but what it reads is mutated before its results "
                f"are wanted again; expected a pin of True, or none"
            )
        assert (tables.gaps["rule"][wanted] == FREE).any(), "what may never be computed again is always kept"
        state.gaps["release"][wanted] = 0
        state.gaps["hold"][wanted] = 0
    return state


def evaluate(program: Program, state: State) -> Evaluation:
    """Return what a state amounts to."""
    peak_bytes, _ = weigh(state, 0)
    return Evaluation(
        sequence=tuple(_sequence(state)),
        seconds=float(state.totals[0]["seconds"]),
        peak_bytes=int(peak_bytes) + program.base_bytes,
    )


def held_bytes(state: State) -> Integers:
    """Return int64[positions]: the most that is held in each stage, residents left out."""
    bucket = np.arange(len(state.within)) >> BUCKET_BITS
    return state.live_after + state.within + state.buckets["added_bytes"][bucket]


def stage_seconds(program: Program, state: State) -> NDArray[np.float64]:
    """Return float64[positions]: the seconds of all that is computed in each stage."""
    seconds, length = program.tables.positions["seconds"], state.stages["length"]
    begins = np.cumsum(length) - length
    entries = np.arange(int(length.sum())) + np.repeat(state.stages["start"] - begins, length)
    total = np.where(state.stages["waits"], 0.0, seconds)
    np.add.at(total, np.repeat(np.arange(len(length)), length), seconds[state.pool[entries]])
    return total


def _sequence(state: State) -> list[int]:
    sequence: list[int] = []
    for position, stage in enumerate(state.stages):
        start = int(stage["start"])
        sequence.extend(state.pool[start : start + int(stage["length"])].tolist())
        if not stage["waits"]:
            sequence.append(position)
    return sequence
