"""The parts of the packers that can be switched off: stages of `auto`, and pruning rules of `exact`.

An ablation switches them off one at a time, by the option `without` of both packers:

    >>> parts_without("auto", "ejection, flush").ejection
    False
    >>> parts_without("exact", "flush") == Parts(flush=False)
    True
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from memfit.system.registered import made_without


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What is switched on. `STAGES` are those of `auto`; `RULES` are those of `exact`, alone or as a stage of `auto`.

    The first layout of `auto`, by first fit in `first_order`, is always made: every stage improves on a layout.
    """

    best_fit: bool = True  # the layout of packer `best_fit`
    exact: bool = True  # branch and bound, up to 4,096 blocks
    tight: bool = True  # the blocks that are live near the peak first, above 4,096 blocks
    ejection: bool = True  # guided ejection search over all blocks
    local_search: bool = True  # squeaky wheel: first fit in an order that is learned
    stacked_starts: bool = True  # orders of local search that stack the blocks of the tightest section first
    section_bound: bool = True  # prunes nodes where what is left in a section exceeds the capacity
    section_choice: bool = True  # branches over the blocks that can cover the section with the fewest of them
    any_level: bool = True  # takes such a section wherever its neighbours are higher, not only at the lowest level
    flush: bool = True  # tries blocks first that end level with their neighbours
    apart: bool = True  # decides parts that are apart in time one by one
    restarts: bool = True  # short searches with orders of the blocks that are drawn at random


NAMES = tuple(field.name for field in dataclasses.fields(Parts))
RULES = NAMES[NAMES.index("section_bound") :]
STAGES = NAMES[: NAMES.index("section_bound")]
_OF_PACKER = {"auto": NAMES, "exact": RULES}

WITHOUT_HELP = "parts to switch off, separated by commas: {}"


def parts_without(packer: str, without: str) -> Parts:
    """Return the parts of `packer` without those named in `without`, separated by commas.

    Args:
        packer: `auto`, which has stages and rules, or `exact`, which has rules.
        without: names of fields of `Parts`; empty switches nothing off.

    Raises:
        InvalidOptionError: the packer has no such part; the message lists those that it has.
    """
    return made_without(Parts, without, owner=f"packer {packer!r}", known=_OF_PACKER[packer])
