"""Time cut into as few sections as possible: one for each maximal set of blocks that are live together.

Packing depends on steps only through the pairs of blocks that overlap in time. Starts without an end between them
share one section. Live ranges become short ranges of small integers, over which the loops of the packers run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memfit.packing.blocks import Blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Sections:
    """Live ranges in sections: block i is live in the sections `[firsts[i], lasts[i])`, of `count` in all."""

    firsts: NDArray[np.int32]
    lasts: NDArray[np.int32]
    count: int


def sections_of(blocks: Blocks) -> Sections:
    """Return the sections; two blocks share one exactly when they share a step.

    >>> from memfit.packing.blocks import Block
    >>> ranges = [(0, 9), (1, 4), (5, 9), (6, 8)]
    >>> blocks = Blocks.of(Block(id=i, bytes=1, start=s, end=e) for i, (s, e) in enumerate(ranges))
    >>> found = sections_of(blocks)
    >>> found.firsts.tolist(), found.lasts.tolist()
    ([0, 0, 1, 1], [2, 1, 2, 2])
    """
    starts, ends = np.unique(blocks.starts), np.sort(blocks.ends)
    ended = np.searchsorted(ends, starts, side="right")  # blocks that have ended by each start
    begins_section = np.append(ended[1:] != ended[:-1], True) if len(starts) else np.zeros(0, bool)
    last_starts = starts[begins_section]  # of each section; an end separates it from the next start
    return Sections(
        firsts=np.searchsorted(last_starts, blocks.starts, side="left").astype(np.int32),
        lasts=np.searchsorted(last_starts, blocks.ends, side="left").astype(np.int32),
        count=len(last_starts),
    )


def live_in_sections(blocks: Blocks, sections: Sections) -> NDArray[np.int64]:
    """Return int64[sections.count], the bytes that are live in each section.

    Args:
        blocks: what is packed.
        sections: those of the blocks.
    """
    live = np.zeros(sections.count + 1, np.int64)
    np.add.at(live, sections.firsts, blocks.sizes_bytes)
    np.subtract.at(live, sections.lasts, blocks.sizes_bytes)
    return np.cumsum(live)[:-1]


def most_live_bytes(blocks: Blocks, sections: Sections) -> NDArray[np.int64]:
    """Return int64[n], for each block the most bytes that are live in any section of its live range.

    Args:
        blocks: what is packed.
        sections: those of the blocks.
    """
    if len(blocks) == 0:
        return np.zeros(0, np.int64)
    most = live_in_sections(blocks, sections)  # maxima over 1, 2, 4 ... sections; any range is two such spans
    spans = np.frexp(sections.lasts - sections.firsts)[1] - 1
    result = np.zeros(len(blocks), np.int64)
    for span in range(int(spans.max()) + 1):
        chosen = np.flatnonzero(spans == span)
        result[chosen] = np.maximum(most[sections.firsts[chosen]], most[sections.lasts[chosen] - (1 << span)])
        most = np.maximum(most[: -(1 << span)], most[1 << span :]) if len(most) > 1 << span else most
    return result
