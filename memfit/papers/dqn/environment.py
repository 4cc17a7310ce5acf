"""The environment: states, actions, transitions and rewards (sections 4.4 to 4.8), over the one simulator.

The agent stands at a row, which is under execution, and chooses an action that is valid there, or nothing.

Actions (section 4.5). An offload is valid from the use that opens its gap on, as long as the copy can end before the
use that closes it; not if the host budget would be exceeded. A removal is valid in forward only, from the last forward
use on. Offload and removal of one storage exclude each other. A removed storage leaves right after its last forward
use, also if the agent decides later. It is recomputed when backward reads it, or before (see
`memfit.papers.dqn.recomputations`), and kept from there on.

Transitions (section 4.6). After doing nothing or a removal the agent is at the next row, after an offload at the first
row that begins when its copy has ended, or later. Rows begin when they do in the simulated schedule of all decisions so
far, which waits for memory.

Rewards (section 4.7). The simulated seconds of the schedule before the action minus those after it, in shares of the
unplanned step: minus the recomputation for a removal, minus the stalls in forward and backward for an offload.

Terminal state (section 4.10): the schedule of the decisions so far fits the budget.

Where the paper is silent:
- Rows at which nothing new can be decided are passed over. After doing nothing, the agent stops at the next row that
  opens a gap, that does not fit the budget, or that is the last one of forward; after another action also at any row
  with a valid action.
- At a row that does not fit, and at the last row of forward while anything later does not fit, doing nothing is not
  valid, and the agent stays until it fits.
- If nothing is valid there, or the agent passes the last row, the episode has failed. It ends with a penalty: minus one
  step, minus the share of the budget by which the schedule exceeds it.
- Host copies of decided offloads are taken to fill the host budget to the end of the step.
- A removal whose recomputation is not legal after all (an input is mutated in between) has no effect.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from memfit.papers.dqn.copies import Carried, Choice, with_trips
from memfit.papers.dqn.recomputations import moved_ahead
from memfit.papers.dqn.rows import Act, Kind, Rows, make_rows
from memfit.plan import Problem
from memfit.planners.engine.offloading.intervals import OffloadIntervals, find_offload_intervals
from memfit.planners.engine.order import update_at_once_order
from memfit.planners.engine.retention.decisions import Retention, evaluate, keep_everything, simulated
from memfit.planners.engine.retention.emit import emit
from memfit.planners.engine.retention.instance import build_instance
from memfit.schedule import Code, Schedule
from memfit.simulate import simulate
from memfit.system.records import Flags, Integers

FAILURE = -1.0  # reward of a failed episode, in steps: more than recomputing all of forward costs
NOTHING = 0  # the first action


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What changes from state to state: bool[actions], which of them are valid, and the row under execution."""

    valid: Flags
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The schedule of some decisions, and its simulation.

    Attributes:
        schedule: legal, whether or not it fits.
        carried: with its trips.
        seconds: of the step.
        peak_bytes, host_peak_bytes: its peaks, the bytes outside included.
        begins, waits: float64[stops], when each stop begins, and how long compute waits before it.
        stop_at: int64[positions], the stop of the first computation at a position or after it.
    """

    schedule: Schedule
    carried: Carried
    seconds: float
    peak_bytes: int
    host_peak_bytes: int
    begins: NDArray[np.float64]
    waits: NDArray[np.float64]
    stop_at: Integers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """The schedule of some removals, without copies."""

    removed: frozenset[int]
    found: OffloadIntervals
    stop_at: Integers
    order: Integers


class Environment:
    """The simulator that the agent acts in; `reset` begins an episode, `step` carries out an action.

    Attributes:
        rows: the graph of rows.
        actions: int64[actions], their rows; the first is row 0, doing nothing.
        state: the agent's.
        outcome: of the decisions so far.
        is_terminal: whether the episode has ended; `fits` says how.
        limit_bytes: that the episode is to fit: the budget, or more.
    """

    def __init__(self, problem: Problem) -> None:
        """Plan nothing yet.

        Args:
            problem: what to plan.

        Raises:
            InvalidOptionError: a pin that cannot be honoured.
        """
        self.problem, self.limit_bytes = problem, problem.budget_bytes
        self.instance = build_instance(problem, update_at_once_order(problem.graph))
        self._kept = keep_everything(self.instance)
        self._draft = self._drafted(frozenset())
        self.unplanned = self._simulated(self._draft, [])
        self.outcome = self.unplanned
        held = self.unplanned.carried.held_bytes[self.unplanned.stop_at]
        self.excess_bytes = max(0, self.unplanned.peak_bytes - problem.budget_bytes)
        self.rows: Rows = make_rows(self.instance, held > problem.budget_bytes, self.excess_bytes)
        self.actions = np.concatenate([[0], np.flatnonzero(self.rows.action != Act.NOTHING)]).astype(np.int64)
        if self.has_actions:
            self._describe_actions()
        self.reset()

    @property
    def has_actions(self) -> bool:
        """Whether there is anything to decide."""
        return len(self.actions) > 1

    @property
    def fits(self) -> bool:
        """Whether the schedule of the decisions so far fits the limit and the host budget."""
        outcome = self.outcome
        within = outcome.peak_bytes <= self.limit_bytes
        return within and outcome.host_peak_bytes <= self.problem.host_budget_bytes

    def reset(self, limit_bytes: int | None = None) -> None:
        """Begin an episode: no decisions, at the first row with a valid action.

        Args:
            limit_bytes: takes the place of the budget in this episode.
        """
        self.limit_bytes = self.problem.budget_bytes if limit_bytes is None else limit_bytes
        self.decided: dict[int, int] = {}  # action -> the position where it was decided
        self.outcome = self.unplanned
        self.is_terminal = self.fits or not self.has_actions or not self._stops_from(0, opens=True)

    def step(self, action: int) -> float:
        """Carry out a valid action, and return its reward.

        Args:
            action: an index of `actions`.
        """
        assert self.state.valid[action], "the agent chooses valid actions"
        before, copy_ends = self.outcome.seconds, -np.inf
        if action != NOTHING:
            self.decided[action] = self._here
            self.outcome = self._decided()
            copy_ends = self._copy_ends(action)
        reward = (before - self.outcome.seconds) / max(self.unplanned.seconds, 1e-12)
        if self.fits:
            self.is_terminal = True
        elif not self._moves(action, copy_ends):
            self.is_terminal = True
            exceeding = self.outcome.peak_bytes - self.limit_bytes
            reward += FAILURE - max(0, exceeding) / max(1, self.limit_bytes)
        return reward

    @property
    def _here(self) -> int:
        return int(self._at[self._row])

    def _describe_actions(self) -> None:
        """Keep what validity depends on, one entry an action."""
        tables, rows, picked = self.instance.tables, self.rows, self.actions
        self._at = rows.position + (rows.kind == Kind.FREE)  # a row's position; frees stand behind their op
        intervals = tables.intervals[rows.gap[picked]]
        self._is_offload = rows.action[picked] == Act.OFFLOAD
        self._is_removal = rows.action[picked] == Act.REMOVE
        self._gaps, self._storages = rows.gap[picked], rows.storage[picked]
        self._starts, self._ends = intervals["start"], intervals["end"]
        begins = self.unplanned.begins[self.unplanned.stop_at]
        graph, rate = self.problem.graph, self.problem.device.to_host_bytes_per_second or np.inf
        self._ids = np.array(self.instance.storage_of, np.int64)[self._storages]
        count = len(graph.storages)  # the bytes that user code holds have that number, and no action
        ids: list[int] = self._ids.tolist()
        host_bytes = [graph.storages[storage].bytes if storage < count else 0 for storage in ids]
        self._host_bytes = np.array(host_bytes, np.int64)
        latest = begins[self._ends] - self._host_bytes / rate
        self._last_begin = np.searchsorted(begins, latest, side="right") - 1  # the last position from which a copy fits
        opened = set(zip(self._storages[1:].tolist(), self._starts[1:].tolist(), strict=True))
        is_use = (rows.kind == Kind.READ) | (rows.kind == Kind.WRITE)
        uses = zip(rows.storage.tolist(), rows.position.tolist(), is_use.tolist(), strict=True)
        self._opens = np.array([use and (storage, at) in opened for storage, at, use in uses], np.bool_)
        forward = np.flatnonzero(self._at < self.instance.backward_start)
        self._last_forward = int(forward[-1]) if len(forward) else -1

    def _drafted(self, removed: frozenset[int]) -> _Draft:
        """Return the schedule without copies in which the storages of these gaps are removed."""
        retention, gaps = self._kept, sorted(removed)
        if gaps:
            starts = self.instance.tables.intervals["start"][gaps]
            release, hold = retention.release.copy(), retention.hold.copy()
            release[gaps], hold[gaps] = starts, starts + 1
            retention = Retention(release=release, hold=hold)
        sequence = evaluate(self.instance, simulated(self.instance, retention)).sequence
        return self._in_order(removed, np.array(sequence, np.int64))

    def _in_order(self, removed: frozenset[int], order: Integers) -> _Draft:
        """Return the draft that computes these positions in this order."""
        problem = self.problem
        if not problem.device.has_link:  # the stops are asked for; the intervals are of no use
            rates = {"to_host_bytes_per_second": 1.0, "to_device_bytes_per_second": 1.0}
            linked = msgspec.structs.replace(problem.device, **rates)
            problem = replace(problem, device=linked)
        found = find_offload_intervals(problem, emit(self.instance, order.tolist()))
        first = np.full(len(self.instance.op_at), len(order) - 1, np.int64)
        first[order[::-1]] = np.arange(len(order))[::-1]
        stop_at = np.minimum.accumulate(first[::-1])[::-1]
        return _Draft(removed=removed, found=found, stop_at=stop_at, order=order)

    def _decided(self) -> Outcome:
        """Return the outcome of the decisions so far."""
        removed = frozenset(int(self._gaps[a]) for a in self.decided if self._is_removal[a])
        if removed != self._draft.removed:
            self._draft = self._drafted(removed)
        outcome = self._simulated(self._draft, self._choices(self._draft))
        held = outcome.carried.held_bytes
        order = moved_ahead(self.instance, self._draft.order, outcome.waits, held, self.limit_bytes)
        if order is None:
            return outcome
        ahead = self._in_order(removed, order)
        changed = self._simulated(ahead, self._choices(ahead))
        most = max(outcome.peak_bytes, self.limit_bytes)
        is_better = changed.seconds < outcome.seconds and changed.peak_bytes <= most
        return changed if is_better and changed.host_peak_bytes <= outcome.host_peak_bytes else outcome

    def _choices(self, draft: _Draft) -> list[Choice]:
        return [
            Choice(storage=int(self._ids[action]), stop=int(draft.stop_at[at]))
            for action, at in self.decided.items()
            if self._is_offload[action]
        ]

    def _simulated(self, draft: _Draft, choices: list[Choice]) -> Outcome:
        graph, device = self.problem.graph, self.problem.device
        carried = with_trips(graph, draft.found, choices, self.limit_bytes)
        schedule = carried.schedule
        timeline = simulate(graph, schedule, device)
        stops = np.flatnonzero(np.isin(schedule.codes, (Code.COMPUTE, Code.BOUNDARY)))
        begins = np.append(timeline.start_seconds[stops], timeline.makespan_seconds)
        return Outcome(
            schedule=schedule,
            carried=carried,
            seconds=timeline.makespan_seconds,
            peak_bytes=timeline.peak_bytes + self.problem.always_outside_bytes,
            host_peak_bytes=timeline.host_peak_bytes,
            begins=begins,
            waits=begins - np.concatenate([[0.0], timeline.end_seconds[stops]]),
            stop_at=draft.stop_at,
        )

    def _copy_ends(self, action: int) -> float:
        """Return when the copy of the action just taken has ended; minus infinity if it is no offload."""
        if not self._is_offload[action]:
            return -np.inf
        storage, stop = int(self._ids[action]), int(self.outcome.stop_at[self.decided[action]])
        ends = [t.ends_seconds for t in self.outcome.carried.trips if t.storage == storage and t.start <= stop < t.end]
        return max(ends, default=-np.inf)

    def _moves(self, action: int, copy_ends: float) -> bool:
        """Move the agent to the row where it decides next; return whether there is one."""
        if action != NOTHING and self._exceeds(self._row) and self._stops_at(self._row):
            return True
        start = self._row + 1
        if copy_ends > -np.inf:
            begins = self.outcome.begins[self.outcome.stop_at[self._at[start:]]]
            later = np.flatnonzero(begins >= copy_ends)
            passed = int(later[0]) if len(later) else len(begins)
            exceeding = [row for row in range(start, start + passed) if self._exceeds(row)]
            start = exceeding[0] if exceeding else start + passed
        return self._stops_from(start, opens=action == NOTHING)

    def _stops_from(self, start: int, *, opens: bool) -> bool:
        """Stop at the first row from `start` on where the agent decides.

        Args:
            start: a row.
            opens: whether only rows that open a gap count, or any with a valid action; others if they do not fit.
        """
        for row in range(start, len(self.rows)):
            is_due = self._exceeds(row) or row == self._last_forward
            if (is_due or self._opens[row] or not opens) and self._stops_at(row):
                return True
            if is_due and self._exceeds(row):
                return False
        return False

    def _stops_at(self, row: int) -> bool:
        """Stop at a row if there is anything to decide."""
        valid = self._valid(int(self._at[row]))
        if not valid.any():
            return False
        valid[NOTHING] = not (self._exceeds(row) or row == self._last_forward)
        self._row, self.state = row, State(valid=valid, row=row)
        return True

    def _exceeds(self, row: int) -> bool:
        """Whether a row does not fit the budget after all copies that are under way."""
        stop = self.outcome.stop_at[self._at[row]]
        return bool(self.outcome.carried.held_bytes[stop] > self.limit_bytes)

    def _valid(self, here: int) -> Flags:
        """Return bool[actions]: what can be done at a position, doing nothing left out."""
        done = list(self.decided)
        offloaded = np.isin(self._storages, self._storages[[a for a in done if self._is_offload[a]]])
        removed = np.isin(self._storages, self._storages[[a for a in done if self._is_removal[a]]])
        again = np.isin(self._gaps, self._gaps[done]) if done else np.zeros(len(self.actions), np.bool_)
        left = self.problem.host_budget_bytes - int(self._host_bytes[[a for a in done if self._is_offload[a]]].sum())
        opened = (self._starts <= here) & (here < self._ends) & ~again & ~removed
        offloads = self._is_offload & (here <= self._last_begin) & (self._host_bytes <= left)
        removals = self._is_removal & (here < self.instance.backward_start) & ~offloaded
        return opened & (offloads | removals)
