"""The bytes of a step under the allocation strategies of MXNet's memory cost tool, in series and in parallel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memfit.device import Device
from memfit.graph import Graph
from memfit.packing.blocks import PackingProblem
from memfit.packing.check import check_layout
from memfit.packing.check_parallel import check_parallel
from memfit.packing.from_schedule import blocks_of
from memfit.packing.parallel import WAYS, pack_parallel, users_of
from memfit.packing.portfolio import Portfolio
from memfit.schedule import Schedule
from memfit.simulate.in_place import apart, in_place

STRATEGIES = ("none", "inplace", "sharing")
_SHARING_SECONDS = 1.0  # time limit of the packing


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelBytes:
    """What a step needs when its ops may run at the same time.

    Attributes:
        needed_bytes: `apart`, and each of `memfit.packing.parallel.WAYS` -> bytes on the device, residents and outputs
            included.
        series_dependences: pairs of ops that the way `series` orders beside the graph's own order.
    """

    needed_bytes: dict[str, int]
    series_dependences: int


def strategy_bytes(
    graph: Graph, schedule: Schedule, device: Device, *, strategies: Sequence[str] = STRATEGIES
) -> dict[str, int]:
    """Return the bytes that `schedule` needs on the device under each strategy, residents and outputs included.

    `none` gives every block its own memory. `inplace` lets an op write over an input that has no later reader, and
    gives every remaining block its own memory. `sharing` does that too and packs the blocks into one arena.

    Args:
        graph: its `reuses` say which op can write over which input.
        schedule: computes and drops, such as the unplanned step; a storage is dropped right after its last use.
        device: gives the alignment.
        strategies: names among `STRATEGIES`.

    Source: mxnet 1.0, "Optimizing Memory Consumption", and its memory cost estimation script.
    """
    result: dict[str, int] = {}
    for strategy in strategies:
        step = blocks_of(graph, apart(schedule) if strategy == "none" else in_place(graph, schedule), device)
        always = device.resident_bytes(graph) + int(step.outside_bytes.max(initial=0))
        if strategy == "sharing":
            layout = Portfolio().pack(PackingProblem(blocks=step.blocks, time_limit_seconds=_SHARING_SECONDS))
            check_layout(step.blocks, layout)
            result[strategy] = always + layout.height_bytes
        else:
            result[strategy] = always + int(step.blocks.sizes_bytes.sum())
    return result


def parallel_bytes(graph: Graph, device: Device) -> ParallelBytes:
    """Return what `graph` needs under each way of sharing that is safe when ops run at the same time.

    In-place reuse and workspaces are left out. Residents, arrivals and outputs are counted as if all were there at
    once, because no order of the ops is assumed. Every layout is checked.

    Args:
        graph: the part that runs in parallel.
        device: gives the alignment.

    Source: mxnet 1.0, "Optimizing Memory Consumption", memory allocation for parallel operations.
    """
    inside = users_of(graph)
    sizes = {storage.id: device.aligned(storage.bytes) for storage in graph.storages}
    always = sum(size for storage, size in sizes.items() if storage not in inside)
    needed, dependences = {"apart": sum(sizes.values())}, 0
    for way in WAYS:
        layout = pack_parallel(graph, way, device)
        check_parallel(graph, layout, device)
        needed[way] = always + layout.height_bytes
        dependences += len(layout.dependences)
    return ParallelBytes(needed_bytes=needed, series_dependences=dependences)
