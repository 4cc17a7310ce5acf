"""What tests run on each rank: steps beside stock DistributedDataParallel, and ranks that fail or differ."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import memfit
import memfit.step.proof as proof_module
import memfit.step.verify as verify_module
from memfit.plan import Plan
from memfit.schedule import Compute
from memfit.step.agreement import agreed_difference

STEPS = 20
SEARCH: dict[str, Any] = {"options": {"iterations": 6_000}, "time_limit_seconds": 60}  # on a busy machine the same
SMALL_BUCKETS_MB = 0.02  # of three Linear(64, 64)


def perceptron(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Dropout(dropout), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(64, 8))


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 16), (16, 16)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8))


def batches(
    rank: int, shape: tuple[int, ...] = (64, 64), count: int = STEPS
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [
        (torch.randn(shape, generator=generator), torch.randint(0, 8, shape[:1], generator=generator))
        for _ in range(count)
    ]


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def loss_in_bfloat16(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss(model, batch)


def fitted(model: nn.Module, batch: Any, budget: str | int = "85%", function: Any = loss, **options: Any) -> Any:
    options = {"process_group": dist.group.WORLD, **({} if "planner" in options else SEARCH), **options}
    return memfit.fit(model, function, batch, budget=budget, **options)


def beside_ddp(
    rank: int,
    make: Callable[[], nn.Module],
    shape: tuple[int, ...] = (64, 64),
    *,
    function: Any = loss,
    clip_norm: float | None = None,
    buckets_mb: float | None = None,
    is_wrapped: bool = False,
    budget: str = "85%",
) -> dict[str, Any]:
    """Train a model by `fit`, and its twin by DDP with the same seeds, 20 steps each; say how they compare."""
    data, mine, twin = batches(rank, shape), make(), make()
    buffers = [buffer.clone() for buffer in twin.buffers()]
    ddp = DistributedDataParallel(twin, bucket_cap_mb=buckets_mb)
    for _ in range(2):  # at its second step DDP has the buckets that it keeps
        function(ddp, data[0]).backward()
        ddp.zero_grad(set_to_none=True)
    for buffer, before in zip(twin.buffers(), buffers, strict=True):
        buffer.copy_(before)
    with torch.no_grad():
        for parameter in mine.parameters():
            parameter.add_(rank)  # rank 0's are everybody's
    given = DistributedDataParallel(mine, bucket_cap_mb=buckets_mb) if is_wrapped else mine
    one, other = (torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (mine, twin))
    step = fitted(given, data[0], budget, function, optimizer=one, clip_norm=clip_norm)
    torch.manual_seed(7 + rank)
    losses = [step(batch).item() for batch in data]
    torch.manual_seed(7 + rank)
    expected: list[float] = []
    for batch in data:
        value = function(ddp, batch)
        value.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(twin.parameters(), clip_norm)
        other.step()
        other.zero_grad()
        expected.append(value.item())
    step.verify()
    measured = step.measure(repeats=1)
    ops = step.plan.graph.ops
    return {
        "is_same": losses == expected and same(mine, twin),
        "difference": furthest(mine.state_dict(), twin.state_dict()),
        "digest": digest(mine.state_dict()),
        "budget": step.plan.budget_bytes,
        "predicted": step.plan.predicted.peak_bytes,
        "measured": measured.peak_bytes,
        "corrections": len(step.corrections),
        "reductions": sum(op.group is not None for op in ops),
        "computed": [op.name for op in ops if op.group is not None for _ in range(_times(step.plan, op.id))],
    }


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of an element."""
    pairs = [(mine.double(), other[name].double()) for name, mine in one.items() if mine.numel()]
    return max(float((mine - theirs).abs().max()) for mine, theirs in pairs)


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return a hash of all bits."""
    found = hashlib.sha256()
    for name, tensor in tensors.items():
        found.update(name.encode() + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _times(plan: Plan, op: int) -> int:
    return sum(isinstance(instruction, Compute) and instruction.op == op for instruction in plan.schedule)


def plain(rank: int, _count: int) -> dict[str, Any]:
    return beside_ddp(rank, perceptron, buckets_mb=SMALL_BUCKETS_MB, is_wrapped=True)


def default_buckets(rank: int, _count: int) -> dict[str, Any]:
    return beside_ddp(rank, perceptron)


def clipped_in_bfloat16(rank: int, _count: int) -> dict[str, Any]:
    # on processors whose bfloat16 kernels take more scratch memory, 85% is below the least
    return beside_ddp(rank, perceptron, function=loss_in_bfloat16, clip_norm=1.0, budget="90%")


def with_buffers(rank: int, _count: int) -> dict[str, Any]:
    return beside_ddp(rank, convolutions, (8, 3, 16, 16))


def accumulated(rank: int, _count: int) -> dict[str, Any]:
    """Two calls without reduction and one with it, four times; gradients and buffers as DDP's."""
    data, mine, twin = batches(rank, (8, 3, 16, 16), 12), convolutions(), convolutions()
    ddp = DistributedDataParallel(twin)
    one, other = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (mine, twin))
    step = fitted(mine, data[0], budget="95%")
    is_same = True
    for number, batch in enumerate(data):
        is_last = number % 3 == 2
        with nullcontext() if is_last else step.no_sync():
            step(batch)
        with nullcontext() if is_last else ddp.no_sync():
            loss(ddp, batch).backward()
        pairs = zip(mine.parameters(), twin.parameters(), strict=True)
        is_same &= all(torch.equal(p.grad, q.grad) for p, q in pairs)  # pyright: ignore[reportArgumentType]
        if is_last:
            for optimizer in (one, other):
                optimizer.step()
                optimizer.zero_grad()
    return {"is_same": is_same and same(mine, twin), "plans": len(step.plans)}


def message(run: Callable[[], Any]) -> str:
    """Return kind and text of the error that `run` raises; empty if it raises none."""
    try:
        run()
    except Exception as error:  # noqa: BLE001 (the test says what it is)
        return f"{type(error).__name__}: {error}"
    return ""


def other_batch_on_one(rank: int, _count: int) -> str:
    model, batch = perceptron(), batches(rank, (64 + rank, 64))[0]
    return message(lambda: fitted(model, batch, budget="1MiB"))


def other_model_on_one(rank: int, _count: int) -> str:
    model = nn.Linear(64, 8, bias=rank == 0)
    return message(lambda: fitted(model, batches(rank)[0], budget="1MiB"))


def other_setting_on_one(rank: int, _count: int) -> str:
    return message(lambda: fitted(perceptron(), batches(rank)[0], budget=f"{1 + rank}MiB"))


def capture_fails_on_one(rank: int, _count: int) -> str:
    def raising(model: nn.Module, batch: Any) -> torch.Tensor:
        if rank == 1:
            raise KeyError("no such column")
        return loss(model, batch)

    return message(lambda: fitted(perceptron(), batches(rank)[0], budget="1MiB", function=raising))


def planning_fails_on_first(rank: int, _count: int) -> str:
    return message(lambda: fitted(perceptron(), batches(rank)[0], budget="200KiB"))


def graph_breaks(rank: int, _count: int) -> str:
    def branching(model: nn.Module, batch: Any) -> torch.Tensor:
        value = loss(model, batch)
        return value * 2 if value > 1 else value

    return message(lambda: fitted(perceptron(), batches(rank)[0], budget="1MiB", function=branching))


def later_calls(rank: int, _count: int) -> list[str]:
    """Sizes that are new on all ranks, on one, or differ; a call that fails on one rank; then a good one."""
    model = perceptron()
    step = fitted(model, batches(rank)[0], budget="2MiB", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    small, large = batches(rank, (32, 64))[0], batches(rank)[0]
    found = [message(lambda: step(small)), message(lambda: step((small, large)[rank]))]
    found.append(message(lambda: step(batches(rank, (16 + rank, 64))[0])))
    found.append(message(lambda: step((large, None)[rank])))
    found.append(message(lambda: step(large)))
    return found


def over_budget_on_one(rank: int, _count: int) -> dict[str, Any]:
    """Rank 1 is told that its first step took more than it did."""
    model = perceptron()
    step = fitted(model, batches(rank)[0], optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    real = proof_module.Meter.run

    def too_much(*args: Any, **kwargs: Any) -> tuple[Any, int]:
        value, measured_bytes = real(*args, **kwargs)
        return value, measured_bytes + rank * 20_000

    with mock.patch.object(proof_module.Meter, "run", too_much):
        step(batches(rank)[0])
    step(batches(rank)[1])
    return {
        "corrections": [str(each) for each in step.corrections],
        "aim": step.plan.budget_bytes,
        "is_same": agree(model),
    }


def agree(model: nn.Module) -> bool:
    """Return whether all ranks have the same parameters."""
    own = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    first = own.clone()
    dist.broadcast(first, src=0)
    return torch.equal(own, first)


def verification_fails_on_one(rank: int, _count: int) -> str:
    step = fitted(perceptron(), batches(rank)[0], budget="95%")
    calls: list[str | None] = []

    def differing(across: Any, difference: str | None) -> str | None:
        calls.append(difference)
        return agreed_difference(across, "the loss (1 and 2)" if rank == 1 and len(calls) == 1 else difference)

    with mock.patch.object(verify_module, "agreed_difference", differing):
        return message(step.verify)


def given_plan(rank: int, _count: int) -> list[str]:
    model = perceptron()
    step = fitted(model, batches(rank)[0])
    same_plan = message(lambda: fitted(model, batches(rank)[0], plan=step.plan))
    unplanned = fitted(model, batches(rank)[0], budget="2MiB", planner="none").plan
    return [same_plan, message(lambda: fitted(model, batches(rank)[0], plan=(step.plan, unplanned)[rank]))]


def refused_ddp(_rank: int, _count: int) -> list[str]:
    def ddp(**options: Any) -> DistributedDataParallel:
        return DistributedDataParallel(perceptron(), **options)

    hooked = ddp()
    hooked.register_comm_hook(None, allreduce_hook)
    joined = ddp()
    Join([joined])
    models = [ddp(find_unused_parameters=True), ddp(static_graph=True), hooked, nn.Sequential(ddp())]
    models += [joined, replicate(perceptron())]
    found = [message(lambda model=model: fitted(model, batches(0)[0])) for model in models]
    found.append(message(lambda: memfit.fit(perceptron(), loss, batches(0)[0], budget="1MiB", process_group="world")))  # pyright: ignore[reportArgumentType]
    found.append(message(lambda: fitted(perceptron(), batches(0)[0], arena=True)))
    model = perceptron()
    step = fitted(model, batches(0)[0], budget="2MiB", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    found.append(message(step.no_sync))
    with step.step.across.no_sync():
        found.append(message(lambda: step(batches(0)[0])))
    later = ddp()
    step = fitted(later, batches(0)[0], budget="2MiB")
    Join([later])
    found.append(message(lambda: step(batches(0)[0])))
    return found


def sparse_gradients(_rank: int, _count: int) -> str:
    model = nn.Sequential(nn.Embedding(16, 8, sparse=True), nn.Flatten(), nn.Linear(32, 8))
    batch = torch.zeros(4, 4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    return message(lambda: fitted(model, batch, budget="1MiB"))


def dying_rank(rank: int, _count: int) -> str:
    """Rank 1 is killed when the ops of its second step begin."""
    batch = batches(rank)[0]
    step = fitted(perceptron(), batch, budget="1MiB")
    step(batch)
    if rank == 1:
        step.step.across.share_buffers = lambda _model: os.kill(os.getpid(), signal.SIGKILL)
    return message(lambda: step(batch))


def late_rank(rank: int, _count: int) -> str:
    """Rank 1 never calls `fit`."""
    return "" if rank == 1 else message(lambda: fitted(perceptron(), batches(rank)[0], budget="1MiB"))


def lost_rank(rank: int, _count: int) -> str:
    """Rank 1 ends while the step is captured, and tells nobody."""

    def ending(model: nn.Module, batch: Any) -> torch.Tensor:
        if rank == 1:
            raise SystemExit
        return loss(model, batch)

    with suppress(SystemExit):
        return message(lambda: fitted(perceptron(), batches(rank)[0], budget="1MiB", function=ending))
    return ""
