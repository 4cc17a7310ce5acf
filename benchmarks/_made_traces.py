"""Made traces that look like training: many short live ranges, a few long ones, sizes over five orders of magnitude."""

from __future__ import annotations

import numpy as np

from memfit.errors import InvalidOptionError
from memfit.packing.blocks import Blocks

_MEAN_STEPS = 200
_LONG_SHARE = 0.02
_LONG_FACTOR = 50
_LEAST_SIZE_LOG2, _MOST_SIZE_LOG2 = 9.0, 24.0


def made_trace(block_count: int, *, seed: int = 0) -> Blocks:
    """Return blocks over a horizon of as many steps as there are blocks.

    Starts are uniform; the lengths of live ranges are geometric with mean 200, 2% of them fifty times longer, all cut
    at the horizon; sizes are log-uniform between 2^9 and 2^24 bytes. The same seed gives the same trace.

    >>> made_trace(1000, seed=0)
    Blocks(1000 blocks, 1 bytes of alignment)
    """
    if block_count < 1:
        raise InvalidOptionError(f"a trace of {block_count} blocks was asked for, expected 1 or more")
    random = np.random.default_rng(seed)
    starts = random.integers(0, block_count, block_count)
    lengths = random.geometric(1 / _MEAN_STEPS, block_count)
    lengths = np.where(random.random(block_count) < _LONG_SHARE, _LONG_FACTOR * lengths, lengths)
    sizes = np.exp2(random.uniform(_LEAST_SIZE_LOG2, _MOST_SIZE_LOG2, block_count)).astype(np.int64)
    return Blocks(
        ids=np.arange(block_count),
        sizes_bytes=sizes,
        starts=starts,
        ends=np.minimum(starts + lengths, block_count),
    )
