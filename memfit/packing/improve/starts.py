"""The starts of local search: weights by which first fit orders the blocks.

A layout is nearly always too high because of small blocks above the tightest section, the one with the most live bytes:
the gaps below them are free there, but not for long enough. Two kinds of starts avoid this: blocks that meet tight
sections are placed early, or the large blocks of the tightest section are stacked first, without a gap, those that
reach far from it lowest.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from memfit.packing.blocks import Blocks
from memfit.packing.sections import Sections, live_in_sections, most_live_bytes

Weights = NDArray[np.float64]

_POWERS = (1.0, 0.25, 3.0)  # of size, length and most live bytes met: of eight tried, the best start for ejection
_MOST_POWERS = (1.0, 0.75, 8.0)
_DUST_SHARE = 1 / 2000  # of the lower bound: smaller blocks are not stacked
_STACKED = 60.0  # added to the logarithm of the weight of stacked blocks
_REACHES = ("nearer", "farther", "after", "length", "before")


def first_order(
    blocks: Blocks, sections: Sections, before: NDArray[np.int64] | tuple[int, ...] = ()
) -> NDArray[np.int64]:
    """Return int64[n], the blocks in the order of the start whose first layout is the lowest in the mean.

    Args:
        blocks: what is packed.
        sections: those of the blocks.
        before: blocks that are placed before all others, in their own order.
    """
    weights = np.exp(_logarithm(blocks, sections, _POWERS))
    weights[np.array(before, np.int64)] = np.inf
    return np.argsort(-weights, kind="stable")


def fixed_starts(blocks: Blocks, sections: Sections, *, stacked: bool = True) -> list[Weights]:
    """Return the first starts, each float64[n], the same for every seed.

    Args:
        blocks: what is packed.
        sections: those of the blocks.
        stacked: whether those that stack blocks are included.
    """
    logarithm = _logarithm(blocks, sections, _POWERS)
    reaches = _REACHES if stacked else ()
    return [np.exp(logarithm), *(_stacked(blocks, sections, logarithm, reach) for reach in reaches)]


def drawn_starts(blocks: Blocks, sections: Sections, seed: int, *, stacked: bool = True) -> Iterator[Weights]:
    """Yield random starts without end, each float64[n]; with `stacked`, every second one stacks the tightest section.

    Args:
        blocks: what is packed.
        sections: those of the blocks.
        seed: of the random numbers.
        stacked: whether there are starts that stack blocks.
    """
    draws = np.random.default_rng(seed)
    while True:
        logarithm = _logarithm(blocks, sections, tuple(draws.uniform((1.0, 0.0, 0.0), _MOST_POWERS)))
        yield np.exp(logarithm)
        if stacked:
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
