"""The packers: one a file, each a frozen dataclass whose fields are its options, all `pack(problem) -> Layout`.

>>> from memfit.packing import Block, Blocks, pack
>>> blocks = Blocks.of([Block(id=0, bytes=64, start=0, end=2), Block(id=1, bytes=64, start=2, end=3)])
>>> layout = pack(blocks)
>>> layout.offsets_bytes.tolist(), layout.height_bytes, layout.proven
([0, 0], 64, True)
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar, Protocol

import numpy as np

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

__all__ = ["PACKERS", "SEARCHING", "Packer", "compile_packers", "make_packer", "options_of", "pack"]


class Packer(Protocol):
    """A packer: a frozen dataclass whose fields are its options; each has a line of `help` in its metadata."""

    name: ClassVar[str]
    source: ClassVar[str]

    def pack(self, problem: PackingProblem) -> Layout:
        """Return the best layout found."""
        ...


_BLOCKS, _SEED, _WORK, _SECONDS = 200, 3, 300_000_000, 3600.0  # it ends by its work
_OF_EJECTION_SECONDS = 0.2
_KINDS = (Portfolio, Exact, LocalSearch, Ejection, BestFit, FirstFit, Mip, Tags, Colouring)
SEARCHING = (Portfolio, Exact, LocalSearch, Ejection)
"""Those that end by a time limit."""
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


@cache
def compile_packers() -> None:
    """Compile what the packers that search wait for, so that it does not count as their time.

    Blocks are packed of which none of them finds the lower bound at once. The machine code is kept on disk: this takes
    seconds once on a machine, and milliseconds later.
    """
    random = np.random.default_rng(_SEED)
    starts, sizes_bytes = random.integers(0, _BLOCKS, _BLOCKS), random.integers(1, 40, _BLOCKS)
    ends = starts + random.integers(1, _BLOCKS // 3, _BLOCKS)
    blocks = Blocks(ids=np.arange(_BLOCKS), sizes_bytes=sizes_bytes, starts=starts, ends=ends)
    check_layout(blocks, Portfolio(work=_WORK).pack(PackingProblem(blocks=blocks, time_limit_seconds=_SECONDS)))
    check_layout(blocks, Ejection().pack(PackingProblem(blocks=blocks, time_limit_seconds=_OF_EJECTION_SECONDS)))


def make_packer(name: str, **options: object) -> Packer:
    """Return the packer called `name` with these options.

    Raises:
        InvalidOptionError: no such packer, or it has no such option; the message lists those that exist.
    """
    return make_registered("packer", PACKERS, name, options)
