"""What `make gpu` measures of a step on a GPU: the bytes of each run alone, and the seconds of several in turns."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from _gpu_driver import Driver
from _measure import GIB, MIB

Run = Callable[[], object]
STEPS_ALONE = 4  # the first makes the optimizer's state, a second one splits the blocks of the first
TURNS = 12
LEAST_TURNS = 3  # whatever the time
_COUNTED = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free")


@dataclass(slots=True, kw_only=True)
class Way:
    """One way to run a step.

    Attributes:
        name: of the way.
        run: one whole step.
        entered: a block around its steps.
        held_bytes: that it keeps between its steps, beside the model and the optimizer.
        tell: what it says of itself.
        found: what is known of it.
    """

    name: str
    run: Run
    entered: Callable[[], AbstractContextManager[Any]] = nullcontext
    held_bytes: Callable[[], int] = lambda: 0
    tell: Callable[[], dict[str, Any]] = dict
    found: dict[str, Any] = field(default_factory=dict[str, Any])


@contextmanager
def peaks(device: int = 0) -> Iterator[Callable[[], dict[str, int]]]:
    """Yield what tells the most bytes reserved and live since the block began; memfit resets torch's counters too.

    Over the GPU that is not there the driver tells what was reserved.
    """
    driver = Driver.of_this_process() if Driver.is_there() else None
    seen = [0, 0]
    reset = torch.cuda.reset_peak_memory_stats

    def note(*args: Any, **how: Any) -> None:
        reserved_bytes = driver.peak_bytes(device) if driver else torch.cuda.max_memory_reserved(device)
        now = reserved_bytes, torch.cuda.max_memory_allocated(device)
        seen[:] = (max(pair) for pair in zip(seen, now, strict=True))
        reset(*args, **how)

    def read() -> dict[str, int]:
        note(device)
        return dict(zip(("reserved_bytes", "live_bytes"), seen, strict=True))

    reset(device)
    if driver:
        driver.forget_peaks()
    torch.cuda.reset_peak_memory_stats = note
    try:
        yield read
    finally:
        torch.cuda.reset_peak_memory_stats = reset


def let_go(device: int = 0) -> None:
    """Give unused memory back to the driver; but the workspaces of cuBLAS, which plans count and steps take anew."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def each_step(run: Run, steps: int, device: int = 0) -> list[dict[str, int]]:
    """Run steps; return for each the most bytes reserved, leftovers of the step before included, and the most live."""
    found: list[dict[str, int]] = []
    for _ in range(steps):
        with peaks(device) as read:
            run()
            torch.cuda.synchronize(device)
        found.append(read())
    return found


def alone(way: Way, others: Sequence[Way] = (), steps: int = STEPS_ALONE) -> dict[str, Any]:
    """What a way takes by itself: of each step the bytes reserved and live, less what other ways keep meanwhile."""
    let_go()
    beside_bytes = sum(other.held_bytes() for other in others if other is not way)
    before = torch.cuda.memory_stats()
    with way.entered():
        found = each_step(way.run, steps)
    after = torch.cuda.memory_stats()
    taken = [{name: count - beside_bytes for name, count in step.items()} for step in found]
    return {
        "steps": taken,
        "reserved_bytes": max(step["reserved_bytes"] for step in taken),
        "live_bytes": max(step["live_bytes"] for step in taken),
        "counts": {name: after.get(name, 0) - before.get(name, 0) for name in _COUNTED},
    }


def in_turns(ways: Sequence[Way], turns: int, *, until: float, steps: int = 1) -> Iterator[int]:
    """Time all ways in turns, each beginning one turn; yield the number of turns after each.

    Before a way's turn the cache of torch's allocator is emptied, and one step runs untimed: nothing of the others is
    reserved then. `seconds` are the device's, from event to event; `wall_seconds` the host's.

    Args:
        ways: to time; their `found` gets the samples, the median, and the ratio to the first way.
        turns: how many.
        until: no further turn begins after this time (of `time.monotonic`), but for the least number of turns.
        steps: timed together.
    """
    for way in ways:
        way.found |= {"seconds": [], "wall_seconds": []}
    for turn in range(turns):
        if turn >= LEAST_TURNS and time.monotonic() > until:
            return
        start = turn % len(ways)
        for way in [*ways[start:], *ways[:start]]:
            torch.cuda.empty_cache()
            with way.entered():
                way.run()
                seconds, wall_seconds = timed(way.run, steps)
            way.found["seconds"].append(seconds)
            way.found["wall_seconds"].append(wall_seconds)
        for way in ways:
            pairs = zip(way.found["seconds"], ways[0].found["seconds"], strict=True)
            way.found["median_seconds"] = statistics.median(way.found["seconds"])
            way.found["time_ratio"] = statistics.median(own / first for own, first in pairs)
        yield turn + 1


def timed(run: Run, steps: int = 1) -> tuple[float, float]:
    """Return the seconds of a step on the device, and on the host's clock, over some steps."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    began = time.perf_counter()
    begin.record()
    for _ in range(steps):
        run()
    end.record()
    end.synchronize()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000 / steps, (time.perf_counter() - began) / steps


def line_of_ways(found: dict[str, dict[str, Any]]) -> str:
    """What matters of some ways, for the terminal: GiB reserved, and the ratio of seconds to the first way."""
    return " | ".join(f"{name} {_cell(each)}" for name, each in found.items() if "not_there" not in each)


def _cell(found: dict[str, Any]) -> str:
    if "error" in found:
        return str(found["error"])[:60]
    ratio = f" x{found['time_ratio']:.3f}" if "time_ratio" in found else ""
    return f"{found['reserved_bytes'] / GIB:.2f}{ratio}"


def over(name: str, steps: Sequence[dict[str, int]], budget_bytes: int) -> list[str]:
    """Say in a line which steps reserved more than a budget; nothing where none did."""
    beyond = [number for number, step in enumerate(steps) if step["reserved_bytes"] > budget_bytes]
    if not beyond:
        return []
    most = max(step["reserved_bytes"] for step in steps) / MIB
    return [f"{name}: steps {beyond} reserved up to {most:,.1f} MiB of a budget of {budget_bytes / MIB:,.1f}"]
