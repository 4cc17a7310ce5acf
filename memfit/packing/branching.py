"""The decision at the heart of `exact`: can these blocks lie within a capacity? A depth-first search, compiled.

Blocks are placed in canonical order (Moffitt 2023, "MiniMalloc"): offsets never fall, and at equal
offsets numbers rise, so that each layout is reached one way only. At each node the next block goes to its least
possible offset: the top of what is placed below it. What cuts the tree:

- dominance: a block is not put where a block that is still left would fit, whole, below it;
- sections: in each section, its floor and all that is still to come must fit the capacity. The floor is raised to the
  least offset that any block left can take there, and, as offsets never fall, to the offset placed last;
- parts: where no block left crosses a border between sections, the two sides are searched one after the other, small
  ones first; if one fails, the node fails;
- twins: of blocks alike in size and live range, the one with the lower number goes lower;
- nogoods: a part that failed is remembered by a hash of 63 bits over its blocks and their least offsets.
"""

# Numba infers the types in here; those that pyright sees for elements of arrays are not the ones at work.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.compiled import compiled, entry_point

FOUND, FAILED, STOPPED, _OPEN = 0, 1, 2, 3

_BLOCK = np.dtype(
    [
        ("size", np.int64),
        ("least", np.int64),  # offset that the blocks placed so far allow
        ("offset", np.int64),
        ("first", np.int32),
        ("last", np.int32),
        ("twin", np.int32),  # the block alike that has to go first, or -1
        ("placed", np.int32),
    ]
)
_SECTION = np.dtype(
    [
        ("left", np.int64),  # bytes of the blocks left in the section
        ("lowest", np.int64),  # the least offset that any of them can take; room to work in
        ("crossing", np.int64),  # blocks left that cross the border to the section before
    ]
)
# A frame is a node, which tries blocks one after the other, or a list of parts, which are searched one after the other.
_FRAME = np.dtype(
    [
        ("key", np.int64),  # of the nogood; 0 for a list of parts
        ("offset", np.int64),  # blocks go at this offset with a higher number, or higher
        ("below", np.int64),  # and below this one
        ("undos", np.int64),  # how many changes there were before this frame
        ("begin", np.int32),  # its blocks are `pool[begin:end]`
        ("end", np.int32),
        ("low", np.int32),  # in the sections `[low, high)`
        ("high", np.int32),
        ("number", np.int32),
        ("unused", np.int32),
    ]
)
_UNDO = np.dtype([("old", np.int64), ("block", np.int64)])
_PLACED = -1  # as `old`: the block was placed; else it was raised
_DEPTH, _UNDOS, _CAPACITY, _SALT, _NODES = 0, 1, 2, 3, 4  # in `state`
_TABLE_ENTRIES = 1 << 18
_FAR = 1 << 62


class Tree(NamedTuple):
    """All arrays of one search; block numbers are ranks in its order."""

    blocks: NDArray[Any]
    sections: NDArray[Any]
    frames: NDArray[Any]
    pool: NDArray[np.int32]
    undo: NDArray[Any]
    table: NDArray[np.int64]
    state: NDArray[np.int64]


def make_table() -> NDArray[np.int64]:
    """Return an empty table of nogoods, which several trees may share."""
    return np.zeros(_TABLE_ENTRIES, np.int64)


def make_tree(
    sizes: NDArray[np.int64],
    firsts: NDArray[np.int32],
    lasts: NDArray[np.int32],
    table: NDArray[np.int64],
) -> Tree:
    """Return a tree over blocks in the order of these arrays."""
    count = len(sizes)
    blocks = np.zeros(count, _BLOCK)
    blocks["size"], blocks["first"], blocks["last"] = sizes, firsts, lasts
    blocks["twin"] = _twins(sizes, firsts, lasts)
    return Tree(
        blocks=blocks,
        sections=np.zeros(int(lasts.max()) + 1, _SECTION),
        frames=np.zeros(2 * count + 4, _FRAME),
        pool=np.zeros((count + 2) * (count + 2), np.int32),
        undo=np.zeros((count + 1) * (count + 2), _UNDO),
        table=table,
        state=np.zeros(5, np.int64),
    )


def _twins(sizes: NDArray[np.int64], firsts: NDArray[np.int32], lasts: NDArray[np.int32]) -> NDArray[np.int32]:
    order = np.lexsort((np.arange(len(sizes)), sizes, lasts, firsts))
    alike = np.ones(len(sizes), bool)
    for column in (sizes, firsts, lasts):
        alike[1:] &= column[order][1:] == column[order][:-1]
    alike[:1] = False
    twins = np.full(len(sizes), -1, np.int32)
    twins[order[alike]] = order[np.flatnonzero(alike) - 1]
    return twins


@entry_point
def start(tree: Any, capacity: int, salt: int) -> None:
    """Begin a search for a layout within `capacity`.

    `salt` tells searches apart whose nogoods do not hold for each other: other capacities, other orders.
    """
    blocks, sections, frames, pool, _, _, state = tree
    state[_DEPTH], state[_UNDOS], state[_CAPACITY], state[_SALT], state[_NODES] = 1, 0, capacity, salt, 0
    for s in range(len(sections)):
        sections[s].left, sections[s].crossing = 0, 0
    for b in range(len(blocks)):
        block = blocks[b]
        block.least, block.placed, pool[b] = 0, 0, b
        for s in range(block.first, block.last):
            sections[s].left += block.size
            if s > block.first:
                sections[s].crossing += 1
    frame = frames[0]
    frame.key, frame.offset, frame.number, frame.undos = 0, 0, -1, 0
    frame.begin, frame.end, frame.low, frame.high = 0, len(blocks), 0, len(sections) - 1


@entry_point
def go_on(tree: Any, nodes: int) -> int:
    """Search on; FOUND leaves a layout in the blocks' offsets, STOPPED says that `nodes` were not enough."""
    frames, table, state = tree[2], tree[5], tree[6]
    depth, until = state[_DEPTH], state[_NODES] + nodes
    found: int = _OPEN
    while depth > 0:
        frame = frames[depth - 1]
        if frame.key == 0:
            if found == FAILED or not _open_part(tree, depth):
                depth -= 1
                found = FAILED if found == FAILED else FOUND
            elif _enter(tree, depth + 1):
                depth, found = depth + 1, _OPEN
            else:
                found = FAILED
        elif found == FOUND:
            depth -= 1
        elif state[_NODES] >= until:
            state[_DEPTH] = depth
            return STOPPED
        else:
            state[_NODES] += 1
            _take_back(tree, frame.undos)
            chosen = _choose(tree, frame)
            if chosen < 0:
                table[_slot(table, frame.key)] = frame.key
                depth, found = depth - 1, FAILED
            else:
                found = _OPEN
                if _place(tree, frame, chosen):
                    depth += 1
                    _open_rest(tree, frame, frames[depth - 1], chosen)
    state[_DEPTH] = 0
    return found


@compiled
def _slot(table: Any, key: int) -> int:
    return (key >> 20) & (len(table) - 1)


@compiled
def _open_rest(tree: Any, frame: Any, rest: Any, chosen: int) -> None:
    """Make `rest` the list of parts of what a node leaves when it has placed `chosen`."""
    pool, state = tree[3], tree[6]
    at = frame.end
    for k in range(frame.begin, frame.end):
        if pool[k] != chosen:
            pool[at] = pool[k]
            at += 1
    rest.key, rest.offset, rest.number, rest.undos = 0, frame.offset, frame.number, state[_UNDOS]
    rest.begin, rest.end, rest.low, rest.high = frame.end, at, frame.low, frame.high


@compiled
def _open_part(tree: Any, depth: int) -> bool:
    """Put a node for the next part of a list above it, the smallest first; False says that there is none left."""
    blocks, sections, frames, pool, _, _, state = tree
    rest, part = frames[depth - 1], frames[depth]
    best, best_low, best_high = _FAR, 0, 0
    low = rest.low
    while low < rest.high:
        high = low + 1
        while high < rest.high and sections[high].crossing > 0:
            high += 1
        if sections[low].left > 0 and (low > rest.low or high < rest.high):
            members = 0
            for k in range(rest.begin, rest.end):
                members += low <= blocks[pool[k]].first < high and blocks[pool[k]].placed == 0
            if members < best:
                best, best_low, best_high = members, low, high
        elif sections[low].left > 0:
            best, best_low, best_high = rest.end - rest.begin, low, high
        low = high
    if best == _FAR:
        return False
    at = rest.end
    if best_low == rest.low and best_high == rest.high:
        part.begin, at = rest.begin, rest.end
    else:
        part.begin = at
        for k in range(rest.begin, rest.end):
            block = blocks[pool[k]]
            if best_low <= block.first < best_high and block.placed == 0:
                pool[at] = pool[k]
                at += 1
    part.end, part.low, part.high, part.offset, part.number = at, best_low, best_high, rest.offset, rest.number
    part.undos = state[_UNDOS]
    return True


@compiled
def _enter(tree: Any, depth: int) -> bool:
    """Prepare the node on top; False says that it is known to fail."""
    blocks, sections, frames, pool, _, table, state = tree
    frame = frames[depth - 1]
    frame.key = _hash(blocks, pool, frame, state[_SALT])
    if table[_slot(table, frame.key)] == frame.key:
        return False
    below = _FAR
    for k in range(frame.begin, frame.end):
        below = min(below, blocks[pool[k]].least + blocks[pool[k]].size)
    most_left = 0
    for s in range(frame.low, frame.high):
        most_left = max(most_left, sections[s].left)
    frame.below = min(below, state[_CAPACITY] - most_left + 1)
    return True


@compiled
def _hash(blocks: Any, pool: Any, frame: Any, salt: int) -> int:
    """Return a number of 63 bits, never 0, for the blocks left, their least offsets, and which of them must rise."""
    total = salt
    for k in range(frame.begin, frame.end):
        b = pool[k]
        least = blocks[b].least
        rises = least < frame.offset or (least == frame.offset and b < frame.number)
        mixed = (2 * least + rises + 1) * 0x1E3779B97F4A7C15 + (b + 1) * 0x3F58476D1CE4E5B9
        mixed ^= (mixed >> 29) & 0x7FFFFFFFF
        mixed *= 0x14D049BB133111EB
        mixed ^= (mixed >> 32) & 0xFFFFFFFF
        total += mixed
    return (total & 0x7FFFFFFFFFFFFFFF) | 1


@compiled
def _choose(tree: Any, frame: Any) -> int:
    """Return the next block in canonical order that the node may place, or -1; the frame remembers it."""
    blocks, pool = tree[0], tree[3]
    chosen, lowest, offset, number = -1, frame.below, frame.offset, frame.number
    for k in range(frame.begin, frame.end):
        b = pool[k]
        block = blocks[b]
        least = block.least
        if least >= lowest or least < offset or (least == offset and b <= number):
            continue
        if block.twin < 0 or blocks[block.twin].placed == 1:
            chosen, lowest = b, least
    if chosen >= 0:
        frame.offset, frame.number = lowest, chosen
    return chosen


@compiled
def _place(tree: Any, frame: Any, chosen: int) -> bool:
    """Place the block at its least offset and draw the conclusions; False says that the rest cannot fit any more.

    Blocks left that overlap it in time rise to its top. Where that raises the lowest block left of a section, what is
    left there must still fit; for all other sections, `below` has made sure of it.
    """
    blocks, sections, _, pool, undo, _, state = tree
    block = blocks[chosen]
    first, last = block.first, block.last
    top = block.least + block.size
    block.offset, block.placed = block.least, 1
    at = state[_UNDOS]
    undo[at].old, undo[at].block = _PLACED, chosen
    at += 1
    for s in range(first, last):
        sections[s].left -= block.size
        sections[s].crossing -= s > first
    low, high = frame.high, frame.low
    for k in range(frame.begin, frame.end):
        other = blocks[pool[k]]
        if other.least < top and other.first < last and first < other.last and other.placed == 0:
            undo[at].old, undo[at].block = other.least, pool[k]
            at += 1
            other.least = top
            low, high = min(low, other.first), max(high, other.last)
    state[_UNDOS] = at
    for s in range(low, high):
        sections[s].lowest = _FAR
    for k in range(frame.begin, frame.end):
        other = blocks[pool[k]]
        if other.placed == 0:
            least = other.least
            for s in range(max(other.first, low), min(other.last, high)):
                if least < sections[s].lowest:
                    sections[s].lowest = least
    capacity = state[_CAPACITY]
    for s in range(low, high):
        if sections[s].left > 0 and sections[s].lowest + sections[s].left > capacity:
            return False
    return True


@compiled
def _take_back(tree: Any, mark: int) -> None:
    blocks, sections, undo, state = tree[0], tree[1], tree[4], tree[6]
    at = state[_UNDOS]
    while at > mark:
        at -= 1
        block = blocks[undo[at].block]
        if undo[at].old != _PLACED:
            block.least = undo[at].old
            continue
        block.placed = 0
        for s in range(block.first, block.last):
            sections[s].left += block.size
            sections[s].crossing += s > block.first
    state[_UNDOS] = mark
