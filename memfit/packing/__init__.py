"""The packers: one a file, each a frozen dataclass whose fields are its options, all `pack(problem) -> Layout`.

>>> from memfit.packing import Block, Blocks, pack
>>> blocks = Blocks.of([Block(id=0, bytes=64, start=0, end=2), Block(id=1, bytes=64, start=2, end=3)])
>>> layout = pack(blocks)
>>> layout.offsets_bytes.tolist(), layout.height_bytes, layout.proven
([0, 0], 64, True)
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Protocol

from memfit.errors import InvalidOptionError
from memfit.packing.auto import Auto
from memfit.packing.best_fit import BestFit
from memfit.packing.blocks import Block, Blocks, Layout, PackingProblem, Progress, lower_bound_bytes
from memfit.packing.check import check_layout
from memfit.packing.ejection import Ejection
from memfit.packing.exact import Exact
from memfit.packing.first_fit import FirstFit
from memfit.packing.local_search import LocalSearch
from memfit.packing.mip import Mip
from memfit.packing.tags import Tags

__all__ = [
    "PACKERS",
    "Block",
    "Blocks",
    "Layout",
    "Packer",
    "PackingProblem",
    "Progress",
    "check_layout",
    "lower_bound_bytes",
    "make_packer",
    "options_of",
    "pack",
]


class Packer(Protocol):
    """What every packer is. Its dataclass fields are its options; each has a line of `help` in its metadata."""

    name: ClassVar[str]
    source: ClassVar[str]

    def pack(self, problem: PackingProblem) -> Layout:
        """Return the best layout found."""
        ...


_KINDS = (Auto, Exact, LocalSearch, Ejection, BestFit, FirstFit, Mip, Tags)
PACKERS: dict[str, type[Packer]] = {kind.name: kind for kind in _KINDS}


def pack(blocks: Blocks, packer: str | Packer = "auto", *, time_limit_seconds: float = 10.0, seed: int = 0) -> Layout:
    """Return a layout of these blocks, checked by code that knows no packer.

    Args:
        blocks: what to pack.
        packer: a packer, or the name of one.
        time_limit_seconds: when a packer that improves its answer has to give the best it has.
        seed: of all that is random.

    Raises:
        InvalidOptionError: no packer has that name.
        InvalidLayoutError: the packer is wrong.
    """
    chosen = make_packer(packer) if isinstance(packer, str) else packer
    layout = chosen.pack(PackingProblem(blocks=blocks, time_limit_seconds=time_limit_seconds, seed=seed))
    check_layout(blocks, layout)
    return layout


def make_packer(name: str, **options: object) -> Packer:
    """Return the packer called `name` with these options.

    Raises:
        InvalidOptionError: no such packer, or it has no such option; the message lists those that exist.
    """
    if name not in PACKERS:
        raise InvalidOptionError(f"no packer is called {name!r}; there are {', '.join(sorted(PACKERS))}")
    known = options_of(PACKERS[name])
    for option in options:
        if option not in known:
            there = ", ".join(known) if known else "none"
            raise InvalidOptionError(f"packer {name!r} has no option {option!r}; its options: {there}")
    return PACKERS[name](**options)


def options_of(kind: type[Packer]) -> dict[str, str]:
    """Return option -> what it does, for `memfit packers`."""
    fields = dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
    return {field.name: field.metadata.get("help", "") for field in fields}
