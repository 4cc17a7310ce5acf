"""Chen's Algorithm 2: from a count for each forward op to a sequence of computations, and the plan of the best.

The count of an op (in the paper m(v), the mirror count) is how often its results may be recomputed; 0 keeps them. Round
k of the algorithm makes copy k of every op with m(v) >= k. Copy k of v reads the newest copies: copy min(k, m(u)) of u.
The backward op of v reads the last copy m(v). The backward pass keeps its order; before each of its ops stand the
copies that it needs and that are not computed yet, in topological order.

Where the paper leaves a choice:
- A copy is computed when it is first needed. The copies that one op needs are ordered by round, then by place; both
  orders are topological.
- Two copies of one result are never held at once: later readers of the older copy read the younger one.
- A first computation is left out if the op may wait (see `memfit.planners.engine.retention.instance`), has a count
  above 0, and has no reader in the forward pass.
- The count is 0 for an op that must be computed once; for one whose results are mutated, handed to the user, or
  required at the end; and for one whose inputs are gone when it would be recomputed.

Source: Chen et al. 2016, Algorithm 2 and section 4.4.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from memfit.errors import InvalidOptionError
from memfit.plan import Problem, Result
from memfit.planners.engine.order import update_at_once_order
from memfit.planners.engine.results import Ending, make_result
from memfit.planners.engine.retention.decisions import Evaluation
from memfit.planners.engine.retention.emit import emit
from memfit.planners.engine.retention.instance import NOT_AN_OP, Instance, Tables, build_instance
from memfit.planners.engine.retention.live_bytes import step_back
from memfit.planners.engine.retention.sorting import sort
from memfit.planners.engine.retention.state import STORAGE_STATE
from memfit.system.compiled import compiled, entry_point
from memfit.system.records import Flags, Integers, Table

Counts = Integers


class CountPlanner(ABC):
    """A planner that makes plans by recompute counts of the ops; its answer is the fastest that fits the budget."""

    __slots__ = ()
    name: ClassVar[str]

    @abstractmethod
    def counts(self, instance: Instance) -> Sequence[Counts]:
        """Return the counts to try, at least one: int64[positions] each.

        Args:
            instance: the problem as tables.

        Raises:
            InvalidOptionError: an option that is out of range.
        """
        ...

    def plan(self, problem: Problem) -> Result:
        """Return the fastest plan that fits the budget, or the one of the least peak as the leanest.

        Args:
            problem: what to plan.

        Raises:
            InvalidOptionError: an option that is out of range, a pin that cannot be honoured.
        """
        return plan_by_counts(problem, self.name, self.counts)


def plan_by_counts(problem: Problem, planner: str, counts: Callable[[Instance], Sequence[Counts]]) -> Result:
    """Return the fastest plan that fits the budget, of those that a planner makes by recompute counts of the ops.

    Args:
        problem: what to plan.
        planner: the planner's name.
        counts: takes the problem as tables, and returns the counts to try, at least one.

    Raises:
        InvalidOptionError: a pin that cannot be honoured.
    """
    started_seconds = problem.clock()
    instance = build_instance(problem, update_at_once_order(problem.graph))
    found = [evaluate_counts(instance, each) for each in counts(instance)]
    fitting = [each for each in found if each.peak_bytes <= problem.budget_bytes]
    if fitting:
        chosen = min(fitting, key=lambda each: (each.seconds, each.peak_bytes))
    else:
        chosen = min(found, key=lambda each: (each.peak_bytes, each.seconds))
    ending = Ending(
        planner=planner,
        started_seconds=started_seconds,
        schedule=emit(instance, chosen.sequence),
        least_found_bytes=min(each.peak_bytes for each in found),
        tried_all=True,
    )
    return make_result(problem, ending)


def evaluate_counts(instance: Instance, counts: Counts) -> Evaluation:
    """Return the sequence that Algorithm 2 makes of these counts, its seconds, and its exact peak.

    Args:
        instance: the problem as tables.
        counts: int64[positions], m(v) of each forward position (see `counts_of`); the others are ignored.

    Raises:
        InvalidOptionError: an op is pinned to be rematerialized, and its inputs are gone by then.
    """
    counts = np.where(_may_be_recomputed(instance), counts, 0).astype(np.int64)
    counts[instance.backward_start :] = 0
    counts = _pinned(instance, counts)
    while True:
        sequence, blocked = _unrolled(instance, counts)
        if blocked < 0:
            return evaluate_sequence(instance, sequence)
        op = instance.graph.ops[instance.op_at[blocked]]
        if instance.problem.pinned.get(op.id) is False:
            raise InvalidOptionError(
                f"op {op.id} {op.name!r} is pinned to be rematerialized, but one of its inputs is mutated before its "
                f"results are needed again; expected a pin of True, or none"
            )
        counts[blocked] = 0


def evaluate_sequence(instance: Instance, sequence: Integers) -> Evaluation:
    """Return the seconds and the peak of a sequence in which everything is freed right after its last use.

    Args:
        instance: the problem as tables.
        sequence: int64[computations], positions in the order in which they are computed.
    """
    peak_bytes = _peak_bytes(instance.tables, sequence, np.zeros(len(instance.storage_of), STORAGE_STATE))
    seconds = float(instance.tables.positions["seconds"][sequence].sum())
    return Evaluation(sequence=tuple(sequence.tolist()), seconds=seconds, peak_bytes=peak_bytes + instance.base_bytes)


def counts_of(instance: Instance, counts: Mapping[int, int], otherwise: int = 0) -> Counts:
    """Return int64[positions]: the counts by position.

    Args:
        instance: the problem as tables.
        counts: op id -> count.
        otherwise: the count of all other ops.
    """
    return np.array([otherwise if op == NOT_AN_OP else counts.get(op, otherwise) for op in instance.op_at], np.int64)


def counts_keeping(instance: Instance, kept: Iterable[int]) -> Counts:
    """Return int64[positions]: 0 for the ops that write a storage (by id) of `kept`, 1 for all others.

    Args:
        instance: the tables of the graph.
        kept: storages, by id.
    """
    writer_of = instance.graph.writer_of
    return counts_of(instance, {writer_of[storage]: 0 for storage in kept if storage in writer_of}, otherwise=1)


def _may_be_recomputed(instance: Instance) -> Flags:
    graph = instance.graph
    gone = {storage for boundary in graph.boundaries for storage in boundary.departures}

    def may(op_id: int) -> bool:
        if op_id == NOT_AN_OP or graph.ops[op_id].computed_once:
            return False
        return not any(
            graph.last_version[s] or graph.storages[s].required_at_end or s in gone for s in graph.ops[op_id].writes
        )

    return np.array([may(op_id) for op_id in instance.op_at], np.bool_)


def _pinned(instance: Instance, counts: Counts) -> Counts:
    """Return the counts with those that the user pinned in place of the planner's."""
    problem, counts = instance.problem, counts.copy()
    if problem.pinned or problem.mirror_counts:
        position_of = {op: position for position, op in enumerate(instance.op_at[: instance.backward_start])}
        for op, keep in problem.pinned.items():
            if op in position_of:
                counts[position_of[op]] = 0 if keep else max(1, counts[position_of[op]])
        for op, count in problem.mirror_counts.items():
            if op in position_of:
                counts[position_of[op]] = count
    return counts


class _Copies(NamedTuple):
    """The copies that recomputations make, numbered by position and then by round.

    Attributes:
        counts: int64[positions], m(v).
        first: int64[positions], the first copy of each position.
        place: int64[copies], the position of each copy.
        is_computed: bool[copies + 1], which of them the sequence contains so far.
        needed: int64[copies + 1], scratch: the copies that one position needs.
        keys: int64[copies + 1], scratch: their rounds times positions, plus their places.
    """

    counts: Integers
    first: Integers
    place: Integers
    is_computed: Flags
    needed: Integers
    keys: Integers


def _unrolled(instance: Instance, counts: Counts) -> tuple[Integers, int]:
    """Return the sequence, and -1; or the position that would have to be recomputed and may not."""
    positions, total = len(counts), int(counts.sum())
    copies = _Copies(
        counts=counts,
        first=np.cumsum(counts) - counts,
        place=np.repeat(np.arange(positions), counts),
        is_computed=np.zeros(total + 1, np.bool_),
        needed=np.zeros(total + 1, np.int64),
        keys=np.zeros(total + 1, np.int64),
    )
    sequence = np.zeros(positions + total, np.int64)
    length = _unroll(instance.tables, instance.backward_start, copies, np.zeros(positions, np.bool_), sequence)
    return sequence[: max(length, 0)], -1 - length if length < 0 else -1


@entry_point
def _unroll(tables: Tables, backward_start: int, copies: _Copies, is_needed: Flags, sequence: Integers) -> int:
    """Write the sequence; return its length, or -1 - p if position p would have to be recomputed and may not."""
    counts = copies.counts
    for position in range(backward_start - 1, -1, -1):
        op = tables.positions[position]
        if counts[position] == 0 or not op.may_wait:
            is_needed[position] = True
        if is_needed[position]:
            for slot in range(op.read_start, op.read_end):
                is_needed[tables.storages[tables.reads[slot].storage].writer] = True
    length = 0
    for position in range(len(counts)):
        if position < backward_start:
            if is_needed[position]:
                sequence[length] = position
                length += 1
            continue
        for index in range(_ancestors(tables, position, copies)):
            recomputed = copies.keys[index] % len(counts)
            if tables.positions[recomputed].last_rematerialization < position:
                return -1 - recomputed
            sequence[length] = recomputed
            length += 1
        sequence[length] = position
        length += 1
    return length


@compiled
def _ancestors(tables: Tables, position: int, copies: _Copies) -> int:
    """Write to `keys` the copies to compute for `position`, ascending; return their count."""
    found, done = _add_missing(tables, position, 1 << 62, copies, 0), 0
    while done < found:
        copy = int(copies.needed[done])
        place = int(copies.place[copy])
        number = copy - copies.first[place] + 1
        copies.keys[done] = number * len(copies.counts) + place
        done += 1
        found = _add_missing(tables, place, number, copies, found)
    sort(copies.keys, 0, found)
    return found


@compiled
def _add_missing(tables: Tables, reader: int, number: int, copies: _Copies, found: int) -> int:
    """Append to `needed` the copies not yet computed that `reader` reads in round `number`; return its length."""
    op = tables.positions[reader]
    for slot in range(op.read_start, op.read_end):
        writer = tables.storages[tables.reads[slot].storage].writer
        if copies.counts[writer] > 0:
            copy = copies.first[writer] + min(number, copies.counts[writer]) - 1
            if not copies.is_computed[copy]:
                copies.is_computed[copy] = True
                copies.needed[found] = copy
                found += 1
    return found


@entry_point
def _peak_bytes(tables: Tables, sequence: Integers, storages: Table) -> int:
    """Return the peak of a sequence, residents left out; walks backward and frees everything after its last use."""
    live, peak = 0, 0
    for index in range(len(sequence) - 1, -1, -1):
        live, held = step_back(tables, storages, sequence[index], live)
        peak = max(peak, held)
    return peak
