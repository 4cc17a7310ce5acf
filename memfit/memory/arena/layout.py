"""Recordings of a step's requests, and the plans that give each request its address.

Time is counted in requests. Request `n` is live from `n` to its end: the number of requests that had been made when it
was freed. Two requests can share an address if and only if one was freed before the other was made. The order of frees
between two requests does not matter, and the time axis has no empty steps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memfit.packing import Blocks, Layout, pack
from memfit.packing.blocks import live_bytes

OUTLIVES = -1  # in `ends`: not freed within the step; in `offsets`: not in the arena

_ALIKE = 2.0  # sizes at one place of sequences of different lengths, the larger by the smaller


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The requests of one step, in order.

    Attributes:
        sizes_bytes: int64[n], as requested.
        ends: int64[n], the number of requests that had been made when each was freed; OUTLIVES if it was not freed.
    """

    sizes_bytes: NDArray[np.int64]
    ends: NDArray[np.int64]

    @property
    def outlives(self) -> NDArray[np.bool_]:
        """Of each request, whether it was still alive at the end of the step."""
        return self.ends == OUTLIVES

    @property
    def outliving_bytes(self) -> int:
        """Bytes of all requests that were still alive at the end of the step."""
        return int(self.sizes_bytes[self.outlives].sum())

    def equals(self, other: Recording) -> bool:
        """Whether both are the same requests with the same live ranges."""
        return np.array_equal(self.sizes_bytes, other.sizes_bytes) and np.array_equal(self.ends, other.ends)

    def merged(self, newer: Recording) -> Recording:
        """Return a recording that covers both steps: the longer one, with what both begin with merged.

        Each request gets the larger size and the later end: what varies leads to a few new plans, and not to one at
        each change (section 4.3 of the paper, whose reoptimization keeps the larger requests). Sequences of different
        lengths are not the same requests all along: where sizes differ much, they are ordinary memory from then on, as
        between the paper's interrupt and resume. An address for the larger one would cost its bytes in each step.

        Args:
            newer: the recording of a later step.
        """
        longer, shorter = (self, newer) if len(self.ends) > len(newer.ends) else (newer, self)
        both = slice(len(shorter.ends))
        sizes, ends = longer.sizes_bytes.copy(), longer.ends.copy()
        sizes[both] = np.maximum(sizes[both], shorter.sizes_bytes)
        ends[both] = np.maximum(ends[both], shorter.ends)
        least = np.minimum(longer.sizes_bytes[both], shorter.sizes_bytes)
        differs = (sizes[both] > _ALIKE * least) & (len(longer.ends) > len(shorter.ends))
        ends[both][longer.outlives[both] | shorter.outlives | differs] = OUTLIVES
        return Recording(sizes_bytes=sizes, ends=ends)

    def blocks(self, alignment_bytes: int) -> Blocks:
        """Return the requests that do not outlive the step as blocks, whose ids are the numbers of the requests."""
        numbers = np.flatnonzero(~self.outlives)
        return Blocks(
            ids=numbers,
            sizes_bytes=self.sizes_bytes[numbers],
            starts=numbers,
            ends=self.ends[numbers],
            alignment_bytes=alignment_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaPlan:
    """The address of each request of a step.

    Attributes:
        recording: the requests that the plan was made for.
        offsets_bytes: int64[n], the address in the arena; OUTLIVES if the request is not in the arena.
        sizes_bytes: int64[n], the bytes at that address: the size as requested, rounded up to the alignment.
        height_bytes: the bytes of the arena.
        lower_bound_bytes: a lower bound on the height of any layout of these requests.
        peak_bytes: the greatest number of live bytes of the requests in the arena, without alignment.
        apart_bytes: the sum of their sizes.
        proven: whether no layout is lower.
        seconds: how long the search for the layout took.
    """

    recording: Recording
    offsets_bytes: NDArray[np.int64]
    sizes_bytes: NDArray[np.int64]
    height_bytes: int
    lower_bound_bytes: int
    peak_bytes: int
    apart_bytes: int
    proven: bool
    seconds: float


def make_arena_plan(
    recording: Recording, *, alignment_bytes: int, packer: str, time_limit_seconds: float, seed: int
) -> ArenaPlan:
    """Pack the requests that do not outlive the step.

    Args:
        recording: the requests of a step.
        alignment_bytes: every address is a multiple of it.
        packer: one of `memfit packers`.
        time_limit_seconds: how long the packer may search.
        seed: of all that is random in the packer.
    """
    started = time.perf_counter()
    blocks = recording.blocks(alignment_bytes)
    offsets = np.full(len(recording.ends), OUTLIVES, np.int64)
    sizes = recording.sizes_bytes.copy()
    layout: Layout | None = None
    if len(blocks):
        layout = pack(blocks, packer, time_limit_seconds=time_limit_seconds, seed=seed)
        offsets[blocks.ids] = layout.offsets_bytes
        # the padding of the alignment is part of the block: a request that grows into it is served
        sizes[blocks.ids] = blocks.sizes_bytes
    exact = recording.blocks(1)
    return ArenaPlan(
        recording=recording,
        offsets_bytes=offsets,
        sizes_bytes=sizes,
        height_bytes=layout.height_bytes if layout else 0,
        lower_bound_bytes=layout.lower_bound_bytes if layout else 0,
        peak_bytes=int(live_bytes(exact)[1].max(initial=0)),
        apart_bytes=int(exact.sizes_bytes.sum()),
        proven=layout is None or layout.proven,
        seconds=time.perf_counter() - started,
    )
