"""Packer `colouring`: colour the graph of conflicts; blocks of one colour share memory as large as the largest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from memfit.packing.blocks import Blocks, Layout, PackingProblem, make_layout
from memfit.packing.first_fit import ORDER_HELP, Order, decreasing, require_order

_NO_COLOUR = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Colouring:
    """Give blocks that are live together different colours; the colours lie one after the other in memory.

    The graph of conflicts has a node for each block and an edge between two blocks that are live together. The papers
    name the method and leave the algorithm open. Here it is greedy: one block after the other takes the lowest colour
    that none of its neighbours has. In decreasing order of size no block is larger than its colour is already; in
    decreasing order of conflicts it is the algorithm of Welsh and Powell. O(n^2) time, O(n) memory.

    Source: Chen et al. 2016, section 3; mxnet 1.0, "Optimizing Memory Consumption", memory allocation; the greedy
    algorithm is Welsh & Powell 1967.
    """

    name: ClassVar[str] = "colouring"
    source: ClassVar[str] = "Chen et al. 2016, section 3: colouring of the conflict graph, greedy (Welsh & Powell 1967)"

    by: Order = field(default="size", metadata={"help": ORDER_HELP})

    def __post_init__(self) -> None:
        require_order(self.name, self.by)

    def pack(self, problem: PackingProblem) -> Layout:
        """Return the layout; each block is compared with every other, whatever the time limit."""
        blocks = problem.blocks
        colours = colour_conflicts(blocks, decreasing(blocks, self.by))
        largest = np.zeros(int(colours.max(initial=_NO_COLOUR)) + 1, np.int64)
        np.maximum.at(largest, colours, blocks.sizes_bytes)
        return make_layout(blocks, (np.cumsum(largest) - largest)[colours], packer=self.name)


def colour_conflicts(blocks: Blocks, order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the colour of each block: from 0 on, and different for two blocks that are live together.

    Args:
        blocks: the nodes; their live ranges say which of them are in conflict.
        order: int64[n], the order in which blocks are coloured.
    """
    colours = np.full(len(blocks), _NO_COLOUR, np.int64)
    for block in order.tolist():
        meets = (blocks.starts < blocks.ends[block]) & (blocks.ends > blocks.starts[block])
        taken = np.zeros(len(blocks) + 1, np.bool_)
        taken[colours[meets]] = True  # neighbours without a colour mark the last entry, which no colour reaches
        colours[block] = int(np.argmin(taken))
    return colours
