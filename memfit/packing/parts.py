"""The parts of the packers that can be switched off: stages of `auto`, and pruning rules of `exact`.

An ablation switches them off one at a time, by the option `without` of both packers:

    >>> parts_without("auto", "beam, support").beam
    False
    >>> parts_without("exact", "support") == Parts(support=False)
    True
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from memfit.errors import InvalidOptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What is switched on. `STAGES` are those of `auto`; `RULES` are those of `exact`, alone or as a stage of `auto`.

    The first layout of `auto`, by first fit in `first_order`, is always made: every stage improves on a layout.
    """

    best_fit: bool = True  # the layout of packer `best_fit`
    exact: bool = True  # branch and bound, up to 4,096 blocks
    beam: bool = True  # a beam of partial layouts, up to 600 blocks
    tight: bool = True  # the blocks that are live near the peak first, above 4,096 blocks
    ejection: bool = True  # guided ejection search over all blocks
    local_search: bool = True  # squeaky wheel: first fit in an order that is learned
    stacked_starts: bool = True  # orders of local search that stack the blocks of the tightest section first
    support: bool = True  # raises a block that is excluded from the level to the least top that it can lie on
    section_bound: bool = True  # prunes nodes where what is left in a section exceeds the capacity
    section_choice: bool = True  # branches over the blocks that can cover the section with the fewest of them
    partition: bool = True  # searches two sides of a border that no block crosses one after the other
    drawn_orders: bool = True  # one more order of the blocks in each round, drawn at random
    climbing: bool = True  # short searches at the bound, with orders that are changed as long as they place more blocks


NAMES = tuple(field.name for field in dataclasses.fields(Parts))
RULES = NAMES[NAMES.index("support") :]
STAGES = NAMES[: NAMES.index("support")]
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
    known = _OF_PACKER[packer]
    names = [name.strip() for name in without.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise InvalidOptionError(f"packer {packer!r} has no part {name!r}; its parts: {', '.join(known)}")
    return Parts(**dict.fromkeys(names, False))
