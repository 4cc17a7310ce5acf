"""What rows of ranks train in the loops of libraries: Transformers, Accelerate, Lightning, TRL, PEFT."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _rank_kit import (
    BATCH,
    HEADS,
    LAYERS,
    LEARNING_RATE,
    MANY,
    VOCABULARY,
    Habits,
    Transformer,
    Way,
    Wrapped,
    loss_of,
    read,
    shorter,
    stored,
    tokens_of,
    train,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_ROWS = 256


def as_torchrun_starts() -> None:
    """Set the variables by which libraries learn of ranks."""
    rank, count = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "checkpoint-ranks"}


@contextmanager
def fsdp_as_on_gpus() -> Iterator[None]:
    """Let Accelerate take an FSDP plugin on CPUs as it does on GPUs, and forget what it was set to before."""
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DistributedType

    real = AcceleratorState.__init__

    def init(self: Any, *given: Any, fsdp_plugin: Any = None, **named: Any) -> None:
        real(self, *given, fsdp_plugin=fsdp_plugin, **named)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    AcceleratorState.__init__ = init
    try:
        yield
    finally:
        AcceleratorState.__init__ = real


# Accelerate


def accelerate(way: Way, turns: Any, *, plugin: str = "", **habits: Any) -> Iterable[torch.Tensor]:
    """Accelerate's loop: DDP, or FSDP2 as its plugin has it.

    Args:
        way: holds it.
        turns: that time it.
        plugin: `fsdp2`, or none.
        habits: `micro_batches`, `precision`, `lengths`, `evaluates`, `saves`.
    """
    from accelerate import Accelerator

    as_torchrun_starts()
    given: dict[str, Any] = {"gradient_accumulation_steps": habits.get("micro_batches", 1)}
    if habits.get("precision"):
        given["mixed_precision"] = habits["precision"]
    with fsdp_as_on_gpus():
        if plugin:
            given["fsdp_plugin"] = _fsdp2_plugin()
        accelerator = Accelerator(cpu=True, **given)

    def prepared() -> tuple[Any, Any]:
        model = Transformer(way.width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        if not way.has_budget:
            way.by_hand(model)
            return accelerator.prepare(model, optimizer)
        from memfit.integrations.accelerate import prepare

        found = prepare(accelerator, model, optimizer, **way.options())
        way.handle = accelerator.memfit[0]  # pyright: ignore
        return found

    model, optimizer = prepared()
    torch.manual_seed(1 + dist.get_rank())
    while not turns.are_over:
        is_short = bool(habits.get("lengths")) and bool((turns.step + dist.get_rank()) % 2)
        tokens = shorter(turns.tokens) if is_short else turns.tokens
        numbers = range(habits.get("micro_batches", 1))
        batches = [tokens_of(turns.step, 8 * dist.get_rank() + number, tokens) for number in numbers]
        turns.begin()
        losses: list[torch.Tensor] = []
        for batch in batches:
            with accelerator.accumulate(model):
                loss = loss_of(model(batch), batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        del loss
        if habits.get("evaluates"):
            model.eval()
            with torch.no_grad():
                losses.append(accelerator.reduce(loss_of(model(batches[0]), batches[0])))
            model.train()
        turns.end(losses, is_largest=not is_short)
        if habits.get("saves") and turns.step == turns.half and plugin:
            read(model, optimizer, stored(model, optimizer))
        elif habits.get("saves") and turns.step == turns.half:
            with tempfile.TemporaryDirectory() as mine:
                folder = [mine]
                dist.broadcast_object_list(folder)
                accelerator.save_state(folder[0])
                dist.barrier()
                for parameter in model.parameters():
                    parameter.data.zero_()
                accelerator.load_state(folder[0])
                dist.barrier()
    return model.parameters()


def _fsdp2_plugin() -> Any:
    from accelerate import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
    )


# Lightning


def lightning(way: Way, turns: Any, *, strategy: str = "ddp", **habits: Any) -> Iterable[torch.Tensor]:
    """Lightning's Trainer.

    Args:
        way: holds it.
        turns: that time it.
        strategy: `ddp`, or `fsdp2`: ModelParallelStrategy with `fully_shard` in `configure_model`.
        habits: options of the Trainer; `evaluates`: whether it evaluates between.
    """
    import pytorch_lightning as library
    from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy

    as_torchrun_starts()
    evaluates, saves = habits.pop("evaluates", False), habits.pop("saves", False)

    class Module(library.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = Transformer(way.width), list[torch.Tensor]()

        def configure_model(self) -> None:
            from torch.distributed.fsdp import FSDPModule, fully_shard

            if strategy == "fsdp2" and not isinstance(self.net, FSDPModule):
                mesh: Any = self.device_mesh["data_parallel"]  # pyright: ignore
                for layer in self.net.layers:
                    fully_shard(layer, mesh=mesh)
                fully_shard(self.net, mesh=mesh)

        def training_step(self, batch: Any, _number: int) -> Any:
            loss = loss_of(self.net(batch), batch)
            self.losses.append(loss.detach())
            return loss

        def validation_step(self, batch: Any, _number: int) -> None:
            self.losses.append(loss_of(self.net(batch), batch))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)

    class Told(library.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            turns.begin()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            turns.end(module.losses)
            module.losses.clear()
            trainer.should_stop = turns.are_over or (saves and turns.step == turns.half)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    given: dict[str, Any] = {"max_steps": MANY, "use_distributed_sampler": False, "accelerator": "cpu"}
    given |= quiet | habits
    if evaluates:
        given |= {"val_check_interval": 2, "limit_val_batches": 1, "num_sanity_val_steps": 1}
    path = None
    with tempfile.TemporaryDirectory() as mine:
        folder = [mine]
        dist.broadcast_object_list(folder)
        while True:
            module = Module()
            callbacks: list[Any] = [Told()]
            if way.has_budget:
                from memfit.integrations.lightning import MemfitCallback

                way.handle = MemfitCallback(module="net", **way.options())
                callbacks.append(way.handle)
            way.by_hand(module.net)
            by: Any = DDPStrategy(process_group_backend="gloo")
            if strategy == "fsdp2":
                by = ModelParallelStrategy(
                    data_parallel_size=dist.get_world_size(), tensor_parallel_size=1, process_group_backend="gloo"
                )
            trainer = library.Trainer(devices=dist.get_world_size(), strategy=by, callbacks=callbacks, **given)
            torch.manual_seed(1 + dist.get_rank())
            loaders: Any = [torch.utils.data.DataLoader(_Texts(turns.tokens), batch_size=None)]
            if evaluates:
                loaders.append(torch.utils.data.DataLoader(_Texts(turns.tokens), batch_size=None))
            trainer.fit(module, *loaders, ckpt_path=path)
            if turns.are_over:
                return module.parameters()
            path = str(Path(folder[0]) / "stored.ckpt")
            trainer.save_checkpoint(path)
            dist.barrier()


class _Texts(torch.utils.data.IterableDataset[Any]):
    """Batches without an end."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (tokens_of(step, dist.get_rank(), self._tokens) for step in range(MANY))


# Transformers


def library_model(width: int) -> Any:
    """Return a Llama of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCABULARY,
    }
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=HEADS, num_key_value_heads=HEADS, use_cache=False, pad_token_id=0)
    )


def adapted_library_model(width: int, dtype: torch.dtype = torch.float32) -> Any:
    """Return it with PEFT's adapters on a frozen base."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    return get_peft_model(library_model(width).to(dtype), settings)


def _rows(count: int, tokens: int, *, lengths: bool = False) -> list[dict[str, torch.Tensor]]:
    rows = tokens_of(0, 0, tokens, count)
    most = [shorter(tokens) if lengths and number // BATCH % 3 == 1 else tokens for number in range(count)]
    cut = [row[:length] for row, length in zip(rows, most, strict=True)]
    return [{"input_ids": row, "labels": row} for row in cut]


def peft(way: Way, turns: Any, dtype: torch.dtype = torch.float32, habits: Habits | None = None) -> Any:
    """PEFT's adapters under DDP, in a loop of one's own."""

    def wrap() -> Wrapped:
        model = adapted_library_model(way.width, dtype)
        way.hold(model)
        parallel = DistributedDataParallel(model)
        return Wrapped(model, lambda batch: parallel(input_ids=batch).logits)

    return train(turns, wrap, habits)


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

        def on_evaluate(self, *_: Any, metrics: dict[str, float], **__: Any) -> None:
            losses.append(torch.tensor(metrics["eval_loss"]))

    class Kind(kind):
        def training_step(self, *given: Any, **named: Any) -> Any:
            loss = super().training_step(*given, **named)
            losses.append(loss)
            return loss

    return Kind, Told()


def _trained(
    way: Way, turns: Any, kind: Any, config: Any, make: Any = library_model, saves: bool = False, **given: Any
) -> Iterable[torch.Tensor]:
    as_torchrun_starts()
    named = given.pop("arguments", {})
    with tempfile.TemporaryDirectory() as mine:
        folder = [mine]
        dist.broadcast_object_list(folder)
        arguments: dict[str, Any] = {
            "output_dir": folder[0],
            "max_steps": 1 << 20,
            "per_device_train_batch_size": BATCH,
            "gradient_checkpointing": False,
            "bf16": False,
            "use_cpu": True,
            "report_to": [],
            "save_strategy": "no",
            "logging_strategy": "no",
            "disable_tqdm": True,
            **named,
        }
        if saves:
            arguments |= {"save_strategy": "steps", "save_steps": turns.half, "max_steps": turns.half}
        while True:
            model = make(way.width)
            made, told = _told(kind, turns)
            callbacks = [told]
            if way.has_budget:
                from memfit.integrations.transformers import MemfitCallback

                way.handle = MemfitCallback(**way.options())
                callbacks.append(way.handle)
            way.by_hand(model)
            is_again = saves and turns.step > 0
            if is_again:
                arguments |= {"max_steps": 1 << 20, "save_strategy": "no"}
            with fsdp_as_on_gpus():
                trainer = made(model=model, args=config(**arguments), callbacks=callbacks, **given)
            trainer.train(resume_from_checkpoint=is_again or None)
            if turns.are_over:
                return model.parameters()


def trainer(way: Way, turns: Any, *, lengths: bool = False, evaluates: bool = False, **given: Any) -> Any:
    """The Trainer.

    Args:
        way: holds it.
        turns: that time it.
        lengths: whether batches are of several lengths, others on each rank.
        evaluates: whether it evaluates after every second step.
        given: `arguments`: of TrainingArguments; `make`: makes the model; `saves`: whether it resumes half-way.
    """
    import transformers

    if evaluates:
        named = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": BATCH}
        given["arguments"] = given.get("arguments", {}) | named
        given["eval_dataset"] = _rows(2 * BATCH, turns.tokens)
    rows = _rows(_ROWS, turns.tokens, lengths=lengths)
    if lengths:
        given["data_collator"] = _padded
    return _trained(way, turns, transformers.Trainer, transformers.TrainingArguments, train_dataset=rows, **given)


def _padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch of the longest row's length, as dynamic padding makes it."""
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {"input_ids": ids, "labels": ids}


def fsdp2_arguments(**more: Any) -> dict[str, Any]:
    """Return the Trainer's arguments for FSDP2, as Accelerate configures it."""
    config = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], **more}
    return {"fsdp": True, "fsdp_config": config}


def trl(way: Way, turns: Any) -> Iterable[torch.Tensor]:
    import datasets
    import trl as library
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1} | {f"w{number}": number for number in range(2, VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="<eos>"
    )
    rows = datasets.Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in _rows(_ROWS, turns.tokens)])
    return _trained(way, turns, library.SFTTrainer, library.SFTConfig, train_dataset=rows, processing_class=tokenizer)
