"""Repeated blocks: recognised by their structure, so that what is planned for one is planned for all.

Two blocks are of one *kind* where their descriptions are equal: the seconds, workspaces, reads, writes and takeovers of
their stages, the sizes of the storages that they write, and every later use of these, all by place within the block
and by how many blocks further it lies; of what is many blocks away (where a running mean is copied at the end of
forward) only the bytes. The windows of one block then have a counterpart in every other of its kind.

`spread` takes from each kind what its blocks take under a few windows for the whole step (the option curve of the
kind), and lets `memfit.planners.joining` pick a point of the curve for each of its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.planners.blocks import Blocks, Option
from memfit.planners.joining import join
from memfit.planners.windows import Integers, Windows

_MOST_POINTS = 16  # of the curve of a kind
_FAR = 20  # blocks; of what is read or used further away only the bytes count

Description = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """The kinds of a program's blocks.

    Attributes:
        kind: int64[blocks], numbered by first appearance.
        stages: int64[positions], those of each block together, ascending; block b has `first[b]` to `first[b + 1]`.
        first: int64[blocks + 1].
        gaps: of each block the gaps of the storages that it writes; those of blocks of one kind correspond in order.
        place: int64[positions], of each position among the stages of its block.
    """

    blocks: Blocks
    kind: Integers
    stages: Integers
    first: Integers
    gaps: list[Integers]
    place: Integers

    @staticmethod
    def of(blocks: Blocks) -> Repeats:
        """Return the kinds; equality of whole descriptions decides, not only of their hashes."""
        owner = blocks.of_storage[blocks.program.tables.gaps["storage"]]
        stages, place = _divided(blocks.of_stage, blocks.count)
        gaps, _ = _divided(owner, blocks.count)
        numbers: dict[Description, int] = {}
        kinds = [numbers.setdefault(each, len(numbers)) for each in _descriptions(blocks, stages, place)]
        first = np.cumsum([0, *(len(each) for each in stages)]).astype(np.int64)
        kind = np.array(kinds, np.int64)
        return Repeats(blocks=blocks, kind=kind, stages=np.concatenate(stages), first=first, gaps=gaps, place=place)

    @property
    def count(self) -> int:
        """How many kinds there are."""
        return int(self.kind.max(initial=-1)) + 1

    def moved(self, windows: Windows, source: int, target: int) -> tuple[Integers, Integers]:
        """Return release and hold for the gaps of block `target` as `windows` have them in block `source` of its
        kind.
        """
        gaps = self.blocks.program.tables.gaps
        here, there = self.gaps[source], self.gaps[target]
        start, end = gaps["start"][there], gaps["end"][there]
        dropped = windows.release[here] < windows.hold[here]
        release = np.clip(self._moved(windows.release[here], target - source), start, end - 1)
        hold = np.clip(self._moved(windows.hold[here], target - source), release + 1, end)
        hold = np.where(windows.hold[here] == gaps["end"][here], end, hold)
        return np.where(dropped, release, 0), np.where(dropped, hold, 0)

    def _moved(self, positions: Integers, blocks_on: int) -> Integers:
        """Return the positions at the same places so many blocks on; the last of a block where it has fewer."""
        last = len(self.place) - 1
        inside = np.clip(positions, 0, last)
        block = np.clip(self.blocks.of_stage[inside] + blocks_on, 0, self.blocks.count - 1)
        most = self.first[block + 1] - self.first[block] - 1
        return self.stages[self.first[block] + np.minimum(self.place[inside], most)]


def spread(repeats: Repeats, options: Sequence[Option]) -> list[Option]:
    """Return windows in which each block does as some block of its kind does in one of `options`; none where no block
    is repeated.

    The borders of blocks are taken as they come: what is picked for one may not suit its neighbours, and the exact
    simulation of the whole says what it takes.
    """
    blocks = repeats.blocks
    if repeats.count == blocks.count or not options:
        return []
    kinds: list[int] = repeats.kind.tolist()
    curves = [_curve(options, [b for b, each in enumerate(kinds) if each == kind]) for kind in range(repeats.count)]
    points = [_of_points(repeats, options, curves, number) for number in range(max(len(curve) for curve in curves))]
    return join(blocks, points)


def _curve(options: Sequence[Option], members: Sequence[int]) -> list[tuple[int, int]]:
    """Return (option, block) of what is done in some block of a kind and not beaten in all of seconds, bytes kept and
    bytes held; evenly chosen where there are many.
    """
    found: dict[tuple[float, int, int], tuple[int, int]] = {
        (float(option.seconds[block]), int(option.kept_bytes[block]), int(option.transient_bytes[block])): (
            number,
            block,
        )
        for number, option in enumerate(options)
        for block in members
    }
    front: list[tuple[float, int, int]] = []
    for point in sorted(found):
        if not any(kept <= point[1] and held <= point[2] for _, kept, held in front):
            front.append(point)
    if len(front) > _MOST_POINTS:
        front = [front[place] for place in np.linspace(0, len(front) - 1, _MOST_POINTS).astype(int)]
    return [found[point] for point in front]


def _of_points(
    repeats: Repeats, options: Sequence[Option], curves: Sequence[Sequence[tuple[int, int]]], number: int
) -> Option:
    """Return the option in which each block does what point `number` of its kind's curve says, or the curve's last."""
    blocks = repeats.blocks
    kinds: list[int] = repeats.kind.tolist()
    chosen = [curves[kind][min(number, len(curves[kind]) - 1)] for kind in kinds]
    release = np.zeros(len(blocks.program.tables.gaps), np.int64)
    hold = np.zeros_like(release)
    for target, (option, source) in enumerate(chosen):
        there = repeats.gaps[target]
        release[there], hold[there] = repeats.moved(options[option].windows, source, target)
    seconds = np.array([options[option].seconds[source] for option, source in chosen], np.float64)
    return Option(
        windows=Windows(release=release, hold=hold),
        peak_bytes=0,
        total_seconds=float(seconds.sum()),
        seconds=seconds,
        kept_bytes=np.array([options[option].kept_bytes[source] for option, source in chosen], np.int64),
        transient_bytes=np.array([options[option].transient_bytes[source] for option, source in chosen], np.int64),
        is_border=np.append(np.ones(blocks.count - 1, np.bool_), False),
    )


def _divided(block_of: Integers, count: int) -> tuple[list[Integers], Integers]:
    """Return the indices of each block, ascending, and of each index its place among those of its block."""
    order = np.argsort(block_of, kind="stable").astype(np.int64)
    ends = np.cumsum(np.bincount(block_of, minlength=count)[:count])
    parts: list[Integers] = np.split(order, ends[:-1])
    place = np.zeros(len(block_of), np.int64)
    for part in parts:
        place[part] = np.arange(len(part))
    return parts, place


def _descriptions(blocks: Blocks, stages: Sequence[Integers], place: Integers) -> list[Description]:
    """Return what two blocks must have in common to be of one kind."""
    program = blocks.program
    tables = program.tables
    of_stage: list[int] = blocks.of_stage.tolist()
    of_storage: list[int] = blocks.of_storage.tolist()
    number: list[int] = _divided(blocks.of_storage, blocks.count)[1].tolist()
    places: list[int] = place.tolist()
    positions: list[tuple[Any, ...]] = tables.positions.tolist()
    reads: list[tuple[int, int]] = tables.reads.tolist()
    writes: list[tuple[int, int]] = tables.writes.tolist()
    reuses: list[tuple[int, int]] = tables.reuses.tolist()
    storages: list[tuple[int, ...]] = tables.storages.tolist()
    gaps: list[tuple[int, ...]] = tables.gaps.tolist()
    owned: list[list[int]] = [[] for _ in range(blocks.count)]
    for storage, block in enumerate(of_storage):
        owned[block].append(storage)

    def storage_at(storage: int, block: int) -> Description:
        distance = of_storage[storage] - block
        return (distance, number[storage]) if abs(distance) <= _FAR else (None, storages[storage][0])

    def stage_at(position: int, block: int) -> Description:
        distance = of_stage[position] - block
        return (distance, places[position]) if abs(distance) <= _FAR else ()

    def computed(position: int, block: int) -> Description:
        row = positions[position]
        read_from, read_to, write_from, write_to, reuse_from, reuse_to, last = row[:7]
        parts: list[object] = [position < program.backward_start, *row[7:]]
        parts.append(stage_at(last, block) if last < len(places) else None)
        parts.extend(storage_at(reads[slot][0], block) for slot in range(read_from, read_to))
        parts.extend(number[writes[slot][0]] for slot in range(write_from, write_to))
        parts.extend(storage_at(s, block) for read, written in reuses[reuse_from:reuse_to] for s in (read, written))
        return tuple(parts)

    def written(storage: int, block: int) -> Description:
        size, _, first, last = storages[storage]
        uses = (gaps[gap] for gap in range(first, last + 1))
        return size, *((gap[3], stage_at(gap[2], block) if gap[4] else None) for gap in uses)

    return [
        (
            tuple(computed(position, block) for position in stages[block].tolist()),
            tuple(written(s, block) for s in owned[block]),
        )
        for block in range(blocks.count)
    ]
