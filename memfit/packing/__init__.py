"""Packing: an address in one arena for every block. `registry` lists the packers; `published` are those of papers."""

from memfit.packing.blocks import Block, Blocks, Layout, PackingProblem, PackingProgress, lower_bound_bytes
from memfit.packing.check import check_layout
from memfit.packing.registry import PACKERS, Packer, make_packer, options_of, pack

__all__ = [
    "PACKERS",
    "Block",
    "Blocks",
    "Layout",
    "Packer",
    "PackingProblem",
    "PackingProgress",
    "check_layout",
    "lower_bound_bytes",
    "make_packer",
    "options_of",
    "pack",
]
