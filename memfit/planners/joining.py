"""Joining: from several windows for the whole step, the best of them block by block, by dynamic programming.

What must fit is, in each block, what earlier blocks keep over the turning point and what the block itself holds above
that. So the state between two blocks is the bytes kept so far and whose windows are in force; others may follow where
all that crosses is kept. Bytes are counted in a few thousand units, and the result is simulated: where its exact peak
is above the budget, the next try aims lower.

Source: the knapsack over stages of Feng and Huang 2018 and of rotor (Beaumont et al. 2019), with whole plans as
options.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from memfit.compiled import entry_point
from memfit.planners.blocks import Blocks, Option, option_of
from memfit.planners.windows import Integers, Windows

_UNITS = 1024  # of what the budget leaves: the precision of bytes
_TRIES = 7  # of aims between the budget and what already fits
_LOWER = 0.93  # from one aim to the next, as long as nothing fits


def join(blocks: Blocks, options: Sequence[Option]) -> list[Option]:
    """Return joined windows of several aims, in the order in which they were tried.

    Args:
        blocks: of the program that the options are for.
        options: at least one.
    """
    budget_bytes = blocks.program.budget_bytes
    found: list[Option] = []
    low, high, aim = 0.0, 1.0, 1.0
    for _ in range(_TRIES):
        picks = _pick(options, int(aim * budget_bytes))
        if picks is None:
            break
        option = option_of(blocks, _assembled(blocks, options, picks))
        found.append(option)
        if option.peak_bytes <= blocks.program.problem.budget_bytes:
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
    best = np.full((2, count, _UNITS + 1), np.inf)
    switched = np.zeros((blocks, count, _UNITS + 1), np.bool_)
    cheapest = np.zeros((blocks, _UNITS + 1), np.int64)
    _tabulate(seconds, kept, room, is_border, best, np.empty(_UNITS + 1), switched, cheapest)
    option, units = (int(index) for index in np.unravel_index(int(np.argmin(best[blocks % 2])), best.shape[1:]))
    if not np.isfinite(best[blocks % 2, option, units]):
        return None
    picks = np.zeros(blocks, np.int64)
    for block in range(blocks - 1, -1, -1):
        picks[block] = option
        units -= int(kept[option, block])
        if switched[block, option, units]:
            option = int(cheapest[block, units])
    return picks


@entry_point
def _tabulate(
    seconds: Any, kept: Any, room: Any, is_border: Any, best: Any, least: Any, switched: Any, cheapest: Any
) -> None:
    """Fill the tables of the dynamic program.

    `best[block % 2, option, units]` is the least seconds of the blocks before `block`, with `units` kept by them and
    the windows of `option` in force; `switched` says that they are in force only from that block on, and were those of
    option `cheapest[block, units]` before. `least` is scratch, float64[units].
    """
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
    """Return bytes in units; their sums are rounded, so that many small ones neither vanish nor pile up."""
    sums = np.round(np.cumsum(kept_bytes) / unit).astype(np.int64)
    return np.diff(sums, prepend=0)


def _assembled(blocks: Blocks, options: Sequence[Option], picks: Integers) -> Windows:
    """Return the windows of each storage's block's option."""
    chosen = picks[blocks.of_storage][blocks.program.tables.gaps["storage"]]
    release = np.stack([option.windows.release for option in options])
    hold = np.stack([option.windows.hold for option in options])
    every = np.arange(len(chosen))
    return Windows(release=release[chosen, every], hold=hold[chosen, every])


def worth_joining(options: Sequence[Option], budget_bytes: int, most: int) -> list[Option]:
    """Return up to `most` options: those that the best picks use, then those that no other beats in peak and seconds.

    Args:
        budget_bytes: of the program, residents left out.
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
