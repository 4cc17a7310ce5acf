"""The one estimate of a measured overhead, with its spread; torch-free."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

_CONFIDENCE = 0.9


def spread_of(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return between which values the overhead is, as far as the turns tell: lowest and highest.

    It is the distribution-free interval of the median of the turns' own ratios, at 90% or more where there are five
    turns or more, and their whole range where there are fewer. The ratio of the medians is always inside.

        >>> spread_of([(1.0, 1.25), (1.0, 1.5), (1.0, 1.375)])
        (0.25, 0.5)

    Args:
        pairs: baseline and planned seconds of each turn, one or more.
    """
    ratios = sorted(planned / baseline for baseline, planned in pairs)
    left_out = _left_out(len(ratios))
    middle = ratio_of(pairs)
    low, high = min(ratios[left_out], middle), max(ratios[-1 - left_out], middle)
    return low - 1.0, high - 1.0


def ratio_of(pairs: Sequence[tuple[float, float]]) -> float:
    """Return median planned seconds over median baseline seconds.

    Args:
        pairs: as for `spread_of`.
    """
    return statistics.median(planned for _, planned in pairs) / statistics.median(baseline for baseline, _ in pairs)


def _left_out(count: int) -> int:
    """Return how many of the smallest, and of the largest, of so many ratios are outside of the interval."""
    left_out = 0
    while 2 * sum(math.comb(count, below) for below in range(left_out + 2)) <= (1.0 - _CONFIDENCE) * 2**count:
        left_out += 1
    return left_out
