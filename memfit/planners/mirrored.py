"""The mirror construction (Chen 2016, Algorithm 2): from mirror counts to a sequence of computations, and its price.

The mirror count m(v) says how often the result of forward op v may be computed again: 0 keeps it. Round k of the
algorithm makes copy k of every op with m(v) >= k; its predecessors are the newest copies there are, so that copy k of v
reads copy min(k, m(u)) of u. The gradient of an op reads the last copy m(v). The backward pass is walked as it stands,
and before each of its ops come the ancestors that are not computed yet, in topological order.

Where the paper leaves room:
- A copy is computed when first wanted, and within one walk copies stand by round, then by place: both are topological.
- Two copies of one result are never held at once: the younger one serves whoever would still read the older.
- An original that may wait (see `program.Tables`), is mirrored, and that nothing of the forward pass reads is not
  computed there.
- An op has count 0 where it must be computed once, where what it writes is mutated, leaves to the user or is required
  at the end, and where what it reads would be gone when it is wanted again.

Source: Chen et al. 2016, Algorithm 2 and section 4.4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memfit.compiled import compiled, entry_point
from memfit.errors import InvalidOptionError
from memfit.planners.kernels import sort
from memfit.planners.program import NOT_AN_OP, Program
from memfit.planners.windows import Evaluation

Counts = NDArray[np.int64]


def evaluate_mirror(program: Program, counts: Counts) -> Evaluation:
    """Return the sequence of the mirror construction, its seconds, and its exact peak.

    Args:
        counts: int64[positions], m(v) of each forward position (see `counts_of`); the rest is ignored.

    Raises:
        InvalidOptionError: a pin wants an op rematerialized whose inputs are gone by then.
    """
    counts = np.where(_may_be_mirrored(program), counts, 0).astype(np.int64)
    counts[program.backward_start :] = 0
    counts = _pinned(program, counts)
    while True:
        sequence, blocked = _unrolled(program, counts)
        if blocked < 0:
            return evaluate_sequence(program, sequence)
        op = program.graph.ops[program.op_at[blocked]]
        if program.problem.pinned.get(op.id) is False:
            raise InvalidOptionError(
                f"pinned wants op {op.id} {op.name!r} rematerialized, but what it reads is mutated before its results "
                f"are wanted again; expected a pin of True, or none"
            )
        counts[blocked] = 0


def evaluate_sequence(program: Program, sequence: NDArray[np.int64]) -> Evaluation:
    """Return what a sequence of positions takes when everything is freed right after its last use."""
    needed = np.zeros(len(program.storage_of), np.bool_)
    peak_bytes = _weigh(program.tables, sequence, needed)
    seconds = float(program.tables.positions["seconds"][sequence].sum())
    return Evaluation(sequence=tuple(sequence.tolist()), seconds=seconds, peak_bytes=peak_bytes + program.base_bytes)


def counts_of(program: Program, counts: Mapping[int, int], otherwise: int = 0) -> Counts:
    """Return the counts by position of counts by op id."""
    return np.array([otherwise if op == NOT_AN_OP else counts.get(op, otherwise) for op in program.op_at], np.int64)


def counts_keeping(program: Program, kept: Iterable[int]) -> Counts:
    """Return count 0 for the ops that write a storage (by id) of `kept`, and 1 for all others."""
    writer_of = program.graph.writer_of
    return counts_of(program, {writer_of[storage]: 0 for storage in kept if storage in writer_of}, otherwise=1)


def _may_be_mirrored(program: Program) -> NDArray[np.bool_]:
    graph = program.graph
    gone = {storage for boundary in graph.boundaries for storage in boundary.departures}

    def may(op_id: int) -> bool:
        if op_id == NOT_AN_OP or graph.ops[op_id].computed_once:
            return False
        return not any(
            graph.last_version[s] or graph.storages[s].required_at_end or s in gone for s in graph.ops[op_id].writes
        )

    return np.array([may(op_id) for op_id in program.op_at], np.bool_)


def _pinned(program: Program, counts: Counts) -> Counts:
    """Put the user's counts in place of the planner's."""
    problem, counts = program.problem, counts.copy()
    if problem.pinned or problem.mirror_counts:
        position_of = {op: position for position, op in enumerate(program.op_at[: program.backward_start])}
        for op, keep in problem.pinned.items():
            if op in position_of:
                counts[position_of[op]] = 0 if keep else max(1, counts[position_of[op]])
        for op, count in problem.mirror_counts.items():
            if op in position_of:
                counts[position_of[op]] = count
    return counts


def _unrolled(program: Program, counts: Counts) -> tuple[NDArray[np.int64], int]:
    """Return the sequence, and -1; or the position that would have to be computed again and may not."""
    positions, total = len(counts), int(counts.sum())
    first_copy = np.cumsum(counts) - counts
    place_of = np.repeat(np.arange(positions), counts)
    scratch = np.zeros((2, total + 1), np.int64)
    sequence = np.zeros(positions + total, np.int64)
    length = _unroll(
        program.tables,
        program.backward_start,
        counts,
        first_copy,
        place_of,
        np.zeros(total + 1, np.bool_),
        np.zeros(positions, np.bool_),
        scratch,
        sequence,
    )
    return sequence[: max(length, 0)], -1 - length if length < 0 else -1


@entry_point
def _unroll(
    tables: Any,
    backward_start: int,
    counts: Any,
    first_copy: Any,
    place_of: Any,
    is_computed: Any,
    is_wanted: Any,
    scratch: Any,
    sequence: Any,
) -> int:
    """Write the sequence; return its length, or -1 - p where position p may not be computed again."""
    for position in range(backward_start - 1, -1, -1):
        op = tables.positions[position]
        if counts[position] == 0 or not op.may_wait:
            is_wanted[position] = True
        if is_wanted[position]:
            for slot in range(op.read_start, op.read_end):
                is_wanted[tables.storages[tables.reads[slot].storage].writer] = True
    length = 0
    for position in range(len(counts)):
        if position < backward_start:
            if is_wanted[position]:
                sequence[length] = position
                length += 1
            continue
        found = _ancestors(tables, position, counts, first_copy, place_of, is_computed, scratch)
        for index in range(found):
            again = scratch[1, index] % len(counts)
            if tables.positions[again].last_rematerialization < position:
                return -1 - again
            sequence[length] = again
            length += 1
        sequence[length] = position
        length += 1
    return length


@compiled
def _ancestors(
    tables: Any, position: int, counts: Any, first_copy: Any, place_of: Any, is_computed: Any, scratch: Any
) -> int:
    """Write to `scratch[1]` the copies to compute for `position`, as round * positions + place, sorted."""
    found, done = _want(tables, position, 1 << 62, counts, first_copy, is_computed, scratch, 0), 0
    while done < found:
        copy = scratch[0, done]
        place = place_of[copy]
        turn = copy - first_copy[place] + 1
        scratch[1, done] = turn * len(counts) + place
        done += 1
        found = _want(tables, place, turn, counts, first_copy, is_computed, scratch, found)
    sort(scratch[1], 0, found)
    return found


@compiled
def _want(
    tables: Any, reader: int, turn: int, counts: Any, first_copy: Any, is_computed: Any, scratch: Any, found: int
) -> int:
    """Add to `scratch[0]` the copies that `reader` reads in round `turn` and that are not computed; return how many."""
    op = tables.positions[reader]
    for slot in range(op.read_start, op.read_end):
        writer = tables.storages[tables.reads[slot].storage].writer
        if counts[writer] > 0:
            copy = first_copy[writer] + min(turn, counts[writer]) - 1
            if not is_computed[copy]:
                is_computed[copy] = True
                scratch[0, found] = copy
                found += 1
    return found


@entry_point
def _weigh(tables: Any, sequence: Any, needed: Any) -> int:
    """Return the peak of a sequence, walked backward, everything freed after its last use."""
    live, peak = 0, 0
    for index in range(len(sequence) - 1, -1, -1):
        op = tables.positions[sequence[index]]
        taken_over = 0
        for slot in range(op.reuse_start, op.reuse_end):
            storage = tables.reuses[slot].read
            if not needed[storage]:
                taken_over = max(taken_over, tables.storages[storage].size_bytes)
        held = live + op.workspace_bytes - taken_over
        for slot in range(op.write_start, op.write_end):
            storage = tables.writes[slot].storage
            if needed[storage]:
                live -= tables.storages[storage].size_bytes
                needed[storage] = False
            else:
                held += tables.storages[storage].size_bytes
        for slot in range(op.read_start, op.read_end):
            storage = tables.reads[slot].storage
            if not needed[storage]:
                live += tables.storages[storage].size_bytes
                held += tables.storages[storage].size_bytes
                needed[storage] = True
        peak = max(peak, held)
    return peak
