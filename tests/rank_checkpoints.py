"""What ranks do in `test_checkpoint_ranks.py`: each function runs on all of them, and returns what it found."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_models import Trained, mlps, rows, train

import memfit
from memfit.errors import UnsupportedStepError
from memfit.integrations.found_models import Running
from memfit.system.recorder import record
from memfit.torch_private.ranks import groups_talked_to


def _compare(
    make: Any, share: float, data: Any = rows, wrap_last: bool = False, steps: int = 7, **options: Any
) -> dict[str, Any]:
    """Train bare and within a share of the bare peak; `make` returns (model, what the loop calls)."""

    def run(budget: int | None) -> tuple[Trained, Any]:
        gc.collect()
        model = mlps(count=4, dropout=0.2)
        handle = memfit.checkpoint(model, budget) if budget and not wrap_last else None
        model, call = make(model)
        if budget and wrap_last:
            handle = memfit.checkpoint(model, budget)
        torch.manual_seed(dist.get_rank())
        trained = train(model, data, steps=steps, call=call, **options)
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
        "policy": [str(size.planned.rules) for size in report.sizes],
    }


def _compare_two(hold: Any, share: float) -> dict[str, Any]:
    """Train an encoder and a decoder bare and within a share of the bare peak; `hold` holds them, and lets them go."""

    def run(budget: int | None) -> tuple[list[int], list[torch.Tensor], Any]:
        gc.collect()
        pair = [torch.nn.parallel.DistributedDataParallel(_Autoencoder()) for _ in range(2)]
        held = hold(pair, budget) if budget else None
        optimizers = [torch.optim.AdamW(each.parameters()) for each in pair]
        torch.manual_seed(dist.get_rank())
        peaks: list[int] = []
        for _ in range(8):
            data = torch.randn(1024, 64)
            with record("cpu") as usage:
                (pair[1](pair[0](data).tanh()) - data).square().mean().backward()
                for each in optimizers:
                    each.step()
                    each.zero_grad()
            peaks.append(usage.start_bytes + usage.peak_bytes)
        return peaks, [each.detach().clone() for model in pair for each in model.parameters()], held and held()

    peaks, bare, _ = run(None)
    budget = int(share * max(peaks))
    got_peaks, got, found = run(budget)
    return {
        "same": all(map(torch.equal, bare, got)),
        "over": sum(peak > budget for peak in got_peaks),
        "used": max(got_peaks[2:]) / budget,
        "found": found,
    }


class _Autoencoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlps(count=5).layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


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


def two_models(_rank: int, _count: int) -> dict[str, Any]:
    """Two models in one call."""

    def hold(pair: Any, budget: int) -> Any:
        return memfit.checkpoint(pair, budget).close

    return _compare_two(hold, _own_share())


def two_models_of_a_script(_rank: int, _count: int) -> dict[str, Any]:
    """Two models that `memfit run` finds."""

    def hold(_pair: Any, budget: int) -> Any:
        running = Running(budget)
        running.begin()
        return lambda: [each.name for each in running.end()]

    return _compare_two(hold, _own_share())


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


def gathered_over_updates(_rank: int, _count: int) -> dict[str, Any]:
    """A loop that leaves parameters gathered after its last backward pass: what memfit says."""
    model: Any = mlps(count=2)
    _sharded(model)
    model.set_reshard_after_backward(False)
    with memfit.checkpoint(model, "1GiB"):
        try:
            train(model, rows, steps=2)
        except UnsupportedStepError as refusal:
            return {"refusal": str(refusal)}
    return {"refusal": ""}


def tensor_parallel(_rank: int, _count: int) -> dict[str, Any]:
    """Ranks with budgets of their own, whose blocks run collectives: they follow one policy."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))

    def make(model: torch.nn.Module) -> Any:
        for layer in model.layers:  # pyright: ignore
            layer.drop = torch.nn.Identity()
            parallelize_module(layer, mesh, {"a": ColwiseParallel(), "b": RowwiseParallel()})
        return model, None

    return _compare(make, 0.85 if dist.get_rank() == 0 else 0.9, wrap_last=True, steps=9)


class _Exchanged(torch.nn.Module):
    """A block whose rows go to the other ranks, as those of experts do, and come back."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed._functional_collectives import all_to_all_single_autograd as exchange

        own, group = len(x) // dist.get_world_size(), dist.group.WORLD
        counts = torch.empty(dist.get_world_size(), dtype=torch.int64)
        dist.all_gather(list(counts.split(1)), torch.tensor([own]))
        theirs, mine = counts.tolist(), [own] * dist.get_world_size()
        there = exchange(x, theirs, mine, group)  # pyright: ignore
        return exchange(self.inner(there), mine, theirs, group)  # pyright: ignore


def experts(_rank: int, _count: int) -> dict[str, Any]:
    """Blocks that exchange rows, with batches of other sizes on each rank."""

    def make(model: torch.nn.Module) -> Any:
        model.layers = torch.nn.ModuleList(_Exchanged(layer) for layer in model.layers)  # pyright: ignore
        return model, None

    return _compare(make, 0.8, _other_lengths, wrap_last=True, steps=12)


@torch.library.custom_op("memfit_tests::summed", mutates_args=())
def _summed(x: torch.Tensor) -> torch.Tensor:
    found = x.clone()
    dist.all_reduce(found)
    return found


_summed.register_fake(torch.empty_like)
_summed.register_autograd(lambda _ctx, grad: _summed(grad.contiguous()))


class _Summed(torch.nn.Module):
    """A block with a collective inside of an operator's own code."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(_summed(x) / dist.get_world_size())


def in_operators(_rank: int, _count: int) -> dict[str, Any]:
    """Ranks with budgets of their own, where operators of the model's author run collectives."""

    def make(model: torch.nn.Module) -> Any:
        model.layers = torch.nn.ModuleList(_Summed(layer) for layer in model.layers)  # pyright: ignore
        return model, torch.nn.parallel.DistributedDataParallel(model)

    return _compare(make, 0.75 if dist.get_rank() == 0 else 0.95, _rows_of_rank, wrap_last=True, steps=9)


class _Averaged(torch.nn.Module):
    """A block with a collective in its own code, as a batch normalization over all ranks has."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed.nn.functional import all_reduce

        return self.inner(x - all_reduce(x.mean(0)) / dist.get_world_size())


def in_compiled_blocks(_rank: int, _count: int) -> dict[str, Any]:
    """Ranks with budgets of their own, whose blocks, compiled by themselves, run collectives between graphs."""

    def make(model: torch.nn.Module) -> Any:
        model.layers = torch.nn.ModuleList(_Averaged(layer) for layer in model.layers)  # pyright: ignore
        for layer in model.layers:
            layer.compile(backend="aot_eager")
        return model, torch.nn.parallel.DistributedDataParallel(model)

    return _compare(make, 0.8 if dist.get_rank() == 0 else 0.95, _rows_of_rank, wrap_last=True, steps=9)


class _AveragedLate(_Averaged):
    """As it, once `begins` is set, as a normalization that is unfrozen."""

    begins = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.begins else self.inner(x)


def _begins_at(begin: int) -> tuple[Any, Any]:
    def make(model: torch.nn.Module) -> Any:
        model.layers = torch.nn.ModuleList(_AveragedLate(layer) for layer in model.layers)  # pyright: ignore
        return model, torch.nn.parallel.DistributedDataParallel(model)

    def data(step: int) -> Any:
        _AveragedLate.begins = step >= begin
        return _rows_of_rank(step)

    return make, data


def late_collectives(_rank: int, _count: int) -> dict[str, Any]:
    """Blocks begin to run collectives in the second step, before the ranks have made plans of their own."""
    return _compare(_begins_at(1)[0], 0.8 if dist.get_rank() == 0 else 0.9, _begins_at(1)[1], wrap_last=True, steps=9)


def late_collectives_of_sharded(_rank: int, _count: int) -> dict[str, Any]:
    """The same in blocks that are compiled by themselves, and gather their parameters inside."""
    from torch.distributed.fsdp import fully_shard

    make, data = _begins_at(1)

    def sharded(model: torch.nn.Module) -> Any:
        layers: Any = make(model)[0].layers
        for layer in layers:
            layer.compile(backend="aot_eager")
            fully_shard(layer)
        return fully_shard(model), None

    return _compare(sharded, 0.8 if dist.get_rank() == 0 else 0.9, data, wrap_last=True, steps=9)


def beside_a_thread(rank: int, _count: int) -> dict[str, Any]:
    """Another thread talks on a group of its own, at other times on each rank, as one that saves checkpoints does."""
    group, is_over = dist.new_group(), threading.Event()

    def talk() -> None:
        for _ in range(400):
            time.sleep(0.01 * rank)
            dist.all_reduce(torch.ones(1), group=group)
        is_over.set()

    def make(model: torch.nn.Module) -> Any:
        return model, torch.nn.parallel.DistributedDataParallel(model)

    thread = threading.Thread(target=talk)
    thread.start()
    found = _compare(make, 0.75 if rank == 0 else 0.85, _rows_of_rank, wrap_last=True)
    was_beside = not is_over.is_set()
    thread.join()
    return {**found, "was_beside": was_beside}


def groups_by_thread(_rank: int, _count: int) -> dict[str, Any]:
    """Which groups `groups_talked_to` notes."""
    from torch.distributed.fsdp import fully_shard

    cpu, ones, beside, known = torch.device("cpu"), torch.ones(1), dist.new_group(), set[Any]()
    model = fully_shard(mlps(count=1))
    thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(1), dist.ReduceOp.SUM, beside))
    with groups_talked_to(cpu) as own:
        dist.all_reduce(ones)
    with groups_talked_to(cpu, known) as of_thread:
        thread.start()
        thread.join()
    known_of_thread = len(known)
    with groups_talked_to(cpu, known) as of_shards:
        model(rows(0)[0])
    with groups_talked_to(cpu, known) as both:
        dist.all_reduce(ones, group=beside)
        model(rows(0)[0])
    return {
        "own": own == [dist.group.WORLD],
        "of_thread": of_thread,
        "of_shards": of_shards,
        "both": both == [beside],
        "known": (known_of_thread, len(known)),
    }


def late_collectives_of_a_plan(_rank: int, _count: int) -> dict[str, Any]:
    """They begin once the ranks have made plans that differ: what memfit says."""
    make, data = _begins_at(5)
    try:
        _compare(make, 0.7 if dist.get_rank() == 0 else 1.2, data, wrap_last=True, steps=9)
    except UnsupportedStepError as refusal:
        return {"refusal": str(refusal)}
    return {"refusal": ""}


def late_collectives_of_two(_rank: int, _count: int) -> dict[str, Any]:
    """They begin once a rank holds two models by one plan, and the other one holds them apart."""
    make, data = _begins_at(1)

    def run(budget: int | None) -> Any:
        models = [make(mlps(count=4))[1] for _ in range(2)]
        optimizers = [torch.optim.AdamW(each.parameters()) for each in models]
        running = Running(budget, budget_is="soft") if budget else None
        if running is not None:
            running.begin()
        peaks: list[int] = []
        for step in range(5):
            inputs, labels = data(step)
            with record("cpu") as usage:
                loss = sum(torch.nn.functional.cross_entropy(each(inputs), labels) for each in models)
                torch.as_tensor(loss).backward()
                for each in optimizers:
                    each.step()
                    each.zero_grad()
            peaks.append(usage.start_bytes + usage.peak_bytes)
        names = [] if running is None else [each.name for each in running.end()]
        return max(peaks), [each.detach().clone() for model in models for each in model.parameters()], names

    peak, bare, _ = run(None)
    _, got, names = run(peak if dist.get_rank() == 0 else peak // 4)
    return {"same": all(map(torch.equal, bare, got)), "models": len(names)}


def planned_operators(_rank: int, _count: int) -> dict[str, Any]:
    """The same under the doors that plan graphs: what `memfit.fit` says, and the bits of `memfit.compile`."""

    def make(compiles: bool) -> tuple[torch.nn.Module, Any]:
        model: Any = mlps(count=4)
        model.layers = torch.nn.ModuleList(_Summed(layer) for layer in model.layers)
        call = torch.nn.parallel.DistributedDataParallel(model)
        if compiles:
            memfit.compile(call, budget="1GiB", time_limit_seconds=1)
        return model, call

    bare, got = (train(model, _rows_of_rank, steps=4, call=call).losses for model, call in map(make, (False, True)))
    model, _ = make(False)
    try:
        memfit.fit(model, torch.nn.CrossEntropyLoss(), _rows_of_rank(0), budget="1GiB", process_group=dist.group.WORLD)
    except UnsupportedStepError as refusal:
        return {"same": got == bare, "refusal": str(refusal)}
    return {"same": got == bare, "refusal": ""}


def unlike(_rank: int, _count: int) -> dict[str, Any]:
    """Blocks that run collectives, and something else on one rank: their ranks cannot share a policy."""

    class Unlike(_Exchanged):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = super().forward(x)
            return found * 2 if dist.get_rank() else found

    def make(model: torch.nn.Module) -> Any:
        model.layers = torch.nn.ModuleList(Unlike(layer) for layer in model.layers)  # pyright: ignore
        return model, None

    return _compare(make, 0.9, _rows_of_rank, wrap_last=True)


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
