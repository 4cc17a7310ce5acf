"""Blocks that fit without a gap: a rectangle of steps and bytes, cut up."""

from __future__ import annotations

import numpy as np

from memfit.packing import Block, Blocks


def cut_up(count: int, steps: int, height_bytes: int, seed: int) -> Blocks:
    """Return a rectangle, cut into blocks across or along one at a time: they can be packed without a gap."""
    random = np.random.default_rng(seed)
    pieces = [(0, steps, 0, height_bytes)]
    while len(pieces) < count:
        start, end, low, high = pieces.pop(int(random.integers(len(pieces))))
        if end - start > 1 and random.random() < (end - start) / steps / (
            (end - start) / steps + (high - low) / height_bytes
        ):
            cut = int(random.integers(start + 1, end))
            pieces += [(start, cut, low, high), (cut, end, low, high)]
        elif high - low > 1:
            cut = int(random.integers(low + 1, high))
            pieces += [(start, end, low, cut), (start, end, cut, high)]
        else:
            pieces.append((start, end, low, high))
    random.shuffle(pieces)
    return Blocks.of(
        Block(id=i, bytes=high - low, start=start, end=end) for i, (start, end, low, high) in enumerate(pieces)
    )
