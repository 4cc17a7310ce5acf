"""Packing: an address in one arena for every block. `registry` lists memfit's packers and those of papers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memfit.packing.blocks import Block, Blocks, Layout, PackingProblem, PackingProgress, lower_bound_bytes
from memfit.packing.check import check_layout

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    """Load the registry when a name of it is first used: it imports the papers' packers, which import this room."""
    if name not in __all__:
        raise AttributeError(f"module 'memfit.packing' has no attribute {name!r}")
    from memfit.packing import registry

    return getattr(registry, name)
