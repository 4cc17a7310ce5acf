"""What rows of ranks train by Transformers, TRL and PEFT."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from _rank_kit import (
    BATCH,
    HEADS,
    LAYERS,
    VOCABULARY,
    Habits,
    Way,
    Wrapped,
    shorter,
    tokens_of,
    train,
)
from _rank_libraries import as_torchrun_starts, fsdp_as_on_gpus, one_folder
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_ROWS = 256


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
    with one_folder() as folder:
        arguments: dict[str, Any] = {
            "output_dir": folder,
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
