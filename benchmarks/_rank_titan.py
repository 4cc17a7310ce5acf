"""A Llama as torchtitan writes it, and its order of wrapping: tensor parallelism, checkpoints, compilation, FSDP."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from _rank_kit import HEADS, LAYERS, VOCABULARY, Way, Wrapped
from torch import nn
from torch.nn import functional

_THETA = 10_000.0
_MOST_TOKENS = 512


class Attention(nn.Module):
    """Attention with rotary positions, of the heads that a rank has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.of_head = width // HEADS
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        given = (each(x).unflatten(-1, (-1, self.of_head)) for each in (self.wq, self.wk, self.wv))
        queries, keys, values = given
        queries, keys = _turned(queries, turns), _turned(keys, turns)
        of_heads = (each.transpose(1, 2) for each in (queries, keys, values))
        mixed = functional.scaled_dot_product_attention(*of_heads, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    pairs = x.unflatten(-1, (-1, 2))
    cosine, sine = turns[: x.shape[1], None, :, 0], turns[: x.shape[1], None, :, 1]
    real, imaginary = pairs[..., 0], pairs[..., 1]
    return torch.stack((real * cosine - imaginary * sine, real * sine + imaginary * cosine), -1).flatten(-2)


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.w2 = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(width), FeedForward(width)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), turns)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    """A Llama of torchtitan's form: layers in a dictionary, positions in a buffer."""

    turns: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleDict({str(number): TransformerBlock(width) for number in range(LAYERS)})
        self.norm, self.output = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        rates = _THETA ** -(torch.arange(0, width // HEADS, 2) / (width // HEADS))
        angles = torch.arange(_MOST_TOKENS)[:, None] * rates
        self.register_buffer("turns", torch.stack((angles.cos(), angles.sin()), -1), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.turns)
        return self.output(self.norm(h))


def titan(way: Way, *, parts: int, compiles: bool = False, is_last: bool = False) -> Wrapped:
    """Wrap it in torchtitan's order; the budget takes the place of `apply_ac`, or comes at the end.

    Args:
        way: holds it.
        parts: of tensor parallelism; what ranks are left are those of FSDP.
        compiles: whether each block is compiled.
        is_last: whether the budget comes at the end.
    """
    from torch.distributed.fsdp import fully_shard

    model, count = Llama(way.width), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (count // parts, parts), mesh_dim_names=("fsdp", "tp"))
    if parts > 1:
        _apply_tp(model, mesh["tp"])
    if not is_last:
        way.hold(model)
    for name, block in model.layers.named_children() if compiles else ():
        model.layers.register_module(name, torch.compile(block, backend="aot_eager", fullgraph=True))  # pyright: ignore
    if count > parts:
        for block in model.layers.values():
            fully_shard(block, mesh=mesh["fsdp"])
        fully_shard([model.norm, model.output], mesh=mesh["fsdp"], reshard_after_forward=False)
        fully_shard(model, mesh=mesh["fsdp"])
    if is_last:
        way.hold(model)

    def during(is_last_batch: bool) -> Any:
        if count > parts:
            model.set_requires_gradient_sync(is_last_batch)  # pyright: ignore
        return nullcontext()

    return Wrapped(model, model, during, is_one=count == parts)


def _apply_tp(model: Llama, mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    whole: Any = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, whole)
    attends = {"input_layouts": (Shard(1), None), "desired_input_layouts": (Replicate(), None)}
    feeds = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    of_block: Any = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(**attends),  # pyright: ignore
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(**feeds),  # pyright: ignore
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }
    of_block |= {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
    for block in model.layers.values():
        parallelize_module(block, mesh, of_block)
