"""What rows of ranks are made from: a transformer, how it is held, and a loop of one's own with its habits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as stock_checkpoint

import memfit
from memfit.checkpointing.blocks import find_blocks

LAYERS, HEADS, VOCABULARY = 6, 4, 256
BATCH = 4
LEARNING_RATE = 1e-3
MANY = 1 << 30  # steps: the turns end first
_DROPPED = 3  # one of so many layers is left out, where some are


class Block(nn.Module):
    """A layer of a transformer, whose heads a rank may have some of."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.of_head = width // HEADS
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.taken, self.given = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.activation, self.dropout = nn.GELU(), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.taken(self.before(x)).unflatten(-1, (-1, 3, self.of_head)).permute(3, 0, 2, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        x = x + self.dropout(self.given(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.narrow(self.activation(self.wide(self.between(x)))))


class Transformer(nn.Module):
    """A decoder, or one stage of it.

    Args:
        width: of its layers.
        stage, stages: which part of the layers it has; the first stage has the embedding, the last one the head.
        drops: whether calls in training leave layers out, others on each rank.
    """

    def __init__(self, width: int, stage: int = 0, stages: int = 1, *, drops: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [Block(width) for _ in range(LAYERS)]
        self.embedding = nn.Embedding(VOCABULARY, width) if stage == 0 else nn.Identity()
        self.layers = nn.ModuleList(layers[stage * LAYERS // stages : (stage + 1) * LAYERS // stages])
        self.head = nn.Linear(width, VOCABULARY) if stage == stages - 1 else nn.Identity()
        self.drops, self.calls = drops, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        self.calls += self.training and self.drops
        for number, layer in enumerate(self.layers):
            if self.drops and (number + self.calls + dist.get_rank()) % _DROPPED == 0:
                continue
            x = layer(x)
        return self.head(x)


class Adapted(nn.Module):
    """A frozen layer in bfloat16 with LoRA's two small ones beside it, in float32."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.bfloat16().requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x.bfloat16()).float() + self.up(self.down(x))


def adapted(width: int) -> Transformer:
    """Return the transformer with a frozen base in bfloat16, of whose layers some have adapters."""
    model = Transformer(width).requires_grad_(False)
    for layer in model.layers:
        for name in ("taken", "wide", "narrow"):
            setattr(layer, name, Adapted(getattr(layer, name)))
    return model


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the loss of predicting each token from those before it."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def shorter(tokens: int) -> int:
    """Return the other length of batches, where there are two."""
    return tokens * 3 // 4


def tokens_of(step: int, of_rank: int, tokens: int, batch: int = BATCH) -> torch.Tensor:
    """Return the batch of a step on a rank."""
    generator = torch.Generator().manual_seed(64 * step + of_rank)
    return torch.randint(0, VOCABULARY, (batch, tokens), generator=generator)


@dataclass(slots=True)
class Way:
    """How a row's model is trained.

    Attributes:
        name: `bare`, `by hand`, or another: within a budget.
        budget_bytes: of this rank.
        width: of the layers of its model.
        door: of the integrations, or of a loop of one's own: `checkpoint`, `compile`, `backend` (of each block),
            `eager`, `fit`.
        handle: of `memfit.checkpoint`, or what a library's door holds.
    """

    name: str
    budget_bytes: int
    width: int
    door: str = "checkpoint"
    handle: Any = field(default=None)

    @property
    def has_budget(self) -> bool:
        """Whether memfit holds the model."""
        return self.name not in ("bare", "by hand")

    def hold(self, model: nn.Module) -> None:
        """Checkpoint all blocks, or hold the model to the budget, or leave it as it is."""
        if self.has_budget and self.door == "eager":
            self.handle = memfit.eager(model, budget=self.budget_bytes)
            self.handle.__enter__()
        elif self.has_budget and self.door == "compile":
            memfit.compile(model, budget=self.budget_bytes, budget_is="soft", time_limit_seconds=1)
        elif self.has_budget and self.door == "backend":
            for _, block in find_blocks(model):
                options = {"budget": self.budget_bytes, "budget_is": "soft", "time_limit_seconds": 1}
                block.compile(backend="memfit", options=options)
        elif self.has_budget:
            self.handle = memfit.checkpoint(model, self.budget_bytes, budget_is="soft")
        self.by_hand(model)

    def let_go(self) -> None:
        """Leave the model as it was."""
        if self.door == "eager" and self.handle is not None:
            self.handle.__exit__(None, None, None)
        elif self.handle is not None and hasattr(self.handle, "close"):
            self.handle.close()
        self.handle = None

    def by_hand(self, model: nn.Module) -> None:
        """Checkpoint all blocks, if that is the way."""
        if self.name == "by hand":
            for _, block in find_blocks(model):
                _checkpoint(block)

    def options(self) -> dict[str, Any]:
        """Return the options of a library's door."""
        quick = {"time_limit_seconds": 1} if self.door == "compile" else {}
        return {"budget": self.budget_bytes, "door": self.door, "budget_is": "soft", **quick}


def _checkpoint(block: nn.Module) -> None:
    forward = block.forward
    block.forward = lambda *args, **kwargs: stock_checkpoint(forward, *args, use_reentrant=False, **kwargs)


@dataclass(slots=True)
class Wrapped:
    """A model as a loop of one's own trains it.

    Attributes:
        model: whose parameters are trained.
        call: that the loop calls.
        during: the context of the forward and backward pass of a micro-batch, by whether it is the last one.
        is_one: whether all ranks have the same batches and draw the same numbers.
        clip: clips the gradients by their norm.
    """

    model: nn.Module
    call: Callable[..., Any]
    during: Callable[[bool], Any] = lambda _: nullcontext()
    is_one: bool = False
    clip: Callable[[Iterable[torch.Tensor]], Any] = lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """What a loop does beside forward, backward and update.

    Attributes:
        joins: whether rank 0 has two batches more than the others, inside torch's Join.
        micro_batches: of a step.
        clips: whether gradients are clipped by their norm.
        evaluates: whether each step ends with an evaluation of half a batch.
        evaluates_first: whether the loop begins with one.
        lengths: whether batches are of two lengths, in turns, another one on the next rank.
        last: whether every fourth batch is of fewer rows.
        autocast: whether forward runs in bfloat16.
        scales: whether a GradScaler scales the loss.
        talks: whether the loss runs collectives: a sum of counts, and a gather of features with gradients.
        saves: whether model and optimizer are stored and read again, in another model and optimizer, half-way.
        optimizer: makes it.
    """

    micro_batches: int = 1
    clips: bool = False
    evaluates: bool = False
    evaluates_first: bool = False
    lengths: bool = False
    last: bool = False
    autocast: bool = False
    scales: bool = False
    saves: bool = False
    joins: bool = False
    talks: bool = False
    optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer] = lambda parameters: torch.optim.AdamW(
        parameters, lr=LEARNING_RATE
    )


def train(
    turns: Any, wrap: Callable[[], Wrapped], habits: Habits | None = None, let_go: Callable[[], None] = lambda: None
) -> Iterable[torch.Tensor]:
    """Train in a loop of one's own; return the parameters.

    Args:
        turns: that time it.
        wrap: makes the model, and lets the way hold it.
        habits: of the loop.
        let_go: what holds a model that another one takes the place of.
    """
    habits = habits or Habits()
    wrapped = wrap()
    rank = 0 if wrapped.is_one else dist.get_rank()
    optimizer = habits.optimizer([each for each in wrapped.model.parameters() if each.requires_grad])
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=habits.scales)
    torch.manual_seed(1 + rank)
    if habits.evaluates_first:
        evaluate(wrapped, tokens_of(0, rank, turns.tokens))
    if habits.joins:
        _join(turns, wrapped, optimizer)
    while not turns.are_over:
        batches, is_largest = _batches(turns, rank, habits)
        turns.begin()
        losses: list[torch.Tensor] = []
        for number, batch in enumerate(batches):
            with wrapped.during(number == habits.micro_batches - 1):
                with torch.autocast("cpu", torch.bfloat16, enabled=habits.autocast):
                    logits = wrapped.call(batch)
                    loss = loss_of(logits, batch)
                    loss = _with_collectives(loss, logits) if habits.talks else loss
                    del logits
                scaler.scale(loss / habits.micro_batches).backward()
            losses.append(loss.detach())
        del loss
        scaler.unscale_(optimizer) if habits.clips and habits.scales else None
        if habits.clips:
            losses.append(_whole(wrapped.clip(wrapped.model.parameters())))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if habits.evaluates:
            losses.append(evaluate(wrapped, batches[0][: BATCH // 2]))
        turns.end(losses, is_largest=is_largest)
        if habits.saves and turns.step == turns.half:
            kept = stored(wrapped.model, optimizer)
            let_go()
            del wrapped, optimizer
            wrapped = wrap()
            optimizer = habits.optimizer([each for each in wrapped.model.parameters() if each.requires_grad])
            read(wrapped.model, optimizer, kept)
            torch.manual_seed(1 + rank)
    return wrapped.model.parameters()


def _batches(turns: Any, rank: int, habits: Habits) -> tuple[list[torch.Tensor], bool]:
    step = turns.step
    is_short = habits.lengths and (step + rank) % 2
    is_last = habits.last and step % 4 == 3
    sizes = shorter(turns.tokens) if is_short else turns.tokens, BATCH // 2 if is_last else BATCH
    batches = [tokens_of(step, 8 * rank + number, *sizes) for number in range(habits.micro_batches)]
    return batches, not (is_short or is_last)


def _with_collectives(loss: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    from torch.distributed.nn.functional import all_gather

    count = torch.tensor(float(logits[..., 0].numel()))
    whole = count.clone()
    dist.all_reduce(whole)
    features = logits.float().mean(1)
    others = torch.cat(list(all_gather(features)))  # as CLIP's loss does
    return loss * count / whole + (features @ others.T).logsumexp(1).mean() / 100


def _join(turns: Any, wrapped: Wrapped, optimizer: torch.optim.Optimizer) -> None:
    from torch.distributed.algorithms.join import Join

    with Join([wrapped.call]):
        for _ in range(turns.half if dist.get_rank() else turns.half + 2):
            batch = tokens_of(turns.step, dist.get_rank(), turns.tokens)
            turns.begin()
            loss = loss_of(wrapped.call(batch), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            turns.end([loss])
            del loss
    turns.stop()


def evaluate(wrapped: Wrapped, batch: torch.Tensor) -> torch.Tensor:
    """Return the loss of a batch, without gradients."""
    wrapped.call.eval() if isinstance(wrapped.call, nn.Module) else wrapped.model.eval()
    with torch.no_grad():
        loss = loss_of(wrapped.call(batch), batch)
    wrapped.call.train() if isinstance(wrapped.call, nn.Module) else wrapped.model.train()
    return loss


def stored(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what `torch.distributed.checkpoint` stores, read back from memory."""
    import copy

    from torch.distributed.checkpoint.state_dict import get_state_dict

    return copy.deepcopy(dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True)))


def read(model: nn.Module, optimizer: torch.optim.Optimizer, kept: dict[str, Any]) -> None:
    """Give model and optimizer what `stored` returned."""
    from torch.distributed.checkpoint.state_dict import set_state_dict

    set_state_dict(model, optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optim"])


def _whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()
