"""Planner `capuchin`: swap where the step hides the copies; then swap or recompute, by cost (Peng et al. 2020)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from memfit.papers.planners.copies import CopyPlanner, choose, place_copies
from memfit.papers.planners.recompute_seconds import RecomputeSeconds
from memfit.plan import Problem
from memfit.planners.engine.offloading.absences import HostRoom, load
from memfit.planners.engine.offloading.host_stays import Draft, make_draft
from memfit.planners.engine.offloading.intervals import OffloadIntervals, find_offload_intervals, with_offloads
from memfit.planners.engine.order import original_order
from memfit.planners.engine.results import kept_schedule, predict
from memfit.planners.engine.retention.decisions import drop_at, keep_everything
from memfit.planners.engine.retention.instance import KEPT, build_instance
from memfit.schedule import Schedule
from memfit.system.records import Flags

_RAISED = 6  # how often the bytes to save are raised by what a plan lacks
_WEIGHTS = (1.0, 4.0, 16.0, np.inf)  # of seconds of recomputations, tried until their bytes fit, too
_LEVELS = 16  # of fixed targets tried then, down to 0, at which everything is chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Capuchin(CopyPlanner):
    """Swap or recompute tensors between two accesses across the peak, whatever costs the step less time.

    The free time (FT) of two accesses is the time between them less both transfers. Tensors whose swap the step hides
    are swapped, in decreasing FT. If they are not enough, the cheapest of the rest is next, by seconds for each byte
    saved: a swap costs what it delays the step, and a recomputation its seconds, for the tensor of the most bytes saved
    per second (MSPS). A swap-in is triggered by the latest access from which it, and those that are read after it,
    arrive in time.

    Where the paper leaves a choice, or its framework differs:
    - The measured iteration is the simulated step that keeps everything. An access is any op or boundary.
    - If the load exceeds the budget elsewhere after a choice, the tensors across the new peak are next.
    - FT is that of a tensor alone. Whether the step hides a swap, and what it delays, is that of the link with all
      swaps so far: see `_Link`. The paper's feedback moves the trigger of a late swap-in earlier by 5% of its transfer
      in each iteration, until none is late: the link's queue says at once where that ends.
    - Sources of a recomputation are what is on the device at the second access; swapped tensors are fetched for it.
      What is not there is recomputed too, and is in its seconds.
    - A recomputed tensor is kept to its last use. If recomputations need more bytes than the choice left free, the
      choice is made again for a budget that is lower by what was lacking, then with recomputations that count as 4
      times, 16 times and infinitely as slow, and last for shares of the unplanned peak.
    - If memory is short, compute waits for a copy out, and a swap-in waits for room.
    - A tensor for which the host has no room is not swapped. Without a host or a link, tensors are only recomputed.

    Source: Peng et al. 2020, "Capuchin: Tensor-based GPU Memory Management for Deep Learning".
    """

    name: ClassVar[str] = "capuchin"
    source: ClassVar[str] = "Peng et al. 2020"

    def schedules(self, problem: Problem) -> Iterator[Schedule]:
        """Yield the schedules that fit, the fastest first; else that of the least peak."""
        made = [_with_copies(problem, draft) for draft in _fitting_drafts(problem)]
        yield from sorted(made, key=lambda schedule: predict(problem, schedule).seconds)


def _with_copies(problem: Problem, draft: Draft) -> Schedule:
    """Return the schedule of a draft with its copies, each back as late as those of later readers let it."""
    found, rows = draft.offloads, draft.offloads.intervals
    done, chosen = found.stops["done_seconds"], np.flatnonzero(rows["chosen"])
    begins = np.asarray(done[rows["end"]] - rows["prefetch_seconds"], np.float64)
    begins[chosen] = _latest_starts(done[rows["end"][chosen]], rows["prefetch_seconds"][chosen])
    place_copies(problem, found, rows["start"], np.searchsorted(done, begins, side="right") - 1)
    return with_offloads(found)


def _fitting_drafts(problem: Problem) -> list[Draft]:
    """Return the draft for the first target whose plan fits, or else, by weights, those that fit.

    Where none does, it is that of the least peak, whatever the budget.
    """
    policy = _Policy(problem)
    fitting: list[Draft] = []
    for policy.recomputation_weight in _WEIGHTS:
        target_bytes = problem.budget_bytes
        for _ in range(_RAISED):
            draft = policy.draft(target_bytes)
            excess_bytes = int(load(draft.offloads).max()) - problem.budget_bytes
            if excess_bytes <= 0:
                fitting.append(draft)
            if excess_bytes <= 0 or policy.has_chosen_all:
                break
            target_bytes -= excess_bytes
        if len(fitting) == 1 and policy.recomputation_weight == 1.0:
            break
    best: tuple[int, Draft] | None = None
    for level in reversed(range(_LEVELS)) if not fitting else ():
        draft = policy.draft(policy.peak_bytes * level // _LEVELS)
        peak_bytes = int(load(draft.offloads).max())
        if best is None or peak_bytes < best[0]:
            best = peak_bytes, draft
        if peak_bytes <= problem.budget_bytes:
            break
    return fitting if best is None else [best[1]]


class _Link:
    """The copies that are chosen, one after the other each way, and by how much they delay the step.

    A copy out starts when its first access is over and those before it are done. It has to be done before the peak that
    it makes room for, and before its copy back, of which each starts as late as those of later readers let it.

    Args:
        found: the intervals in which tensors may be swapped.
    """

    def __init__(self, found: OffloadIntervals) -> None:
        rows, done = found.intervals, found.stops["done_seconds"]
        self._ready, self._due = done[rows["start"] + 1], done[rows["end"]]
        self._out, self._back = rows["offload_seconds"], rows["prefetch_seconds"]
        self._done = done
        self._chosen: list[int] = []
        self._wanted: list[float] = []  # the time of the peak that each was chosen for
        self.delay_seconds = 0.0

    def cost(self, number: int, peak: int) -> float:
        """Return by how many seconds more the step is delayed if an interval is chosen for the peak at a stop.

        Args:
            number: of the interval; not chosen yet.
            peak: number of the stop, before which the copy out has to be done.
        """
        return self._delay([*self._chosen, number], [*self._wanted, float(self._done[peak])]) - self.delay_seconds

    def take(self, number: int, peak: int) -> None:
        """Choose an interval for the peak at a stop.

        Args:
            number, peak: as for `cost`.
        """
        self._chosen.append(number)
        self._wanted.append(float(self._done[peak]))
        self.delay_seconds = self._delay(self._chosen, self._wanted)

    def _delay(self, chosen: list[int], wanted: list[float]) -> float:
        numbers = np.array(chosen, np.int64)
        out, ready = self._out[numbers], self._ready[numbers]
        order = np.argsort(ready, kind="stable")
        behind = np.cumsum(out[order])
        out_done = np.empty(len(numbers))
        out_done[order] = behind + np.maximum.accumulate(ready[order] - (behind - out[order]))
        back_begins = _latest_starts(self._due[numbers], self._back[numbers])
        late = np.maximum(out_done - back_begins, out_done - np.array(wanted))
        return max(0.0, float(late.max(initial=0.0)))


def _latest_starts(due: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return when each copy of one stream starts at the latest, if all are there when they are due.

    Args:
        due: float64[copies], the time at which each has to be done.
        seconds: float64[copies], that each takes.
    """
    order = np.argsort(-due, kind="stable")  # the last one first
    taken = np.cumsum(seconds[order])
    starts = np.empty(len(due))
    starts[order] = np.minimum.accumulate(due[order] + (taken - seconds[order])) - taken
    return starts


class _Policy:
    """The accesses of the step that keeps everything, and which tensors are swapped or recomputed between them."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.instance = build_instance(problem, original_order(problem.graph))
        self.found = find_offload_intervals(problem, kept_schedule(self.instance))
        rows, done = self.found.intervals, self.found.stops["done_seconds"]
        transfers = rows["offload_seconds"] + rows["prefetch_seconds"]
        self.free_seconds: NDArray[np.float64] = done[rows["end"]] - done[rows["start"] + 1] - transfers
        # Every op is computed once: stops are the positions of the instance, and their intervals the same.
        intervals = self.instance.tables.intervals
        storages = np.array(self.instance.storage_of, np.int64)[intervals["storage"]]
        number_at = {key: n for n, key in enumerate(zip(storages.tolist(), intervals["start"].tolist(), strict=True))}
        self.retained = np.array([number_at[int(row["storage"]), int(row["start"])] for row in rows], np.int64)
        self.peak_bytes = int(self.found.stops["held_bytes"].max())
        self.has_chosen_all = False
        self.recomputation_weight = 1.0

    def draft(self, target_bytes: int) -> Draft:
        """Return the draft of what is chosen for a load of at most `target_bytes`, its swaps chosen."""
        swapped, recomputed = self._choose(target_bytes)
        chosen = np.zeros(len(self.instance.tables.intervals), np.bool_)
        chosen[self.retained[recomputed]] = True
        retention = drop_at(self.instance, keep_everything(self.instance), chosen)
        draft = make_draft(self.instance, self.problem, retention)
        rows, stage_of = draft.offloads.intervals, draft.stage_of
        first, last = stage_of[rows["start"]], stage_of[rows["end"]]
        within = np.zeros(len(rows), np.bool_)  # recomputations may read a swapped tensor in between
        for number in swapped:
            row = self.found.intervals[number]
            within |= (rows["storage"] == row["storage"]) & (row["start"] <= first) & (last <= row["end"])
        choose(self.problem, draft.offloads, np.flatnonzero(within & (first < last)).tolist())
        return draft

    def _choose(self, target_bytes: int) -> tuple[list[int], list[int]]:
        """Return the intervals in which tensors are swapped, and those in which they are recomputed."""
        rows, live = self.found.intervals, self.found.stops["held_bytes"].copy()
        room = HostRoom(self.found, self.problem.host_budget_bytes)
        may_swap = np.full(len(rows), self.problem.may_copy)
        may_recompute = self.instance.tables.intervals["rule"][self.retained] != KEPT
        seconds, link = RecomputeSeconds(self.instance), _Link(self.found)
        sizes = rows["size_bytes"]
        swapped, recomputed = list[int](), list[int]()
        while int(live.max()) > target_bytes:
            across = (rows["start"] < (peak := int(np.argmax(live)))) & (peak < rows["end"])
            swap, recompute = self._best_swap(across & may_swap), None
            swap_cost = np.inf if swap is None else link.cost(swap, peak) / sizes[swap]
            if swap_cost > 0.0:
                recompute = self._best_recomputation(across & may_recompute, seconds)
            if swap is None and recompute is None:
                break
            is_swap = recompute is None or swap_cost <= self._weighted(seconds.of(*recompute[1:]) / sizes[recompute[0]])
            if swap is not None and is_swap:
                may_swap[swap] = False
                if not room.take(swap, int(rows["start"][swap])):
                    continue
                taken = swap
                link.take(swap, peak)
                swapped.append(swap)
            else:
                assert recompute is not None
                taken = recompute[0]
                recomputed.append(taken)
                seconds.drop(*self._at(taken))
            may_swap[taken] = may_recompute[taken] = False
            live[rows["start"][taken] + 1 : rows["end"][taken]] -= rows["size_bytes"][taken]
        self.has_chosen_all = int(live.max()) > target_bytes
        return swapped, recomputed

    def _weighted(self, cost: float) -> float:
        return cost * self.recomputation_weight if cost > 0.0 else 0.0

    def _best_swap(self, among: Flags) -> int | None:
        """Return the interval of the most free time."""
        return int(np.argmax(np.where(among, self.free_seconds, -np.inf))) if among.any() else None

    def _best_recomputation(self, among: Flags, seconds: RecomputeSeconds) -> tuple[int, int, int] | None:
        """Return the interval of the greatest MSPS, with its storage and the position of the second access."""
        best: tuple[float, int] | None = None
        for number in np.flatnonzero(among).tolist():
            storage, _, end = self._at(number)
            cost = seconds.of(storage, end)
            if cost == np.inf:
                continue
            saved = int(self.found.intervals["size_bytes"][number]) / cost if cost > 0.0 else np.inf
            if best is None or saved > best[0]:
                best = saved, number
        if best is None:
            return None
        storage, _, end = self._at(best[1])
        return best[1], storage, end

    def _at(self, number: int) -> tuple[int, int, int]:
        """Return the managed storage, the start and the end of an interval."""
        row = self.found.intervals[number]
        storage = int(self.instance.tables.intervals["storage"][self.retained[number]])
        return storage, int(row["start"]), int(row["end"])
