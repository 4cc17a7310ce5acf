"""From a sequence of computations to the schedule that frees everything right after its last use."""

from __future__ import annotations

from collections.abc import Iterable

from memfit.in_place import in_place
from memfit.planners.program import NOT_AN_OP, Program
from memfit.schedule import Boundary, Compute, Drop, Instruction, Schedule


def emit(program: Program, sequence: Iterable[int]) -> Schedule:
    """Return the schedule that computes `sequence` (positions of `program`) with the fewest bytes at every instruction.

    A storage is dropped right after its last use, or taken over there where it may be; a write that nothing uses, at
    once.
    """
    order = list(sequence)
    departures = _departures(program)
    # All that is the user's at this place, walking back.
    departed = {storage for gone in departures.values() for storage in gone}
    blocks: list[list[Instruction]] = []
    needed: set[int] = set()
    for position in reversed(order):
        departed -= departures.get(position, set())
        blocks.append(_block(program, position, needed, departed))
    return in_place(program.graph, Schedule.of(instruction for block in reversed(blocks) for instruction in block))


def _departures(program: Program) -> dict[int, set[int]]:
    """Position of each boundary -> the managed storages that are the user's from there on, and not before."""
    number_of = {storage: number for number, storage in enumerate(program.storage_of)}
    first: dict[int, set[int]] = {}
    for position, boundary in sorted(program.boundary_at.items()):
        departing = {number_of[s] for s in program.graph.boundaries[boundary].departures if s in number_of}
        first[position] = departing.difference(*first.values())
    return first


def _block(program: Program, position: int, needed: set[int], departed: set[int]) -> list[Instruction]:
    """Return the instructions of one position; `needed` goes from what is used after it to what is used from it on."""
    tables, row = program.tables, program.tables.positions[position]
    reads: list[int] = tables.reads["storage"][row["read_start"] : row["read_end"]].tolist()
    writes: list[int] = tables.writes["storage"][row["write_start"] : row["write_end"]].tolist()
    unused = [storage for storage in writes if storage not in needed]
    dying = [storage for storage in reads if storage not in needed]
    # What the user has stays, also where its op is computed once more for the sake of another result.
    needed.difference_update(storage for storage in writes if storage not in departed)
    needed.update(reads)
    if position in program.boundary_at:
        number = program.boundary_at[position]
        holds = any(program.storage_of[storage] == len(program.graph.storages) for storage in writes)
        block: list[Instruction] = [
            Boundary(boundary=number, bytes_outside=program.problem.bytes_outside if holds else 0)
        ]
    elif program.op_at[position] == NOT_AN_OP:
        return []  # the end: what it reads stays
    else:
        block = [Compute(op=program.op_at[position])]
    return block + [Drop(storage=program.storage_of[storage]) for storage in sorted(unused + dying)]
