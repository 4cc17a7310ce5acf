"""The decision at the heart of `exact`: can these blocks lie within a capacity? A depth-first search, compiled.

Blocks are placed from below (after Moffitt 2023, "MiniMalloc"): offsets never fall. At each node the level is the least
top on which a block left can lie. Where some section has to be covered at that level, as otherwise what is left there
would not fit the capacity, the node tries the blocks that can cover it, in the section with the fewest of them. Where
there is no such section, it tries the first block that can lie at the level, and then excludes it from there. What cuts
the tree:

- dominance: a block is not put where a block that is still left would fit, whole, below it;
- support: a block left that is not put on what it lies on now has to lie on another one that it meets, so that it rises
  to the least top that any of those can have, or higher;
- sections: in each section, the least offset that any block left can take there and all that is still to come must fit
  the capacity;
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
        ("least", np.int64),  # the top of what is placed below it
        ("rise", np.int64),  # the least offset it can take: `least`, or more where it is excluded from there
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
        ("crossing", np.int64),  # blocks left that cross the border to the section before
        (
            "next",
            np.int64,
        ),  # the least offset that those of them can take that cannot lie at the level; room to work in
        ("ready", np.int64),  # how many can lie at the level; room to work in
        ("support", np.int64),  # the least top that any of those left can have; room to work in
    ]
)
# A frame is a node, which tries blocks one after the other, or a list of parts, which are searched one after the other.
_FRAME = np.dtype(
    [
        ("key", np.int64),  # of the nogood; 0 for a list of parts
        ("level", np.int64),  # where the node puts a block
        ("undos", np.int64),  # how many changes there were before this frame
        ("begin", np.int32),  # its blocks are `pool[begin:end]`
        ("end", np.int32),
        ("low", np.int32),  # in the sections `[low, high)`
        ("high", np.int32),
        ("section", np.int32),  # the one that the node has to cover, or -1: its block may be excluded
        ("number", np.int32),  # the block tried last, or -1
    ]
)
_UNDO = np.dtype([("least", np.int64), ("rise", np.int64), ("block", np.int64)])
_PLACED = -1  # as `least`: the block was placed; else it has risen
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
        block.least, block.rise, block.placed, pool[b] = 0, 0, 0, b
        for s in range(block.first, block.last):
            sections[s].left += block.size
            if s > block.first:
                sections[s].crossing += 1
    frame = frames[0]
    frame.key, frame.undos = 0, 0
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
                _place(tree, frame, chosen)
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
    rest.key, rest.undos = 0, state[_UNDOS]
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
    part.end, part.low, part.high, part.undos = at, best_low, best_high, state[_UNDOS]
    return True


@compiled
def _enter(tree: Any, depth: int) -> bool:
    """Prepare the node on top; False says that it is known to fail."""
    blocks, _, frames, pool, _, table, state = tree
    frame = frames[depth - 1]
    frame.key = _hash(blocks, pool, frame, state[_SALT])
    return table[_slot(table, frame.key)] != frame.key and _look(tree, frame)


@compiled
def _hash(blocks: Any, pool: Any, frame: Any, salt: int) -> int:
    """Return a number of 63 bits, never 0, for the blocks left, their least offsets, and those they can take."""
    total = salt
    for k in range(frame.begin, frame.end):
        block = blocks[pool[k]]
        mixed = (block.least + 1) * 0x1E3779B97F4A7C15 + (pool[k] + 1) * 0x3F58476D1CE4E5B9
        mixed += block.rise * 0x369DEA0F31A53F85
        mixed ^= (mixed >> 29) & 0x7FFFFFFFF
        mixed *= 0x14D049BB133111EB
        mixed ^= (mixed >> 32) & 0xFFFFFFFF
        total += mixed
    return (total & 0x7FFFFFFFFFFFFFFF) | 1


@compiled
def _is_open(blocks: Any, block: Any) -> bool:
    """Return whether the block may be put on what it lies on."""
    return block.rise == block.least and (block.twin < 0 or blocks[block.twin].placed == 1)


@compiled
def _find_supports(tree: Any, frame: Any) -> None:
    """Find the least top that any block left can have in each section, and make room to look at what covers it."""
    blocks, sections, _, pool, _, _, _ = tree
    for s in range(frame.low, frame.high):
        sections[s].next, sections[s].ready, sections[s].support = _FAR, 0, _FAR
    for k in range(frame.begin, frame.end):
        block = blocks[pool[k]]
        top = max(block.rise, frame.level) + block.size
        for s in range(block.first, block.last):
            sections[s].support = min(sections[s].support, top)


@compiled
def _rise_without(blocks: Any, pool: Any, frame: Any, excluded: Any) -> int:
    """Return the least top on which the block can lie that is excluded from the level."""
    rise = _FAR
    for k in range(frame.begin, frame.end):
        block = blocks[pool[k]]
        if block.first < excluded.last and excluded.first < block.last and pool[k] != frame.number:
            rise = min(rise, max(block.rise, frame.level) + block.size)
    return rise


@compiled
def _look(tree: Any, frame: Any) -> bool:
    """Find the level and the section to cover there; False says that the blocks left do not fit."""
    blocks, sections, _, pool, _, _, state = tree
    level, below = _FAR, _FAR
    for k in range(frame.begin, frame.end):
        block = blocks[pool[k]]
        below = min(below, block.least + block.size)
        if _is_open(blocks, block):
            level = min(level, block.least)
    if level >= below:
        return False
    frame.level, frame.number = level, -1
    _find_supports(tree, frame)
    for k in range(frame.begin, frame.end):
        block = blocks[pool[k]]
        rise = block.least
        if rise == level or not _is_open(blocks, block):
            if _is_open(blocks, block):
                for s in range(block.first, block.last):
                    sections[s].ready += 1
            support = _FAR
            for s in range(block.first, block.last):
                support = min(support, sections[s].support)
            rise = max(block.rise, support)
        for s in range(block.first, block.last):
            sections[s].next = min(sections[s].next, rise)
    frame.section, fewest, capacity = -1, _FAR, state[_CAPACITY]
    for s in range(frame.low, frame.high):
        section = sections[s]
        if section.left > 0 and section.next + section.left > capacity and section.ready < fewest:
            frame.section, fewest = s, section.ready
        if level + section.left > capacity:
            return False
    return fewest > 0


@compiled
def _choose(tree: Any, frame: Any) -> int:
    """Return the next block that the node puts at its level, or -1; the frame remembers it."""
    blocks, _, _, pool, undo, _, state = tree
    if frame.section < 0 and frame.number >= 0:
        block, at = blocks[frame.number], state[_UNDOS]
        undo[at].least, undo[at].rise, undo[at].block = block.least, block.rise, frame.number
        block.rise = _rise_without(blocks, pool, frame, block)
        state[_UNDOS] = frame.undos = at + 1  # for good: it is the last that the node tries
        if not _look(tree, frame):
            return -1
    chosen, section = -1, frame.section
    for k in range(frame.begin, frame.end):
        b = pool[k]
        block = blocks[b]
        if (
            block.least != frame.level
            or b <= frame.number
            or (chosen >= 0 and b > chosen)
            or not _is_open(blocks, block)
        ):
            continue
        if section < 0 or block.first <= section < block.last:
            chosen = b
    if chosen >= 0:
        frame.number = chosen
    return chosen


@compiled
def _place(tree: Any, frame: Any, chosen: int) -> None:
    """Place the block at the level; blocks left that overlap it in time rise to its top."""
    blocks, sections, _, pool, undo, _, state = tree
    block = blocks[chosen]
    first, last = block.first, block.last
    top = block.least + block.size
    block.offset, block.placed = block.least, 1
    at = state[_UNDOS]
    undo[at].least, undo[at].block = _PLACED, chosen
    at += 1
    for s in range(first, last):
        sections[s].left -= block.size
        sections[s].crossing -= s > first
    for k in range(frame.begin, frame.end):
        other = blocks[pool[k]]
        if other.least < top and other.first < last and first < other.last and other.placed == 0:
            undo[at].least, undo[at].rise, undo[at].block = other.least, other.rise, pool[k]
            at += 1
            other.least, other.rise = top, max(top, other.rise)
    state[_UNDOS] = at


@compiled
def _take_back(tree: Any, mark: int) -> None:
    blocks, sections, undo, state = tree[0], tree[1], tree[4], tree[6]
    at = state[_UNDOS]
    while at > mark:
        at -= 1
        block = blocks[undo[at].block]
        if undo[at].least != _PLACED:
            block.least, block.rise = undo[at].least, undo[at].rise
            continue
        block.placed = 0
        for s in range(block.first, block.last):
            sections[s].left += block.size
            sections[s].crossing += s > block.first
    state[_UNDOS] = mark
