"""The arena's C++ side driven by random requests and frees: no two live blocks ever overlap."""

from __future__ import annotations

import bisect
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.memory.arena.arena import Arena
from memfit.memory.arena.layout import OUTLIVES, Recording, make_arena_plan
from memfit.memory.arena.library import load_arena_library
from memfit.packing import check_layout
from memfit.packing.blocks import make_layout

ALIGNMENT_BYTES = 64
LARGEST_BYTES = 5000


class Live:
    """Blocks that are alive, each filled with a byte of its own; complains about an overlap, and about a lost byte."""

    def __init__(self) -> None:
        self.library = load_arena_library("cpu").library
        self.starts: list[int] = []
        self.blocks: dict[int, tuple[int, int]] = {}
        self.count = 0

    def allocate(self, size: int) -> int:
        address = self.library.memfit_arena_test_allocate(size)
        assert address % ALIGNMENT_BYTES == 0
        at = bisect.bisect(self.starts, address)
        if at:
            below = self.starts[at - 1]
            assert below + self.blocks[below][0] <= address, f"{below} reaches into {address}"
        if at < len(self.starts):
            assert address + size <= self.starts[at], f"{address} reaches into {self.starts[at]}"
        self.starts.insert(at, address)
        self.count += 1
        self.blocks[address] = size, self.count % 251
        self.bytes_of(address)[:] = self.count % 251
        return address

    def free(self, address: int) -> None:
        assert (self.bytes_of(address) == self.blocks[address][1]).all()
        self.starts.remove(address)
        del self.blocks[address]
        self.library.memfit_arena_test_free(address)

    def bytes_of(self, address: int) -> np.ndarray:
        import ctypes

        size = self.blocks[address][0]
        return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


@pytest.fixture
def live() -> Iterator[Live]:
    blocks = Live()
    with Arena().step():
        pass  # the arena has to have seen the ordinary allocator once
    yield blocks
    for address in list(blocks.blocks):
        blocks.free(address)


def run_script(live: Live, script: list[int], chance: random.Random, *, jitter: float, kept: float) -> None:
    """Carry out a step: at each number a size is requested (positive), or a live block of this step freed (negative).

    With probability `jitter` an event is changed, left out or done twice; of what is left, `kept` outlives the step.
    """
    mine: list[int] = []
    for event in script:
        size = event
        if chance.random() < jitter:
            kind = chance.randrange(4)
            if kind == 0:
                continue
            if kind == 1:
                mine.append(live.allocate(chance.randint(1, LARGEST_BYTES)))
            elif kind == 2 and size > 0:
                size = chance.randint(1, 2 * LARGEST_BYTES)
            elif mine:
                live.free(mine.pop(chance.randrange(len(mine))))
        if size > 0:
            mine.append(live.allocate(size))
        elif mine:
            live.free(mine.pop(-size % len(mine)))
    for address in mine:
        if chance.random() >= kept:
            live.free(address)


def make_script(chance: random.Random, length: int) -> list[int]:
    return [
        chance.randint(1, LARGEST_BYTES) if chance.random() < 0.55 else -chance.randint(0, 1000) for _ in range(length)
    ]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("jitter", "kept"), [(0.0, 0.0), (0.0, 0.1), (0.01, 0.05), (0.2, 0.2)])
def test_live_blocks_never_overlap(live: Live, seed: int, jitter: float, kept: float) -> None:
    chance = random.Random(seed)
    scripts = [make_script(chance, 300) for _ in range(2)]
    with Arena(packer="best_fit") as arena:
        for number in range(16):
            with arena.step(key=chance.randrange(2) if jitter < 0.1 else None):
                run_script(live, scripts[number % 2], chance, jitter=jitter, kept=kept)
            while len(live.starts) > 200:  # what earlier steps left behind goes at any time
                live.free(chance.choice(live.starts))
        assert arena.served > (300 if jitter < 0.1 else 0)  # steps that differ all along have little in common
        if jitter or kept:
            assert arena.counts.kept + arena.counts.outliving + arena.not_served > 0


def test_a_steady_script_is_served_at_the_planned_addresses(live: Live) -> None:
    script = make_script(random.Random(9), 500)
    addresses: list[list[int]] = []
    with Arena() as arena:
        for _ in range(4):
            with arena.step():
                before = live.count
                run_script(live, script, random.Random(0), jitter=0, kept=0)
            assert live.count - before == arena.last_step.served + arena.last_step.recorded
            addresses.append(list(live.starts))
        assert arena.counts.recorded == arena.last_step.served
        assert (arena.not_served, arena.reoptimizations) == (0, 0)


def test_threads_at_random(live: Live) -> None:
    """Frees come from other threads while the step's thread requests; the test's own table has a lock."""
    script, lock = make_script(random.Random(3), 400), threading.Lock()
    queue: list[int] = []
    stop = threading.Event()

    def freeing() -> None:
        while not stop.is_set() or queue:
            with lock:
                if queue:
                    live.free(queue.pop())

    threads = [threading.Thread(target=freeing) for _ in range(2)]
    for thread in threads:
        thread.start()
    with Arena(packer="first_fit") as arena:
        for _ in range(20):
            with arena.step():
                for event in script:
                    with lock:
                        if event > 0:
                            queue.insert(0, live.allocate(event))
        stop.set()
        for thread in threads:
            thread.join()
        assert arena.counts.recorded > 0


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    sizes = draw(st.lists(st.integers(1, 1000), min_size=1, max_size=30))
    ends = [draw(st.one_of(st.just(OUTLIVES), st.integers(at + 1, len(sizes)))) for at in range(len(sizes))]
    return Recording(sizes_bytes=np.array(sizes, np.int64), ends=np.array(ends, np.int64))


@given(recordings())
def test_a_plan_of_a_recording(recording: Recording) -> None:
    plan = make_arena_plan(recording, alignment_bytes=64, packer="best_fit", time_limit_seconds=0.1, seed=0)
    assert ((plan.offsets_bytes == OUTLIVES) == recording.outlives).all()
    assert (plan.sizes_bytes >= recording.sizes_bytes).all()
    inside = ~recording.outlives
    if inside.any():
        blocks = recording.blocks(64)
        check_layout(blocks, make_layout(blocks, plan.offsets_bytes[inside], packer="test"))
    assert plan.peak_bytes <= plan.lower_bound_bytes <= plan.height_bytes
    assert plan.apart_bytes + recording.outliving_bytes == recording.sizes_bytes.sum()


@given(recordings(), st.data())
def test_merged_recordings_cover_both(one: Recording, data: st.DataObject) -> None:
    other = data.draw(recordings())
    merged = one.merged(other)
    assert len(merged.ends) == max(len(one.ends), len(other.ends))
    for each in (one, other):
        both = slice(len(each.ends))
        assert (merged.sizes_bytes[both] >= each.sizes_bytes).all()
        assert (merged.outlives[both] | ((merged.ends[both] >= each.ends) & ~each.outlives)).all()
    if len(one.ends) != len(other.ends):
        shared = slice(min(len(one.ends), len(other.ends)))
        larger = np.maximum(one.sizes_bytes[shared], other.sizes_bytes[shared])
        differs = larger > 2 * np.minimum(one.sizes_bytes[shared], other.sizes_bytes[shared])
        assert merged.outlives[shared][differs].all()
    assert merged.equals(merged.merged(one))
    assert merged.equals(merged.merged(other))


def test_the_peak_of_a_recording_by_hand() -> None:
    # 0 is freed after two requests, 1 outlives, 2 and 3 are alive together
    recording = Recording(sizes_bytes=np.array([100, 50, 30, 70]), ends=np.array([2, OUTLIVES, 4, 4]))
    plan = make_arena_plan(recording, alignment_bytes=1, packer="auto", time_limit_seconds=1.0, seed=0)
    assert (plan.peak_bytes, plan.height_bytes, plan.apart_bytes) == (100, 100, 200)
    assert recording.outliving_bytes == 50
    assert plan.offsets_bytes[1] == OUTLIVES
