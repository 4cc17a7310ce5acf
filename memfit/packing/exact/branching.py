"""The decision of `exact`, whether blocks fit into a capacity: a depth-first search, compiled.

Blocks are placed from below, each on what is placed already. A section has a least offset that any of its remaining
blocks can take, its rise. A basin is a run of sections with the same rise between higher ones. In a layout where each
block lies on another one or at 0, some block of a basin lies at its rise, or no block does and the basin is left empty
there: blocks that reach out of it lie higher, and none within it could be supported otherwise. So a node may choose any
basin, and any section in it: either one of the blocks that can lie there at the rise does, or each of them is excluded
from it, one after the other. The node takes the section with the fewest such blocks, in whatever basin it is: what has
to follow from the blocks placed is found first, before any choice elsewhere.

A block that is excluded from its floor has to lie on another remaining block, and rises to the least top that it can
lie on. Rules that prune the tree or choose in it, by their names in `Parts`:

- `section_bound`: in each section, its rise plus the bytes of all remaining blocks must fit the capacity;
- `section_choice`: as above; otherwise the node takes the first block of all that can lie lowest, as MiniMalloc does;
- `any_level`: as above; otherwise the node takes a section of a lowest basin;
- `flush`: of the blocks that can cover the section, those that end level with a side of the basin are tried first.

Source: Moffitt 2023, "MiniMalloc", for blocks placed from below and sections; basins are added.
"""

# Numba infers the types in here; those that pyright sees for elements of arrays are not the ones at work.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from typing import Any

from memfit.packing.exact.placing import FAR, change_section, count_sections, exclude, place, take_back
from memfit.system.compiled import compiled, entry_point

FOUND, FAILED, STOPPED, GIVEN_UP = 0, 1, 2, 3


@entry_point
def start(tree: Any, ranks: Any, capacity: int) -> bool:
    """Begin a search for a layout within `capacity`; False: the blocks of some section do not fit.

    Args:
        tree: from `make_tree`.
        ranks: int32[n], the place of each block in the order in which blocks are tried.
        capacity: in the units of the sizes.
    """
    blocks, sections, state = tree.blocks, tree.sections, tree.state[0]
    state.depth, state.undos, state.capacity, state.nodes, state.excluded = 0, 0, capacity, 0, 0
    state.left, state.most, state.changed, state.step = len(blocks), 0, 0, state.step + 1
    for s in range(len(sections)):
        section = sections[s]
        section.left, section.count, section.changed = 0, 0, 0
        change_section(tree, s)
    for b in range(len(blocks)):
        block = blocks[b]
        block.floor, block.rise, block.placed, block.excluded, block.rank = 0, 0, 0, 0, ranks[b]
        tree.left[b], block.place = b, b
        for s in range(block.first, block.last):
            section = sections[s]
            tree.places[block.entry + s - block.first] = section.head + section.count
            tree.live[section.head + section.count] = b
            section.count += 1
            section.left += block.size
    return count_sections(tree)


@entry_point
def go_on(tree: Any, nodes: int) -> int:
    """Visit more nodes, and return how the search stands.

    Args:
        tree: begun by `start`.
        nodes: how many are visited at most.

    Returns:
        FOUND, with a layout in the offsets of `tree.blocks`; FAILED: no layout is within the capacity; STOPPED: the
        nodes were not enough; or GIVEN_UP: there is no room for more.
    """
    placements, state, sections = tree.placements, tree.state[0], tree.sections
    until, room = state.nodes + nodes, len(tree.undo) - 3 * (len(tree.blocks) + len(sections))
    fits = True
    while state.left > 0:
        if fits:
            if state.nodes >= until:
                return STOPPED
            if state.undos > room:
                return GIVEN_UP
            fits = _try_next(tree)
        elif state.depth == 0:
            return FAILED
        else:
            state.depth -= 1
            last = placements[state.depth]
            take_back(tree, last.undos)
            state.nodes += 1
            fits = exclude(tree, last.block)
    return FOUND


@compiled
def _try_next(tree: Any) -> bool:
    """Place the block that is to be tried next."""
    state = tree.state[0]
    number = _choose(tree)
    state.nodes += 1
    placement = tree.placements[state.depth]
    placement.undos, placement.block = state.undos, number
    state.depth += 1
    state.most = max(state.most, state.depth)
    return place(tree, number)


@compiled
def _choose(tree: Any) -> int:
    """Return the block to be tried next."""
    sections, rules, count = tree.sections, tree.rules[0], len(tree.sections)
    lowest = FAR
    for s in range(count):
        lowest = min(lowest, sections[s].rise)
    if not rules.section_choice:
        return _first_at(tree, lowest)
    capacity, begin, chosen, fewest, chosen_rise = tree.state[0].capacity, 0, -1, FAR, FAR
    chosen_begin, chosen_end = 0, count
    while begin < count:
        rise, end = sections[begin].rise, begin + 1
        while end < count and sections[end].rise == rise:
            end += 1
        is_basin = (begin == 0 or sections[begin - 1].rise > rise) and (end == count or sections[end].rise > rise)
        if is_basin and rise < FAR and (rise == lowest or rules.any_level):
            for s in range(begin, end):
                section = sections[s]
                ways = 2 * section.ready + (rise + section.left < capacity)
                if section.ready > 0 and (ways < fewest or (ways == fewest and rise < chosen_rise)):
                    chosen, fewest, chosen_rise, chosen_begin, chosen_end = s, ways, rise, begin, end
        begin = end
    wall_before = sections[chosen_begin - 1].rise if chosen_begin > 0 else FAR
    wall_after = sections[chosen_end].rise if chosen_end < count else FAR
    return _first_in(tree, chosen, chosen_begin, chosen_end, wall_before, wall_after)


@compiled
def _first_in(tree: Any, number: int, begin: int, end: int, wall_before: int, wall_after: int) -> int:
    """Return the block to be tried first in a section of the basin `[begin, end)`, between walls up to such offsets."""
    blocks, section, flush = tree.blocks, tree.sections[number], tree.rules[0].flush
    chosen, most_level = -1, -1
    for k in range(section.head, section.head + section.count):
        b = tree.live[k]
        block = blocks[b]
        if block.rise == block.floor == section.rise:
            top = block.rise + block.size
            level = (block.first == begin and top == wall_before) + (block.last == end and top == wall_after)
            level = level if flush else 0
            if level > most_level or (level == most_level and block.rank < blocks[chosen].rank):
                chosen, most_level = b, level
    return chosen


@compiled
def _first_at(tree: Any, level: int) -> int:
    """Return the first block that can lie at the level."""
    blocks, left, chosen = tree.blocks, tree.left, -1
    for k in range(tree.state[0].left):
        block = blocks[left[k]]
        if block.rise == block.floor == level and (chosen < 0 or block.rank < blocks[chosen].rank):
            chosen = left[k]
    return chosen
