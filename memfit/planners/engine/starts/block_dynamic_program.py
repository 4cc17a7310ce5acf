"""Block dynamic program: from several retentions of the whole step, the best one for each block.

In each block, the bytes that earlier blocks keep over the forward/backward boundary and the bytes that the block itself
holds must together fit the budget. The state between two blocks is therefore the bytes kept so far and the retention
used. The retention may change at a border over which all storages are kept. Bytes are counted in about a thousand
units. The result is simulated; if its exact peak is above the budget, the next try aims lower.

Source: the knapsack over stages of Feng and Huang 2018 and of rotor (Beaumont et al. 2019), with whole plans as
options.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.planners.engine.retention.decisions import Retention
from memfit.planners.engine.starts.blocks import Blocks, Option, option_of
from memfit.system.compiled import entry_point
from memfit.system.records import Flags, Integers

_UNITS = 1024  # of what the budget leaves: the precision of bytes
_TRIES = 7  # of aims between the budget and what already fits
_LOWER = 0.93  # from one aim to the next, as long as nothing fits


def join(blocks: Blocks, options: Sequence[Option]) -> list[Option]:
    """Return joined retentions for several aims below the budget, in the order in which they were tried.

    Args:
        blocks: of the instance that the options are for.
        options: at least one.
    """
    budget_bytes = blocks.instance.budget_bytes
    found: list[Option] = []
    low, high, aim = 0.0, 1.0, 1.0
    for _ in range(_TRIES):
        picks = _pick(options, int(aim * budget_bytes))
        if picks is None:
            break
        option = option_of(blocks, _assembled(blocks, options, picks))
        found.append(option)
        if option.peak_bytes <= blocks.instance.problem.budget_bytes:
            low = aim
        else:
            high = aim
        if low == 1.0:
            break
        aim = (low + high) / 2 if low > 0.0 else high * _LOWER
    return found


def _pick(options: Sequence[Option], budget_bytes: int) -> Integers | None:
    """Return int64[blocks]: the option of each block that takes the fewest seconds within the budget, or None."""
    if budget_bytes <= 0:
        return None
    unit = budget_bytes / _UNITS
    seconds = np.stack([option.seconds for option in options])
    kept = np.stack([_in_units(option.kept_bytes, unit) for option in options])
    room = np.stack([np.floor((budget_bytes - option.transient_bytes) / unit).astype(np.int64) for option in options])
    is_border = np.stack([option.is_border for option in options])
    count, blocks = seconds.shape
    tables = _Tables(
        best=np.full((2, count, _UNITS + 1), np.inf),
        least=np.empty(_UNITS + 1),
        switched=np.zeros((blocks, count, _UNITS + 1), np.bool_),
        cheapest=np.zeros((blocks, _UNITS + 1), np.int64),
    )
    _tabulate(seconds, kept, room, is_border, tables)
    last = tables.best[blocks % 2]
    option, units = (int(index) for index in np.unravel_index(int(np.argmin(last)), last.shape))
    if not np.isfinite(last[option, units]):
        return None
    picks = np.zeros(blocks, np.int64)
    for block in range(blocks - 1, -1, -1):
        picks[block] = option
        units -= int(kept[option, block])
        if tables.switched[block, option, units]:
            option = int(tables.cheapest[block, units])
    return picks


class _Tables(NamedTuple):
    """The tables of the dynamic program; units are those of the bytes kept over the forward/backward boundary.

    Attributes:
        best: float64[2, options, units], `best[block % 2, option, units]` is the least seconds of the blocks before
            `block` if they keep `units` and `block` uses `option`.
        least: float64[units], scratch.
        switched: bool[blocks, options, units], whether `option` is used only from that block on.
        cheapest: int64[blocks, units], the option used before that block then.
    """

    best: NDArray[np.float64]
    least: NDArray[np.float64]
    switched: Flags
    cheapest: Integers


@entry_point
def _tabulate(seconds: NDArray[np.float64], kept: Integers, room: Integers, is_border: Flags, tables: _Tables) -> None:
    """Fill the tables, given of each option and block: seconds, units kept, units of room, whether it ends at a border.

    All four are [options, blocks].
    """
    best, least, switched, cheapest = tables
    count, blocks = seconds.shape
    units_end = best.shape[2]
    for option in range(count):
        best[0, option, 0] = 0.0
    for block in range(blocks):
        now, following = best[block % 2], best[(block + 1) % 2]
        if block > 0:
            for units in range(units_end):
                least[units] = np.inf
            for option in range(count):
                if is_border[option, block - 1]:
                    for units in range(units_end):
                        if now[option, units] < least[units]:
                            least[units] = now[option, units]
                            cheapest[block, units] = option
            for option in range(count):
                for units in range(units_end):
                    if least[units] < now[option, units]:
                        now[option, units] = least[units]
                        switched[block, option, units] = True
        for option in range(count):
            shift = kept[option, block]
            first = min(max(shift, 0), units_end)
            end = max(first, min(units_end, shift + room[option, block] + 1))
            for units in range(first):
                following[option, units] = np.inf
            for units in range(first, end):
                following[option, units] = now[option, units - shift] + seconds[option, block]
            for units in range(end, units_end):
                following[option, units] = np.inf


def _in_units(kept_bytes: Integers, unit: float) -> Integers:
    """Return bytes in units. Their running sums are rounded, so that rounding errors do not add up."""
    sums = np.round(np.cumsum(kept_bytes) / unit).astype(np.int64)
    return np.diff(sums, prepend=0)


def _assembled(blocks: Blocks, options: Sequence[Option], picks: Integers) -> Retention:
    """Return the retention of each storage's block's option."""
    chosen = picks[blocks.of_storage][blocks.instance.tables.intervals["storage"]]
    release = np.stack([option.retention.release for option in options])
    hold = np.stack([option.retention.hold for option in options])
    every = np.arange(len(chosen))
    return Retention(release=release[chosen, every], hold=hold[chosen, every])


def worth_joining(options: Sequence[Option], budget_bytes: int, most: int) -> list[Option]:
    """Return up to `most` options: those that the best picks use, then those not dominated in peak and seconds.

    Args:
        options: retentions of the whole step.
        budget_bytes: of the instance, residents left out.
        most: maximum number of options.
    """
    picks = [_pick(options, int(aim * budget_bytes)) for aim in (1.0, _LOWER, _LOWER**2)]
    chosen = list(dict.fromkeys(int(option) for used in picks if used is not None for option in used))[:most]
    left = sorted(
        set(range(len(options))) - set(chosen),
        key=lambda index: (options[index].peak_bytes, options[index].total_seconds),
    )
    while left and len(chosen) < most:
        front: list[int] = []
        for index in left:
            if not front or options[index].total_seconds < options[front[-1]].total_seconds:
                front.append(index)
        if len(front) > most - len(chosen):
            front = [front[place] for place in np.linspace(0, len(front) - 1, most - len(chosen)).astype(int)]
        chosen += front
        taken = set(front)
        left = [index for index in left if index not in taken]
    return [options[index] for index in chosen]
