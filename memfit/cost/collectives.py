"""Seconds of collectives: a latency and a rate of each kind, measured once by all ranks together.

A collective ends when its slowest rank has come to it, so that ranks which measure ops one by one would measure how far
they are apart. All ranks therefore run the same few collectives, one after another, and the slowest rank's seconds
count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import torch
import torch.distributed as dist

from memfit.cost.environment import environment
from memfit.cost.gpu_timing import now
from memfit.device import Rate
from memfit.graph import Graph, Op
from memfit.system.cache import environment_path, keep, read_kept
from memfit.torch_private.ranks import (
    finish_gather,
    finish_scatter,
    start_gather,
    start_scatter,
    start_sum,
    wait_for_sum,
)

_SMALL_BYTES, _LARGE_BYTES = 4 << 10, 8 << 20
_RUNS = 7
_STARTS = (start_sum, start_gather, start_scatter)
_COPYING = (finish_gather, finish_scatter)


class CollectiveRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured of a kind of collectives: `seconds = latency_seconds + bytes / bytes_per_second`.

    >>> CollectiveRates(latency_seconds=1e-4, bytes_per_second=1e9).seconds(1_000_000)
    0.0011
    """

    latency_seconds: Annotated[float, msgspec.Meta(ge=0)]
    bytes_per_second: Rate

    def seconds(self, size_bytes: int) -> float:
        """Return the seconds of a collective that sums, gathers or scatters as many bytes."""
        return self.latency_seconds + size_bytes / self.bytes_per_second


def is_collective(target: object) -> bool:
    """Return whether a call's target runs between ranks, or waits for what does."""
    return target in (*_STARTS, *_COPYING, wait_for_sum)


def copies_results(target: object) -> bool:
    """Return whether a call's target waits for a collective, and copies its results."""
    return target in _COPYING


def kinds_of(graph: Graph) -> list[str]:
    """Return the kinds of the collectives of a graph: the names of the functions that start them."""
    return sorted({op.target for op in graph.ops if op.group is not None})


def with_collectives(graph: Graph, seconds: Callable[[str, int], float]) -> Graph:
    """Return `graph` with the seconds of its collectives.

    Args:
        graph: a captured graph.
        seconds: of a kind of collective, and of the bytes that it sums, gathers or scatters.
    """
    ops = (
        op if op.group is None else msgspec.structs.replace(op, seconds=seconds(op.target, collective_bytes(graph, op)))
        for op in graph.ops
    )
    return msgspec.structs.replace(graph, ops=tuple(ops))


def collective_bytes(graph: Graph, op: Op) -> int:
    """Return the bytes of a collective: of all that it sums, or of what it gathers from all ranks.

    Args:
        graph: the step.
        op: a collective of it.
    """
    return max(graph.storages[s].bytes for s in (*op.mutates, *op.writes))


def kept_rates(group: dist.ProcessGroup, device: torch.device, hosts: list[str], kind: str) -> CollectiveRates | None:
    """Return the rates that were measured before in this setting, or None.

    Args:
        group: the ranks.
        device: of the tensors.
        hosts: the names of the hosts of all ranks.
        kind: one of `kinds_of`.
    """
    path = _path(group, device, hosts, kind)
    return read_kept(path, CollectiveRates, "the kept rates of collectives are not used: %s")


def measured_rates(
    group: dist.ProcessGroup, device: torch.device, kind: str, slowest: Callable[[float], float]
) -> CollectiveRates:
    """Measure the rates, on all ranks at once.

    Args:
        group: the ranks.
        device: of the tensors.
        kind: one of `kinds_of`.
        slowest: returns the largest of the numbers that the ranks give.
    """
    run = _RUN[kind]
    small, large = (slowest(_seconds(run, group, device, size)) for size in (_SMALL_BYTES, _LARGE_BYTES))
    rate = (_LARGE_BYTES - _SMALL_BYTES) / max(large - small, 1e-9)
    return CollectiveRates(latency_seconds=max(0.0, small - _SMALL_BYTES / rate), bytes_per_second=rate)


def keep_rates(
    rates: CollectiveRates, group: dist.ProcessGroup, device: torch.device, hosts: list[str], kind: str
) -> None:
    """Keep rates on disk for `kept_rates`.

    Args:
        rates: as `measured_rates` returned them.
        group, device, hosts, kind: as for `kept_rates`, which looks for the rates of the same ones.
    """
    keep(rates, _path(group, device, hosts, kind), "rates of collectives")


def _path(group: dist.ProcessGroup, device: torch.device, hosts: list[str], kind: str) -> Path:
    setting = {"backend": dist.get_backend(group), "hosts": " ".join(sorted(hosts)), "kind": kind}
    return environment_path("collectives", environment(device) | setting)


def _sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    start_sum(tensor, group.group_name)
    wait_for_sum(tensor)


def _gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    length = tensor.numel() // group.size()
    whole = start_gather([tensor[:length]], tensor.dtype, group.group_name)
    finish_gather(whole, group.size(), [(length, (length * group.size(),))])


def _scatter(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    whole = tensor[: tensor.numel() // group.size() * group.size()].clone()
    finish_scatter(start_scatter(whole, "sum", group.group_name), whole, group.rank())


_RUN: Mapping[str, Callable[[torch.Tensor, dist.ProcessGroup], None]] = {
    "start_sum": _sum,
    "start_gather": _gather,
    "start_scatter": _scatter,
}


def _seconds(
    run: Callable[[torch.Tensor, dist.ProcessGroup], None],
    group: dist.ProcessGroup,
    device: torch.device,
    size_bytes: int,
) -> float:
    """Return the median of several runs, after one that makes the connections."""
    tensor = torch.zeros(size_bytes // 4, device=device)
    seconds: list[float] = []
    for _ in range(_RUNS + 1):
        started = time.perf_counter()
        run(tensor, group)
        seconds.append(now(device) - started)
    return statistics.median(seconds[1:])
