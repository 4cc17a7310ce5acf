"""Workload gpt2: GPT-2 from a config, with random weights; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from memfit.workloads.parts import Options, Parts, autocast, autocast_dtype, head_count

_LEAST_POSITIONS = 1024  # GPT-2's own


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageLoss:
    """The model's own loss: cross entropy of every next token."""

    autocast: torch.dtype | None

    def __call__(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        with autocast(batch["input_ids"].device, self.autocast):
            return model(**batch).loss


def make(name: str, options: Options) -> Parts:
    """Return GPT2LMHeadModel and a batch of random tokens."""
    tokens, dropout = options["tokens"], options["dropout"]
    config = GPT2Config(
        vocab_size=options["vocabulary"],
        n_positions=max(_LEAST_POSITIONS, tokens),
        n_embd=options["width"],
        n_layer=options["layers"],
        n_head=head_count(name, options),
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    identifiers = torch.randint(config.vocab_size, (options["batch"], tokens))
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # the default of transformers, which warns if it is not set
    return Parts(
        model=model,
        loss=LanguageLoss(autocast=autocast_dtype(options)),
        batch={"input_ids": identifiers, "labels": identifiers.clone()},
    )


def places(model: Any, granularity: str) -> list[torch.nn.Module]:
    """Return every transformer block, or all of them as one."""
    return [model.transformer] if granularity == "stage" else list(model.transformer.h)
