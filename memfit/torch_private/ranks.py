"""Sums over ranks as DistributedDataParallel makes them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch._guards
import torch._subclasses
import torch.utils.checkpoint


def runs_under_ddp() -> bool:
    """Return whether a DistributedDataParallel module's forward is running, or being compiled."""
    if not torch.distributed.is_available():
        return False
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None


_LET_GO_SECONDS = 1.0  # the threads of gloo need microseconds, or their turn on a processor


def start_sum(tensor: torch.Tensor, group_name: str) -> None:
    """Start a sum over the ranks of a process group, in place; `wait_for_sum` waits for it.

    Args:
        tensor: all of its storage.
        group_name: of the group.
    """
    setattr(tensor, _HOLDERS, tensor._use_count())
    torch.ops._c10d_functional.all_reduce_(tensor, "sum", group_name)


def wait_for_sum(tensor: torch.Tensor) -> None:
    """Wait until a sum over ranks is complete, and gloo's threads hold the tensor no more: memory that they hold is
    freed late, at any time.

    Args:
        tensor: that `start_sum` was called with; it has got no views since.
    """
    torch.ops._c10d_functional.wait_tensor(tensor)
    if tensor.device.type == "cpu":
        holders, until = getattr(tensor, _HOLDERS), time.monotonic() + _LET_GO_SECONDS
        while tensor._use_count() > holders and time.monotonic() < until:
            time.sleep(0)


_HOLDERS = "_memfit_holders"


def gradient_buckets(parameters: Sequence[torch.Tensor], limits_bytes: Sequence[int]) -> list[list[int]]:
    """Return the positions of the parameters in each bucket that DistributedDataParallel would reduce together.

    Args:
        parameters: in the order in which their gradients are ready.
        limits_bytes: a bucket is full at its limit; the last limit holds for all later buckets.
    """
    order = list(range(len(parameters)))
    return torch.distributed._compute_bucket_assignment_by_size(list(parameters), list(limits_bytes), [], order)[0]


def first_bucket_bytes() -> int:
    """Return the size of the bucket that DistributedDataParallel reduces first, by default."""
    return torch.distributed._DEFAULT_FIRST_BUCKET_BYTES


def ddp_facts(module: torch.nn.parallel.DistributedDataParallel) -> dict[str, str]:
    """Return what DistributedDataParallel logs of itself: its communication hook and, once rebuilt, its buckets."""
    return {name: str(value) for name, value in module._get_ddp_logging_data().items()}


def group_timeout(group: torch.distributed.ProcessGroup) -> timedelta:
    """Return how long a rank of a process group waits for the others."""
    device = group._device_types[0]
    return group._get_backend(device).options._timeout
