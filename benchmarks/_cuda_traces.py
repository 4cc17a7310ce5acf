"""Random traces of requests for `cuda_allocator.py`: sizes over all rules, several streams, a full device, caps."""

from __future__ import annotations

import random
from dataclasses import dataclass

from memfit.simulate.allocator_trace import Event, EventKind
from memfit.simulate.cuda_allocator import AllocatorSettings

KIB, MIB = 1 << 10, 1 << 20
CAPACITY_BYTES = 64 << 30  # a power of two: the cap is a fraction of it
_RANGES = ((1, 4 * KIB), (512, 1 * MIB), (900 * KIB, 2 * MIB), (1 * MIB, 10 * MIB), (9 * MIB, 40 * MIB))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Events, and the device that they happen on."""

    name: str
    events: list[Event]
    settings: AllocatorSettings


def random_trace(seed: int, *, expandable: bool, max_split_bytes: int | None = None) -> Trace:
    """Return a trace of 100 to 700 events: of three, one on a device without end, one on a full one, one under a cap.

    Args:
        seed: gives the same events with and without expandable segments.
        expandable: the setting.
        max_split_bytes: the setting.
    """
    draw = random.Random(seed)
    events = _events(draw)
    alive = peak = 0
    sizes: dict[int, int] = {}
    for event in events:
        if event.kind == EventKind.ALLOCATE:
            sizes[event.block] = event.size_bytes
            alive += event.size_bytes
        elif event.kind == EventKind.FREE:
            alive -= sizes[event.block]
        peak = max(peak, alive)
    tight = max(4 * MIB, int(peak * draw.uniform(0.7, 1.5)) // (2 * MIB) * 2 * MIB)
    return Trace(
        name=f"random {seed}",
        events=events,
        settings=AllocatorSettings(
            expandable_segments=expandable,
            max_split_bytes=max_split_bytes,
            capacity_bytes=tight if seed % 3 == 1 else CAPACITY_BYTES,
            allowed_bytes=tight if seed % 3 == 2 else None,
        ),
    )


def _events(draw: random.Random) -> list[Event]:
    events: list[Event] = []
    alive: list[int] = []
    streams = draw.choice((1, 1, 2, 3))
    ranges = draw.sample(_RANGES, draw.randint(1, len(_RANGES)))
    few = [_size(draw, ranges) for _ in range(draw.randint(3, 12))]  # sizes that come again, as a step's do
    most_alive = draw.choice((5, 20, 60))
    repeats = draw.random()
    for block in range(draw.randint(50, 350)):
        size = draw.choice(few) if draw.random() < repeats else _size(draw, ranges)
        events.append(Event(EventKind.ALLOCATE, block, size, draw.randrange(streams)))
        alive.append(block)
        while alive and (len(alive) > most_alive or draw.random() < 0.45):
            freed = alive.pop(draw.randrange(len(alive)) if draw.random() < 0.6 else -1)
            if streams > 1 and draw.random() < 0.3:
                events.append(Event(EventKind.USE, freed, stream=draw.randrange(streams)))
            events.append(Event(EventKind.FREE, freed))
        if streams > 1 and draw.random() < 0.2:
            events.append(Event(EventKind.FINISH, stream=draw.randrange(streams)))
        if draw.random() < 0.01:
            events.append(Event(EventKind.EMPTY))
    return events


def _size(draw: random.Random, ranges: list[tuple[int, int]]) -> int:
    least, most = draw.choice(ranges)
    size = draw.randint(least, most)
    return size if draw.random() < 0.5 else max(1, size // (256 * KIB) * 256 * KIB)
