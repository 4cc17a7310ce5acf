"""A plan as a memory snapshot of torch, for https://pytorch.org/memory_viz."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from memfit.graph import Graph
from memfit.plan import Plan
from memfit.report.live import play
from memfit.simulate.live_ranges import live_ranges
from memfit.system.files import write_atomically
from memfit.system.lines import printable

_FIRST_ADDRESS = 1 << 20  # 0 stands for no address
_MICROSECONDS = 1_000_000

Event = dict[str, Any]


def write_snapshot(plan: Plan, path: Path | str) -> None:
    """Write the plan's step as a memory snapshot, which `torch.cuda.memory._dump_snapshot` would write, atomically.

    Drop it on https://pytorch.org/memory_viz, or read it with `python -m torch.cuda._memory_viz`. Each storage, second
    copy and workspace is one allocation, at an address of its own; its frames name the op that makes it and the module.
    Events carry predicted times.

    Args:
        plan: checked.
        path: where the snapshot is written, such as `step.pickle`.

    Raises:
        InvalidFileError: the file cannot be written.

    Guarantees: the sum of the live allocations at the peak is the plan's predicted peak, less the bytes outside.
    """
    events = [event for _, event in sorted(_events(plan), key=lambda pair: pair[0])]
    document = {"segments": [], "device_traces": [events], "external_annotations": []}
    write_atomically(Path(path), pickle.dumps(document, protocol=4))  # as torch's own


def _events(plan: Plan) -> Iterator[tuple[tuple[int, bool], Event]]:
    """Yield each event with its moment: an instruction's position, where frees precede allocations."""
    graph, schedule = plan.graph, plan.schedule
    run, found = play(graph, schedule, plan.device), live_ranges(graph, schedule)
    clock = np.rint(run.clock_seconds * _MICROSECONDS).astype(np.int64).tolist()
    held: list[tuple[int, int, int, list[Event]]] = []  # from, to, bytes, frames
    for stay in found.ranges:
        size_bytes = plan.device.aligned(graph.storages[stay.storage].bytes)
        held.append((stay.first, stay.last, size_bytes, _frames_of_storage(graph, stay.storage)))
    for position, storage in found.second_copies:
        size_bytes = plan.device.aligned(graph.storages[storage].bytes)
        held.append((position, position + 1, size_bytes, _frames_of_storage(graph, storage)))
    for position, op in found.workspaces:
        if workspace_bytes := graph.ops[op].workspace_bytes:
            held.append((position, position + 1, workspace_bytes, _frames(graph, op, "workspace of ")))
    address = _FIRST_ADDRESS
    for first, last, size_bytes, frames in held:
        if not size_bytes:
            continue
        common = {"addr": address, "size": size_bytes, "stream": 0, "frames": frames}
        yield (first, True), common | {"action": "alloc", "time_us": clock[first]}
        if last < len(schedule):
            yield (last, False), common | {"action": "free_requested", "time_us": clock[last]}
            yield (last, False), common | {"action": "free_completed", "time_us": clock[last]}
        address += size_bytes


def _frames_of_storage(graph: Graph, storage: int) -> list[Event]:
    held = graph.storages[storage]
    name = {"name": printable(held.name), "filename": str(held.role), "line": storage}
    writer = graph.writer_of.get(storage)
    return [name, *(_frames(graph, writer) if writer is not None else [])]


def _frames(graph: Graph, op: int, what: str = "") -> list[Event]:
    """Return an op and its module as the frames of a stack, the innermost first."""
    found = graph.ops[op]
    own = {"name": f"{what}{printable(found.name)}", "filename": str(found.phase), "line": op}
    module = {"name": printable(found.module), "filename": "module", "line": op}
    return [own, module] if found.module else [own]
