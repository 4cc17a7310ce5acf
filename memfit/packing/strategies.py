"""What a step needs under the allocation strategies of the memory cost tool: each block apart, in place, shared."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.device import Device
from memfit.graph import Graph
from memfit.in_place import in_place
from memfit.packing.auto import Auto
from memfit.packing.blocks import PackingProblem
from memfit.packing.check import check_layout
from memfit.packing.from_schedule import blocks_of
from memfit.schedule import Compute, Drop, Instruction, Schedule

STRATEGIES = ("none", "inplace", "sharing")


def strategy_bytes(
    graph: Graph, schedule: Schedule, device: Device, *, strategies: Sequence[str] = STRATEGIES, seconds: float = 1.0
) -> dict[str, int]:
    """Return the bytes that `schedule` needs on the device under each strategy, residents and outputs included.

    `none` gives every block its own memory; `inplace` lets an op write over an input that dies there, and gives every
    block left its own; `sharing` does that too and packs the blocks into one arena.

    Args:
        graph: its `reuses` say which op can write over which input.
        schedule: computes and drops, such as the unplanned step; what dies is dropped right after its last use.
        device: gives the alignment.
        strategies: those that are asked for.
        seconds: time limit of the packing.

    Source: mxnet 1.0, "Optimizing Memory Consumption", and its memory cost estimation script.
    """
    resident = sum(device.aligned(storage.bytes) for storage in graph.storages if storage.resident)
    result: dict[str, int] = {}
    for strategy in strategies:
        step = blocks_of(graph, apart(schedule) if strategy == "none" else in_place(graph, schedule), device)
        always = resident + int(step.outside_bytes.max(initial=0))
        if strategy == "sharing":
            layout = Auto().pack(PackingProblem(blocks=step.blocks, time_limit_seconds=seconds))
            check_layout(step.blocks, layout)
            result[strategy] = always + layout.height_bytes
        else:
            result[strategy] = always + int(step.blocks.sizes_bytes.sum())
    return result


def apart(schedule: Schedule) -> Schedule:
    """Return the schedule with nothing taken over: what would be is dropped right after."""
    rows: list[Instruction] = []
    for instruction in schedule:
        if isinstance(instruction, Compute) and instruction.in_place_of is not None:
            rows += [Compute(op=instruction.op), Drop(storage=instruction.in_place_of)]
        else:
            rows.append(instruction)
    return Schedule.of(rows)
