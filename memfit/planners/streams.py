"""Which trips to the host pay: the three streams of a step with trips, simulated, and annealing over which are made.

The simulation is that of `memfit.simulate`, for the schedule that `memfit.planners.trips.with_trips` makes: a copy to
the host starts right after the use that opens the trip, and the storage leaves the device before the first stop at
which the copy is done, or earlier, at the price of waiting, where the budget needs its bytes. The copy back starts as
late as the link allows without keeping compute waiting, or later, where the budget has no room for it until then.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.compiled import compiled, entry_point
from memfit.planners.course import draw
from memfit.planners.program import Table
from memfit.planners.trips import Trips

_NOWHERE = -1
_SWAP, _AT_PEAK = 0.4, 0.5  # shares of moves: one trip in the place of another; one that could be away at the peak
_TRIES = 8  # draws for such a trip
_ADAPT_EVERY, _STIFFER, _SOFTER = 50, 1.05, 0.95  # of the penalty, as in `memfit.planners.anneal`

_TOTALS = np.dtype(
    [
        ("random", np.uint64),
        ("budget_bytes", np.int64),
        ("host_budget_bytes", np.int64),
        ("seconds", np.float64),
        ("excess", np.float64),
        ("peak_bytes", np.int64),
        ("peak_stop", np.int64),
        ("host_peak_bytes", np.int64),
        ("is_impossible", np.bool_),
        ("now", np.float64),
        ("out_end", np.float64),
        ("back_end", np.float64),
        ("away_bytes", np.int64),
        ("host_bytes", np.int64),
        ("started", np.int64),
        ("leaving", np.int64),
        ("returning", np.int64),
        ("read", np.int64),
        ("blocked_until", np.int64),
        ("temperature", np.float64),
        ("penalty", np.float64),
        ("cost", np.float64),
        ("best_seconds", np.float64),
        ("tried", np.int64),
    ],
    align=True,
)


class Streams(NamedTuple):
    """Trips as arrays, the best choice that was found, and one record of totals.

    The totals hold the budgets, what the last simulation gave (`excess` is the bytes above the budget, summed over the
    stops; `is_impossible` says that a trip is too short for its copy, or that the host is full), where it stands (the
    three clocks; places in `trips` and `by_end`), and the annealing's course. `best_seconds` is infinite until a choice
    fits.
    """

    stops: Table
    trips: Table
    by_end: NDArray[np.int64]
    families: Table
    best: NDArray[np.bool_]
    totals: Table


def make_streams(found: Trips, budget_bytes: int, host_budget_bytes: int, seed: int) -> Streams:
    """Return the streams of these trips within the two budgets: nothing simulated yet."""
    totals = np.zeros(1, _TOTALS)
    totals["random"] = np.random.SeedSequence(seed).generate_state(1, np.uint64) | np.uint64(1)
    totals["budget_bytes"], totals["host_budget_bytes"] = budget_bytes, host_budget_bytes
    totals["best_seconds"] = np.inf
    best = np.zeros(len(found.trips), np.bool_)
    return Streams(found.stops, found.trips, found.by_end, found.families, best, totals)


def make_possible(streams: Streams) -> None:
    """Leave out trips until all that are made are long enough for their copies, and the host has room for them."""
    trips, totals = streams.trips, streams.totals
    run(streams)
    while totals["is_impossible"][0]:
        place = int(totals["returning"][0])
        if place < len(trips):
            trips["made"][streams.by_end[place]] = False
        else:
            made = np.flatnonzero(trips["made"])
            trips["made"][made[np.argmax(trips["host_bytes"][made])]] = False
        run(streams)


@entry_point
def run(streams: Any) -> None:
    """Simulate the step with the trips that are `made`: when each leaves and returns, and the totals."""
    begin(streams)
    totals, stops = streams.totals[0], streams.stops
    for stop in range(len(stops)):
        leave(streams, stop)
        come_back(streams, stop)
        first_read = totals.read
        arrive(streams, stop)
        if totals.is_impossible:
            return
        held = stops[stop].held_bytes - totals.away_bytes
        totals.excess += max(0, held - totals.budget_bytes)
        if held > totals.peak_bytes:
            totals.peak_bytes = held
            totals.peak_stop = stop
        totals.now += stops[stop].seconds
        set_out(streams, stop, first_read)
    totals.seconds = max(totals.now, max(totals.out_end, totals.back_end))
    totals.is_impossible = totals.host_peak_bytes > totals.host_budget_bytes


@compiled
def begin(streams: Any) -> None:
    """Bring everything to the start of the step; work out when each copy back has to start, seen from the end."""
    trips, totals = streams.trips, streams.totals[0]
    totals.now = totals.out_end = totals.back_end = totals.excess = 0.0
    totals.away_bytes = totals.host_bytes = totals.host_peak_bytes = totals.peak_bytes = totals.peak_stop = 0
    totals.started = totals.leaving = totals.returning = totals.read = 0
    totals.blocked_until = _NOWHERE
    totals.is_impossible = False
    due_seconds = np.inf
    for index in range(len(trips) - 1, -1, -1):
        trip = trips[streams.by_end[index]]
        if trip.made:
            due_seconds = min(due_seconds, streams.stops[trip.end].done_seconds) - trip.back_seconds
            trip.due_seconds = due_seconds
    for index in range(len(trips)):
        trip = trips[index]
        if trip.made:
            trip.left = _NOWHERE
            streams.families[trip.family].is_copied = False
            streams.families[trip.family].last = index


@compiled
def leave(streams: Any, stop: int) -> None:
    """Let go what has been copied before `stop`, and wait for more copies where the budget needs their bytes."""
    trips, totals = streams.trips, streams.totals[0]
    back_bytes, index = 0, totals.returning  # what has to be back at this stop
    while index < len(trips) and trips[streams.by_end[index]].end == stop:
        if trips[streams.by_end[index]].made:
            back_bytes += trips[streams.by_end[index]].size_bytes
        index += 1
    while totals.leaving < totals.started:
        trip = trips[totals.leaving]
        if trip.made and trip.copied:
            held = streams.stops[stop].held_bytes - totals.away_bytes + back_bytes
            if trip.out_end > totals.now and held <= totals.budget_bytes:
                break
            totals.now = max(totals.now, trip.out_end)
            totals.away_bytes += trip.size_bytes
            totals.blocked_until = _NOWHERE
            trip.left = stop
        totals.leaving += 1


@compiled
def come_back(streams: Any, stop: int) -> None:
    """Start the copies back that are due before `stop`: those read there, and those that would be late otherwise."""
    trips, totals = streams.trips, streams.totals[0]
    while totals.returning < len(trips):
        trip = trips[streams.by_end[totals.returning]]
        if trip.made:
            is_away = trip.start < stop and trip.left != _NOWHERE and trip.left <= stop
            if trip.end > stop and not (is_away and is_due(streams, trip, stop)):
                return
            if not is_away:
                totals.is_impossible = True
                return
            totals.away_bytes -= trip.size_bytes
            totals.back_end = max(totals.now, totals.back_end) + trip.back_seconds
            totals.blocked_until = _NOWHERE
            trip.back_end = totals.back_end
            trip.returned = stop
        totals.returning += 1


@compiled
def is_due(streams: Any, trip: Any, stop: int) -> bool:
    """Whether the copy back has to start before `stop`, and there is room from there on."""
    stops, totals = streams.stops, streams.totals[0]
    if trip.due_seconds >= stops[stop + 1].done_seconds or stop <= totals.blocked_until:
        return False
    room_bytes = totals.budget_bytes + totals.away_bytes - trip.size_bytes
    for later in range(trip.end - 1, stop - 1, -1):
        if stops[later].held_bytes > room_bytes:
            totals.blocked_until = later
            return False
    return True


@compiled
def arrive(streams: Any, stop: int) -> None:
    """Wait for what `stop` reads."""
    trips, totals = streams.trips, streams.totals[0]
    while totals.read < len(trips) and trips[streams.by_end[totals.read]].end == stop:
        trip = trips[streams.by_end[totals.read]]
        if trip.made:
            totals.now = max(totals.now, trip.back_end)
        totals.read += 1


@compiled
def set_out(streams: Any, stop: int, first_read: int) -> None:
    """Free the host's copies that were read for the last time at `stop`, and start the copies that open there."""
    trips, families, totals = streams.trips, streams.families, streams.totals[0]
    for index in range(first_read, totals.read):
        trip = trips[streams.by_end[index]]
        if trip.made and families[trip.family].last == streams.by_end[index]:
            totals.host_bytes -= trip.host_bytes
    while totals.started < len(trips) and trips[totals.started].start == stop:
        trip = trips[totals.started]
        if trip.made:
            trip.copied = not families[trip.family].is_copied
            if trip.copied:
                families[trip.family].is_copied = True
                totals.out_end = max(totals.now, totals.out_end) + trip.out_seconds
                trip.out_end = totals.out_end
                totals.host_bytes += trip.host_bytes
                totals.host_peak_bytes = max(totals.host_peak_bytes, totals.host_bytes)
            else:
                totals.away_bytes += trip.size_bytes
                totals.blocked_until = _NOWHERE
                trip.left = stop + 1
        totals.started += 1


@entry_point
def anneal(streams: Any, moves: int, cooling: float) -> None:
    """Try `moves` changes of which trips are made; after each, the temperature is multiplied by `cooling`.

    The choice at the start has to be possible. The penalty follows the budget as in `memfit.planners.anneal`.
    """
    totals = streams.totals[0]
    run(streams)
    remember(streams)
    seconds, excess, peak = totals.seconds, totals.excess, totals.peak_stop
    for _ in range(moves if len(streams.trips) > 0 else 0):
        totals.tried += 1
        first, second = pick(streams, peak), _NOWHERE
        if draw(streams) < _SWAP:
            second = pick(streams, peak)
            if streams.trips[second].made == streams.trips[first].made:
                second = _NOWHERE
        flip(streams, first, second)
        run(streams)
        limit = seconds + totals.penalty * excess - totals.temperature * np.log(draw(streams) + 1e-300)
        if totals.is_impossible or totals.seconds + totals.penalty * totals.excess > limit:
            flip(streams, first, second)
        else:
            seconds, excess, peak = totals.seconds, totals.excess, totals.peak_stop
            remember(streams)
        totals.temperature *= cooling
        if totals.tried % _ADAPT_EVERY == 0:
            totals.penalty *= _SOFTER if excess <= 0 else _STIFFER


@entry_point
def prune(streams: Any) -> None:
    """Leave out every trip without which the step still fits and takes no longer; the choice has to fit."""
    totals = streams.totals[0]
    run(streams)
    seconds = totals.seconds
    for index in range(len(streams.trips)):
        if streams.trips[index].made:
            streams.trips[index].made = False
            run(streams)
            if totals.is_impossible or totals.excess > 0 or totals.seconds > seconds:
                streams.trips[index].made = True
            else:
                seconds = totals.seconds


@compiled
def pick(streams: Any, peak: int) -> int:
    """Return a random trip: one that could be away at the stop `peak`, if a few draws find one, half of the time."""
    at_peak, trip = draw(streams) < _AT_PEAK, 0
    for _ in range(_TRIES):
        trip = int(draw(streams) * len(streams.trips))
        if not at_peak or (streams.trips[trip].start < peak and peak < streams.trips[trip].end):
            break
    return trip


@compiled
def flip(streams: Any, first: int, second: int) -> None:
    """Make one trip, or two, that are not made, or the other way round."""
    streams.trips[first].made = not streams.trips[first].made
    if second >= 0:
        streams.trips[second].made = not streams.trips[second].made


@compiled
def remember(streams: Any) -> None:
    """Keep the choice at hand where it fits and is the fastest so far."""
    totals = streams.totals[0]
    if totals.excess <= 0 and not totals.is_impossible and totals.seconds < totals.best_seconds:
        totals.best_seconds = totals.seconds
        for index in range(len(streams.trips)):
            streams.best[index] = streams.trips[index].made
