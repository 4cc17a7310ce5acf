"""Planner `capuchin`: swap what hides, then swap or recompute, corrected by feedback (Peng et al. 2020)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from memfit.papers.options import refuse
from memfit.papers.planners.copies import CopyPlanner, choose, place_copies
from memfit.papers.planners.recompute_seconds import RecomputeSeconds
from memfit.plan import Problem
from memfit.planners.engine.offloading.absences import HostRoom, load
from memfit.planners.engine.offloading.host_stays import Draft, make_draft
from memfit.planners.engine.offloading.intervals import find_offload_intervals, with_offloads
from memfit.planners.engine.order import original_order
from memfit.planners.engine.results import kept_schedule
from memfit.planners.engine.retention.decisions import drop_at, keep_everything
from memfit.planners.engine.retention.instance import KEPT, build_instance
from memfit.planners.engine.tables import Flags
from memfit.schedule import Schedule

_EARLIER = 0.05  # of its transfer: how much earlier a late swap-in is triggered in the next iteration
_RAISED = 6  # how often the bytes to save are raised by what a plan lacks
_LEVELS = 16  # of fixed targets tried then, down to 0, at which everything is chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Capuchin(CopyPlanner):
    """Swap or recompute tensors between two accesses across the peak, whatever costs the step less time.

    The free time (FT) of two accesses is the time between them less both transfers. Tensors whose FT is not negative
    are swapped, in decreasing FT. If they are not enough, the cheapest of the rest is next: a swap costs -FT, and a
    recomputation its seconds, for the tensor of the most bytes saved per second (MSPS). A swap-in is triggered by the
    latest access that is a whole transfer before its reader. Feedback: where a tensor is still arriving when it is
    read, its trigger moves earlier by 5% of its transfer, until none arrives late, `feedback` times at most.

    Where the paper leaves a choice, or its framework differs:
    - The measured iteration is the simulated step that keeps everything. An access is any op or boundary.
    - If the load exceeds the budget elsewhere after a choice, the tensors across the new peak are next.
    - FT is that of a tensor alone: that copies wait for one another is not in it.
    - Sources of a recomputation are what is on the device at the second access; swapped tensors are fetched for it.
      What is not there is recomputed too, and is in its seconds.
    - A recomputed tensor is kept to its last use. If recomputations need more bytes than the choice left free, the
      choice is made again for a budget that is lower by what was lacking, and last for shares of the unplanned peak.
    - If memory is short, compute waits for a copy out, and a swap-in waits for room.
    - A tensor for which the host has no room is not swapped. Without a host or a link, tensors are only recomputed.

    Source: Peng et al. 2020, "Capuchin: Tensor-based GPU Memory Management for Deep Learning".
    """

    name: ClassVar[str] = "capuchin"
    source: ClassVar[str] = "Peng et al. 2020"

    feedback: int = field(default=20, metadata={"help": "iterations of feedback at most; 0 leaves the first triggers"})

    def schedules(self, problem: Problem) -> Iterator[Schedule]:
        """Yield the schedule after the feedback."""
        if self.feedback < 0:
            refuse(self, "feedback", "a number of 0 or more")
        yield self._fed_back(problem, _fitting_draft(problem))

    def _fed_back(self, problem: Problem, draft: Draft) -> Schedule:
        """Return the schedule of a draft with its copies, triggered earlier until none is late."""
        found, rows = draft.offloads, draft.offloads.intervals
        done, lead_seconds = found.stops["done_seconds"], rows["prefetch_seconds"].copy()
        for iteration in range(self.feedback + 1):
            due = np.asarray(done[rows["end"]] - lead_seconds, np.float64)
            triggers = np.searchsorted(done, due, side="right") - 1
            late = place_copies(problem, found, rows["start"], triggers)
            if not late.any() or iteration == self.feedback:
                break
            lead_seconds[late] += _EARLIER * rows["prefetch_seconds"][late]
        return with_offloads(found)


def _fitting_draft(problem: Problem) -> Draft:
    """Return the draft for the first target whose plan fits; else that of the least peak, whatever the budget."""
    policy, target_bytes = _Policy(problem), problem.budget_bytes
    for _ in range(_RAISED):
        draft = policy.draft(target_bytes)
        excess_bytes = int(load(draft.offloads).max()) - problem.budget_bytes
        if excess_bytes <= 0:
            return draft
        if policy.has_chosen_all:
            break
        target_bytes -= excess_bytes
    best: tuple[int, Draft] | None = None
    for level in reversed(range(_LEVELS)):
        draft = policy.draft(policy.peak_bytes * level // _LEVELS)
        peak_bytes = int(load(draft.offloads).max())
        if best is None or peak_bytes < best[0]:
            best = peak_bytes, draft
        if peak_bytes <= problem.budget_bytes:
            break
    assert best is not None, "there are levels"
    return best[1]


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
        seconds = RecomputeSeconds(self.instance)
        swapped, recomputed = list[int](), list[int]()
        while int(live.max()) > target_bytes:
            across = (rows["start"] < (peak := int(np.argmax(live)))) & (peak < rows["end"])
            swap, recompute = self._best_swap(across & may_swap), None
            if swap is None or self.free_seconds[swap] < 0.0:
                recompute = self._best_recomputation(across & may_recompute, seconds)
            if swap is None and recompute is None:
                break
            if recompute is None or (swap is not None and -self.free_seconds[swap] <= seconds.of(*recompute[1:])):
                assert swap is not None
                may_swap[swap] = False
                if not room.take(swap, int(rows["start"][swap])):
                    continue
                taken = swap
                swapped.append(swap)
            else:
                taken = recompute[0]
                recomputed.append(taken)
                seconds.drop(*self._at(taken))
            may_swap[taken] = may_recompute[taken] = False
            live[rows["start"][taken] + 1 : rows["end"][taken]] -= rows["size_bytes"][taken]
        self.has_chosen_all = int(live.max()) > target_bytes
        return swapped, recomputed

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
