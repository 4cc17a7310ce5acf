"""Blocks: a long graph cut where little crosses, and what windows cost in each block.

A *block* is a run of forward ops between two places, with the stages of backward that use what it writes. Windows for
the whole step, simulated once, say what each block takes under them: seconds, bytes that stay over the turning point,
and the most that is held while the block runs above what earlier blocks keep. Equal blocks get equal figures.
`memfit.planners.joining` picks windows block by block.

Source: Feng and Huang 2018, section 5 (segments of a division), with exact bytes and seconds in place of sums; Chen et
al. 2016, section 4.4 (segments within segments).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memfit.planners.incremental import State
from memfit.planners.program import Program
from memfit.planners.sublinear import Frontier
from memfit.planners.windows import Flags, Integers, Windows, held_bytes, keep_only, simulated, stage_seconds

_MOST_BLOCKS = 256
_FURTHEST = 64  # ops around a place that are compared with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A program cut into blocks.

    Attributes:
        places: int64[blocks - 1], ascending: the forward op (its place in `frontier`) that each block but the last ends
            with.
        of_stage: int64[positions], the block in which each stage counts: of forward, the op's own; of backward, the
            last one that the op reads from, else that of the stage before it.
        of_storage: int64[managed storages], the block of its writer.
    """

    program: Program
    frontier: Frontier
    places: Integers
    of_stage: Integers
    of_storage: Integers

    @staticmethod
    def of(program: Program, most: int = _MOST_BLOCKS) -> Blocks:
        """Return the blocks of a program, cut where fewer bytes cross than around."""
        frontier = Frontier.of(program)
        places = _places(frontier, most)
        op_place = {op: place for place, op in enumerate(frontier.ops)}
        at = np.array([op_place.get(op, -1) for op in program.op_at[: program.backward_start]], np.int64)
        at = np.maximum.accumulate(at) if len(at) else at
        forward = np.searchsorted(places, at)
        of_stage = np.concatenate([forward, _backward_blocks(program, forward)]).astype(np.int64)
        of_storage = of_stage[program.tables.storages["writer"]]
        return Blocks(program=program, frontier=frontier, places=places, of_stage=of_stage, of_storage=of_storage)

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.places) + 1

    def borders(self, every: int) -> frozenset[int]:
        """Return the storages, by id, that cross every so manieth place."""
        return self.frontier.crossing(self.places[every - 1 :: every].tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Windows, and what they take in each block.

    Attributes:
        peak_bytes: of the whole step, residents included.
        total_seconds: of the whole step.
        seconds: float64[blocks], of all computations.
        kept_bytes: int64[blocks], of what the block writes, over the turning point.
        transient_bytes: int64[blocks], the most that is held in the block's stages, above what earlier blocks keep.
        is_border: bool[blocks], whether all that later blocks need across the block's end is kept over the turning
            point: other windows may follow.
    """

    windows: Windows
    peak_bytes: int
    total_seconds: float
    seconds: NDArray[np.float64]
    kept_bytes: Integers
    transient_bytes: Integers
    is_border: Flags


def option_of(blocks: Blocks, windows: Windows) -> Option:
    """Simulate `windows`, and return what they take in each block."""
    program, count = blocks.program, blocks.count
    state = simulated(program, windows)
    there = _over_turning(program, state)
    sizes = np.where(there, program.tables.storages["size_bytes"], 0)
    written_forward = program.tables.storages["writer"] < program.backward_start
    kept = np.zeros(count, np.int64)
    np.add.at(kept, blocks.of_storage[written_forward], sizes[written_forward])
    before = np.concatenate([[0], np.cumsum(kept)[:-1]])
    transient, seconds = np.zeros(count, np.int64), np.zeros(count, np.float64)
    np.maximum.at(transient, blocks.of_stage, held_bytes(state) - before[blocks.of_stage])
    np.add.at(seconds, blocks.of_stage, stage_seconds(program, state))
    return Option(
        windows=Windows(release=state.gaps["release"].copy(), hold=state.gaps["hold"].copy()),
        peak_bytes=int(held_bytes(state).max(initial=0)) + program.base_bytes,
        total_seconds=float(state.totals[0]["seconds"]),
        seconds=seconds,
        kept_bytes=kept,
        transient_bytes=transient,
        is_border=_borders(blocks, there),
    )


def nested(program: Program, kept: frozenset[int], levels: list[tuple[frozenset[int], Integers]]) -> Windows:
    """Return windows with segments within segments.

    Args:
        kept: storages, by id, that stay over the turning point.
        levels: from the outermost segments inward: the storages, by id, that come back when backward first enters
            their segment, and the segment of each managed storage. What no level names comes back in its innermost
            segment.

    A storage that is dropped is not retained before backward enters its segment: until then it is computed anew for
    each op that wants it.
    """
    plain = keep_only(program, kept)
    gaps = program.tables.gaps
    dropped = np.flatnonzero(plain.release < plain.hold)
    storage, end = gaps["storage"][dropped], gaps["end"][dropped]
    ids = np.array(program.storage_of, np.int64)[storage]
    hold, is_open = plain.hold.copy(), np.ones(len(dropped), np.bool_)
    for number, (back, segment_of) in enumerate(levels):
        is_last = number == len(levels) - 1
        here = is_open & (np.isin(ids, list(back)) | is_last)
        inside = segment_of[storage[is_open]]
        entered = np.full(int(segment_of.max(initial=0)) + 1, len(program.op_at), np.int64)
        np.minimum.at(entered, inside, end[is_open])
        hold[dropped[here]] = np.minimum(entered[segment_of[storage[here]]], end[here])
        is_open &= ~here
    hold = np.where(plain.release < plain.hold, np.maximum(hold, plain.release + 1), plain.hold)
    return Windows(release=plain.release, hold=hold)


def _places(frontier: Frontier, most: int) -> Integers:
    """Return up to `most - 1` candidate places: those where no more bytes cross than at any candidate around them, or
    every so manieth of these.

    How far around is the least that leaves few enough. What is chosen depends on the surroundings alone, so that what
    repeats is cut alike (see `memfit.planners.repeats`).
    """
    candidates = np.flatnonzero(np.array(frontier.is_candidate, np.bool_) & (np.array(frontier.written_bytes) > 0))
    candidates = candidates[candidates < len(frontier.ops) - 1].astype(np.int64)
    if len(candidates) == 0 or most < 2:
        return np.zeros(0, np.int64)
    crossing = np.full(len(frontier.ops), np.iinfo(np.int64).max)
    crossing[candidates] = np.array(frontier.crossing_bytes, np.int64)[candidates]
    least, chosen = crossing.copy(), candidates
    for distance in range(1, _FURTHEST + 1):
        if len(chosen) < most:
            break
        least[distance:] = np.minimum(least[distance:], crossing[:-distance])
        least[:-distance] = np.minimum(least[:-distance], crossing[distance:])
        chosen = candidates[crossing[candidates] <= least[candidates]]
    every = -(-(len(chosen) + 1) // most)
    return chosen[every - 1 :: every]


def _backward_blocks(program: Program, forward: Integers) -> Integers:
    """Return the block of each stage from `backward_start` on."""
    tables, start = program.tables, program.backward_start
    writer = tables.storages["writer"][tables.reads["storage"]]
    reader = np.repeat(np.arange(len(program.op_at)), tables.positions["read_end"] - tables.positions["read_start"])
    chosen = (writer < start) & (reader >= start)
    last = np.full(len(program.op_at) - start, -1, np.int64)
    np.maximum.at(last, reader[chosen] - start, forward[writer[chosen]])
    known = np.where(last >= 0, np.arange(len(last)), -1)
    known = np.maximum.accumulate(known)
    return np.where(known >= 0, last[np.maximum(known, 0)], int(forward.max(initial=0)))


def _over_turning(program: Program, state: State) -> Flags:
    """Return bool[managed storages]: what forward wrote and is on the device when backward starts."""
    gaps, start = program.tables.gaps, program.backward_start
    there = (gaps["start"] < start) & (gaps["end"] >= start) & (state.gaps["gone_after"] >= start)
    found = np.zeros(len(program.storage_of), np.bool_)
    found[gaps["storage"][there]] = True
    return found


def _borders(blocks: Blocks, there: Flags) -> Flags:
    """Return bool[blocks]: whether all that crosses the block's end is there; false for the last."""
    frontier = blocks.frontier
    number = {storage: index for index, storage in enumerate(blocks.program.storage_of)}
    gone = np.array(
        [storage in number and not there[number[storage]] for storage in frontier.storages.tolist()], np.int64
    )
    missing = np.zeros(len(frontier.ops) + 1, np.int64)
    np.add.at(missing, frontier.first_place, gone)
    np.add.at(missing, frontier.last_place + 1, -gone)
    return np.append(np.cumsum(missing)[blocks.places] == 0, False)
