"""What follows from a placement or an exclusion in a search of `exact`: rises, supports, bounds; and taking it back."""

# Numba infers the types in here; those that pyright sees for elements of arrays are not the ones at work.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from typing import Any

from memfit.system.compiled import compiled

FAR = 1 << 61
_PLACED, _EXCLUDED, _BLOCK, _SECTION = 0, 1, 2, 3  # kinds of undo


@compiled
def place(tree: Any, number: int) -> bool:
    """Place a block at its rise; remaining blocks that it meets rise to its top. False: what is left does not fit."""
    blocks, left, state = tree.blocks, tree.left, tree.state[0]
    block = blocks[number]
    first, last, top = block.first, block.last, block.rise + block.size
    state.step += 1
    _enter_undo(tree, _PLACED, number, 0, 0, 0)
    block.offset, block.placed = block.rise, 1
    _leave_sections(tree, number)
    state.left -= 1
    moved = left[state.left]
    left[block.place], blocks[moved].place = moved, block.place
    left[state.left], block.place = number, state.left
    for k in range(state.left):
        other = blocks[left[k]]
        if other.first < last and first < other.last and other.floor < top:
            _keep_block(tree, left[k])
            other.floor = top
            _rise(tree, left[k], max(top, other.rise))
    return _settle(tree)


@compiled
def exclude(tree: Any, number: int) -> bool:
    """Raise a block to the least top that it can lie on. False: there is none, or what is left does not fit."""
    blocks, left, state = tree.blocks, tree.left, tree.state[0]
    block, rise = blocks[number], FAR
    state.step += 1
    for k in range(state.left):
        other = blocks[left[k]]
        if other.first < block.last and block.first < other.last and left[k] != number:
            rise = min(rise, other.rise + other.size)
    if rise + block.size > state.capacity:
        return False
    if not block.excluded:
        block.excluded = 1
        tree.excluded[state.excluded] = number
        state.excluded += 1
        _enter_undo(tree, _EXCLUDED, number, 0, 0, 0)
    _keep_block(tree, number)
    _rise(tree, number, rise)
    return _settle(tree)


@compiled
def take_back(tree: Any, mark: int) -> None:
    """Undo all changes but the first `mark`."""
    blocks, sections, undo, state = tree.blocks, tree.sections, tree.undo, tree.state[0]
    for k in range(state.changed):
        sections[tree.changed[k]].changed = 0
    state.changed = 0
    while state.undos > mark:
        state.undos -= 1
        change = undo[state.undos]
        if change.kind == _SECTION:
            section = sections[change.number]
            section.rise, section.support, section.ready = change.first, change.second, change.third
        elif change.kind == _BLOCK:
            blocks[change.number].rise, blocks[change.number].floor = change.first, change.second
        elif change.kind == _EXCLUDED:
            state.excluded -= 1
            blocks[change.number].excluded = 0
        else:
            block = blocks[change.number]
            block.placed = 0
            state.left += 1
            for s in range(block.first, block.last):
                section = sections[s]
                section.left += block.size
                section.count += 1
    state.step += 1


@compiled
def _enter_undo(tree: Any, kind: int, number: int, first: int, second: int, third: int) -> None:
    state = tree.state[0]
    change = tree.undo[state.undos]
    change.kind, change.number, change.first, change.second, change.third = kind, number, first, second, third
    state.undos += 1


@compiled
def _keep_block(tree: Any, number: int) -> None:
    """Enter a block into the undo, once in a step."""
    block, step = tree.blocks[number], tree.state[0].step
    if block.step != step:
        block.step = step
        _enter_undo(tree, _BLOCK, number, block.rise, block.floor, 0)


@compiled
def change_section(tree: Any, number: int) -> None:
    """Have a section counted anew."""
    section, state = tree.sections[number], tree.state[0]
    if not section.changed:
        section.changed = 1
        tree.changed[state.changed] = number
        state.changed += 1


@compiled
def _leave_sections(tree: Any, number: int) -> None:
    """Take a placed block out of its sections."""
    blocks, sections, live, places = tree.blocks, tree.sections, tree.live, tree.places
    block = blocks[number]
    for s in range(block.first, block.last):
        section = sections[s]
        section.left -= block.size
        section.count -= 1
        here, end = places[block.entry + s - block.first], section.head + section.count
        moved = live[end]
        live[here], live[end] = moved, number
        places[blocks[moved].entry + s - blocks[moved].first] = here
        places[block.entry + s - block.first] = end
        change_section(tree, s)


@compiled
def _rise(tree: Any, number: int, rise: int) -> None:
    """Raise a block, or let it lie on a new floor at its rise; sections where that may matter are counted anew."""
    block, sections = tree.blocks[number], tree.sections
    before, top = block.rise, rise + block.size
    block.rise = rise
    for s in range(block.first, block.last):
        section = sections[s]
        if section.rise == before or section.support == before + block.size or section.support > top:
            change_section(tree, s)


@compiled
def count_sections(tree: Any) -> bool:
    """Count the changed sections anew; False: the blocks left in one of them do not fit."""
    blocks, sections, live, state = tree.blocks, tree.sections, tree.live, tree.state[0]
    fits, bounded, capacity = True, tree.rules[0].section_bound, state.capacity
    for c in range(state.changed):
        number = tree.changed[c]
        section = sections[number]
        section.changed = 0
        if not fits:
            continue
        least, ready, support, most = FAR, 0, FAR, 0
        for k in range(section.head, section.head + section.count):
            block = blocks[live[k]]
            rise = block.rise
            lies = rise == block.floor
            if rise < least:
                least, ready = rise, 0
            ready += lies and rise == least
            if lies:
                support = min(support, rise + block.size)
            most = max(most, rise + block.size)
        if section.step != state.step:
            section.step = state.step
            _enter_undo(tree, _SECTION, number, section.rise, section.support, section.ready)
        section.rise, section.support, section.ready = least, support, ready
        fits = section.count == 0 or (least + section.left if bounded else most) <= capacity
    state.changed = 0
    return fits


@compiled
def _settle(tree: Any) -> bool:
    """Count changed sections, and raise excluded blocks to what can support them, until nothing changes."""
    while count_sections(tree):
        if not _raise_excluded(tree):
            return False
        if tree.state[0].changed == 0:
            return True
    return False


@compiled
def _raise_excluded(tree: Any) -> bool:
    """Raise each excluded block to the least top that it can lie on; False: there is none within the capacity.

    It lies on a block that lies on its own floor, or on another excluded block that is supported lower, so that the
    lowest of them is settled first, as in Dijkstra's algorithm.
    """
    blocks, sections, excluded, state = tree.blocks, tree.sections, tree.excluded, tree.state[0]
    open_blocks = 0
    for k in range(state.excluded):
        block = blocks[excluded[k]]
        block.open = block.placed == 0 and block.rise > block.floor
        if block.open:
            open_blocks += 1
            support = FAR
            for s in range(block.first, block.last):
                support = min(support, sections[s].support)
            block.support = max(support, block.rise)
    while open_blocks > 0:
        lowest, number = FAR + 1, -1
        for k in range(state.excluded):
            block = blocks[excluded[k]]
            if block.open and block.support < lowest:
                lowest, number = block.support, excluded[k]
        block = blocks[number]
        top = lowest + block.size
        if top > state.capacity:
            return False
        block.open = 0
        open_blocks -= 1
        if lowest > block.rise:
            _keep_block(tree, number)
            _rise(tree, number, lowest)
        for k in range(state.excluded):
            other = blocks[excluded[k]]
            if other.open and other.first < block.last and block.first < other.last:
                other.support = min(other.support, max(top, other.rise))
    return True
