"""Rematerialization around trips to the host: where each storage is away, told to the search over windows.

A storage on a trip is *away* in the stages that lie wholly between the stop before which it leaves and the stop before
which it returns: its bytes do not count there, nothing may read it, and its window is as it is. A search over the other
windows then finds what is best computed again beside these trips.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from memfit.plan import Problem
from memfit.planners.emit import emit
from memfit.planners.incremental import State, make_state
from memfit.planners.program import KEPT, Program
from memfit.planners.stages import rebuild
from memfit.planners.trips import Trips, find_trips
from memfit.planners.windows import Integers, Windows, evaluate, simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """A storage (by id) that is on the host in the stages from `first` to `last`."""

    storage: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Windows, and the trips that their schedule could make; `stage_of` int64[stops], the stage of each stop."""

    windows: Windows
    peak_bytes: int
    seconds: float
    trips: Trips
    stage_of: Integers


def make_draft(program: Program, problem: Problem, windows: Windows) -> Draft:
    """Return what `windows` lead to, everything on the device at first."""
    state = simulated(program, windows)
    evaluation = evaluate(program, state)
    return Draft(
        windows=Windows(release=state.gaps["release"].copy(), hold=state.gaps["hold"].copy()),
        peak_bytes=evaluation.peak_bytes,
        seconds=evaluation.seconds,
        trips=find_trips(problem, emit(program, evaluation.sequence)),
        stage_of=_stages(state),
    )


def _stages(state: State) -> Integers:
    """Return the stage of each computation, in their order; the end is the last one."""
    counts = state.stages["length"] + ~state.stages["waits"]
    return np.repeat(np.arange(len(state.stages)), counts)


def absences(draft: Draft) -> list[Absence]:
    """Return where the trips that are made leave whole stages without their storages."""
    found: list[Absence] = []
    for number in np.flatnonzero(draft.trips.trips["made"]):
        trip, stage_of = draft.trips.trips[number], draft.stage_of
        left, returned = int(trip["left"]), int(trip["returned"])
        # The first stage that begins at `left` or later; the last one that ends before `returned`.
        first = int(stage_of[left]) + int(left > 0 and stage_of[left - 1] == stage_of[left])
        last = int(stage_of[returned - 1]) - int(stage_of[returned - 1] == stage_of[returned])
        if first <= last:
            found.append(Absence(storage=int(trip["storage"]), first=first, last=last))
    return found


def without(program: Program, away: Sequence[Absence]) -> Program:
    """Return the program in which these storages are away, and the windows around them stay as they are."""
    positions, gaps = program.tables.positions.copy(), program.tables.gaps.copy()
    number_of = {storage: number for number, storage in enumerate(program.storage_of)}
    for absence in away:
        number = number_of[absence.storage]
        positions["away_bytes"][absence.first : absence.last + 1] += program.tables.storages["size_bytes"][number]
        rows = slice(program.tables.storages["first_gap"][number], program.tables.storages["last_gap"][number] + 1)
        touched = (gaps["start"][rows] <= absence.last) & (gaps["end"][rows] > absence.first)
        gaps["rule"][rows][touched] = KEPT
        gaps["away_from"][rows][touched] = absence.first
        gaps["away_until"][rows][touched] = absence.last + 1
    return replace(program, tables=program.tables._replace(positions=positions, gaps=gaps))


def is_possible(program: Program, windows: Windows) -> bool:
    """Return whether `windows` compute only what may be computed, with what is away."""
    state = make_state(program)
    state.gaps["release"], state.gaps["hold"] = windows.release, windows.hold
    return rebuild(program.tables, state)


def take_along(draft: Draft, away: Sequence[Absence]) -> None:
    """Make those trips of `draft` during which the storages of `away` would be away as they say."""
    trips, stage_of = draft.trips.trips, draft.stage_of
    opens, closes = stage_of[trips["start"]], stage_of[trips["end"]]
    for absence in away:
        trips["made"] |= (trips["storage"] == absence.storage) & (opens <= absence.first) & (closes >= absence.last)
