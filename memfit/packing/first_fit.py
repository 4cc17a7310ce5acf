"""Packer `first_fit`: blocks in a fixed order, each at the lowest address that is free for all its live range."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from memfit.errors import InvalidOptionError
from memfit.packing.blocks import Blocks, Layout, PackingProblem, make_layout
from memfit.packing.fitting import fit_in_order, shelf_of
from memfit.packing.sections import sections_of

Order = Literal["size", "length", "area", "conflicts"]
ORDERS: tuple[str, ...] = get_args(Order)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstFit:
    """Place blocks in decreasing order of one measure, each as low as those already placed let it.

    Source: by size, Pisarchyk & Lee 2020, "Efficient Memory Management for Deep Neural Net Inference" (greedy by size
    for offsets); the others are that algorithm with other measures.
    """

    name: ClassVar[str] = "first_fit"
    source: ClassVar[str] = "Pisarchyk & Lee 2020: greedy by size, for offsets"

    by: Order = field(
        default="size", metadata={"help": f"largest first by this: {', '.join(ORDERS)} (blocks met while live)"}
    )

    def __post_init__(self) -> None:
        if self.by not in ORDERS:
            raise InvalidOptionError(f"first_fit has no order {self.by!r}; there are {', '.join(ORDERS)}")

    def pack(self, problem: PackingProblem) -> Layout:
        """Return the layout; it takes no longer than it takes, whatever the time limit."""
        blocks = problem.blocks
        order = np.argsort(-measure(blocks, self.by), kind="stable")
        return make_layout(blocks, fit_in_order(shelf_of(blocks, sections_of(blocks)), order), packer=self.name)


def measure(blocks: Blocks, by: str) -> NDArray[np.float64]:
    """Return what the blocks are ordered by; `length` is in steps, `area` in bytes times steps."""
    sizes, lengths = blocks.sizes_bytes.astype(np.float64), (blocks.ends - blocks.starts).astype(np.float64)
    if by == "conflicts":
        begun = np.searchsorted(np.sort(blocks.starts), blocks.ends, side="left")
        over = np.searchsorted(np.sort(blocks.ends), blocks.starts, side="right")
        return (begun - over - 1).astype(np.float64)
    return {"size": sizes, "length": lengths, "area": sizes * lengths}[by]
