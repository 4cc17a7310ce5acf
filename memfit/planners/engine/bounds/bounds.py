"""Lower bounds that hold for every legal schedule, in any order, with any number of rematerializations.

Proof of the bound on the seconds of recomputation. Consider the time at which some op t is computed first. All
ancestors of t have been computed, and none of its descendants. Let R be the ancestors that are recomputed later, and K
the storages that are on the device, beside those that t itself reads and writes. A storage that an ancestor wrote, and
that a descendant of t reads or the step requires at its end, is in K or is written by an op of R. The same holds for
each storage that an op of R reads. The bytes of K fit into the budget beside those of t. Every op is computed once, and
those of R once more. For each price p >= 0 of a byte, all such K and R cost at least the minimum cut at that price,
less p times the room for K. The maximum over prices, at any t, is a bound.

Copies on the host. Let H be the storages that are not on the device at that time and return from the host later: a
storage that is needed later is in K, in H, or written by an op of R. All of H is on the host then, within the host's
budget. Its copies to the host have ended (else the storages could not have been dropped), and those back have not
started (else the storages would be on the device). So the link was busy for the bytes of H in one direction before the
time, and will be busy for them in the other after it. Say that the step takes x seconds beyond computing each op once.
Descendants, t itself, and R are computed after the time, so that at most N + x - sec(R) seconds are before it, where N
are the seconds of all ops but t and its descendants. Ancestors are computed before, so that at most M + x are after it,
where M are the seconds of all ops but the ancestors. Both together take the whole step. With rates r in the two
directions, H has therefore at most a = min(host budget, r1 (N + x - sec(R)), r2 (M + x), (once + x) / (1 / r1 + 1 /
r2)) bytes. With that much more room for K and H together, the proof above gives sec(R) >= f(a). A guess g at x is too
low if g < f(a) for the a that g allows; f(a) may then take the place of sec(R) in a, which falls, until nothing
changes. The greatest guess that is too low is found by bisection. Bytes on the host are not aligned; all storages are
therefore counted with their exact bytes, which is no more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from memfit.device import Device
from memfit.graph import Graph, Op, Phase
from memfit.plan import Bounds, Problem
from memfit.planners.engine.bounds.last_large_op import least_at_last_large_op
from memfit.planners.engine.bounds.minimum_cuts import NO_BOUND, Bound, Cuts, OpCuts
from memfit.planners.engine.parts import ALL_PARTS, Parts
from memfit.system.records import Integers

_LEAST_GRID, _MOST_GRID, _HALVINGS = 9, 65, 4  # ops tried at first, evenly; then between the best and its neighbours
_GUESSES = 8  # at the seconds of a step with copies on the host
_ROUNDS = 3  # of putting the seconds of recomputation into the bytes on the host
_NEAR_BOUNDARY, _MOST_NEAR_BOUNDARY = 6, 24  # ops tried where backward begins, as a step is often at its fullest there
_GRID_WORK = 60_000  # ops of the graph times ops tried: a second or so

LeastBudget = tuple[int, tuple[int, ...]]
"""Bytes that every schedule needs at its peak, and the ops that need them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proofs:
    """The bounds that a planner has proved for a problem; None where it has not tried.

    Attributes:
        least_budget: the result of `least_budget_bound`.
        recompute: the result of `least_recompute_seconds`, or a higher bound of the same kind.
        recompute_in_order_seconds: a bound on the seconds of recomputation in one order of ops, as
            `memfit.planners.engine.cpsat.solve` proves it.
    """

    least_budget: LeastBudget | None = None
    recompute: Bound | None = None
    recompute_in_order_seconds: float | None = None


NOTHING_PROVED = Proofs()


def prove_bounds(
    problem: Problem, proofs: Proofs, *, least_found_bytes: int | None, unplanned_seconds: float
) -> Bounds:
    """Return the bounds for a problem's least budget and for its overhead.

    Args:
        problem: its budgets count.
        proofs: bounds that are proved already; the others are proved here.
        least_found_bytes: the least peak of all schedules that the planner simulated.
        unplanned_seconds: seconds of planner `none`'s plan.
    """
    least_bytes, holding_ops = proofs.least_budget or least_budget_bound(problem)
    recompute, in_order_seconds = proofs.recompute, proofs.recompute_in_order_seconds
    recompute = recompute or least_recompute_seconds(problem)
    share = 1.0 / unplanned_seconds if unplanned_seconds > 0 else 0.0
    # A plan may use the time in which the unplanned step waits for collectives: it may even be faster than that step.
    idle_seconds = max(0.0, unplanned_seconds - problem.graph.compute_seconds) if problem.graph.has_collectives else 0.0
    return Bounds(
        least_budget_found_bytes=least_found_bytes,
        least_budget_bound_bytes=least_bytes,
        overhead=(recompute.seconds - idle_seconds) * share,
        overhead_in_order=None if in_order_seconds is None else (in_order_seconds - idle_seconds) * share,
        holding_ops=holding_ops,
    )


def least_recompute_seconds(problem: Problem, *, until_seconds: float = math.inf, parts: Parts = ALL_PARTS) -> Bound:
    """Return a bound on the seconds that every schedule within the budget takes beyond computing each op once.

    The bound holds in any order of ops; see the module for the proof. A few ops t are tried where backward begins,
    others on a grid, and then some around the best. The bound is 0 if the budget has no room for some op.

    Args:
        problem: its budgets count.
        until_seconds: the problem's clock at which no more ops are tried.
        parts: which ops are tried.

    Source: see `memfit.planners.engine.bounds.minimum_cuts`.
    """
    candidates = _over_budget(problem)
    if len(candidates) == 0:
        return NO_BOUND
    copies = problem.may_copy
    alignment_bytes = 1 if copies else problem.device.alignment_bytes
    cuts = Cuts(problem.graph, msgspec.structs.replace(problem.device, alignment_bytes=alignment_bytes))
    bounds: dict[int, float] = {}

    def at(place: int) -> float:
        op = int(candidates[place])
        if op not in bounds:
            at_op = cuts.at(op)
            more_bytes = _most_host_bytes(problem, at_op, 0.0, 0.0) if copies else 0
            bounds[op] = at_op.bound_seconds(op_room_bytes(problem, cuts.resident_bytes, op) + more_bytes)
        return bounds[op]

    if min(op_room_bytes(problem, cuts.resident_bytes, int(op)) for op in candidates) < 0:
        return NO_BOUND
    grid = min(_MOST_GRID, max(_LEAST_GRID, _GRID_WORK // len(problem.graph.ops)))
    distance = max(1, len(candidates) // (grid - 1))
    places = sorted({int(place) for place in np.linspace(0, len(candidates) - 1, grid)})
    middle = places[len(places) // 2]  # a step is at its fullest in the middle: from there outwards, as time allows

    def best_of(best: int, others: Iterable[int]) -> int:
        for place in others:
            if problem.clock() < until_seconds:
                best = max(best, place, key=at)
        return best

    crossing = best_of(middle, _near_boundary(problem.graph, candidates) if parts.boundary_candidates else ())
    best = best_of(middle, sorted(places, key=lambda place: abs(place - middle)))
    for _ in range(_HALVINGS):
        distance = max(1, distance // 2)
        best = best_of(best, (max(0, best - distance), min(len(candidates) - 1, best + distance)))
    best = max(best, crossing, key=at)
    op, seconds = int(candidates[best]), at(best)
    seconds = _least_seconds_with_host(problem, cuts, op, seconds) if copies else seconds
    return Bound(op=op, seconds=seconds)


def _near_boundary(graph: Graph, candidates: Integers) -> list[int]:
    """Return the places of the few candidates nearest to the forward/backward boundary, those on long paths only.

    An op is on a long path if its depth is at least half of the largest depth so far; others, such as counters, prove
    nothing. More are tried on small graphs, because the room is least where large gradients begin, a few ops later.
    """
    depths: list[int] = []
    for op in graph.ops:
        writers = [graph.writer_of.get(storage) for storage, _ in graph.read_versions[op.id]]
        depths.append(1 + max((depths[writer] for writer in writers if writer is not None), default=0))
    depth = np.array(depths, np.int64)
    deep = np.flatnonzero((2 * depth >= np.maximum.accumulate(depth))[candidates])
    crossing = next((op.id for op in graph.ops if op.phase != Phase.FORWARD), len(graph.ops))
    count = max(_NEAR_BOUNDARY, min(_MOST_NEAR_BOUNDARY, _GRID_WORK // len(graph.ops) // 2))
    return deep[np.argsort(np.abs(candidates[deep] - crossing), kind="stable")][:count].tolist()


def _most_host_bytes(problem: Problem, at_op: OpCuts, more_seconds: float, recompute_seconds: float) -> int:
    """Return the most bytes that can be on the host while an op is first computed, and return later.

    Args:
        problem: with a link; its host budget counts.
        at_op: tells what is computed before the op, and after it.
        more_seconds: of the step, beyond computing each op once.
        recompute_seconds: what is recomputed after the op takes at least so many of them.
    """
    to_host, to_device = problem.device.to_host_bytes_per_second, problem.device.to_device_bytes_per_second
    assert to_host is not None and to_device is not None
    before = max(0.0, at_op.not_after_seconds + more_seconds - recompute_seconds) * to_host
    after = (at_op.not_before_seconds + more_seconds) * to_device
    both = (at_op.once_seconds + more_seconds) / (1.0 / to_host + 1.0 / to_device)
    return min(problem.host_budget_bytes, int(min(before, after, both)) + 1)


def _least_seconds_with_host(problem: Problem, cuts: Cuts, op: int, most_seconds: float) -> float:
    """Return a bound on the seconds beyond computing each op once, by bisection from none to `most_seconds`."""
    at_op, room_bytes = cuts.at(op), op_room_bytes(problem, cuts.resident_bytes, op)

    def least_up_to(guess_seconds: float) -> float:
        """Return a bound on x if it is at most the guess; one above the guess contradicts that."""
        recompute_seconds = 0.0
        for _ in range(_ROUNDS):
            host_bytes = _most_host_bytes(problem, at_op, guess_seconds, recompute_seconds)
            seconds = at_op.bound_seconds(room_bytes + host_bytes)
            if seconds > guess_seconds or seconds <= recompute_seconds:
                return seconds
            recompute_seconds = seconds
        return recompute_seconds

    low_seconds, high_seconds = 0.0, most_seconds
    for _ in range(_GUESSES):
        guess_seconds = (low_seconds + high_seconds) / 2
        seconds = least_up_to(guess_seconds)
        low_seconds = max(low_seconds, min(guess_seconds, seconds))
        if seconds <= guess_seconds:
            high_seconds = guess_seconds
    return low_seconds


def _over_budget(problem: Problem) -> Integers:
    """Return the ops at which the live bytes exceed the budget if everything is kept, in the original order."""
    graph, device = problem.graph, problem.device
    live = np.zeros(len(graph.ops) + 1, np.int64)
    last = {s: op.id for op in graph.ops for s, _ in graph.read_versions[op.id]}
    for storage in graph.storages:
        if not storage.resident:
            begin = graph.writer_of.get(storage.id, 0)
            end = len(graph.ops) if storage.required_at_end else last.get(storage.id, begin) + 1
            live[begin] += device.aligned(storage.bytes)
            live[end] -= device.aligned(storage.bytes)
    held = device.resident_bytes(graph) + np.cumsum(live[:-1])
    return np.flatnonzero(held > problem.budget_bytes - problem.bytes_outside)


def op_room_bytes(problem: Problem, resident_bytes: int, op: int) -> int:
    """Return the bytes of the budget that are left beside an op and the residents.

    Args:
        problem: gives the budget.
        resident_bytes: aligned bytes of the residents.
        op: the op's id.
    """
    boundaries = problem.graph.boundaries
    is_outside = not boundaries or boundaries[0].position <= op
    taken = resident_bytes + op_bytes(problem.graph, problem.device, problem.graph.ops[op])
    return problem.budget_bytes - taken - (problem.bytes_outside if is_outside else 0)


def least_budget_bound(problem: Problem, parts: Parts = ALL_PARTS) -> LeastBudget:
    """Return (bytes, ops that need them): no legal schedule has a lower peak.

    Proof. Every op is computed at least once. While it runs, the device holds all residents, the storages that the op
    reads, mutates and writes, and its workspace. In-place reuse may save the bytes of one read. At the end, the device
    holds all residents and all storages required then. At a boundary, it holds the departures, the arrivals and the
    bytes that user code holds from then on. If nothing may be copied to the host, some op also runs beside storages
    that are required at the end: see `memfit.planners.engine.bounds.last_large_op`.

    Args:
        problem: its graph, device, host budget and bytes outside count.
        parts: which bounds are tried.
    """
    graph, device = problem.graph, problem.device
    sizes = [0 if storage.resident else device.aligned(storage.bytes) for storage in graph.storages]
    resident_bytes = device.resident_bytes(graph)
    # User code may hold bytes from the first boundary on; where there is none, all the time.
    held_from = graph.boundaries[0].position if graph.boundaries else 0
    needs = [op_bytes(graph, device, op) + (problem.bytes_outside if op.id >= held_from else 0) for op in graph.ops]
    at_end = problem.bytes_outside + sum(sizes[s.id] for s in graph.storages if s.required_at_end)
    at_boundaries = [sum(sizes[s] for s in {*boundary.departures, *boundary.arrivals}) for boundary in graph.boundaries]
    least = max([at_end, *needs, *(problem.bytes_outside + held for held in at_boundaries)])
    holding = tuple(op for op, needed in enumerate(needs) if needed >= least)
    if problem.host_budget_bytes == 0 and parts.last_large_op:
        later_bytes, later = least_at_last_large_op(graph, device, needs, above_bytes=least)
        if later:
            return resident_bytes + later_bytes, later
    return resident_bytes + least, holding


def op_bytes(graph: Graph, device: Device, op: Op) -> int:
    """Return the aligned bytes that `op` needs beside the residents: reads, writes, workspace, less one in-place reuse.

    What only a recomputation of a random op needs does not count: a saved state of the generator, and its workspace,
    which may be a replay's.

    Args:
        graph: the op's.
        device: gives the alignment.
        op: of the graph.
    """
    if op.saves_generator:
        return 0
    writers = {s: graph.writer_of.get(s) for s, _ in graph.read_versions[op.id]}
    reads = {s for s, writer in writers.items() if writer is None or not graph.ops[writer].saves_generator}
    managed = [s for s in reads | set(op.writes) if not graph.storages[s].resident]
    workspace_bytes = 0 if op.random else op.workspace_bytes or 0
    saved = max((device.aligned(graph.storages[r].bytes) for r, _ in op.reuses if r in managed), default=0)
    return sum(device.aligned(graph.storages[s].bytes) for s in managed) + workspace_bytes - saved
