"""What ranks do in `test_checkpoint_ranks.py`: each function runs on all of them, and returns what it found."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_models import Trained, cross_entropy, mlps, rows, train

import memfit


def _compare(make: Any, share: float, data: Any = rows, wrap_last: bool = False, **options: Any) -> dict[str, Any]:
    """Train bare and within a share of the bare peak; `make` returns (model, what the loop calls)."""

    def run(budget: int | None) -> tuple[Trained, Any]:
        gc.collect()
        model = mlps(count=4, dropout=0.2)
        handle = memfit.checkpoint(model, budget) if budget and not wrap_last else None
        model, call = make(model)
        if budget and wrap_last:
            handle = memfit.checkpoint(model, budget)
        torch.manual_seed(dist.get_rank())
        trained = train(model, data, steps=7, call=call, **options)
        trained.state = {name: _whole(tensor) for name, tensor in model.named_parameters()}
        if handle is not None:
            handle.end_step()
            report = handle.report()
            handle.close()
            return trained, report
        return trained, None

    bare, _ = run(None)
    budget = int(share * max(bare.peaks[2:]))
    got, report = run(budget)
    return {
        "same": got.losses == bare.losses and all(torch.equal(got.state[n], bare.state[n]) for n in bare.state),
        "over": report.over,
        "used": max(got.peaks[2:]) / budget,
        "rules": {str(rule) for size in report.sizes for rule in size.planned.rules.values()},
    }


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def _own_share() -> float:
    return 0.75 if dist.get_rank() == 0 else 0.85


def _rows_of_rank(step: int) -> Any:
    return rows(2 * step + dist.get_rank())


def _other_lengths(step: int) -> Any:
    return rows(2 * step + dist.get_rank(), (512, 384)[(step + dist.get_rank()) % 2])


def data_parallel(_rank: int, _count: int) -> dict[str, Any]:
    def make(model: torch.nn.Module) -> Any:
        return model, torch.nn.parallel.DistributedDataParallel(model)

    return _compare(make, _own_share(), _rows_of_rank)


def _sharded(model: torch.nn.Module) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:  # pyright: ignore
        fully_shard(layer)
    return fully_shard(model), None


def sharded_after(_rank: int, _count: int) -> dict[str, Any]:
    """`fully_shard` comes after the budget."""
    return _compare(_sharded, _own_share(), _rows_of_rank)


def sharded_before(_rank: int, _count: int) -> dict[str, Any]:
    """It comes before, and ranks have batches of different sizes."""
    return _compare(_sharded, _own_share(), _other_lengths, wrap_last=True)


def tensor_parallel(_rank: int, _count: int) -> dict[str, Any]:
    """Ranks with budgets of their own, whose blocks run collectives: each is computed again as a whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))

    def make(model: torch.nn.Module) -> Any:
        for layer in model.layers:  # pyright: ignore
            layer.drop = torch.nn.Identity()
            parallelize_module(layer, mesh, {"a": ColwiseParallel(), "b": RowwiseParallel()})
        return model, None

    return _compare(make, 0.9 if dist.get_rank() == 0 else 1.2, wrap_last=True, loss=cross_entropy)


def trainer(rank: int, count: int) -> dict[str, Any]:
    """transformers' Trainer, as torchrun starts it: DistributedDataParallel, accumulation, evaluations between."""
    import os
    import tempfile
    from pathlib import Path

    from test_integrations import Peak, trainer_of

    from memfit.integrations.transformers import MemfitCallback

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    trainers: list[Any] = []

    def run(*callbacks: Any) -> None:
        path = Path(tempfile.mkdtemp())
        trainers.append(trainer_of(path, callbacks, steps=5, eval_strategy="steps", eval_steps=2))
        trainers[-1].train()

    peak = Peak()
    peak.run(run)
    budget = peak.budget(0.9)
    callback = MemfitCallback(budget)
    run(callback)
    bare, held = (each.model.state_dict() for each in trainers)
    report = callback.report()
    return {
        "same": all(torch.equal(bare[name], held[name]) for name in bare),
        "over": report.over,  # pyright: ignore
        "used": callback.most_bytes / budget,
        "rules": {str(rule) for size in report.sizes for rule in size.planned.rules.values()},  # pyright: ignore
    }
