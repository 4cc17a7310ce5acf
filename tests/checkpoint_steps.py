"""What the test of checkpoints runs on each rank: written on two ranks, read on one and on four."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from rank_steps import loss
from shard_steps import Batches, Blocks, adam, data, fitted, in_blocks, load, save, stock
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten

FOLDER = "MEMFIT_TEST_CHECKPOINTS"  # where they are: processes inherit the environment
_FEW = 2


def written(rank: int, _count: int) -> dict[str, int]:
    """Train models by memfit and by torch alone, sharded and whole, and write a checkpoint of each."""
    batches = data(rank, _FEW)
    for is_sharded in (True, False):
        for is_planned in (True, False):
            train(batches, is_sharded=is_sharded, is_planned=is_planned, writes=_path(is_sharded, is_planned))
    return {"ranks": dist.get_world_size()}


def read_again(rank: int, count: int) -> dict[str, bool]:
    """Read each checkpoint into a model of each kind, and train on: by memfit as by torch alone.

    DDP's sums of four ranks depend on its buckets, which are others in its first step: there only what was read counts.
    """
    batches, found = data(rank, 2 * _FEW)[_FEW:], dict[str, bool]()
    for was_sharded in (True, False):
        for is_sharded in (True, False):
            given = batches if is_sharded or count == 1 else []

            def after(*, is_planned: bool, was_planned: bool, shards: tuple[bool, bool], given: Batches) -> list[Any]:
                reads = _path(shards[0], was_planned)
                return train(given, is_sharded=shards[1], is_planned=is_planned, reads=reads, batch=batches[0])

            both: Any = {"shards": (was_sharded, is_sharded), "given": given}
            expected = after(is_planned=False, was_planned=False, **both)
            for is_planned in (True, False):
                mine = after(is_planned=is_planned, was_planned=not is_planned, **both)
                writer = f"{'stock' if is_planned else 'planned'} {'sharded' if was_sharded else 'whole'}"
                reader = f"{'planned' if is_planned else 'stock'} {'sharded' if is_sharded else 'whole'}"
                found[f"{writer} to {reader}"] = len(mine) == len(expected) and all(map(_equal, mine, expected))
    return found


def train(
    batches: Batches,
    *,
    is_sharded: bool,
    is_planned: bool,
    reads: str = "",
    writes: str = "",
    batch: Any = None,
) -> list[Any]:
    """Train a model; return the leaves of its state and of its optimizer's, whole on each rank.

    Args:
        batches: of this rank.
        is_sharded: by `fully_shard`, or whole as under DDP.
        is_planned: by memfit, or by torch alone.
        reads, writes: folders of checkpoints, before and after the training. A planned step is made before it reads.
        batch: that a step is planned for, the first of `batches` if it is None.
    """
    model: Any = in_blocks(Blocks()) if is_sharded else Blocks()
    optimizer = adam(model.parameters())
    wrapped = model if is_sharded or is_planned else DistributedDataParallel(model)
    step: Any = None
    if is_planned:
        options: Any = {} if is_sharded else {"process_group": dist.group.WORLD}
        step = fitted(model, batches[0] if batch is None else batch, optimizer=optimizer, **options)
    if reads:
        load(wrapped, optimizer, reads)
    torch.manual_seed(7 + dist.get_rank())
    if is_planned:
        for each in batches:
            step(each)
    else:
        stock(wrapped, batches, optimizer, loss)
    if writes:
        save(wrapped, optimizer, writes)
    leaves, _ = tree_flatten(get_state_dict(wrapped, optimizer))
    return [leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf for leaf in leaves]


def _path(is_sharded: bool, is_planned: bool) -> str:
    return f"{os.environ[FOLDER]}/{'sharded' if is_sharded else 'whole'}-{'planned' if is_planned else 'stock'}"


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
