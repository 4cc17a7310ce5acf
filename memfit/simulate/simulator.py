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

The two passes, over bytes and over seconds, are compiled by numba. The first refuses instructions on storages that are
not where they must be; neither reads out of bounds. They assume the other rules, which `memfit.checker.check` verifies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from memfit.device import GENERIC, Device
from memfit.errors import InvalidDeviceError, InvalidScheduleError
from memfit.graph import Graph
from memfit.schedule import Code, Schedule, format_instruction
from memfit.simulate.arrays import arrays_of, link_of
from memfit.simulate.bytes_pass import trace_memory
from memfit.simulate.seconds_pass import trace_seconds


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
    memory = trace_memory(schedule, arrays, *in_bytes)
    if memory.failed_at >= 0:
        _fail_instruction(graph, schedule, memory.failed_at)
    seconds = trace_seconds(schedule, arrays, link_of(device), *in_seconds)
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
