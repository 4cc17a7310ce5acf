"""What rows of ranks train in loops of one's own: under each wrapper, with each habit.

A row is a function of the way and the turns. It makes its model, lets the way hold it, trains until the turns are over,
and returns the parameters that it trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from _rank_kit import (
    BATCH,
    LEARNING_RATE,
    Habits,
    Transformer,
    Way,
    Wrapped,
    adapted,
    evaluate,
    loss_of,
    tokens_of,
    train,
)
from _rank_titan import titan
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memfit

Row = Callable[[Way, Any], Iterable[torch.Tensor]]
MICRO_BATCHES = 4  # of a pipeline's step


def own(wrap: Callable[[Way], Wrapped], habits: Habits | None = None) -> Row:
    """Return the row of a wrapper in a loop of one's own.

    Args:
        wrap: makes the model, and lets the way hold it.
        habits: of the loop.
    """

    def row(way: Way, turns: Any) -> Iterable[torch.Tensor]:
        return train(turns, lambda: wrap(way), habits, way.let_go)

    return row


def fitted(wrap: Callable[[Way], Wrapped], habits: Habits | None = None) -> Row:
    """Return the row of a wrapper that `memfit.fit` trains, beside the same loop without it.

    Args:
        wrap: as `own`.
        habits: of the loop.
    """

    def row(way: Way, turns: Any) -> Iterable[torch.Tensor]:
        if not way.has_budget:
            return own(wrap, habits)(way, turns)
        wanted = habits or Habits()
        wrapped = wrap(Way("bare", 0, way.width))
        optimizer = wanted.optimizer([each for each in wrapped.model.parameters() if each.requires_grad])
        rank, first = dist.get_rank(), tokens_of(0, 8 * dist.get_rank(), turns.tokens)
        if wanted.evaluates_first:
            evaluate(wrapped, first)
        step = memfit.fit(
            wrapped.model,
            lambda model, batch: loss_of(model(batch), batch),
            first,
            optimizer=optimizer,
            budget=way.budget_bytes,
            time_limit_seconds=2,
        )
        torch.manual_seed(1 + rank)
        while not turns.are_over:
            batch = tokens_of(turns.step, 8 * rank, turns.tokens)
            turns.begin()
            losses = [step(batch)]
            if wanted.evaluates:
                losses.append(evaluate(wrapped, batch[: BATCH // 2]))
            turns.end(losses)
        return wrapped.model.parameters()

    return row


# Wrappers


def ddp(way: Way, *, make: Callable[[int], nn.Module] = Transformer, is_first: bool = False, **options: Any) -> Wrapped:
    """DistributedDataParallel, which comes after the budget if that is first."""
    inner = make(way.width)
    if is_first:
        way.hold(inner)
    model = DistributedDataParallel(inner, **options)
    if not is_first:
        way.hold(model)
    return Wrapped(model, model, lambda is_last: nullcontext() if is_last else model.no_sync())


def ddp_hooked(way: Way, hook: Callable[[Any], Any]) -> Wrapped:
    """DDP with a communication hook."""
    wrapped = ddp(way)
    hook(wrapped.model)
    return wrapped


def _fp16_hook(model: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model.register_comm_hook(None, fp16_compress_hook)


def replicated(way: Way) -> Wrapped:
    """`replicate`, as torchtitan has it."""
    from torch.distributed._composable.replicate import replicate

    model: Any = replicate(Transformer(way.width))
    way.hold(model)

    def during(is_last: bool) -> Any:
        model.set_requires_gradient_sync(is_last)
        return nullcontext()

    return Wrapped(model, model, during)


def sharded(
    way: Way,
    *,
    make: Callable[[int], nn.Module] = Transformer,
    is_first: bool = False,
    by_block: bool = True,
    prefetches: bool = False,
    mesh: Callable[[], Any] = lambda: None,
    **options: Any,
) -> Wrapped:
    """`fully_shard` of each block and the root, or of the root alone; it comes after the budget if that is first."""
    from torch.distributed.fsdp import fully_shard

    model: Any = make(way.width)
    if is_first:
        way.hold(model)
    given = {"mesh": mesh(), **options}
    for layer in model.layers if by_block else ():
        fully_shard(layer, **given)
    fully_shard(model, **given)
    if prefetches:
        layers = list(model.layers)
        for one, other in itertools.pairwise(layers):
            one.set_modules_to_forward_prefetch([other])
            other.set_modules_to_backward_prefetch([one])
    if not is_first:
        way.hold(model)

    def during(is_last: bool) -> Any:
        model.set_requires_gradient_sync(is_last)
        return nullcontext()

    return Wrapped(model, model, during)


def hsdp_mesh() -> Any:
    """Return a mesh whose first dimension has replicas, two of them if there are enough ranks."""
    count = dist.get_world_size()
    sizes = (2, count // 2)
    return dist.init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))


def _bf16_policy() -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def _offloaded() -> Any:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return CPUOffloadPolicy(pin_memory=False)


def divided(way: Way, *, compiles: bool = False) -> Wrapped:
    """Tensor parallelism."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model = Transformer(way.width)
    for layer in model.layers:
        plan = {name: ColwiseParallel() for name in ("taken", "wide")}
        parallelize_module(layer, mesh, plan | {name: RowwiseParallel() for name in ("given", "narrow")})
    way.hold(model)
    for layer in model.layers if compiles else ():
        layer.compile(backend="aot_eager")
    return Wrapped(model, model, is_one=True)


def tied(width: int) -> nn.Module:
    """Return a model whose embedding and head are one parameter."""
    model: Any = Transformer(width)
    model.head.weight = model.embedding.weight
    return model


def compiled_blocks(width: int, backend: str = "aot_eager") -> nn.Module:
    """Return a model whose blocks are compiled by themselves."""
    model = Transformer(width)
    for layer in model.layers:
        layer.compile(backend=backend)
    return model


def compiled_whole(way: Way, *, is_outside: bool) -> Wrapped:
    """A model that is compiled as a whole, in DDP or around it."""
    if is_outside:
        wrapped = ddp(Way("bare", 0, way.width))
        call: Any = torch.compile(wrapped.model, backend="aot_eager")
    else:
        inner = Transformer(way.width)
        inner.compile(backend="aot_eager")
        wrapped = ddp(Way("bare", 0, way.width), make=lambda _: inner)
        call = wrapped.model
    way.hold(call)
    return Wrapped(wrapped.model, call, wrapped.during)


# Pipelines


def _pipeline(way: Way, turns: Any, schedule: str) -> Iterable[torch.Tensor]:
    from torch.distributed import pipelining

    rank, stages = dist.get_rank(), dist.get_world_size()
    model = Transformer(way.width, rank, stages)
    way.hold(model)
    stage = pipelining.PipelineStage(model, rank, stages, torch.device("cpu"))
    passes = getattr(pipelining, schedule)(stage, MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    torch.manual_seed(1 + rank)
    is_last = rank == stages - 1
    while not turns.are_over:
        batch = tokens_of(turns.step, 0, turns.tokens, 2 * BATCH)
        turns.begin()
        losses: list[torch.Tensor] = []
        given = {"target": batch, "losses": losses} if is_last else {}
        passes.step(*([batch] if rank == 0 else []), **given)
        optimizer.step()
        optimizer.zero_grad()
        turns.end([loss.detach() for loss in losses])
        losses.clear()
    return model.parameters()


def pipeline_gpipe(way: Way, turns: Any) -> Iterable[torch.Tensor]:
    return _pipeline(way, turns, "ScheduleGPipe")


def pipeline_1f1b(way: Way, turns: Any) -> Iterable[torch.Tensor]:
    return _pipeline(way, turns, "Schedule1F1B")


def _divided_over_ranks(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.AdamW, lr=LEARNING_RATE)


HABITS = {
    "plain": Habits(),
    "accumulation": Habits(micro_batches=2),
    "clipping": Habits(clips=True),
    "evaluation": Habits(evaluates=True),
    "evaluation first": Habits(evaluates_first=True, evaluates=True),
    "lengths": Habits(lengths=True),
    "last batches": Habits(last=True),
    "bf16": Habits(autocast=True),
    "scaler": Habits(scales=True, clips=True),
    "save and resume": Habits(saves=True),
    "all": Habits(micro_batches=2, clips=True, evaluates=True, lengths=True, last=True, autocast=True),
    "Join": Habits(joins=True),
    "collectives in the loss": Habits(talks=True),
    "ZeRO": Habits(optimizer=_divided_over_ranks),
    "momentum": Habits(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)),
}
WRAPPERS: dict[str, Callable[[Way], Wrapped]] = {
    "DDP": ddp,
    "DDP after the line": lambda way: ddp(way, is_first=True),
    "DDP, small buckets": lambda way: ddp(way, bucket_cap_mb=0.2),
    "DDP, static_graph": lambda way: ddp(way, static_graph=True),
    "DDP, bucket views": lambda way: ddp(way, gradient_as_bucket_view=True),
    "DDP, unused": lambda way: ddp(way, make=lambda width: Transformer(width, drops=True), find_unused_parameters=True),
    "DDP, fp16 hook": lambda way: ddp_hooked(way, _fp16_hook),
    "DDP, LoRA on bf16": lambda way: ddp(way, make=adapted),
    "DDP, blocks compiled": lambda way: ddp(way, make=compiled_blocks),
    "DDP, compiled inside": lambda way: compiled_whole(way, is_outside=False),
    "DDP, compiled outside": lambda way: compiled_whole(way, is_outside=True),
    "replicate": replicated,
    "FSDP2": sharded,
    "FSDP2 after the line": lambda way: sharded(way, is_first=True),
    "FSDP2, root only": lambda way: sharded(way, by_block=False),
    "FSDP2, not resharded": lambda way: sharded(way, reshard_after_forward=False),
    "FSDP2, prefetch": lambda way: sharded(way, prefetches=True),
    "FSDP2, bf16 policy": lambda way: sharded(way, mp_policy=_bf16_policy()),
    "FSDP2, CPU offload": lambda way: sharded(way, offload_policy=_offloaded()),
    "FSDP2, tied": lambda way: sharded(way, make=tied),
    "FSDP2, LoRA on bf16": lambda way: sharded(way, make=adapted),
    "FSDP2, blocks compiled": lambda way: sharded(way, make=compiled_blocks),
    "FSDP2, blocks by Inductor": lambda way: sharded(way, make=lambda width: compiled_blocks(width, "inductor")),
    "HSDP": lambda way: sharded(way, mesh=hsdp_mesh),
    "TP": divided,
    "TP, blocks compiled": lambda way: divided(way, compiles=True),
    "torchtitan, FSDP": lambda way: titan(way, parts=1),
    "torchtitan, FSDP, compiled": lambda way: titan(way, parts=1, compiles=True),
    "torchtitan, TP": lambda way: titan(way, parts=2),
    "torchtitan, TP, compiled": lambda way: titan(way, parts=2, compiles=True),
    "torchtitan, line last": lambda way: titan(way, parts=1, compiles=True, is_last=True),
}
