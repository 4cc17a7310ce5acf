"""Which offload intervals pay: the three streams of a step with offloading, simulated, and annealing over the choice.

The simulation is that of `memfit.simulate`, for the schedule that
`memfit.planners.engine.offloading.intervals.with_offloads` makes, but for what copies do to one another and to compute:
here each copy has its direction's rate alone, and what it takes of compute's rate delays compute when it starts.
`memfit.simulate` then judges the schedule.

A copy to the host starts right after the use that opens the interval. The storage leaves the device before the first
stop at which the copy is done, or earlier if the budget needs its bytes; compute then waits for the copy. The copy back
starts as late as the link allows without a stall, or later if the budget has no room for it until then.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.planners.engine.annealing.state import draw
from memfit.planners.engine.offloading.intervals import OffloadIntervals
from memfit.system.compiled import compiled, entry_point
from memfit.system.records import Table, record

_NOWHERE = -1
_SWAP = 0.4  # share of moves that exchange two intervals
_AT_PEAK, _TRIES = 0.5, 8  # share of draws that prefer an interval over the peak; draws for one
_ADAPT_EVERY, _STIFFER, _SOFTER = 50, 1.05, 0.95  # of the penalty, as in `memfit.planners.engine.annealing.loop`

_TOTALS = record(
    "budget_bytes host_budget_bytes peak_bytes peak_stop host_peak_bytes offloaded_bytes host_bytes "
    "started leaving returning read blocked_until tried",
    floats="seconds excess now offload_end prefetch_end copy_compute_seconds_per_byte temperature penalty cost "
    "best_seconds",
    flags="is_impossible",
    unsigned="random",
)


class Streams(NamedTuple):
    """Offload intervals as arrays, the best choice found, and one record of totals.

    The totals hold the budgets; the results of the last simulation (`excess` is the bytes above the budget, summed over
    the stops; `is_impossible` says that an interval is too short for its copy, or that the host is full); the position
    of the simulation (three clocks; places in `intervals` and `by_end`); and the state of the annealing. `best_seconds`
    is infinite until a choice fits.
    """

    stops: Table
    intervals: Table
    by_end: NDArray[np.int64]
    host_copies: Table
    best: NDArray[np.bool_]
    totals: Table


def make_streams(
    found: OffloadIntervals,
    budget_bytes: int,
    host_budget_bytes: int,
    seed: int,
    *,
    copy_compute_seconds_per_byte: float = 0.0,
) -> Streams:
    """Return the streams of these intervals, not simulated yet.

    Args:
        found: its `intervals` are shared, and changed by the functions here.
        budget_bytes: most bytes on the device, residents and bytes outside the graph included.
        host_budget_bytes: most bytes of host copies.
        seed: of the annealing's random numbers.
        copy_compute_seconds_per_byte: the seconds of compute that a copied byte takes away.
    """
    totals = np.zeros(1, _TOTALS)
    totals["random"] = np.random.SeedSequence(seed).generate_state(1, np.uint64) | np.uint64(1)
    totals["budget_bytes"], totals["host_budget_bytes"] = budget_bytes, host_budget_bytes
    totals["best_seconds"], totals["copy_compute_seconds_per_byte"] = np.inf, copy_compute_seconds_per_byte
    best = np.zeros(len(found.intervals), np.bool_)
    return Streams(found.stops, found.intervals, found.by_end, found.host_copies, best, totals)


def make_possible(streams: Streams) -> None:
    """Drop chosen intervals until each is long enough for its copies and the host has room for all."""
    intervals, totals = streams.intervals, streams.totals
    run(streams)
    while totals["is_impossible"][0]:
        place = int(totals["returning"][0])
        if place < len(intervals):
            intervals["chosen"][streams.by_end[place]] = False
        else:
            chosen = np.flatnonzero(intervals["chosen"])
            intervals["chosen"][chosen[np.argmax(intervals["host_bytes"][chosen])]] = False
        run(streams)


@entry_point
def run(streams: Streams) -> None:
    """Simulate the step with the `chosen` intervals: fill in when each storage leaves and returns, and the totals."""
    _begin(streams)
    totals, stops = streams.totals[0], streams.stops
    for stop in range(len(stops)):
        _release(streams, stop)
        _start_prefetches(streams, stop)
        first_read = totals.read
        _wait_for_reads(streams, stop)
        if totals.is_impossible:
            return
        held = stops[stop].held_bytes - totals.offloaded_bytes
        totals.excess += max(0, held - totals.budget_bytes)
        if held > totals.peak_bytes:
            totals.peak_bytes = held
            totals.peak_stop = stop
        totals.now += stops[stop].seconds
        _start_offloads(streams, stop, first_read)
    totals.seconds = max(totals.now, max(totals.offload_end, totals.prefetch_end))
    totals.is_impossible = totals.host_peak_bytes > totals.host_budget_bytes


@compiled
def _begin(streams: Streams) -> None:
    """Reset the simulation; compute from the end when each copy back has to start (`due_seconds`)."""
    intervals, totals = streams.intervals, streams.totals[0]
    totals.now = totals.offload_end = totals.prefetch_end = totals.excess = 0.0
    totals.offloaded_bytes = totals.host_bytes = totals.host_peak_bytes = totals.peak_bytes = totals.peak_stop = 0
    totals.started = totals.leaving = totals.returning = totals.read = 0
    totals.blocked_until = _NOWHERE
    totals.is_impossible = False
    due_seconds = np.inf
    for index in range(len(intervals) - 1, -1, -1):
        interval = intervals[streams.by_end[index]]
        if interval.chosen:
            due_seconds = min(due_seconds, streams.stops[interval.end].done_seconds) - interval.prefetch_seconds
            interval.due_seconds = due_seconds
    for index in range(len(intervals)):
        interval = intervals[index]
        if interval.chosen:
            interval.left = _NOWHERE
            streams.host_copies[interval.host_copy].is_made = False
            streams.host_copies[interval.host_copy].last = index


@compiled
def _release(streams: Streams, stop: int) -> None:
    """Free storages whose copy to the host ends before `stop`; wait for more copies if the budget needs their bytes."""
    intervals, totals = streams.intervals, streams.totals[0]
    returning_bytes, index = 0, totals.returning  # of storages read at this stop
    while index < len(intervals) and intervals[streams.by_end[index]].end == stop:
        if intervals[streams.by_end[index]].chosen:
            returning_bytes += intervals[streams.by_end[index]].size_bytes
        index += 1
    while totals.leaving < totals.started:
        interval = intervals[totals.leaving]
        if interval.chosen and interval.copied:
            held = streams.stops[stop].held_bytes - totals.offloaded_bytes + returning_bytes
            if interval.offload_end > totals.now and held <= totals.budget_bytes:
                break
            totals.now = max(totals.now, interval.offload_end)
            totals.offloaded_bytes += interval.size_bytes
            totals.blocked_until = _NOWHERE
            interval.left = stop
        totals.leaving += 1


@compiled
def _start_prefetches(streams: Streams, stop: int) -> None:
    """Start the copies back that are due before `stop`: storages read there, and those that would cause a stall."""
    intervals, totals = streams.intervals, streams.totals[0]
    while totals.returning < len(intervals):
        interval = intervals[streams.by_end[totals.returning]]
        if interval.chosen:
            is_on_host = interval.start < stop and interval.left != _NOWHERE and interval.left <= stop
            if interval.end > stop and not (is_on_host and _is_due(streams, interval, stop)):
                return
            if not is_on_host:
                totals.is_impossible = True
                return
            totals.offloaded_bytes -= interval.size_bytes
            totals.prefetch_end = max(totals.now, totals.prefetch_end) + interval.prefetch_seconds
            totals.now += totals.copy_compute_seconds_per_byte * interval.host_bytes
            totals.blocked_until = _NOWHERE
            interval.prefetch_end = totals.prefetch_end
            interval.returned = stop
        totals.returning += 1


@compiled
def _is_due(streams: Streams, interval: Any, stop: int) -> bool:
    """Whether the copy back has to start before `stop`, and the budget has room for it from there on."""
    stops, totals = streams.stops, streams.totals[0]
    if interval.due_seconds >= stops[stop + 1].done_seconds or stop <= totals.blocked_until:
        return False
    room_bytes = totals.budget_bytes + totals.offloaded_bytes - interval.size_bytes
    for later in range(interval.end - 1, stop - 1, -1):
        if stops[later].held_bytes > room_bytes:
            totals.blocked_until = later
            return False
    return True


@compiled
def _wait_for_reads(streams: Streams, stop: int) -> None:
    """Wait for the copies back that `stop` reads."""
    intervals, totals = streams.intervals, streams.totals[0]
    while totals.read < len(intervals) and intervals[streams.by_end[totals.read]].end == stop:
        interval = intervals[streams.by_end[totals.read]]
        if interval.chosen:
            totals.now = max(totals.now, interval.prefetch_end)
        totals.read += 1


@compiled
def _start_offloads(streams: Streams, stop: int, first_read: int) -> None:
    """Free the host copies read for the last time at `stop`; start the copies of intervals that open there."""
    intervals, host_copies, totals = streams.intervals, streams.host_copies, streams.totals[0]
    for index in range(first_read, totals.read):
        interval = intervals[streams.by_end[index]]
        if interval.chosen and host_copies[interval.host_copy].last == streams.by_end[index]:
            totals.host_bytes -= interval.host_bytes
    while totals.started < len(intervals) and intervals[totals.started].start == stop:
        interval = intervals[totals.started]
        if interval.chosen:
            interval.copied = not host_copies[interval.host_copy].is_made
            if interval.copied:
                host_copies[interval.host_copy].is_made = True
                totals.offload_end = max(totals.now, totals.offload_end) + interval.offload_seconds
                totals.now += totals.copy_compute_seconds_per_byte * interval.host_bytes
                interval.offload_end = totals.offload_end
                totals.host_bytes += interval.host_bytes
                totals.host_peak_bytes = max(totals.host_peak_bytes, totals.host_bytes)
            else:
                totals.offloaded_bytes += interval.size_bytes
                totals.blocked_until = _NOWHERE
                interval.left = stop + 1
        totals.started += 1


@entry_point
def anneal(streams: Streams, moves: int, cooling: float) -> None:
    """Try `moves` changes of the choice; after each, the temperature is multiplied by `cooling`.

    The choice at the start has to be possible. The penalty adapts as in `memfit.planners.engine.annealing.loop`.

    Args:
        streams: the intervals and the choice; changed.
        moves: how many to try.
        cooling: factor of the temperature.
    """
    totals = streams.totals[0]
    run(streams)
    _remember(streams)
    seconds, excess, peak = totals.seconds, totals.excess, totals.peak_stop
    for _ in range(moves if len(streams.intervals) > 0 else 0):
        totals.tried += 1
        first, second = _pick(streams, peak), _NOWHERE
        if draw(streams.totals) < _SWAP:
            second = _pick(streams, peak)
            if streams.intervals[second].chosen == streams.intervals[first].chosen:
                second = _NOWHERE
        _flip(streams, first, second)
        run(streams)
        limit = seconds + totals.penalty * excess - totals.temperature * np.log(draw(streams.totals) + 1e-300)
        if totals.is_impossible or totals.seconds + totals.penalty * totals.excess > limit:
            _flip(streams, first, second)
        else:
            seconds, excess, peak = totals.seconds, totals.excess, totals.peak_stop
            _remember(streams)
        totals.temperature *= cooling
        if totals.tried % _ADAPT_EVERY == 0:
            totals.penalty *= _SOFTER if excess <= 0 else _STIFFER


@entry_point
def prune(streams: Streams) -> None:
    """Drop every interval without which the step still fits and is no slower; the choice has to fit."""
    totals = streams.totals[0]
    run(streams)
    seconds = totals.seconds
    for index in range(len(streams.intervals)):
        if streams.intervals[index].chosen:
            streams.intervals[index].chosen = False
            run(streams)
            if totals.is_impossible or totals.excess > 0 or totals.seconds > seconds:
                streams.intervals[index].chosen = True
            else:
                seconds = totals.seconds


@compiled
def _pick(streams: Streams, peak: int) -> int:
    """Return a random interval; in half of the calls one that contains the stop `peak`, if a few draws find one."""
    at_peak, interval = draw(streams.totals) < _AT_PEAK, 0
    for _ in range(_TRIES):
        interval = int(draw(streams.totals) * len(streams.intervals))
        if not at_peak or (streams.intervals[interval].start < peak and peak < streams.intervals[interval].end):
            break
    return interval


@compiled
def _flip(streams: Streams, first: int, second: int) -> None:
    """Choose one interval or two, or drop them if they are chosen; `second` may be -1."""
    streams.intervals[first].chosen = not streams.intervals[first].chosen
    if second >= 0:
        streams.intervals[second].chosen = not streams.intervals[second].chosen


@compiled
def _remember(streams: Streams) -> None:
    """Keep the current choice if it fits and is the fastest so far."""
    totals = streams.totals[0]
    if totals.excess <= 0 and not totals.is_impossible and totals.seconds < totals.best_seconds:
        totals.best_seconds = totals.seconds
        for index in range(len(streams.intervals)):
            streams.best[index] = streams.intervals[index].chosen
