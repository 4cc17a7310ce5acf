"""What each row of `checkpoint_ranks.py` trains on a rank: a wrapper, and what a loop does with it.

A row is a function of the way, the turns and the mesh's size. It makes its model, lets the way hold it, trains until
the turns are over, and returns the parameters that it trained.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as stock_checkpoint

import memfit
from memfit.checkpointing.blocks import find_blocks

LAYERS, WIDTH, HEADS, VOCABULARY = 6, 128, 4, 256
BATCH, TOKENS, SHORTER = 4, 256, 192
MICRO_BATCHES = 4  # of a pipeline's step
LEARNING_RATE = 1e-3
MANY = 1 << 30  # steps: the turns end first


class Block(nn.Module):
    """A layer of a transformer, whose heads a rank may have some of."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.taken, self.given = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.activation, self.dropout = nn.GELU(), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.taken(self.before(x)).unflatten(-1, (-1, 3, WIDTH // HEADS)).permute(3, 0, 2, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        x = x + self.dropout(self.given(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.narrow(self.activation(self.wide(self.between(x)))))


class Transformer(nn.Module):
    """A decoder, or one stage of it.

    Args:
        stage, stages: which part of the layers it has; the first stage has the embedding, the last one the head.
    """

    def __init__(self, stage: int = 0, stages: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [Block() for _ in range(LAYERS)]
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if stage == 0 else nn.Identity()
        self.layers = nn.ModuleList(layers[stage * LAYERS // stages : (stage + 1) * LAYERS // stages])
        self.head = nn.Linear(WIDTH, VOCABULARY) if stage == stages - 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the loss of predicting each token from those before it."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def tokens_of(step: int, of_rank: int, tokens: int = TOKENS, batch: int = BATCH) -> torch.Tensor:
    """Return the batch of a step on a rank."""
    generator = torch.Generator().manual_seed(64 * step + of_rank)
    return torch.randint(0, VOCABULARY, (batch, tokens), generator=generator)


@dataclass(slots=True)
class Way:
    """How a row's model is trained.

    Attributes:
        name: `bare`, `by hand`, or another: within a budget.
        budget_bytes: of this rank.
        handle: of `memfit.checkpoint`, or what a library's door holds.
    """

    name: str
    budget_bytes: int
    handle: Any = field(default=None)

    @property
    def has_budget(self) -> bool:
        """Whether memfit holds the model."""
        return self.name not in ("bare", "by hand")

    def hold(self, model: nn.Module) -> None:
        """Checkpoint all blocks, or hold the model to the budget, or leave it as it is."""
        if self.has_budget:
            self.handle = memfit.checkpoint(model, self.budget_bytes, budget_is="soft")
        self.by_hand(model)

    def by_hand(self, model: nn.Module) -> None:
        """Checkpoint all blocks, if that is the way."""
        if self.name == "by hand":
            for _, block in find_blocks(model):
                _checkpoint(block)

    def door(self) -> dict[str, Any]:
        """Return the options of a library's door."""
        return {"budget": self.budget_bytes, "door": "checkpoint", "budget_is": "soft"}


def _checkpoint(block: nn.Module) -> None:
    forward = block.forward
    block.forward = lambda *args, **kwargs: stock_checkpoint(forward, *args, use_reentrant=False, **kwargs)


# Loops of one's own


def _train(
    turns: Any,
    model: nn.Module,
    call: Callable[..., Any] | None = None,
    *,
    rank: int | None = None,
    lengths: bool = False,
    micro_batches: int = 1,
    during: Callable[[int], Any] = lambda _: nullcontext(),
    evaluates: bool = False,
) -> Iterable[torch.Tensor]:
    """Train a model in a loop of one's own; return its parameters.

    Args:
        turns: that time it.
        model: that the loop calls; `call` if that is another one.
        call: as said.
        rank: whose batches it gets; that of the process by default.
        lengths: whether batches are of two lengths, in turns, another one on the next rank.
        micro_batches: of a step.
        during: the context of the forward and backward pass of a micro-batch, by its number.
        evaluates: whether each step ends with an evaluation of half a batch.
    """
    called: Any = call or model
    rank = dist.get_rank() if rank is None else rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    torch.manual_seed(1 + rank)
    while not turns.are_over:
        is_short = lengths and (turns.step + rank) % 2
        given = [
            tokens_of(turns.step, 8 * rank + number, SHORTER if is_short else TOKENS) for number in range(micro_batches)
        ]
        turns.begin()
        losses: list[torch.Tensor] = []
        for number, batch in enumerate(given):
            with during(number):
                loss = loss_of(called(batch), batch)
                loss.backward()
            losses.append(loss.detach())
        del loss
        optimizer.step()
        optimizer.zero_grad()
        if evaluates:
            model.eval()
            with torch.no_grad():
                losses.append(loss_of(called(given[0][: BATCH // 2]), given[0][: BATCH // 2]))
            model.train()
        turns.end(losses, is_largest=not is_short)
    return model.parameters()


def ddp(way: Way, turns: Any) -> Iterable[torch.Tensor]:
    model = DistributedDataParallel(Transformer())
    way.hold(model)
    return _train(turns, model)


def ddp_accumulation(way: Way, turns: Any) -> Iterable[torch.Tensor]:
    inner = Transformer()
    way.hold(inner)
    model = DistributedDataParallel(inner)
    return _train(turns, model, micro_batches=2, during=lambda n: model.no_sync() if n == 0 else nullcontext())


def _sharded(**options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    model = Transformer()
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def fsdp2(way: Way, turns: Any, options: Any = None, **habits: Any) -> Iterable[torch.Tensor]:
    model = _sharded(**(options or {}))
    way.hold(model)
    return _train(turns, model, **habits)


def fsdp2_evaluation(way: Way, turns: Any) -> Iterable[torch.Tensor]:
    return fsdp2(way, turns, evaluates=True)


def fsdp2_accumulation(way: Way, turns: Any) -> Iterable[torch.Tensor]:
    model = _sharded()
    way.hold(model)

    def during(number: int) -> Any:
        model.set_requires_gradient_sync(number == 1)
        return nullcontext()

    return _train(turns, model, micro_batches=2, during=during)


def fsdp2_lengths(way: Way, turns: Any) -> Iterable[torch.Tensor]:
    return fsdp2(way, turns, lengths=True)


def hsdp(way: Way, turns: Any) -> Iterable[torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return fsdp2(way, turns, {"mesh": mesh})


def fsdp2_offload(way: Way, turns: Any) -> Iterable[torch.Tensor]:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return fsdp2(way, turns, {"offload_policy": CPUOffloadPolicy(pin_memory=False)})


def fsdp2_bf16(way: Way, turns: Any) -> Iterable[torch.Tensor]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return fsdp2(way, turns, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)})


def tensor_parallel(way: Way, turns: Any) -> Iterable[torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Transformer()
    for layer in model.layers:
        divided = {name: ColwiseParallel() for name in ("taken", "wide")}
        parallelize_module(layer, mesh, divided | {name: RowwiseParallel() for name in ("given", "narrow")})
    way.hold(model)
    return _train(turns, model, rank=0)  # all ranks have the same batch, and draw the same numbers


def _pipeline(way: Way, turns: Any, schedule: str) -> Iterable[torch.Tensor]:
    from torch.distributed import pipelining

    rank, stages = dist.get_rank(), dist.get_world_size()
    model = Transformer(rank, stages)
    way.hold(model)
    stage = pipelining.PipelineStage(model, rank, stages, torch.device("cpu"))
    passes = getattr(pipelining, schedule)(stage, MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    torch.manual_seed(1 + rank)
    is_last = rank == stages - 1
    while not turns.are_over:
        batch = tokens_of(turns.step, 0, batch=2 * BATCH)
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


# Loops of libraries


def accelerate(way: Way, turns: Any) -> Iterable[torch.Tensor]:
    from accelerate import Accelerator

    _as_torchrun_starts()
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    accelerator = Accelerator(cpu=True)
    if way.has_budget:
        from memfit.integrations.accelerate import prepare

        model, optimizer = prepare(accelerator, model, optimizer, **way.door())
        way.handle = accelerator.memfit[0]  # pyright: ignore
    else:
        way.by_hand(model)
        model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(1 + dist.get_rank())
    while not turns.are_over:
        batch = tokens_of(turns.step, dist.get_rank())
        turns.begin()
        with accelerator.accumulate(model):
            loss = loss_of(model(batch), batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        loss = loss.detach()
        turns.end([loss])
    return model.parameters()


def lightning(way: Way, turns: Any) -> Iterable[torch.Tensor]:
    import pytorch_lightning as library
    from pytorch_lightning.strategies import DDPStrategy

    _as_torchrun_starts()

    class Module(library.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = Transformer(), list[torch.Tensor]()

        def training_step(self, batch: Any, _number: int) -> Any:
            loss = loss_of(self.net(batch), batch)
            self.losses = [loss.detach()]
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)

    class Told(library.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            turns.begin()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            turns.end(module.losses)
            trainer.should_stop = turns.are_over

    module = Module()
    callbacks: list[Any] = [Told()]
    if way.has_budget:
        from memfit.integrations.lightning import MemfitCallback

        way.handle = MemfitCallback(module="net", **way.door())
        callbacks.append(way.handle)
    way.by_hand(module.net)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = library.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_steps=MANY,
        callbacks=callbacks,
        use_distributed_sampler=False,
        **quiet,
    )
    torch.manual_seed(1 + dist.get_rank())
    trainer.fit(module, torch.utils.data.DataLoader(_Texts(), batch_size=None))
    return module.parameters()


class _Texts(torch.utils.data.IterableDataset[Any]):
    """Batches without an end."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (tokens_of(step, dist.get_rank()) for step in range(MANY))


def _library_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCABULARY,
    }
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=HEADS, num_key_value_heads=HEADS, use_cache=False, pad_token_id=0)
    )


def _rows(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": row, "labels": row} for row in tokens_of(0, 0, batch=count)]


def peft(way: Way, turns: Any) -> Iterable[torch.Tensor]:
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(_library_model(), settings)
    way.hold(model)
    parallel = DistributedDataParallel(model)
    return _train(turns, model, lambda batch: parallel(input_ids=batch).logits)


def _told(kind: Any, turns: Any) -> Any:
    """Return a kind of Trainer whose steps the turns time."""
    import transformers

    losses: list[torch.Tensor] = []

    class Told(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            losses.clear()
            turns.begin()

        def on_step_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
            turns.end(losses)
            control.should_training_stop = turns.are_over

    class Kind(kind):
        def training_step(self, *given: Any, **named: Any) -> Any:
            loss = super().training_step(*given, **named)
            losses.append(loss)
            return loss

    return Kind, Told()


def _trained(way: Way, turns: Any, kind: Any, config: Any, **given: Any) -> Iterable[torch.Tensor]:
    _as_torchrun_starts()
    model = _library_model()
    made, told = _told(kind, turns)
    callbacks = [told]
    if way.has_budget:
        from memfit.integrations.transformers import MemfitCallback

        way.handle = MemfitCallback(**way.door())
        callbacks.append(way.handle)
    way.by_hand(model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = config(
            output_dir=folder,
            max_steps=1 << 20,
            per_device_train_batch_size=BATCH,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        made(model=model, args=arguments, callbacks=callbacks, **given).train()
    return model.parameters()


def trainer(way: Way, turns: Any) -> Iterable[torch.Tensor]:
    import transformers

    return _trained(way, turns, transformers.Trainer, transformers.TrainingArguments, train_dataset=_rows(256))


def trl(way: Way, turns: Any) -> Iterable[torch.Tensor]:
    import datasets
    import trl as library
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1} | {f"w{number}": number for number in range(2, VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="<eos>"
    )
    rows = datasets.Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in _rows(256)])
    return _trained(way, turns, library.SFTTrainer, library.SFTConfig, train_dataset=rows, processing_class=tokenizer)


def _as_torchrun_starts() -> None:
    rank, count = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "checkpoint-ranks"}


ROWS: dict[str, Callable[[Way, Any], Iterable[torch.Tensor]]] = {
    "ddp": ddp,
    "ddp, accumulation": ddp_accumulation,
    "fsdp2": fsdp2,
    "fsdp2, evaluation": fsdp2_evaluation,
    "fsdp2, accumulation": fsdp2_accumulation,
    "fsdp2, lengths": fsdp2_lengths,
    "fsdp2, hsdp": hsdp,
    "fsdp2, cpu offload": fsdp2_offload,
    "fsdp2, bf16": fsdp2_bf16,
    "tensor parallel": tensor_parallel,
    "pipeline, gpipe": pipeline_gpipe,
    "pipeline, 1f1b": pipeline_1f1b,
    "trainer": trainer,
    "accelerate": accelerate,
    "lightning": lightning,
    "trl": trl,
    "peft": peft,
}
FOUR_RANKS_ONLY = ("fsdp2, hsdp",)
