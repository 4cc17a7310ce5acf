"""The decision of `exact`, whether blocks fit into a capacity: a depth-first search, compiled.

Blocks are placed from below: offsets never fall. At each node the level is the least offset that a remaining block can
take. A section has to be covered at the level if its remaining blocks would otherwise exceed the capacity; the node
then tries the blocks that can cover it, in the section with the fewest of them (`section_choice`). If no section has
to be covered, the node tries the first block that can lie at the level, and then excludes that block from the level.
Rules that prune the tree, by their names in `Parts`:

- `support`: a block that is excluded from the level has to lie on another block that it meets, so it rises to the least
  top that any of those can have;
- `section_bound`: in each section, the least offset of any remaining block plus the bytes of all of them must fit the
  capacity;
- `partition`: if no remaining block crosses a border between sections, the two sides are searched one after the other,
  small ones first; if one fails, the node fails.

Source: Moffitt 2023, "MiniMalloc"; `section_choice` and `support` are added.
"""

# Numba infers the types in here; those that pyright sees for elements of arrays are not the ones at work.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from typing import Any

from memfit.system.compiled import compiled, entry_point

FOUND, FAILED, STOPPED, _OPEN = 0, 1, 2, 3
_PLACED = -1  # as `least` of an undo: the block was placed; any other value: it had that `least` before it rose
_FAR = 1 << 62


@entry_point
def start(tree: Any, capacity: int) -> None:
    """Begin a search for a layout within `capacity`.

    Args:
        tree: from `make_tree`.
        capacity: in the units of the sizes.
    """
    blocks, sections, pool, state = tree.blocks, tree.sections, tree.pool, tree.state[0]
    state.depth, state.undos, state.capacity, state.nodes = 1, 0, capacity, 0
    for s in range(len(sections)):
        sections[s].left, sections[s].crossing = 0, 0
    for b in range(len(blocks)):
        block = blocks[b]
        block.least, block.rise, block.placed, pool[b] = 0, 0, 0, b
        for s in range(block.first, block.last):
            sections[s].left += block.size
            if s > block.first:
                sections[s].crossing += 1
    frame = tree.frames[0]
    frame.is_node, frame.undos = 0, 0
    frame.begin, frame.end, frame.low, frame.high = 0, len(blocks), 0, len(sections) - 1


@entry_point
def go_on(tree: Any, nodes: int) -> int:
    """Visit more nodes, and return how the search stands.

    Args:
        tree: begun by `start`.
        nodes: how many are visited at most.

    Returns:
        FOUND, with a layout in the offsets of `tree.blocks`; FAILED: no layout is within the capacity; or STOPPED: the
        nodes were not enough.
    """
    frames, state = tree.frames, tree.state[0]
    depth, until = state.depth, state.nodes + nodes
    found: int = _OPEN
    while depth > 0:
        frame = frames[depth - 1]
        if not frame.is_node:
            if found == FAILED or not _open_part(tree, depth):
                depth -= 1
                found = FAILED if found == FAILED else FOUND
            elif _look(tree, frames[depth]):
                depth, found = depth + 1, _OPEN
            else:
                found = FAILED
        elif found == FOUND:
            depth -= 1
        elif state.nodes >= until:
            state.depth = depth
            return STOPPED
        else:
            state.nodes += 1
            _take_back(tree, frame.undos)
            chosen = _choose(tree, frame)
            if chosen < 0:
                depth, found = depth - 1, FAILED
            else:
                found = _OPEN
                _place(tree, frame, chosen)
                depth += 1
                _open_rest(tree, frame, frames[depth - 1], chosen)
    state.depth = 0
    return found


@compiled
def _open_rest(tree: Any, frame: Any, rest: Any, chosen: int) -> None:
    """Make `rest` the list of parts of what a node leaves when it has placed `chosen`."""
    pool, at = tree.pool, frame.end
    for k in range(frame.begin, frame.end):
        if pool[k] != chosen:
            pool[at] = pool[k]
            at += 1
    rest.is_node, rest.undos = 0, tree.state[0].undos
    rest.begin, rest.end, rest.low, rest.high = frame.end, at, frame.low, frame.high


@compiled
def _smallest_part(tree: Any, rest: Any) -> tuple[int, int, int]:
    """Return the part of the list with the fewest blocks: how many, and its sections; `_FAR` blocks if none is left."""
    blocks, sections, pool = tree.blocks, tree.sections, tree.pool
    fewest, first, last = _FAR, rest.low, rest.high
    if not tree.rules[0].partition:
        members = 0
        for k in range(rest.begin, rest.end):
            members += blocks[pool[k]].placed == 0
        return members if members > 0 else _FAR, first, last
    low = rest.low
    while low < rest.high:
        high = low + 1
        while high < rest.high and sections[high].crossing > 0:
            high += 1
        if sections[low].left > 0 and (low > rest.low or high < rest.high):
            members = 0
            for k in range(rest.begin, rest.end):
                members += low <= blocks[pool[k]].first < high and blocks[pool[k]].placed == 0
            if members < fewest:
                fewest, first, last = members, low, high
        elif sections[low].left > 0:
            fewest, first, last = rest.end - rest.begin, low, high
        low = high
    return fewest, first, last


@compiled
def _open_part(tree: Any, depth: int) -> bool:
    """Put a node for the next part of a list above it, the smallest first; False means that none is left."""
    blocks, pool = tree.blocks, tree.pool
    rest, part = tree.frames[depth - 1], tree.frames[depth]
    fewest, low, high = _smallest_part(tree, rest)
    if fewest == _FAR:
        return False
    at = rest.end
    if low == rest.low and high == rest.high:
        part.begin = rest.begin
    else:
        part.begin = at
        for k in range(rest.begin, rest.end):
            block = blocks[pool[k]]
            if low <= block.first < high and block.placed == 0:
                pool[at] = pool[k]
                at += 1
    part.end, part.low, part.high, part.undos, part.is_node = at, low, high, tree.state[0].undos, 1
    return True


@compiled
def _find_supports(tree: Any, frame: Any) -> None:
    """Find the least top that any block left can have in each section, and reset what `_find_next_offsets` counts."""
    blocks, sections, pool = tree.blocks, tree.sections, tree.pool
    for s in range(frame.low, frame.high):
        sections[s].next, sections[s].ready, sections[s].support = _FAR, 0, _FAR
    for k in range(frame.begin, frame.end):
        block = blocks[pool[k]]
        top = max(block.rise, frame.level) + block.size
        for s in range(block.first, block.last):
            sections[s].support = min(sections[s].support, top)


@compiled
def _rise_without(tree: Any, frame: Any, excluded: Any) -> int:
    """Return the least offset of a block that is excluded from the level."""
    blocks, pool = tree.blocks, tree.pool
    if not tree.rules[0].support:
        return excluded.least + 1
    rise = _FAR
    for k in range(frame.begin, frame.end):
        block = blocks[pool[k]]
        if block.first < excluded.last and excluded.first < block.last and pool[k] != frame.number:
            rise = min(rise, max(block.rise, frame.level) + block.size)
    return rise


@compiled
def _look(tree: Any, frame: Any) -> bool:
    """Find the level and the section to cover there; False means that the blocks left do not fit."""
    blocks, pool, rules = tree.blocks, tree.pool, tree.rules[0]
    level = _FAR
    for k in range(frame.begin, frame.end):
        block = blocks[pool[k]]
        if block.rise == block.least:
            level = min(level, block.least)
        if not rules.section_bound and block.rise + block.size > tree.state[0].capacity:
            return False
    if level == _FAR:
        return False
    frame.level, frame.number, frame.section = level, -1, -1
    if not rules.section_bound:
        return True
    _find_supports(tree, frame)
    _find_next_offsets(tree, frame)
    return _choose_section(tree, frame)


@compiled
def _find_next_offsets(tree: Any, frame: Any) -> None:
    """Count in each section the blocks that can lie at the level, and find the least offset of any block above it."""
    blocks, sections, pool = tree.blocks, tree.sections, tree.pool
    for k in range(frame.begin, frame.end):
        block = blocks[pool[k]]
        is_open, rise = block.rise == block.least, block.least
        if rise == frame.level or not is_open:
            for s in range(block.first, block.last):
                sections[s].ready += is_open
            support = frame.level + 1 if is_open else 0
            if tree.rules[0].support:
                support = _FAR
                for s in range(block.first, block.last):
                    support = min(support, sections[s].support)
            rise = max(block.rise, support)
        for s in range(block.first, block.last):
            sections[s].next = min(sections[s].next, rise)


@compiled
def _choose_section(tree: Any, frame: Any) -> bool:
    """Choose the section to cover, if any has to be; False means that some section cannot hold what is left."""
    sections, capacity = tree.sections, tree.state[0].capacity
    fewest = _FAR
    for s in range(frame.low, frame.high):
        section = sections[s]
        if section.left > 0 and section.next + section.left > capacity and section.ready < fewest:
            frame.section, fewest = s, section.ready
        if frame.level + section.left > capacity:
            return False
    if not tree.rules[0].section_choice:
        frame.section = -1
    return fewest > 0


@compiled
def _choose(tree: Any, frame: Any) -> int:
    """Return the next block that the node puts at its level, or -1; the frame remembers it."""
    blocks, pool, undo, state = tree.blocks, tree.pool, tree.undo, tree.state[0]
    if frame.section < 0 and frame.number >= 0:
        block, at = blocks[frame.number], state.undos
        undo[at].least, undo[at].rise, undo[at].block = block.least, block.rise, frame.number
        block.rise = _rise_without(tree, frame, block)
        state.undos = frame.undos = at + 1  # the node never takes this back: it tries no placement before it again
        if not _look(tree, frame):
            return -1
    chosen, section = -1, frame.section
    for k in range(frame.begin, frame.end):
        b = pool[k]
        block = blocks[b]
        can_lie = block.least == frame.level == block.rise and (section < 0 or block.first <= section < block.last)
        if can_lie and b > frame.number and (chosen < 0 or b < chosen):
            chosen = b
    if chosen >= 0:
        frame.number = chosen
    return chosen


@compiled
def _place(tree: Any, frame: Any, chosen: int) -> None:
    """Place the block at the level; remaining blocks that overlap it in time rise to its top."""
    blocks, sections, pool, undo, state = tree.blocks, tree.sections, tree.pool, tree.undo, tree.state[0]
    block = blocks[chosen]
    first, last = block.first, block.last
    top = block.least + block.size
    block.offset, block.placed = block.least, 1
    at = state.undos
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
    state.undos = at


@compiled
def _take_back(tree: Any, mark: int) -> None:
    blocks, sections, undo, state = tree.blocks, tree.sections, tree.undo, tree.state[0]
    at = state.undos
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
    state.undos = mark
