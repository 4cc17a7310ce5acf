"""Where local search starts from: weights that say in which order first fit takes the blocks.

What makes a layout too high is nearly always dust: small blocks on top of the one moment at which most bytes are live,
above gaps that are free at that moment but not for long enough. Two cures: blocks that meet tight moments go early, or
the large blocks of the tightest moment are stacked first, without a gap, those that reach far from it lowest.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from memfit.packing.blocks import Blocks
from memfit.packing.sections import Sections, live_in_sections, most_live_bytes

Weights = NDArray[np.float64]

_POWERS = (1.0, 0.25, 3.0)  # of size, length and most live bytes met: what ejection gets furthest from, of eight tried
_MOST_POWERS = (1.0, 0.75, 8.0)
_DUST_SHARE = 1 / 2000  # of the lower bound: a block below it is no part of the stack
_STACKED = 60.0  # added to the logarithm of the weight of what is stacked first
_REACHES = ("nearer", "farther", "after", "length", "before")


def first_start(blocks: Blocks, sections: Sections) -> Weights:
    """Return the start that gives the best first layout in the mean."""
    return np.exp(_logarithm(blocks, sections, _POWERS))


def fixed_starts(blocks: Blocks, sections: Sections) -> list[Weights]:
    """Return the starts that come first, the same for every seed."""
    logarithm = _logarithm(blocks, sections, _POWERS)
    return [np.exp(logarithm), *(_stacked(blocks, sections, logarithm, reach) for reach in _REACHES)]


def drawn_starts(blocks: Blocks, sections: Sections, seed: int) -> Iterator[Weights]:
    """Yield starts without end, drawn at random; every second one stacks the tightest moment first."""
    draws = np.random.default_rng(seed)
    while True:
        logarithm = _logarithm(blocks, sections, tuple(draws.uniform((1.0, 0.0, 0.0), _MOST_POWERS)))
        yield np.exp(logarithm)
        yield _stacked(blocks, sections, logarithm, _REACHES[int(draws.integers(len(_REACHES)))])


def _logarithm(blocks: Blocks, sections: Sections, powers: tuple[float, ...]) -> Weights:
    met = most_live_bytes(blocks, sections) / max(blocks.lower_bound_bytes, 1)
    columns = (blocks.sizes_bytes, blocks.ends - blocks.starts, met)
    result = np.zeros(len(blocks))
    for power, column in zip(powers, columns, strict=True):
        result += power * np.log(column.astype(np.float64))
    return result


def _stacked(blocks: Blocks, sections: Sections, logarithm: Weights, reach: str) -> Weights:
    tightest = int(np.argmax(live_in_sections(blocks, sections)))
    before, after = tightest - sections.firsts, sections.lasts - tightest
    chosen = (before >= 0) & (after > 0) & (blocks.sizes_bytes > blocks.lower_bound_bytes * _DUST_SHARE)
    reaches = {
        "nearer": np.minimum(before, after),
        "farther": np.maximum(before, after),
        "before": before,
        "after": after,
        "length": blocks.ends - blocks.starts,
    }
    return np.exp(np.where(chosen, _STACKED + np.log1p(np.maximum(reaches[reach], 0)), logarithm))
