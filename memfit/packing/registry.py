"""The packers: one a file, each a frozen dataclass whose fields are its options, all `pack(problem) -> Layout`.

>>> from memfit.packing import Block, Blocks, pack
>>> blocks = Blocks.of([Block(id=0, bytes=64, start=0, end=2), Block(id=1, bytes=64, start=2, end=3)])
>>> layout = pack(blocks)
>>> layout.offsets_bytes.tolist(), layout.height_bytes, layout.proven
([0, 0], 64, True)
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from memfit.packing.best_fit import BestFit
from memfit.packing.blocks import Blocks, Layout, PackingProblem
from memfit.packing.check import check_layout
from memfit.packing.exact.exact import Exact
from memfit.packing.first_fit import FirstFit
from memfit.packing.improve.ejection import Ejection
from memfit.packing.improve.local_search import LocalSearch
from memfit.packing.portfolio import Portfolio
from memfit.papers.packers.colouring import Colouring
from memfit.papers.packers.mip import Mip
from memfit.papers.packers.tags import Tags
from memfit.system.registered import make_registered, options_of

__all__ = ["PACKERS", "Packer", "make_packer", "options_of", "pack"]


class Packer(Protocol):
    """A packer: a frozen dataclass whose fields are its options; each has a line of `help` in its metadata."""

    name: ClassVar[str]
    source: ClassVar[str]

    def pack(self, problem: PackingProblem) -> Layout:
        """Return the best layout found."""
        ...


_KINDS = (Portfolio, Exact, LocalSearch, Ejection, BestFit, FirstFit, Mip, Tags, Colouring)
PACKERS: dict[str, type[Packer]] = {kind.name: kind for kind in _KINDS}


def pack(blocks: Blocks, packer: str | Packer = "auto", *, time_limit_seconds: float = 10.0, seed: int = 0) -> Layout:
    """Return a layout of these blocks, checked by `check_layout`.

    Args:
        blocks: what to pack.
        packer: a packer, or the name of one.
        time_limit_seconds: after it, a packer that improves its answer returns the best layout so far.
        seed: of all random numbers.

    Raises:
        InvalidOptionError: no packer has that name.
        InvalidLayoutError: the packer has a fault.
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
    return make_registered("packer", PACKERS, name, options)
