"""GPT-2 from a config, with random weights: nothing is asked of the hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from memfit.errors import InvalidOptionError
from memfit.workloads.parts import AUTOCAST_DTYPES, Options, Parts, autocast

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
    tokens, width, head_width = (int(options[key]) for key in ("tokens", "width", "head_width"))
    if width % head_width:
        raise InvalidOptionError(f"workload {name}: width {width} is not a multiple of head_width {head_width}")
    dropout = float(options["dropout"])
    config = GPT2Config(
        vocab_size=int(options["vocabulary"]),
        n_positions=max(_LEAST_POSITIONS, tokens),
        n_embd=width,
        n_layer=int(options["layers"]),
        n_head=width // head_width,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    identifiers = torch.randint(config.vocab_size, (int(options["batch"]), tokens))
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # what transformers falls back on; said here, it does not warn
    return Parts(
        model=model,
        loss=LanguageLoss(autocast=AUTOCAST_DTYPES[str(options["autocast"])]),
        batch={"input_ids": identifiers, "labels": identifiers.clone()},
    )


def places(model: Any, granularity: str) -> list[torch.nn.Module]:
    """Return every transformer block, or all of them as one."""
    return [model.transformer] if granularity == "stage" else list(model.transformer.h)
