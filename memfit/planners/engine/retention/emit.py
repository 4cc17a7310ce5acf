"""From a sequence of computations to the schedule that frees everything right after its last use."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from memfit.graph import Graph, Op
from memfit.planners.engine.retention.instance import NOT_AN_OP, Instance
from memfit.schedule import Compute, CrossBoundary, Drop, Instruction, Schedule
from memfit.simulate.in_place import in_place


def emit(instance: Instance, sequence: Iterable[int]) -> Schedule:
    """Return the schedule that computes `sequence` with the fewest bytes at every instruction.

    A storage is dropped right after its last use, or reused in place there if its op allows it. A write without a use
    is dropped at once.

    Args:
        instance: the tables of the graph.
        sequence: positions of `instance`, in the order of computation.
    """
    order = list(sequence)
    departed = dict(instance.departed_at)  # those that belong to the user at the current place of the walk backward
    blocks: list[list[Instruction]] = []
    needed: set[int] = set()
    for position in reversed(order):
        if position in instance.boundary_at:
            departed = {storage: at for storage, at in departed.items() if at != position}
        blocks.append(_block(instance, position, needed, departed))
    instructions = [instruction for block in reversed(blocks) for instruction in block]
    return in_place(instance.graph, Schedule.of(with_early_collectives(instance.graph, instructions)))


def with_early_collectives(graph: Graph, instructions: list[Instruction]) -> list[Instruction]:
    """Return the instructions with each collective as early as it may be; the bytes at all others stay the same.

    Only collectives that allocate nothing are moved: behind the last instruction that touches what they mutate, behind
    the one before of the same ranks or generator, and on their side of each boundary.

    Args:
        graph: the step.
        instructions: of a legal schedule.
    """
    if not graph.has_collectives:
        return instructions
    moved: list[Instruction] = []
    for instruction in instructions:
        place = len(moved)
        op = graph.ops[instruction.op] if isinstance(instruction, Compute) else None
        if op is not None and op.group is not None and not op.writes and not op.workspace_bytes:
            while place and not _stays_before(graph, moved[place - 1], op):
                place -= 1
        moved.insert(place, instruction)
    return moved


def _stays_before(graph: Graph, instruction: Instruction, collective: Op) -> bool:
    if isinstance(instruction, CrossBoundary):
        return True
    if isinstance(instruction, Drop):
        return False  # of a storage that the collective, which comes later, does not need
    if not isinstance(instruction, Compute):
        return True
    op = graph.ops[instruction.op]
    touched = {*collective.reads, *collective.mutates}
    in_order = not set(op.kept_in_order).isdisjoint(collective.kept_in_order)
    return in_order or not touched.isdisjoint((*op.reads, *op.writes, *op.mutates))


def _block(instance: Instance, position: int, needed: set[int], departed: Collection[int]) -> list[Instruction]:
    """Return the instructions of one position.

    Args:
        instance: the tables of the graph.
        position: the position that is computed.
        needed: managed storages that are used later; updated to those used from here on.
        departed: managed storages that belong to the user here.
    """
    reads, writes = instance.reads(position), instance.writes(position)
    unused = [storage for storage in writes if storage not in needed]
    dying = [storage for storage in reads if storage not in needed]
    # The user's storages stay, also if their op is recomputed for another result.
    needed.difference_update(storage for storage in writes if storage not in departed)
    needed.update(reads)
    if position in instance.boundary_at:
        number = instance.boundary_at[position]
        holds = any(instance.storage_of[storage] == len(instance.graph.storages) for storage in writes)
        block: list[Instruction] = [
            CrossBoundary(boundary=number, bytes_outside=instance.problem.bytes_outside if holds else 0)
        ]
    elif instance.op_at[position] == NOT_AN_OP:
        return []  # the end: its reads stay
    else:
        block = [Compute(op=instance.op_at[position])]
    return block + [Drop(storage=instance.storage_of[storage]) for storage in sorted(unused + dying)]
