"""A schedule as a trace for https://ui.perfetto.dev and chrome://tracing: streams and two counters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from memfit.plan import Plan
from memfit.report.live import Run, play
from memfit.schedule import Compute, CrossBoundary, Drop, DropHost, Instruction, Offload, Prefetch, Wait
from memfit.system.files import write_atomically
from memfit.system.lines import printable

_PROCESS = 1
_COMPUTE, _TO_HOST, _TO_DEVICE, _COMMUNICATION = 1, 2, 3, 4
_STREAM_NAMES = {_COMPUTE: "compute", _TO_HOST: "to host", _TO_DEVICE: "to device", _COMMUNICATION: "communication"}
_STREAM_OF: dict[type[Instruction], int] = {Offload: _TO_HOST, Prefetch: _TO_DEVICE}
_VERBS: dict[type[Instruction], str] = {
    Drop: "drop",
    DropHost: "drop host copy of",
    Offload: "offload",
    Prefetch: "prefetch",
    Wait: "wait for",
}
_CATEGORY: dict[type[Instruction], str] = {CrossBoundary: "Boundary"}
_NANOSECONDS = 1_000_000_000

Event = dict[str, Any]


def write_trace(plan: Plan, path: Path | str) -> None:
    """Write the plan's schedule, as the simulator times it, to `path` in Chrome's trace format, atomically.

    Open it in https://ui.perfetto.dev or chrome://tracing. Computations and waits are slices of the thread `compute`,
    copies of the threads `to host` and `to device`, collectives of `communication`, drops are instants; the counters
    are live bytes on the device and on the host. Every slice has its instruction, its module and phase, and whether its
    op is recomputed. A path that ends in `.gz` is compressed; Perfetto reads both.

    Args:
        plan: checked.
        path: where the trace is written.

    Raises:
        InvalidFileError: the file cannot be written.

    Guarantees: times are whole nanoseconds, so that slices of one stream never overlap. A graph without times of its
    ops gives slices of no length, all at 0.

    Source: the Trace Event Format (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
    """
    run = play(plan.graph, plan.schedule, plan.device)
    document = {
        "displayTimeUnit": "ms",
        "otherData": {
            "graph": printable(plan.graph.name),
            "fingerprint": plan.fingerprint,
            "budget_bytes": plan.budget_bytes,
            "predicted_peak_bytes": plan.predicted.peak_bytes,
            "planner": printable(plan.planner),
        },
        "traceEvents": [*_names(plan), *_events(run)],
    }
    write_atomically(Path(path), json.dumps(document, allow_nan=False, separators=(",", ":")).encode())


def _names(plan: Plan) -> list[Event]:
    process = {
        "ph": "M",
        "name": "process_name",
        "pid": _PROCESS,
        "args": {"name": f"memfit {printable(plan.graph.name)}"},
    }
    threads = [
        {"ph": "M", "name": name, "pid": _PROCESS, "tid": stream, "args": args}
        for stream, title in _STREAM_NAMES.items()
        if stream != _COMMUNICATION or plan.graph.has_collectives
        for name, args in (("thread_name", {"name": title}), ("thread_sort_index", {"sort_index": stream}))
    ]
    return [process, *threads]


def _events(run: Run) -> Iterator[Event]:
    timeline = run.timeline
    starts = np.rint(timeline.start_seconds * _NANOSECONDS).astype(np.int64).tolist()
    ends = np.rint(timeline.end_seconds * _NANOSECONDS).astype(np.int64).tolist()
    clock = np.rint(run.clock_seconds * _NANOSECONDS).astype(np.int64).tolist()
    device_bytes, host_bytes = timeline.device_bytes.tolist(), timeline.host_bytes.tolist()
    shown = (-1, -1)
    for position, instruction in enumerate(run.schedule):
        yield _event(run, position, instruction, starts[position], ends[position])
        if (device_bytes[position], host_bytes[position]) != shown:
            shown = (device_bytes[position], host_bytes[position])
            yield _counter("device bytes", clock[position], shown[0])
            yield _counter("host bytes", clock[position], shown[1])


def _event(run: Run, position: int, instruction: Instruction, start: int, end: int) -> Event:
    """Return the slice or instant of one instruction; times are given in nanoseconds and written in microseconds."""
    name, details = _described(run, position, instruction)
    event = {
        "name": name,
        "cat": _CATEGORY.get(type(instruction), type(instruction).__name__),
        "pid": _PROCESS,
        "tid": _stream(run, instruction),
        "ts": start / 1000,
        "args": {"instruction": position, **details},
    }
    if isinstance(instruction, (Drop, DropHost, CrossBoundary)):
        return {**event, "ph": "i", "s": "t"}
    return {**event, "ph": "X", "dur": (end - start) / 1000}


def _stream(run: Run, instruction: Instruction) -> int:
    is_collective = isinstance(instruction, Compute) and run.graph.ops[instruction.op].group is not None
    return _COMMUNICATION if is_collective else _STREAM_OF.get(type(instruction), _COMPUTE)


def _counter(name: str, at: int, size_bytes: int) -> Event:
    return {"ph": "C", "name": name, "pid": _PROCESS, "ts": at / 1000, "args": {"bytes": size_bytes}}


def _described(run: Run, position: int, instruction: Instruction) -> tuple[str, dict[str, Any]]:
    graph = run.graph
    match instruction:
        case Compute():
            op = graph.ops[instruction.op]
            recomputed = run.computations[op.id].index(position)
            details: dict[str, Any] = {"op": op.id, "module": printable(op.module), "phase": op.phase}
            mark = " (recomputed)" if recomputed else ""
            return printable(op.name) + mark, details | ({"recomputed": recomputed} if recomputed else {})
        case CrossBoundary():
            return f"boundary {instruction.boundary}", {"bytes_outside": instruction.bytes_outside}
        case Drop() | DropHost() | Offload() | Prefetch() | Wait():
            storage = graph.storages[instruction.storage]
            name = f"{_VERBS[type(instruction)]} {printable(storage.name)}"
            return name, {"storage": storage.id, "bytes": storage.bytes}
