"""Packer `first_fit`: blocks in a fixed order, each at the lowest address that is free during all its live range."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from memfit.errors import InvalidOptionError
from memfit.packing.blocks import Blocks, Layout, PackingProblem, make_layout
from memfit.packing.fitting import fit_in_order, make_shelf
from memfit.packing.sections import sections_of

Order = Literal["size", "length", "area", "conflicts"]
ORDERS: tuple[str, ...] = get_args(Order)
ORDER_HELP = f"largest first by this: {', '.join(ORDERS)} (blocks met while live)"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstFit:
    """Place blocks in decreasing order of one measure, each as low as the blocks already placed allow.

    Source: by size, Pisarchyk & Lee 2020, "Efficient Memory Management for Deep Neural Net Inference" (greedy by size
    for offsets); the others are that algorithm with other measures.
    """

    name: ClassVar[str] = "first_fit"
    source: ClassVar[str] = "Pisarchyk & Lee 2020: greedy by size, for offsets"

    by: Order = field(default="size", metadata={"help": ORDER_HELP})

    def __post_init__(self) -> None:
        require_order(self.name, self.by)

    def pack(self, problem: PackingProblem) -> Layout:
        """Return the layout, whatever the time limit."""
        blocks = problem.blocks
        shelf = make_shelf(blocks, sections_of(blocks))
        return make_layout(blocks, fit_in_order(shelf, decreasing(blocks, self.by)), packer=self.name)


def require_order(packer: str, by: str) -> None:
    """Return if an order of blocks is known.

    Args:
        packer: its name, for the message.
        by: expected to be one of `ORDERS`.

    Raises:
        InvalidOptionError: it is not; the message names the packer.
    """
    if by not in ORDERS:
        raise InvalidOptionError(f"{packer} has no order {by!r}; there are {', '.join(ORDERS)}")


def decreasing(blocks: Blocks, by: str) -> NDArray[np.int64]:
    """Return int64[n], the blocks in decreasing order of a measure; equal blocks keep their order.

    Args:
        blocks: what is ordered.
        by: one of `ORDERS`.
    """
    return np.argsort(-measure(blocks, by), kind="stable")


def measure(blocks: Blocks, by: str) -> NDArray[np.float64]:
    """Return float64[n], a measure of each block: `size` in bytes, `length` in steps, `area` in bytes times steps, or
    `conflicts`, the number of other blocks that are live with it.

    Args:
        blocks: what is measured.
        by: one of `ORDERS`.
    """
    sizes, lengths = blocks.sizes_bytes.astype(np.float64), (blocks.ends - blocks.starts).astype(np.float64)
    if by == "conflicts":
        begun = np.searchsorted(np.sort(blocks.starts), blocks.ends, side="left")
        over = np.searchsorted(np.sort(blocks.ends), blocks.starts, side="right")
        return (begun - over - 1).astype(np.float64)
    return {"size": sizes, "length": lengths, "area": sizes * lengths}[by]
