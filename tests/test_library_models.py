"""Models of Transformers at tiny sizes: what they ask of their tensors is answered as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import memfit

transformers = pytest.importorskip("transformers")

WIDTHS: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def text(padded: int | None) -> dict[str, torch.Tensor]:
    """Return two rows of 24 tokens; the last `padded` of the first are masked, None gives no mask."""
    ids = torch.randint(3, 100, (2, 24), generator=torch.Generator().manual_seed(2))
    batch = {"input_ids": ids, "labels": ids}
    if padded is not None:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][0, 24 - padded :] = 0
    return batch


def grouped_query_llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, use_cache=False, **WIDTHS))


def grouped_query_mistral() -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(num_key_value_heads=2, use_cache=False, **WIDTHS))


def deberta() -> Any:
    return transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(**NO_DROPOUT, **WIDTHS))


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**WIDTHS))


CASES: dict[str, tuple[Callable[[], Any], list[int | None]]] = {
    "Llama without a mask": (grouped_query_llama, [None, None, None]),
    "Llama with and without padding": (grouped_query_llama, [0, 4, 0, 4]),
    "Mistral with padding": (grouped_query_mistral, [4, 4, 4]),
    "DeBERTa": (deberta, [8, 8, 8]),
    "BERT with and without padding": (bert, [4, 0, 4]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "padding"), CASES.values(), ids=CASES.keys())
def test_training_gives_the_bits_of_eager(make: Callable[[], Any], padding: list[int | None]) -> None:
    torch.manual_seed(0)
    model = make().train()
    other = copy.deepcopy(model)
    batches = [text(padded) for padded in padding]

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return model(**batch).loss

    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)]
    step = memfit.fit(model, loss, batches[0], optimizer=optimizers[0], budget="64MiB", planner="none", verify=True)
    eager = memfit.TrainingStep(model=other, loss=loss, batch=batches[0], optimizer=optimizers[1])
    torch.manual_seed(5)
    planned_losses = [step(batch).item() for batch in batches]
    torch.manual_seed(5)
    assert planned_losses == [eager.run_eager(batch).item() for batch in batches]
    assert len(set(planned_losses)) == len(padding)
    assert len(step.plans) == len(set(padding))
