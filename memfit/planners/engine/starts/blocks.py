"""Blocks: parts of a long graph, cut where few bytes cross, and the cost of a retention in each of them.

A *block* is a run of forward ops between two places, with the stages of backward that use its writes. One simulation of
a retention of the whole step gives the figures of each block: seconds, bytes kept over the forward/backward boundary,
and the most bytes held while the block runs above those that earlier blocks keep. Equal blocks have equal figures.
`memfit.planners.engine.starts.block_dynamic_program` picks a retention for each block.

Source: Feng and Huang 2018, section 5 (segments of a division), with exact bytes and seconds in place of sums; Chen et
al. 2016, section 4.4 (segments within segments).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memfit.planners.engine.retention.decisions import (
    Retention,
    held_bytes,
    keep_only,
    retention_of,
    simulated,
    stage_seconds,
)
from memfit.planners.engine.retention.instance import Instance
from memfit.planners.engine.retention.state import IncrementalState
from memfit.planners.engine.starts.forward_part import ForwardPart
from memfit.system.records import Flags, Integers

_MOST_BLOCKS = 256
_FURTHEST = 64  # ops around a place that are compared with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """An instance cut into blocks.

    Attributes:
        places: int64[blocks - 1], ascending: the last forward op (its place in `forward_part`) of each block but the
            last.
        of_stage: int64[positions], the block of each stage: in forward, the op's own; in backward, the last block that
            the op reads from, or else that of the stage before it.
        of_storage: int64[managed storages], the block of its writer.
    """

    instance: Instance
    forward_part: ForwardPart
    places: Integers
    of_stage: Integers
    of_storage: Integers

    @staticmethod
    def of(instance: Instance, most: int = _MOST_BLOCKS) -> Blocks:
        """Return the blocks of an instance, cut where fewer bytes cross than near by.

        Args:
            instance: of the whole step.
            most: maximum number of blocks.
        """
        forward_part = ForwardPart.of(instance)
        places = _places(forward_part, most)
        op_place = {op: place for place, op in enumerate(forward_part.ops)}
        at = np.array([op_place.get(op, -1) for op in instance.op_at[: instance.backward_start]], np.int64)
        at = np.maximum.accumulate(at) if len(at) else at
        forward = np.searchsorted(places, at)
        of_stage = np.concatenate([forward, _backward_blocks(instance, forward)]).astype(np.int64)
        of_storage = of_stage[instance.tables.storages["writer"]]
        return Blocks(
            instance=instance, forward_part=forward_part, places=places, of_stage=of_stage, of_storage=of_storage
        )

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.places) + 1

    def borders(self, every: int) -> frozenset[int]:
        """Return the storages, by id, that cross every k-th place, with k = `every`."""
        return self.forward_part.crossing(self.places[every - 1 :: every].tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A retention of the whole step, and its figures in each block.

    Attributes:
        peak_bytes: of the whole step, residents included.
        total_seconds: of the whole step.
        seconds: float64[blocks], of all computations.
        kept_bytes: int64[blocks], of what the block writes, over the forward/backward boundary.
        transient_bytes: int64[blocks], the most that is held in the block's stages, above what earlier blocks keep.
        is_border: bool[blocks], whether all that later blocks need across the block's end is kept over the
            forward/backward boundary: other retention may follow.
    """

    retention: Retention
    peak_bytes: int
    total_seconds: float
    seconds: NDArray[np.float64]
    kept_bytes: Integers
    transient_bytes: Integers
    is_border: Flags


def option_of(blocks: Blocks, retention: Retention) -> Option:
    """Simulate `retention`, and return its figures in each block.

    Args:
        blocks: of the instance.
        retention: of the whole step.
    """
    instance, count = blocks.instance, blocks.count
    state = simulated(instance, retention)
    there = _kept_over_boundary(instance, state)
    sizes = np.where(there, instance.tables.storages["size_bytes"], 0)
    written_forward = instance.tables.storages["writer"] < instance.backward_start
    kept = np.zeros(count, np.int64)
    np.add.at(kept, blocks.of_storage[written_forward], sizes[written_forward])
    before = np.concatenate([[0], np.cumsum(kept)[:-1]])
    transient, seconds = np.zeros(count, np.int64), np.zeros(count, np.float64)
    np.maximum.at(transient, blocks.of_stage, held_bytes(state) - before[blocks.of_stage])
    np.add.at(seconds, blocks.of_stage, stage_seconds(instance, state))
    return Option(
        retention=retention_of(state),
        peak_bytes=int(held_bytes(state).max(initial=0)) + instance.base_bytes,
        total_seconds=float(state.totals[0]["seconds"]),
        seconds=seconds,
        kept_bytes=kept,
        transient_bytes=transient,
        is_border=_borders(blocks, there),
    )


def nested(instance: Instance, kept: frozenset[int], levels: list[tuple[frozenset[int], Integers]]) -> Retention:
    """Return retention with segments within segments.

    Args:
        kept: storages, by id, that stay over the forward/backward boundary.
        levels: from the outermost segments inward: the storages, by id, that are recomputed when backward first enters
            their segment, and the segment of each managed storage. A storage that no level names is recomputed in its
            innermost segment.

    A dropped storage is not retained before backward enters its segment: until then it is recomputed for each op that
    reads it.
    """
    plain = keep_only(instance, kept)
    intervals = instance.tables.intervals
    dropped = np.flatnonzero(plain.release < plain.hold)
    storage, end = intervals["storage"][dropped], intervals["end"][dropped]
    ids = np.array(instance.storage_of, np.int64)[storage]
    hold, is_open = plain.hold.copy(), np.ones(len(dropped), np.bool_)
    for number, (back, segment_of) in enumerate(levels):
        is_last = number == len(levels) - 1
        here = is_open & (np.isin(ids, list(back)) | is_last)
        inside = segment_of[storage[is_open]]
        entered = np.full(int(segment_of.max(initial=0)) + 1, len(instance.op_at), np.int64)
        np.minimum.at(entered, inside, end[is_open])
        hold[dropped[here]] = np.minimum(entered[segment_of[storage[here]]], end[here])
        is_open &= ~here
    hold = np.where(plain.release < plain.hold, np.maximum(hold, plain.release + 1), plain.hold)
    return Retention(release=plain.release, hold=hold)


def _places(forward_part: ForwardPart, most: int) -> Integers:
    """Return up to `most - 1` candidate places: those with the fewest crossing bytes near them, or every k-th of these.

    "Near" is the least distance that leaves few enough places. The choice depends on a place's surroundings alone, so
    that equal parts of a step are cut alike.
    """
    candidates = np.flatnonzero(
        np.array(forward_part.is_candidate, np.bool_) & (np.array(forward_part.written_bytes) > 0)
    )
    candidates = candidates[candidates < len(forward_part.ops) - 1].astype(np.int64)
    if len(candidates) == 0 or most < 2:
        return np.zeros(0, np.int64)
    crossing = np.full(len(forward_part.ops), np.iinfo(np.int64).max)
    crossing[candidates] = np.array(forward_part.crossing_bytes, np.int64)[candidates]
    least, chosen = crossing.copy(), candidates
    for distance in range(1, _FURTHEST + 1):
        if len(chosen) < most:
            break
        least[distance:] = np.minimum(least[distance:], crossing[:-distance])
        least[:-distance] = np.minimum(least[:-distance], crossing[distance:])
        chosen = candidates[crossing[candidates] <= least[candidates]]
    every = -(-(len(chosen) + 1) // most)
    return chosen[every - 1 :: every]


def _backward_blocks(instance: Instance, forward: Integers) -> Integers:
    """Return the block of each stage from `backward_start` on."""
    tables, start = instance.tables, instance.backward_start
    writer = tables.storages["writer"][tables.reads["storage"]]
    reader = np.repeat(np.arange(len(instance.op_at)), tables.positions["read_end"] - tables.positions["read_start"])
    chosen = (writer < start) & (reader >= start)
    last = np.full(len(instance.op_at) - start, -1, np.int64)
    np.maximum.at(last, reader[chosen] - start, forward[writer[chosen]])
    known = np.where(last >= 0, np.arange(len(last)), -1)
    known = np.maximum.accumulate(known)
    return np.where(known >= 0, last[np.maximum(known, 0)], int(forward.max(initial=0)))


def _kept_over_boundary(instance: Instance, state: IncrementalState) -> Flags:
    """Return bool[managed storages]: those that forward wrote and that are on the device when backward starts."""
    there = instance.crosses & (state.intervals["held_until"] >= instance.backward_start)
    found = np.zeros(len(instance.storage_of), np.bool_)
    found[instance.tables.intervals["storage"][there]] = True
    return found


def _borders(blocks: Blocks, there: Flags) -> Flags:
    """Return bool[blocks]: whether all storages that cross the block's end are on the device; false for the last."""
    forward_part = blocks.forward_part
    number = {storage: index for index, storage in enumerate(blocks.instance.storage_of)}
    gone = np.array(
        [storage in number and not there[number[storage]] for storage in forward_part.storages.tolist()], np.int64
    )
    missing = np.zeros(len(forward_part.ops) + 1, np.int64)
    np.add.at(missing, forward_part.first_place, gone)
    np.add.at(missing, forward_part.last_place + 1, -gone)
    return np.append(np.cumsum(missing)[blocks.places] == 0, False)
