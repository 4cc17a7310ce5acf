"""What eager mode frees first where a call does not fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from memfit.eager_mode.kept import Kept
from memfit.eager_mode.sources import seconds_to_make

Policy = Callable[[Sequence[Kept], int], Iterable[Kept]]
"""Gives what may be freed, the best first, from that and the number of the next call; each is freed before the next
one is asked for."""


def cheap_and_stale(
    free: Sequence[Kept], now: int, seconds_of: Callable[[Kept], float] = lambda kept: seconds_to_make(kept.source)
) -> Iterable[Kept]:
    """Order by cost over bytes and the root of staleness, least first; what cannot be recomputed is left out.

    That is h of "Dynamic tensor rematerialization" (Kirisame et al. 2021), with measured costs, in which what a
    contents' call lacks itself counts too, and with less weight on staleness: backward reads everything once, so that
    age says when, and not whether.

    Args:
        free, now: see `Policy`.
        seconds_of: returns what it costs to let contents go.
    """
    scored: list[tuple[float, int, Kept]] = []
    for number, kept in enumerate(free):
        source = kept.source
        seconds = seconds_of(kept)
        if seconds < float("inf"):
            scored.append((seconds / (source.bytes * math.sqrt(now - source.used_at)), number, kept))
    return (kept for _, _, kept in sorted(scored, key=lambda each: each[:2]))
