"""A graph and a device's link as arrays and numbers, for the compiled passes of the simulator.

No doctest stands here: numba's files on disk name the module of these types, and files written under another name (by a
doctest run on a path) would break every later import.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from memfit.device import Device
from memfit.graph import Graph

_MOST_LOAD = 0.45  # of each direction's copies on compute: it never stands still for both


class GraphArrays(NamedTuple):
    """A graph as numpy arrays, for compiled code. `xs[x_starts[i]:x_starts[i + 1]]` are the xs of op or boundary i.

    `collective` ops run between ranks. `device_bytes` are aligned, `host_bytes` exact; unknown workspace is 0; `reads`
    include what is only mutated; `reuses` are (read, written) pairs end to end.
    """

    device_bytes: NDArray[np.int64]
    host_bytes: NDArray[np.int64]
    resident: NDArray[np.uint8]
    seconds: NDArray[np.float64]
    collective: NDArray[np.uint8]
    workspace_bytes: NDArray[np.int64]
    read_starts: NDArray[np.uint32]
    reads: NDArray[np.uint32]
    write_starts: NDArray[np.uint32]
    writes: NDArray[np.uint32]
    reuse_starts: NDArray[np.uint32]
    reuses: NDArray[np.uint32]
    arrival_starts: NDArray[np.uint32]
    arrivals: NDArray[np.uint32]
    departure_starts: NDArray[np.uint32]
    departures: NDArray[np.uint32]


class Link(NamedTuple):
    """The link to the host; each pair is (to host, to device).

    `rates` are in bytes per second, 0 without a link; `slower` is how many times as long a copy takes while the other
    direction copies too; `loads` are the shares of compute's rate that a copy under way takes away when it is alone.
    """

    rates: tuple[float, float]
    slower: tuple[float, float]
    latency_seconds: float
    loads: tuple[float, float]


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
