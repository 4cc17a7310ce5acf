"""First fit again and again: what stands too high goes earlier in the next round (squeaky wheel, Joslin & Clements
1999).

Each block has a weight, and first fit takes the blocks heaviest first. After a round, the blocks whose tops stand above
the target get heavier. The target lies between the lower bound and the height reached, so that few blocks move at a
time.
"""

# pyright: reportArgumentType=false

from __future__ import annotations

from typing import Any

from memfit.compiled import compiled, entry_point
from memfit.packing.fitting import fit_blocks

_HEAVIEST = 1e200  # when all weights are brought down, long before they leave what a float holds


@compiled
def _lighten(weights: Any) -> None:
    for block in range(len(weights)):
        weights[block] /= _HEAVIEST


@compiled
def sort_by_weight(order: Any, weights: Any, spare: Any) -> None:
    """Sort `order` by decreasing weight, stably: merges of runs, which are long as few blocks have moved."""
    count = len(order)
    sorted_to = 1
    while sorted_to < count and weights[order[sorted_to - 1]] >= weights[order[sorted_to]]:
        sorted_to += 1
    if sorted_to >= count:
        return
    width = 1
    while width < count:
        low = 0
        while low < count:
            middle, high = min(low + width, count), min(low + 2 * width, count)
            if middle < high and weights[order[middle - 1]] < weights[order[middle]]:
                left, right = low, middle
                for at in range(low, high):
                    if right >= high or (left < middle and weights[order[left]] >= weights[order[right]]):
                        spare[at] = order[left]
                        left += 1
                    else:
                        spare[at] = order[right]
                        right += 1
                for at in range(low, high):
                    order[at] = spare[at]
            low += 2 * width
        width *= 2


@compiled
def next_random(state: int) -> int:
    """Return the next state of a 63-bit generator (xorshift, Marsaglia 2003); never 0 where `state` is not."""
    state ^= (state << 13) & 0x7FFFFFFFFFFFFFFF
    state ^= state >> 7
    state ^= (state << 17) & 0x7FFFFFFFFFFFFFFF
    return state


@entry_point
def improve(
    rounds: int,
    bound: int,
    best: int,
    random: int,
    shelf: Any,
    order: Any,
    weights: Any,
    spare: Any,
    offsets: Any,
    best_offsets: Any,
) -> tuple[int, int]:
    """Play `rounds` rounds; return the best height and the state of the random numbers; stop early at `bound`.

    `best_offsets` has the best layout of all rounds, if any was better than `best`.
    """
    sizes = shelf[0]
    for _ in range(rounds):
        sort_by_weight(order, weights, spare)
        fit_blocks(order, shelf, offsets)
        height = 0
        for block in range(len(sizes)):
            height = max(height, offsets[block] + sizes[block])
        if height < best:
            best = height
            for block in range(len(sizes)):
                best_offsets[block] = offsets[block]
            if best <= bound:
                return best, random
        random = next_random(random)
        share = (random & 0xFFFF) / 65536.0
        target = max(bound, bound + int((height - bound) * share))
        random = next_random(random)
        boost = 1.1 + (random & 0xFFFF) / 65536.0
        for block in range(len(sizes)):
            if offsets[block] + sizes[block] > target:
                weights[block] *= boost
                if weights[block] > _HEAVIEST:
                    _lighten(weights)
    return best, random
