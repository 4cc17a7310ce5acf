"""The rounds of `local_search`: first fit in the order of weights, and heavier weights for blocks that end too high.

Blocks whose tops are above the target get heavier after a round, and are placed earlier in the next one. The target
lies between the lower bound and the height reached, so few blocks move at a time. Compiled.

Source: squeaky wheel optimisation, Joslin & Clements 1999.
"""

# pyright: reportArgumentType=false

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.packing.fitting import Shelf, fit_blocks
from memfit.packing.improve.xorshift import next_random
from memfit.system.compiled import compiled, entry_point

_HEAVIEST = 1e200  # all weights are divided by it when one reaches it, long before a float overflows


class Wheel(NamedTuple):
    """What the rounds work on; every array has an entry for each block.

    `spare` is room for sorting; `best_offsets` is the lowest layout since the weights were set.
    """

    shelf: Shelf
    order: NDArray[np.int64]
    weights: NDArray[np.float64]
    spare: NDArray[np.int64]
    offsets: NDArray[np.int64]
    best_offsets: NDArray[np.int64]


def make_wheel(shelf: Shelf) -> Wheel:
    """Return a wheel for the blocks of the shelf; all weights are 0."""
    count = len(shelf.sizes_bytes)
    return Wheel(
        shelf=shelf,
        order=np.arange(count),
        weights=np.zeros(count),
        spare=np.arange(count),
        offsets=np.zeros(count, np.int64),
        best_offsets=np.zeros(count, np.int64),
    )


@entry_point
def play(rounds: int, bound: int, best: int, random: int, wheel: Any) -> tuple[int, int]:
    """Play rounds of first fit.

    Args:
        rounds: how many; fewer if the bound is reached.
        bound: the lower bound in bytes.
        best: the lowest height before; a lower layout is copied to `wheel.best_offsets`.
        random: a state from `xorshift.random_state`.
        wheel: from `make_wheel`.

    Returns:
        The lowest height so far, in bytes, and the state of the random numbers.
    """
    sizes, offsets, weights = wheel.shelf.sizes_bytes, wheel.offsets, wheel.weights
    for _ in range(rounds):
        _sort_by_weight(wheel.order, weights, wheel.spare)
        fit_blocks(wheel.order, wheel.shelf, offsets)
        height = 0
        for block in range(len(sizes)):
            height = max(height, offsets[block] + sizes[block])
        if height < best:
            best = height
            for block in range(len(sizes)):
                wheel.best_offsets[block] = offsets[block]
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


@compiled
def _lighten(weights: Any) -> None:
    for block in range(len(weights)):
        weights[block] /= _HEAVIEST


@compiled
def _sort_by_weight(order: Any, weights: Any, spare: Any) -> None:
    """Sort `order` by decreasing weight, stably: a merge sort, which is fast because few blocks have moved."""
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
