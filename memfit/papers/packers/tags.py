"""Packer `tags`: replay the step with a box of free tags; a tag is as large as the largest block that has it."""

# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from memfit.packing.blocks import Layout, PackingProblem, make_layout
from memfit.system.compiled import compiled, entry_point

_NONE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """Give each block a tag from the box of free tags when it begins, and put the tag back when it ends.

    A block takes the smallest free tag that is large enough. If there is none, it takes the largest free tag, which
    grows, or a new tag if none is free. The paper leaves this choice open. Tags lie one after the other in memory and
    never share an address.

    Source: Chen et al. 2016, section 3, Figure 2; its in-place step is `Compute.in_place_of`, before any packing.
    """

    name: ClassVar[str] = "tags"
    source: ClassVar[str] = "Chen et al. 2016, section 3, Figure 2: the box of free tags"

    def pack(self, problem: PackingProblem) -> Layout:
        """Return the layout, whatever the time limit; each block is compared with all free tags."""
        blocks = problem.blocks
        numbers = np.arange(len(blocks))
        events = np.concatenate([~numbers, numbers])
        events = events[np.argsort(np.concatenate([blocks.ends, blocks.starts]), kind="stable")]
        tags, tag_sizes, box = np.zeros(len(blocks), np.int64), np.zeros(len(blocks), np.int64), numbers.copy()
        _replay(events, blocks.sizes_bytes, tags, tag_sizes, box)
        offsets = (np.cumsum(tag_sizes) - tag_sizes)[tags]
        return make_layout(blocks, offsets, packer=self.name)


@entry_point
def _replay(events: Any, sizes: Any, tags: Any, tag_sizes: Any, box: Any) -> None:
    """Fill in the tag of each block and the size of each tag; `box[:free]` are the free tags."""
    count, free = 0, 0
    for k in range(len(events)):
        event = events[k]
        if event < 0:
            box[free] = tags[~event]
            free += 1
            continue
        place = _fitting(sizes[event], tag_sizes, box, free)
        if place == _NONE:
            tags[event] = count
            count += 1
        else:
            tags[event] = box[place]
            free -= 1
            box[place] = box[free]
        tag_sizes[tags[event]] = max(tag_sizes[tags[event]], sizes[event])


@compiled
def _fitting(size: int, tag_sizes: Any, box: Any, free: int) -> int:
    """Return the place in the box of the smallest tag that holds `size`, else of the largest, else -1."""
    best = _NONE
    for place in range(free):
        here = tag_sizes[box[place]]
        if best == _NONE:
            best = place
            continue
        there = tag_sizes[box[best]]
        if (size <= here < there) or (there < size and here > there) or (here == there and box[place] < box[best]):
            best = place
    return best
