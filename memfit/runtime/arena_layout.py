"""From the requests of a recorded step to the addresses that the next step gets.

Time is counted in requests: request `number` is alive from `number` until as many requests as `end` says had been made
when it was freed. Two of them can never share an address exactly if one was not freed before the other was made, so the
order of frees between two requests does not matter, and the time axis has no empty steps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memfit.packing import Blocks, Layout, pack
from memfit.packing.blocks import live_bytes

OUTLIVES = -1  # in `ends`: not freed within the step; in `offsets`: not in the arena


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The requests of one step, in order.

    Attributes:
        sizes_bytes: int64[n], as requested.
        ends: int64[n], how many requests there had been when it was freed; OUTLIVES if it never was.
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
        """Return what covers both steps if they made as many requests, else the newer one.

        Each request gets the larger size and the later end, so that a size or a live range that goes up and down causes
        one new plan and not one for each change.
        """
        if len(self.ends) != len(newer.ends):
            return newer
        ends = np.maximum(self.ends, newer.ends)
        ends[self.outlives | newer.outlives] = OUTLIVES
        return Recording(sizes_bytes=np.maximum(self.sizes_bytes, newer.sizes_bytes), ends=ends)

    def blocks(self, alignment_bytes: int) -> Blocks:
        """Return the requests that do not outlive the step; ids are their numbers."""
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
    """Where each request of a step goes.

    Attributes:
        recording: what it was made for.
        offsets_bytes: int64[n]; OUTLIVES where the request is not in the arena.
        height_bytes: what the arena needs.
        lower_bound_bytes: no layout of these requests is lower.
        peak_bytes: the most bytes live at once of the requests that are in the arena, as requested: without alignment.
        apart_bytes: what they would take if each had its own memory.
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
    """Pack the requests that do not outlive the step."""
    started = time.perf_counter()
    blocks = recording.blocks(alignment_bytes)
    offsets = np.full(len(recording.ends), OUTLIVES, np.int64)
    sizes = recording.sizes_bytes.copy()
    layout: Layout | None = None
    if len(blocks):
        layout = pack(blocks, packer, time_limit_seconds=time_limit_seconds, seed=seed)
        offsets[blocks.ids] = layout.offsets_bytes
        # what the alignment adds belongs to the block: a request that grows into it is served
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
