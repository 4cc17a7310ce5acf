"""The moves of `ejection`: put a block without a place below the cap, and take out the blocks that lie there. Compiled.

Blocks are numbered in the order in which they begin. So the blocks that a block meets in time are a range of numbers,
and the blocks that were live before that range begins; every window of a few sections has a list of the latter.
"""

# Numba infers the types in here; those that pyright sees for elements of arrays are not the ones at work.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.packing.improve.xorshift import next_random
from memfit.packing.sections import Sections
from memfit.system.compiled import compiled, entry_point

OUT = -1  # as an offset: the block has no place
_WINDOWS_A_RANGE = 8  # of mean length
_MOST_BUCKETS, _FEWEST_BUCKETS = 4096, 64
_SHORT_RUN = 24  # runs up to this length are sorted by insertion
_NOISE = 0.1  # of the cost of a place, so that no two blocks eject each other for ever
_HARDER = 1.1  # the factor by which a block gets harder to eject each time it has ejected others
_HEAVIEST = 1e100
_MEETING_WORK, _MOVE_WORK = 30, 2000  # a move reads and sorts all blocks that the block meets
_POOL, _RANDOM = 0, 1  # in `state`
_NONE, _FAR = -1, 1 << 62


class Room(NamedTuple):
    """Blocks in the order in which they begin, their offsets, and scratch arrays."""

    sizes: NDArray[np.int64]
    firsts: NDArray[np.int32]
    lasts: NDArray[np.int32]
    offsets: NDArray[np.int64]
    weights: NDArray[np.float64]
    begun: NDArray[np.int32]  # how many blocks begin before each section
    window_sections: int
    heads: NDArray[np.int64]  # of the list of each window
    lists: NDArray[np.int32]  # blocks that are live when their window begins, and began before it
    pool: NDArray[np.int32]  # blocks without a place; the last one is placed next
    met: NDArray[Any]
    buckets: NDArray[Any]
    by_offset: NDArray[Any]
    by_top: NDArray[Any]
    state: NDArray[np.int64]


_MET = np.dtype([("offset", np.int64), ("top", np.int64), ("weight", np.float64), ("block", np.int64)])
_BUCKET = np.dtype([("begun", np.int32), ("over", np.int32)])  # of addresses: how many offsets and tops are in it
_KEYED = np.dtype([("at", np.int64), ("weight", np.float64)])


def make_room(order: NDArray[np.int64], sizes: NDArray[np.int64], sections: Sections, random: int) -> Room:
    """Return a room for blocks.

    Args:
        order: int64[n], the blocks by their first sections.
        sizes: int64[n], in bytes.
        sections: those of the blocks.
        random: a state from `xorshift.random_state`.
    """
    count = len(order)
    firsts, lasts = sections.firsts[order], sections.lasts[order]
    width = max(1, int((lasts - firsts).mean() / _WINDOWS_A_RANGE))
    begun = np.searchsorted(firsts, np.arange(sections.count + 1)).astype(np.int32)
    heads = np.zeros(sections.count // width + 2, np.int64)
    _count_lists(firsts, lasts, width, heads)
    heads = np.cumsum(heads)
    lists = np.zeros(int(heads[-1]), np.int32)
    _fill_lists(firsts, lasts, width, heads[:-1].copy(), lists)
    state = np.zeros(2, np.int64)
    state[_RANDOM] = random
    return Room(
        sizes=sizes[order],
        firsts=firsts,
        lasts=lasts,
        offsets=np.zeros(count, np.int64),
        weights=np.ones(count),
        begun=begun,
        window_sections=width,
        heads=heads,
        lists=lists,
        pool=np.zeros(count, np.int32),
        met=np.zeros(count, _MET),
        buckets=np.zeros(_MOST_BUCKETS + 1, _BUCKET),
        by_offset=np.zeros(count, _KEYED),
        by_top=np.zeros(count, _KEYED),
        state=state,
    )


@entry_point
def _count_lists(firsts: Any, lasts: Any, width: int, counts: Any) -> None:
    for block in range(len(firsts)):
        for window in range(firsts[block] // width + 1, (lasts[block] - 1) // width + 1):
            counts[window + 1] += 1


@entry_point
def _fill_lists(firsts: Any, lasts: Any, width: int, nexts: Any, lists: Any) -> None:
    for block in range(len(firsts)):
        for window in range(firsts[block] // width + 1, (lasts[block] - 1) // width + 1):
            lists[nexts[window]] = block
            nexts[window] += 1


@entry_point
def take_out(room: Room, cap: int) -> int:
    """Put all blocks whose tops are too high into the empty pool; return how many they are.

    Args:
        room: all its blocks have a place.
        cap: the highest allowed top, in bytes.
    """
    count = 0
    for block in range(len(room.sizes)):
        if room.offsets[block] + room.sizes[block] > cap:
            room.offsets[block] = OUT
            room.pool[count] = block
            count += 1
    room.state[_POOL] = count
    return count


@entry_point
def eject(room: Room, cap: int, work: int) -> tuple[int, int]:
    """Move until the pool is empty or the work is done.

    A move puts the last block of the pool at the lowest free place below `cap`. If no place is free, it puts the block
    where the blocks in its way weigh least; these enter the pool, and the block gets heavier.

    Args:
        room: its pool is from `take_out`, or as the last call left it.
        cap: the highest allowed top, in bytes.
        work: after which no move begins, in operations of about a nanosecond.

    Returns:
        The number of blocks in the pool, and the work done.

    Source: guided ejection search, Nagata & Bräysy 2009.
    """
    count, done = room.state[_POOL], 0
    while count > 0 and done < work:
        block = room.pool[count - 1]
        count -= 1
        met = _meet(room, block)
        done += _MOVE_WORK + _MEETING_WORK * met
        offset, free = _cheapest_place(room, room.sizes[block], met, cap)
        room.offsets[block] = offset
        if free:
            continue
        _make_heavier(room.weights, block)
        top = offset + room.sizes[block]
        for at in range(met):
            if room.met[at].offset < top and room.met[at].top > offset:
                room.offsets[room.met[at].block] = OUT
                room.pool[count] = room.met[at].block
                count += 1
    room.state[_POOL] = count
    return count, done


@entry_point
def put_all(room: Room) -> tuple[int, int]:
    """Give all blocks of the pool the lowest free places, however high.

    The pool stays as it is, so `take_back` can undo this.

    Args:
        room: its pool holds the blocks without a place.

    Returns:
        The height in bytes, and the work done.
    """
    done = 0
    for at in range(room.state[_POOL] - 1, -1, -1):
        block = room.pool[at]
        met = _meet(room, block)
        done += _MOVE_WORK + _MEETING_WORK * met
        room.offsets[block] = _cheapest_place(room, room.sizes[block], met, _FAR)[0]
    height = 0
    for block in range(len(room.sizes)):
        height = max(height, room.offsets[block] + room.sizes[block])
    return height, done


def take_back(room: Room) -> None:
    """Undo `put_all`."""
    room.offsets[room.pool[: int(room.state[_POOL])]] = OUT


@compiled
def _make_heavier(weights: Any, block: int) -> None:
    weights[block] *= _HARDER
    if weights[block] > _HEAVIEST:
        for other in range(len(weights)):
            weights[other] /= _HEAVIEST


@compiled
def _meet(room: Any, block: int) -> int:
    """Put into `met` all blocks that have a place and share a section with this one; return how many."""
    first, window, count = room.firsts[block], room.firsts[block] // room.window_sections, 0
    for at in range(room.heads[window], room.heads[window + 1]):
        count = _enter(room, room.lists[at], first, count)
    for other in range(room.begun[window * room.window_sections], room.begun[room.lasts[block]]):
        count = _enter(room, other, first, count)
    return count


@compiled
def _enter(room: Any, other: int, first: int, count: int) -> int:
    offset = room.offsets[other]
    if room.lasts[other] <= first or offset < 0:
        return count
    met = room.met[count]
    met.offset, met.top, met.weight, met.block = offset, offset + room.sizes[other], room.weights[other], other
    return count + 1


@compiled
def _cheapest_place(room: Any, size: int, met: int, cap: int) -> tuple[int, bool]:
    """Return the lowest place below `cap` that is free, and True; or the place where the blocks weigh least, and False.

    The blocks are the first `met` of `room.met`. A place begins at 0 or at a top.
    """
    _sort_met(room, met)
    best, place, random = np.inf, _NONE, room.state[_RANDOM]
    offset, weight, begun, over = 0, 0.0, 0, 0  # how many offsets are below the end of the place, tops below its begin
    while offset + size <= cap:
        while begun < met and room.by_offset[begun].at < offset + size:
            weight += room.by_offset[begun].weight
            begun += 1
        while over < met and room.by_top[over].at <= offset:
            weight -= room.by_top[over].weight
            over += 1
        if begun == over:
            return offset, True
        random = next_random(random)
        blurred = weight * (1.0 + _NOISE * (random & 0xFFFF) / 65536.0)
        if blurred < best:
            best, place = blurred, offset
        if over == met:
            break
        offset = room.by_top[over].at
    room.state[_RANDOM] = random
    return place, False


@compiled
def _sort_met(room: Any, met: int) -> None:
    """Sort the blocks met by offset, and by top: first into buckets of equal width, then each bucket."""
    buckets, shift, highest = _FEWEST_BUCKETS, 0, 0
    while buckets < min(met, _MOST_BUCKETS):
        buckets *= 2
    for at in range(met):
        highest = max(highest, room.met[at].top)
    while highest >> shift >= buckets:
        shift += 1
    for bucket in range(buckets + 1):
        room.buckets[bucket].begun, room.buckets[bucket].over = 0, 0
    for at in range(met):
        room.buckets[(room.met[at].offset >> shift) + 1].begun += 1
        room.buckets[(room.met[at].top >> shift) + 1].over += 1
    for bucket in range(buckets):
        room.buckets[bucket + 1].begun += room.buckets[bucket].begun
        room.buckets[bucket + 1].over += room.buckets[bucket].over
    for at in range(met):
        one = room.met[at]
        bucket = room.buckets[one.offset >> shift]
        room.by_offset[bucket.begun].at, room.by_offset[bucket.begun].weight = one.offset, one.weight
        bucket.begun += 1
        bucket = room.buckets[one.top >> shift]
        room.by_top[bucket.over].at, room.by_top[bucket.over].weight = one.top, one.weight
        bucket.over += 1
    _sort_runs(room, buckets)


@compiled
def _sort_runs(room: Any, buckets: int) -> None:
    begun, over = 0, 0
    for number in range(buckets):
        bucket = room.buckets[number]
        if bucket.begun > begun + 1:
            _sort(room.by_offset, begun, bucket.begun)
        if bucket.over > over + 1:
            _sort(room.by_top, over, bucket.over)
        begun, over = bucket.begun, bucket.over


@compiled
def _sort(keyed: Any, begin: int, end: int) -> None:
    count = end - begin
    if count > _SHORT_RUN:
        for root in range(count // 2 - 1, -1, -1):
            _sift(keyed, begin, root, count)
        for last in range(count - 1, 0, -1):
            key, weight = keyed[begin].at, keyed[begin].weight
            keyed[begin].at, keyed[begin].weight = keyed[begin + last].at, keyed[begin + last].weight
            keyed[begin + last].at, keyed[begin + last].weight = key, weight
            _sift(keyed, begin, 0, last)
        return
    for at in range(begin + 1, end):
        key, weight, place = keyed[at].at, keyed[at].weight, at
        while place > begin and keyed[place - 1].at > key:
            keyed[place].at, keyed[place].weight = keyed[place - 1].at, keyed[place - 1].weight
            place -= 1
        keyed[place].at, keyed[place].weight = key, weight


@compiled
def _sift(keyed: Any, begin: int, root: int, count: int) -> None:
    key, weight = keyed[begin + root].at, keyed[begin + root].weight
    while 2 * root + 1 < count:
        child = 2 * root + 1
        if child + 1 < count and keyed[begin + child + 1].at > keyed[begin + child].at:
            child += 1
        if keyed[begin + child].at <= key:
            break
        keyed[begin + root].at, keyed[begin + root].weight = keyed[begin + child].at, keyed[begin + child].weight
        root = child
    keyed[begin + root].at, keyed[begin + root].weight = key, weight
