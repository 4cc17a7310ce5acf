"""Lower bounds that hold for every legal schedule, in any order, with any number of rematerializations."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from memfit.device import Device
from memfit.graph import Graph, Op, Phase
from memfit.plan import Bounds, Problem
from memfit.planners.cuts import Bound, Cuts, Integers
from memfit.planners.last_heavy_op import least_at_last_heavy_op

_LEAST_GRID, _MOST_GRID, _HALVINGS = 9, 65, 4  # ops tried at first, evenly; then between the best and its neighbours
_GUESSES = 8  # at the seconds of a step with copies on the host
_MOST_TIMES = 16  # that seconds of computing each op once are guessed
_AT_TURNING, _MOST_AT_TURNING = 6, 24  # ops tried where backward begins, as a step is often at its fullest there
_GRID_WORK = 60_000  # ops of the graph times ops tried: a second or so

LeastBudget = tuple[int, tuple[int, ...]]
"""Bytes below which no schedule can be, and the ops that hold them."""


def prove_bounds(
    problem: Problem,
    *,
    least_found_bytes: int | None,
    unplanned_seconds: float,
    least_budget: LeastBudget | None = None,
    again: Bound | None = None,
    again_in_order_seconds: float | None = None,
) -> Bounds:
    """Return the bounds for a problem's least budget and for its overhead.

    Args:
        least_found_bytes: the least peak of all schedules that the planner saw.
        unplanned_seconds: what planner `none` takes.
        least_budget: what `least_budget_bound` said of this problem, if it was asked already.
        again: what `least_seconds_again` said of this problem, if it was asked already.
        again_in_order_seconds: what `memfit.planners.retention_proof` proved for one order of ops, if it was asked.
    """
    least_bytes, holding_ops = least_budget or least_budget_bound(problem)
    again = again or least_seconds_again(problem)
    share = 1.0 / unplanned_seconds if unplanned_seconds > 0 else 0.0
    return Bounds(
        least_budget_found_bytes=least_found_bytes,
        least_budget_bound_bytes=least_bytes,
        overhead=again.seconds * share,
        overhead_in_order=None if again_in_order_seconds is None else again_in_order_seconds * share,
        holding_ops=holding_ops,
    )


def least_seconds_again(problem: Problem, *, until_seconds: float | None = None) -> Bound:
    """Return what every schedule within the budget takes beyond computing each op once, in any order of ops.

    Proof. Consider the moment at which some op t is computed for the first time. All ancestors of t have been computed
    before, and none of its descendants. Let R be the ancestors that are computed again later, and K the storages that
    are on the device at that moment, beside those that t itself reads and writes, which are there too. Whatever an
    ancestor wrote and a descendant of t reads (or the step requires at its end) is in K or written by an op of R; so is
    whatever an op of R reads. The bytes of K fit into what t leaves of the budget. Every op is computed once, and those
    of R once more. Any K and R with these properties cost at least the minimum cut at price p for each byte, less p
    times the room for K, whatever p >= 0 is; and the maximum over prices, at any t, is a bound.

    Copies on the host. Let H be the storages that are not on the device at that moment and come back from the host
    later: what is needed later is in K, in H, or written by an op of R. All of H is on the host then, within the host's
    budget. Its copies to the host have ended (else their storages could not have been dropped), and those back have not
    started (else their storages would be on the device). So the link was busy for the bytes of H in one direction
    before, and will be in the other, which takes no more than the whole step: with T its seconds, H has at most
    a(T) = min(host budget, T / (seconds to the host + seconds back, of a byte)) bytes. With that much more room for K
    and H together, the proof above gives T >= once + f(a(T)), where f falls with the room and a grows with T. For any
    guess g, then, T is at least g, or else at least once + f(a(g)): the best guess is found by bisection. Bytes on the
    host are not aligned; all storages are therefore counted with their exact bytes here, which is no more.

    The ops t that are tried are a few where backward begins, others on a grid, and then around the best; with
    `until_seconds`, as long as the problem's clock is below that. No bound (0.0) is given where the budget has no room
    for some op.

    Source: see `memfit.planners.cuts`.
    """
    nothing = Bound(op=None, seconds=0.0, cuts=())
    candidates = _over_budget(problem)
    if len(candidates) == 0:
        return nothing
    once_seconds = sum(op.seconds for op in problem.graph.ops)
    least_away_bytes = _most_away_bytes(problem, once_seconds)
    alignment_bytes = 1 if least_away_bytes > 0 else problem.device.alignment_bytes
    cuts = Cuts(problem.graph, msgspec.structs.replace(problem.device, alignment_bytes=alignment_bytes))
    bounds: dict[int, Bound] = {}

    def at(place: int) -> float:
        op = int(candidates[place])
        if op not in bounds:
            bounds[op] = cuts.at(op).bound(op_room_bytes(problem, cuts.resident_bytes, op) + least_away_bytes)
        return bounds[op].seconds

    if min(op_room_bytes(problem, cuts.resident_bytes, int(op)) for op in candidates) < 0:
        return nothing
    grid = min(_MOST_GRID, max(_LEAST_GRID, _GRID_WORK // len(problem.graph.ops)))
    distance = max(1, len(candidates) // (grid - 1))
    places = sorted({int(place) for place in np.linspace(0, len(candidates) - 1, grid)})
    middle = places[len(places) // 2]  # a step is at its fullest in the middle: from there outwards, as time allows

    def best_of(best: int, others: Iterable[int]) -> int:
        for place in others:
            if until_seconds is None or problem.clock() < until_seconds:
                best = max(best, place, key=at)
        return best

    turning = best_of(middle, _at_turning(problem.graph, candidates))
    best = best_of(middle, sorted(places, key=lambda place: abs(place - middle)))
    for _ in range(_HALVINGS):
        distance = max(1, distance // 2)
        best = best_of(best, (max(0, best - distance), min(len(candidates) - 1, best + distance)))
    best = max(best, turning, key=at)
    op, seconds = int(candidates[best]), at(best)
    if least_away_bytes > 0:
        seconds = _least_seconds_with_host(problem, cuts, op, seconds)
    return Bound(
        op=op,
        seconds=seconds,
        cuts=tuple(cut for bound in bounds.values() for cut in bound.cuts),
    )


def _at_turning(graph: Graph, candidates: Integers) -> list[int]:
    """Return the places of the few candidates nearest to where backward begins that depend on much: a counter, which
    depends on little, shows nothing.

    Small graphs have more of them tried: where large gradients begin, a few ops on, less room is left.

    What has half of the largest depth of all ops up to it counts as much.
    """
    depths: list[int] = []
    for op in graph.ops:
        writers = [graph.writer_of.get(storage) for storage, _ in graph.read_versions[op.id]]
        depths.append(1 + max((depths[writer] for writer in writers if writer is not None), default=0))
    depth = np.array(depths, np.int64)
    deep = np.flatnonzero((2 * depth >= np.maximum.accumulate(depth))[candidates])
    turning = next((op.id for op in graph.ops if op.phase != Phase.FORWARD), len(graph.ops))
    count = max(_AT_TURNING, min(_MOST_AT_TURNING, _GRID_WORK // len(graph.ops) // 2))
    return deep[np.argsort(np.abs(candidates[deep] - turning), kind="stable")][:count].tolist()


def _most_away_bytes(problem: Problem, step_seconds: float) -> int:
    """Return the bytes that can have gone to the host and can still come back, within a step of so many seconds."""
    rates = problem.device.to_host_bytes_per_second, problem.device.to_device_bytes_per_second
    if rates[0] is None or rates[1] is None:
        return 0
    return min(problem.host_budget_bytes, int(step_seconds / (1.0 / rates[0] + 1.0 / rates[1])) + 1)


def _least_seconds_with_host(problem: Problem, cuts: Cuts, op: int, most_seconds: float) -> float:
    """Return the best bound by bisection over the seconds of the step, from none to `most_seconds` beyond once."""
    at_op, room_bytes = cuts.at(op), op_room_bytes(problem, cuts.resident_bytes, op)
    once_seconds = sum(op.seconds for op in problem.graph.ops)
    low_seconds, high_seconds = 0.0, min(most_seconds, _MOST_TIMES * once_seconds)  # any guess is good for a bound
    guess_seconds = high_seconds
    for _ in range(_GUESSES):
        away_bytes = _most_away_bytes(problem, once_seconds + guess_seconds)
        seconds = at_op.bound(room_bytes + away_bytes).seconds
        low_seconds = max(low_seconds, min(guess_seconds, seconds))
        if seconds < guess_seconds:
            high_seconds = guess_seconds
        guess_seconds = (low_seconds + high_seconds) / 2
    return low_seconds


def _over_budget(problem: Problem) -> Integers:
    """Return the ops over which too much lives when everything is kept, in the original order."""
    graph, device = problem.graph, problem.device
    live = np.zeros(len(graph.ops) + 1, np.int64)
    last = {s: op.id for op in graph.ops for s, _ in graph.read_versions[op.id]}
    for storage in graph.storages:
        if not storage.resident:
            begin = graph.writer_of.get(storage.id, 0)
            end = len(graph.ops) if storage.required_at_end else last.get(storage.id, begin) + 1
            live[begin] += device.aligned(storage.bytes)
            live[end] -= device.aligned(storage.bytes)
    resident_bytes = sum(device.aligned(storage.bytes) for storage in graph.storages if storage.resident)
    held = resident_bytes + np.cumsum(live[:-1])
    return np.flatnonzero(held > problem.budget_bytes - problem.bytes_outside)


def op_room_bytes(problem: Problem, resident_bytes: int, op: int) -> int:
    """Return the bytes that `op` leaves of the budget."""
    boundaries = problem.graph.boundaries
    is_outside = not boundaries or boundaries[0].position <= op
    taken = resident_bytes + op_bytes(problem.graph, problem.device, problem.graph.ops[op])
    return problem.budget_bytes - taken - (problem.bytes_outside if is_outside else 0)


def least_budget_bound(problem: Problem) -> LeastBudget:
    """Return (bytes, ops that hold them): no legal schedule has a lower peak.

    Proof. Every op is computed at least once. While it runs, the device holds all residents, what the op reads, mutates
    and writes, and its workspace; one read may die into a write where `reuses` allows it, which saves that read's
    bytes. At the end the device holds all residents and all that is required then. At a boundary it holds the
    departures and the arrivals, and what user code holds from then on. Where nothing goes to the host, some op
    also runs beside what the end wants: see `memfit.planners.last_heavy_op`.
    """
    graph, device = problem.graph, problem.device
    sizes = [0 if storage.resident else device.aligned(storage.bytes) for storage in graph.storages]
    resident_bytes = sum(device.aligned(storage.bytes) for storage in graph.storages if storage.resident)
    # User code may hold bytes from the first boundary on; where there is none, all the time.
    held_from = graph.boundaries[0].position if graph.boundaries else 0
    needs = [op_bytes(graph, device, op) + (problem.bytes_outside if op.id >= held_from else 0) for op in graph.ops]
    at_end = problem.bytes_outside + sum(sizes[s.id] for s in graph.storages if s.required_at_end)
    turns = [sum(sizes[s] for s in {*boundary.departures, *boundary.arrivals}) for boundary in graph.boundaries]
    least = max([at_end, *needs, *(problem.bytes_outside + held for held in turns)])
    if problem.host_budget_bytes == 0:
        later_bytes, later = least_at_last_heavy_op(graph, device, needs, above_bytes=least)
        if later:
            return resident_bytes + later_bytes, later
    return resident_bytes + least, tuple(op for op, needed in enumerate(needs) if needed >= least)


def op_bytes(graph: Graph, device: Device, op: Op) -> int:
    """Return the aligned bytes that `op` itself needs beside the residents: reads, writes, workspace, less one
    takeover.
    """
    touched = {s for s, _ in graph.read_versions[op.id]} | set(op.writes)
    managed = [s for s in touched if not graph.storages[s].resident]
    saved = max((device.aligned(graph.storages[r].bytes) for r, _ in op.reuses if r in managed), default=0)
    return sum(device.aligned(graph.storages[s].bytes) for s in managed) + (op.workspace_bytes or 0) - saved
