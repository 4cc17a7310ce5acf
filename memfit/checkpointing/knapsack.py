"""A knapsack over the moments of a pass: one choice for each call of a block, the fewest seconds within all moments.

Calls come in the order of the forward pass. What a call holds is live from its forward pass to its backward pass, which
comes in reverse order: so at each moment a prefix of the calls holds its bytes. The search goes from call to call, and
keeps, of all prefixes, those that no other beats in bytes and in seconds. With few of them it is exact. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memfit.checkpointing.choices import Choice

_MOST_STATES = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """The bytes that the calls may hold together, moment by moment.

    Attributes:
        after: by call: the bytes that it and the calls before it may hold.
        within: by call: the bytes that the calls before it may hold beside what its own backward pass adds.
        forward: by call: the same for its own forward pass; empty: no limit.
    """

    after: Sequence[int]
    within: Sequence[int]
    forward: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """One choice for each call.

    Attributes:
        chosen: the index of the choice, by call.
        seconds: of all.
        bound_seconds: no solution takes fewer.
    """

    chosen: list[int]
    seconds: float
    bound_seconds: float


def solve(choices: Sequence[Sequence[Choice]], moments: Moments, most_states: int = _MOST_STATES) -> Solution | None:
    """Return the choices with the fewest seconds that keep within all moments; None if there are none.

    Args:
        choices: of each call, in the order of the forward pass.
        moments: the bytes that are allowed.
        most_states: kept after each call; of more, some are left out, and the bound may be below the seconds.
    """
    exact = _search(choices, moments, 0, most_states)
    if exact is None:
        return None
    chosen, seconds, was_thinned = exact
    bound = seconds
    if was_thinned:
        most = max([1, *(bytes_ for bytes_ in moments.after)])
        relaxed = _search(choices, moments, -(-most // most_states), most_states)
        bound = min(seconds, relaxed[1]) if relaxed is not None else seconds
    return Solution(chosen=chosen, seconds=seconds, bound_seconds=bound)


def _search(
    choices: Sequence[Sequence[Choice]], moments: Moments, unit_bytes: int, most_states: int
) -> tuple[list[int], float, bool] | None:
    """Return (choices, seconds, whether states were left out); with a unit, bytes are rounded down to multiples."""
    limits = np.minimum.accumulate(np.array(moments.after, dtype=np.int64)[::-1])[::-1]
    held, seconds = np.zeros(1, dtype=np.int64), np.zeros(1)
    steps: list[tuple[np.ndarray, np.ndarray]] = []  # for each state: the state before, and the choice
    was_thinned = False
    for call, options in enumerate(choices):
        own = np.array([option.held_bytes for option in options], dtype=np.int64)
        if unit_bytes:
            own = own // unit_bytes * unit_bytes
        more = np.array([option.more_bytes for option in options], dtype=np.int64)
        cost = np.array([option.seconds for option in options])
        sums = held[:, None] + own[None, :]
        fits = (sums <= limits[call]) & (held[:, None] + more[None, :] <= moments.within[call])
        if moments.forward:
            forward = np.array([option.forward_bytes for option in options], dtype=np.int64)
            fits &= held[:, None] + forward[None, :] <= moments.forward[call]
        before, choice = np.nonzero(fits)
        if not len(before):
            return None
        sums, total = sums[before, choice], seconds[before] + cost[choice]
        order = np.lexsort((choice, total, sums))
        best = np.minimum.accumulate(total[order])
        is_better = np.concatenate(([True], best[1:] < best[:-1]))
        kept = order[is_better]
        if len(kept) > most_states:
            was_thinned = True
            kept = kept[_spread(sums[kept], most_states)]
        held, seconds = sums[kept], total[kept]
        steps.append((before[kept], choice[kept]))
    state = int(np.argmin(seconds))
    found = float(seconds[state])
    chosen: list[int] = []
    for before, choice in reversed(steps):
        chosen.append(int(choice[state]))
        state = int(before[state])
    return chosen[::-1], found, was_thinned


def _spread(sums: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of at most about `count` states, the last of each of as many equal ranges of bytes."""
    bucket = (sums - sums[0]) * count // max(1, int(sums[-1] - sums[0]) + 1)
    is_last = np.concatenate((bucket[1:] != bucket[:-1], [True]))
    is_last[0] = True
    return np.nonzero(is_last)[0]
