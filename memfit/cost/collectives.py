"""Seconds of collectives: a latency and a rate, measured once by all ranks together.

A collective ends when its slowest rank has come to it, so that ranks which measure ops one by one would measure how far
they are apart. All ranks therefore run the same few sums, one after another, and the slowest rank's seconds count.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import torch
import torch.distributed as dist

from memfit.cost.environment import environment
from memfit.device import Rate
from memfit.graph import Graph
from memfit.system.cache import environment_path, keep, read_kept
from memfit.torch_private.ranks import start_sum, wait_for_sum

_SMALL_BYTES, _LARGE_BYTES = 4 << 10, 8 << 20
_RUNS = 7


class CollectiveRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured of sums over ranks: `seconds = latency_seconds + bytes / bytes_per_second`.

    >>> CollectiveRates(latency_seconds=1e-4, bytes_per_second=1e9).seconds(1_000_000)
    0.0011
    """

    latency_seconds: Annotated[float, msgspec.Meta(ge=0)]
    bytes_per_second: Rate

    def seconds(self, size_bytes: int) -> float:
        """Return the seconds of a sum over ranks of as many bytes on each."""
        return self.latency_seconds + size_bytes / self.bytes_per_second


def is_collective(target: object) -> bool:
    """Return whether a call's target runs between ranks, or waits for what does."""
    return target is start_sum or target is wait_for_sum


def with_collectives(graph: Graph, rates: CollectiveRates) -> Graph:
    """Return `graph` with the seconds of its collectives.

    Args:
        graph: a captured graph.
        rates: of its ranks.
    """
    ops = (
        op
        if op.group is None
        else msgspec.structs.replace(op, seconds=rates.seconds(sum(graph.storages[s].bytes for s in op.mutates)))
        for op in graph.ops
    )
    return msgspec.structs.replace(graph, ops=tuple(ops))


def kept_rates(group: dist.ProcessGroup, device: torch.device, hosts: list[str]) -> CollectiveRates | None:
    """Return the rates that were measured before in this setting, or None.

    Args:
        group: the ranks.
        device: of the tensors.
        hosts: the names of the hosts of all ranks.
    """
    return read_kept(_path(group, device, hosts), CollectiveRates, "the kept rates of collectives are not used: %s")


def measured_rates(
    group: dist.ProcessGroup,
    device: torch.device,
    slowest: Callable[[float], float],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> CollectiveRates:
    """Measure the rates, on all ranks at once.

    Args:
        group: the ranks.
        device: of the tensors.
        slowest: returns the largest of the numbers that the ranks give.
        clock: gives seconds.
    """
    small, large = (slowest(_seconds(group, device, size, clock)) for size in (_SMALL_BYTES, _LARGE_BYTES))
    rate = (_LARGE_BYTES - _SMALL_BYTES) / max(large - small, 1e-9)
    return CollectiveRates(latency_seconds=max(0.0, small - _SMALL_BYTES / rate), bytes_per_second=rate)


def keep_rates(rates: CollectiveRates, group: dist.ProcessGroup, device: torch.device, hosts: list[str]) -> None:
    """Keep rates on disk for `kept_rates`, whose arguments the others are."""
    keep(rates, _path(group, device, hosts), "rates of collectives")


def host_name() -> str:
    """Return the name of this host."""
    return socket.gethostname()


def _path(group: dist.ProcessGroup, device: torch.device, hosts: list[str]) -> Path:
    setting = environment(device) | {"backend": dist.get_backend(group), "hosts": " ".join(sorted(hosts))}
    return environment_path("collectives", setting)


def _seconds(group: dist.ProcessGroup, device: torch.device, size_bytes: int, clock: Callable[[], float]) -> float:
    """Return the median of several sums over ranks, after one that makes the connections."""
    tensor = torch.zeros(size_bytes // 4, device=device)
    seconds: list[float] = []
    for _ in range(_RUNS + 1):
        started = clock()
        dist.all_reduce(tensor, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(clock() - started)
    return statistics.median(seconds[1:])
