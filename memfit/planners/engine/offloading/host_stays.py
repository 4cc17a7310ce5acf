"""Retention beside offloading: the stages in which a storage is on the host, as a search over retention sees them.

A storage with a chosen offload interval has a *host stay*: the stages wholly between the stop before which it leaves
and the stop before which it returns. Its bytes do not count there, nothing may read it there, and its retention around
the stay is fixed. A search over the other retention then chooses what is recomputed beside these stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from memfit.plan import Problem
from memfit.planners.engine.offloading.intervals import OffloadIntervals, find_offload_intervals
from memfit.planners.engine.retention.decisions import Retention, evaluate, retention_of, simulated
from memfit.planners.engine.retention.emit import emit
from memfit.planners.engine.retention.instance import KEPT, Instance
from memfit.planners.engine.retention.stages import rebuild
from memfit.planners.engine.retention.state import IncrementalState, empty_state
from memfit.system.records import Integers


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStay:
    """A storage (by id) that is on the host in the stages from `first` to `last`, both included."""

    storage: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A retention, and the offload intervals of its schedule; `stage_of` int64[stops] is the stage of each stop."""

    retention: Retention
    peak_bytes: int
    seconds: float
    offloads: OffloadIntervals
    stage_of: Integers


def make_draft(instance: Instance, problem: Problem, retention: Retention) -> Draft:
    """Return the draft of `retention`, with no interval chosen.

    Args:
        instance: the tables of the graph.
        problem: gives the link.
        retention: allowed as it is, or kept where it is not.
    """
    state = simulated(instance, retention)
    evaluation = evaluate(instance, state)
    return Draft(
        retention=retention_of(state),
        peak_bytes=evaluation.peak_bytes,
        seconds=evaluation.seconds,
        offloads=find_offload_intervals(problem, emit(instance, evaluation.sequence)),
        stage_of=_stages(state),
    )


def _stages(state: IncrementalState) -> Integers:
    """Return the stage of each computation, in their order; the end is the last one."""
    counts = state.stages["length"] + ~state.stages["waits"]
    return np.repeat(np.arange(len(state.stages)), counts)


def host_stays(draft: Draft) -> list[HostStay]:
    """Return the host stays of the chosen intervals that cover at least one whole stage."""
    found: list[HostStay] = []
    for number in np.flatnonzero(draft.offloads.intervals["chosen"]):
        interval, stage_of = draft.offloads.intervals[number], draft.stage_of
        left, returned = int(interval["left"]), int(interval["returned"])
        # The first stage that begins at `left` or later; the last one that ends before `returned`.
        first = int(stage_of[left]) + int(left > 0 and stage_of[left - 1] == stage_of[left])
        last = int(stage_of[returned - 1]) - int(stage_of[returned - 1] == stage_of[returned])
        if first <= last:
            found.append(HostStay(storage=int(interval["storage"]), first=first, last=last))
    return found


def with_host_stays(instance: Instance, stays: Sequence[HostStay]) -> Instance:
    """Return the instance with these host stays; the retention of the intervals that they touch is fixed.

    Args:
        instance: the tables of the graph.
        stays: of storages of the instance.
    """
    positions, intervals = instance.tables.positions.copy(), instance.tables.intervals.copy()
    number_of = {storage: number for number, storage in enumerate(instance.storage_of)}
    for stay in stays:
        storage = instance.tables.storages[number_of[stay.storage]]
        positions["host_bytes"][stay.first : stay.last + 1] += storage["size_bytes"]
        rows = slice(storage["first_interval"], storage["last_interval"] + 1)
        touched = (intervals["start"][rows] <= stay.last) & (intervals["end"][rows] > stay.first)
        intervals["rule"][rows][touched] = KEPT
        intervals["host_from"][rows][touched] = stay.first
        intervals["host_until"][rows][touched] = stay.last + 1
    return replace(instance, tables=instance.tables._replace(positions=positions, intervals=intervals))


def is_possible(instance: Instance, retention: Retention) -> bool:
    """Return whether `retention` needs only computations that are allowed and that read nothing on the host.

    Args:
        instance: with host stays.
        retention: of all intervals.
    """
    state = empty_state(instance.tables)
    state.intervals["release"], state.intervals["hold"] = retention.release, retention.hold
    return rebuild(instance.tables, state)


def choose_again(draft: Draft, stays: Sequence[HostStay]) -> None:
    """Choose the intervals of `draft` that contain these host stays.

    Args:
        draft: its intervals are changed.
        stays: of the same graph, perhaps from another schedule.
    """
    intervals, stage_of = draft.offloads.intervals, draft.stage_of
    opens, closes = stage_of[intervals["start"]], stage_of[intervals["end"]]
    for stay in stays:
        contains = (opens <= stay.first) & (closes >= stay.last)
        intervals["chosen"] |= (intervals["storage"] == stay.storage) & contains
