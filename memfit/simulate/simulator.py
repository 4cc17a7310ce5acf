"""The one simulator: exact bytes at every instruction of a schedule, and its time on serial streams.

Memory is allocated and freed at positions, never at times, so that bytes are exact: a Compute allocates its writes, a
Drop frees, a Prefetch allocates. Time runs on streams that overlap, each serial:

- compute: Compute instructions in order. One starts when the one before it has ended, and every prefetch that it reads.
- to_host: an Offload starts when compute has reached it and the offload before it has ended; Wait stops compute until
  it has ended.
- to_device: a Prefetch starts when compute has reached it and the prefetch before it has ended.
- communication: a Compute of a collective starts when compute has reached it and the collective before it has ended.
  An op that reads a storage of it starts after it has ended.

While both directions copy, each has the rate that the device says it then has; and copies may slow compute down, where
the processor itself makes them, as on a CPU with a disk.

The hot loop is compiled by numba. It refuses instructions on storages that are not where they must be, and never reads
out of bounds; it assumes the other rules, which `memfit.checker.check` verifies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from memfit.device import GENERIC, Device
from memfit.errors import InvalidDeviceError, InvalidScheduleError
from memfit.graph import Graph
from memfit.schedule import Code, Schedule, format_instruction
from memfit.simulate.loop import GraphArrays, Link, trace

_MOST_LOAD = 0.45  # of each direction's copies on compute: it never stands still for both


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Bytes and seconds of a simulated schedule; arrays have one entry for each instruction.

    Attributes:
        start_seconds: float64[n], when the instruction starts on its stream, from 0 at the start of the step.
        end_seconds: float64[n], when it ends; frees and allocations take no time.
        device_bytes: int64[n], bytes on the device while it runs: residents, workspace and second copies included.
        host_bytes: int64[n], bytes of host copies while it runs.
        peak_bytes: the largest of `device_bytes`.
        peak_position: the first instruction with these bytes.
        host_peak_bytes: the largest of `host_bytes`.
        makespan_seconds: when the last stream ends.
        busy_seconds: stream (`compute`, `to_host`, `to_device`; `communication` if the graph has collectives) ->
            seconds that it works.
        stall_seconds: seconds that compute waits for copies and collectives.
    """

    start_seconds: NDArray[np.float64]
    end_seconds: NDArray[np.float64]
    device_bytes: NDArray[np.int64]
    host_bytes: NDArray[np.int64]
    peak_bytes: int
    peak_position: int
    host_peak_bytes: int
    makespan_seconds: float
    busy_seconds: dict[str, float]
    stall_seconds: float


def simulate(graph: Graph, schedule: Schedule, device: Device = GENERIC) -> Timeline:
    """Simulate `schedule` on `graph` and `device`.

        >>> from memfit.graph import Graph, Op, Phase, Role, Storage
        >>> from memfit.schedule import Schedule
        >>> graph = Graph.build(
        ...     name="double",
        ...     storages=[
        ...         Storage(id=0, name="x", bytes=4096, role=Role.INPUT),
        ...         Storage(id=1, name="y", bytes=4096, role=Role.OUTPUT),
        ...     ],
        ...     ops=[Op(id=0, name="mul", phase=Phase.FORWARD, reads=(0,), writes=(1,), seconds=1e-6)],
        ... )
        >>> timeline = simulate(graph, Schedule.parse("compute 0"))
        >>> timeline.peak_bytes, timeline.makespan_seconds
        (8192, 1e-06)

    Args:
        graph: its op times, in seconds, and storage sizes, in bytes, are taken as they stand.
        schedule: legal on `graph` (see `memfit.checker.check`).
        device: gives the alignment of allocations and the rates of the link to the host.

    Raises:
        InvalidScheduleError: an id is not in the graph, or a storage is not where an instruction needs it.
        InvalidDeviceError: the schedule offloads or prefetches, and the device has no rate for it.
    """
    arrays = arrays_of(graph, device.alignment_bytes)
    count = len(schedule)
    in_bytes, in_seconds = (np.empty(count, np.int64), np.empty(count, np.int64)), (np.empty(count), np.empty(count))
    link = link_of(device)
    memory, seconds = trace(schedule.codes, schedule.operands, schedule.extras, arrays, link, in_bytes, in_seconds)
    if memory.failed_at >= 0:
        _fail_instruction(graph, schedule, memory.failed_at)
    if seconds.failed_at >= 0:
        _fail_link(device, schedule, seconds.failed_at)
    busy_seconds = {"compute": seconds.compute, "to_host": seconds.to_host, "to_device": seconds.to_device}
    if arrays.collective.any():
        busy_seconds["communication"] = seconds.communication
    return Timeline(
        start_seconds=in_seconds[0],
        end_seconds=in_seconds[1],
        device_bytes=in_bytes[0],
        host_bytes=in_bytes[1],
        peak_bytes=memory.peak_bytes,
        peak_position=memory.peak_position,
        host_peak_bytes=memory.host_peak_bytes,
        makespan_seconds=seconds.makespan,
        busy_seconds=busy_seconds,
        stall_seconds=seconds.stall,
    )


def on_compute(graph: Graph, schedule: Schedule) -> NDArray[np.bool_]:
    """Return for each instruction whether its start and end are on the compute stream: no copies, no collectives.

    Args:
        graph: the step.
        schedule: of the graph.
    """
    ops = np.where(schedule.codes == Code.COMPUTE, schedule.operands, 0)
    collective = (schedule.codes == Code.COMPUTE) & (arrays_of(graph).collective[ops] > 0)
    return np.isin(schedule.codes, (Code.OFFLOAD, Code.PREFETCH), invert=True) & ~collective


def link_of(device: Device) -> Link:
    """Return a device's link as the simulator's loop takes it."""
    rates = (device.to_host_bytes_per_second or 0.0, device.to_device_bytes_per_second or 0.0)
    shared = device.to_host_shared_bytes_per_second, device.to_device_shared_bytes_per_second
    to_host, to_device = (max(1.0, alone / (both or alone or 1.0)) for alone, both in zip(rates, shared, strict=True))
    loads = [min(rate * device.copy_compute_seconds_per_byte, _MOST_LOAD) for rate in rates]
    return Link(
        rates=rates,
        slower=(to_host, to_device),
        latency_seconds=device.copy_latency_seconds,
        loads=(loads[0], loads[1]),
    )


def arrays_of(graph: Graph, alignment_bytes: int = 1) -> GraphArrays:
    """Return the graph as arrays, storages rounded up to `alignment_bytes`; made once for each graph and alignment.

    Args:
        graph: the step.
        alignment_bytes: of the device's allocations.

    Raises:
        InvalidGraphError: the graph was not made by `Graph.build`, and breaks a rule.
    """
    kept = cast("dict[int, GraphArrays]", vars(graph).setdefault("_arrays", {}))
    if alignment_bytes not in kept:
        kept[alignment_bytes] = _to_arrays(graph.verify(), alignment_bytes)
    return kept[alignment_bytes]


def _to_arrays(graph: Graph, alignment_bytes: int) -> GraphArrays:
    sizes = np.array([storage.bytes for storage in graph.storages], np.int64)
    lists: dict[str, list[Sequence[int]]] = {
        "read": [[storage for storage, _ in needs] for needs in graph.read_versions],
        "write": [op.writes for op in graph.ops],
        "reuse": [[storage for pair in op.reuses for storage in pair] for op in graph.ops],
        "arrival": [boundary.arrivals for boundary in graph.boundaries],
        "departure": [boundary.departures for boundary in graph.boundaries],
    }
    rows: dict[str, NDArray[np.uint32]] = {}
    for name, entries in lists.items():
        rows[f"{name}_starts"], rows[f"{name}s"] = _rows(entries)
    return GraphArrays(
        device_bytes=-(-sizes // alignment_bytes) * alignment_bytes,
        host_bytes=sizes,
        resident=np.array([storage.resident for storage in graph.storages], np.uint8),
        seconds=np.array([op.seconds for op in graph.ops], np.float64),
        collective=np.array([op.group is not None for op in graph.ops], np.uint8),
        workspace_bytes=np.array([op.workspace_bytes or 0 for op in graph.ops], np.int64),
        **rows,
    )


def _rows(rows: Sequence[Sequence[int]]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return (starts, entries): where each list begins, and the lists end to end."""
    starts = np.zeros(len(rows) + 1, np.uint32)
    np.cumsum([len(row) for row in rows], out=starts[1:])
    return starts, np.array([entry for row in rows for entry in row], np.uint32)


def _fail_instruction(graph: Graph, schedule: Schedule, position: int) -> NoReturn:
    code, operand = int(schedule.codes[position]), int(schedule.operands[position])
    counts = {Code.COMPUTE: len(graph.ops), Code.BOUNDARY: len(graph.boundaries)}
    if code not in set(Code) or not 0 <= operand < counts.get(Code(code), len(graph.storages)):
        raise InvalidScheduleError(
            f"instruction {position} (code {code}, operand {operand}) names what is not in graph {graph.name!r}; was "
            f"the schedule made for another graph? memfit.check says more"
        )
    raise InvalidScheduleError(
        f"instruction {position} {format_instruction(schedule[position])!r} cannot be carried out on graph "
        f"{graph.name!r}: something is not where it must be; memfit.check says what, and what to do"
    )


def _fail_link(device: Device, schedule: Schedule, position: int) -> NoReturn:
    rate = "to_host" if schedule.codes[position] == Code.OFFLOAD else "to_device"
    raise InvalidDeviceError(
        f"instruction {position} {format_instruction(schedule[position])!r} copies, but device {device.name!r} has no "
        f"{rate}_bytes_per_second; calibrate it, or name a device with a link to its host"
    )
