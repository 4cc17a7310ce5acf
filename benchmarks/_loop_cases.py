"""Training loops for `checkpoint.py` and `doors.py`: models of many kinds, each with a loss, batches, an optimizer."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _eager_loops import LOOPS, Experts, made
from _loop_models import (
    Denoiser,
    Detector,
    Equilibrium,
    GraphNetwork,
    Looks,
    Packed,
    Pondering,
    detection_loss,
    noise_loss,
    tagging_loss,
)
from torch import Tensor, nn
from torch.nn import functional

from memfit.checkpointing.blocks import find_blocks
from memfit.workloads import build

VOCABULARY = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training loop.

    Attributes:
        model: in training.
        loss: of the model, or of what is called in its place, and a batch.
        batch: returns the batch of the next step.
        optimizer: of the model's parameters.
    """

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    batch: Callable[[], Any]
    optimizer: torch.optim.Optimizer

    def step(self, batch: Any, model: Any = None) -> Tensor:
        """Run forward, backward and update; return the loss, detached."""
        loss = self.loss(self.model if model is None else model, batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


Maker = Callable[[], Case]


def _case(model: nn.Module, loss: Callable[[Any, Any], Tensor], batch: Any, optimizer: str = "adamw") -> Case:
    parameters = list(model.parameters())
    update = (
        torch.optim.SGD(parameters, 1e-3, momentum=0.9)
        if optimizer == "sgd"
        else torch.optim.AdamW(parameters, lr=1e-4)
    )
    make = batch if callable(batch) else lambda: batch
    return Case(model=model.train(), loss=loss, batch=make, optimizer=update)


def _workload(name: str, **options: Any) -> Maker:
    def make() -> Case:
        step = build(name, **options)
        assert step.optimizer is not None
        return Case(model=step.model, loss=step.compute_loss, batch=lambda: step.batch, optimizer=step.optimizer)

    return make


def _own(
    model: Callable[[], nn.Module], loss: Callable[[Any, Any], Tensor], batch: Any, optimizer: str = "adamw"
) -> Maker:
    return lambda: _case(model(), loss, batch() if batch.__name__ == "once" else batch, optimizer)


def _hugging(name: str, config: str, batch: Callable[[], dict[str, Tensor]], **settings: Any) -> Maker:
    """Return a maker of a model of transformers with random weights: its class, its configuration's, and a batch."""

    def make() -> Case:
        library = importlib.import_module("transformers")
        model = getattr(library, name)(getattr(library, config)(**settings))
        return _case(model, lambda model, batch: model(**batch).loss, batch())

    return make


def _once(make: Callable[[], Any]) -> Callable[[], Any]:
    """Mark a maker of the one batch that all steps have."""

    def once() -> Any:
        return make()

    return once


def _looking(make: Maker, lines: int = 2) -> Maker:
    """Return a maker of the same case with so many lines in its model that look at a tensor's value."""

    def look() -> Case:
        case = make()
        names = [name for name, _ in find_blocks(case.model)]
        for number in range(lines):
            parent, _, last = names[(number + 1) * len(names) // (lines + 1) - 1].rpartition(".")
            owner = case.model.get_submodule(parent)
            setattr(owner, last, Looks(owner.get_submodule(last)))
        return case

    return look


def _tokens(batch: int, length: int) -> Callable[[], dict[str, Tensor]]:
    def make() -> dict[str, Tensor]:
        ids = torch.randint(3, VOCABULARY, (batch, length))
        return {"input_ids": ids, "labels": ids.clone()}

    return make


def _translation(batch: int, length: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: {name: torch.randint(3, VOCABULARY, (batch, length)) for name in ("input_ids", "labels")}


def _pictures(batch: int, size: int, classes: int = 10) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(0, classes, (batch,))}


def _waves(batch: int, samples: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"input_values": torch.randn(batch, samples), "labels": torch.randint(1, 20, (batch, 6))}


def _square(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def _labelled(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def _graph_loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0], batch[1]), batch[2])


def _sentences() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 500, (16, 64)), torch.randint(16, 65, (16,))


def _tree_loss(model: Any, batch: Tensor) -> Tensor:
    return model(batch)[0].square().mean()


def _lengths(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def _of_loop(name: str, loss: Callable[[Any, Any], Tensor], batch: Callable[[], Any]) -> Maker:
    return lambda: _case(made(LOOPS[name]), loss, batch, "sgd")


_LAYERS = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 1024}
_NARROW = {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 512}
_LANGUAGE = {"vocab_size": VOCABULARY, "max_position_embeddings": 256, "pad_token_id": 0}
_DECODER = {**_LANGUAGE, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2}
_T5 = {"vocab_size": VOCABULARY, "d_kv": 32, "num_heads": 8, "decoder_start_token_id": 0, "use_cache": False}
_WAVE = {
    **_NARROW, "vocab_size": 32, "conv_dim": (64,) * 4, "conv_kernel": (10, 3, 3, 3), "conv_stride": (5, 2, 2, 2),
    "num_feat_extract_layers": 4, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip
_PICTURE = {"image_size": 96, "patch_size": 8, "num_labels": 10}
_BART = {
    "vocab_size": VOCABULARY, "d_model": 128, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512, "max_position_embeddings": 128,
    "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "forced_eos_token_id": None, "encoder_layerdrop": 0.2, "decoder_layerdrop": 0.2,
}  # fmt: skip

OWN_LOOPS: dict[str, Maker] = {
    "resnet18": _workload("resnet50", depth=18, batch=16, size=80, optimizer="sgd"),
    "densenet121": _workload("densenet121", batch=4, size=64, optimizer="sgd"),
    "unet": _workload("unet", batch=2, size=96, width=16, optimizer="sgd"),
    "gpt2": _workload("gpt2", batch=4, tokens=128, layers=6, width=256, vocabulary=VOCABULARY, optimizer="adamw"),
    "llama": _hugging("LlamaForCausalLM", "LlamaConfig", _tokens(4, 128), **_LAYERS, **_DECODER, num_key_value_heads=4),
    "t5": _hugging(
        "T5ForConditionalGeneration", "T5Config", _translation(4, 64), **_T5, d_model=256, d_ff=1024, num_layers=4
    ),
    "vit": _hugging("ViTForImageClassification", "ViTConfig", _pictures(4, 96), **_LAYERS, **_PICTURE),
    "mixture of experts": _own(Experts, _square, _once(lambda: torch.randn(8, 128, 128))),
    "diffusion": _own(Denoiser, noise_loss, _once(lambda: torch.randn(4, 3, 32, 32))),
    "graph network": _own(
        GraphNetwork,
        _graph_loss,
        _once(lambda: (torch.randn(3000, 16), torch.randint(0, 3000, (2, 12000)), torch.randint(0, 10, (3000,)))),
    ),
    "detection": _own(Detector, detection_loss, _once(lambda: torch.randn(8, 3, 128, 128)), "sgd"),
}
"""Of issue 35: own loops of ten kinds of models, one CNN with batch normalization more."""

MORE_OWN_LOOPS: dict[str, Maker] = {
    "gpt2 small": _workload("gpt2", batch=2, tokens=32, layers=6, width=64, vocabulary=500, optimizer="adamw"),
    "encoder": _workload("encoder", batch=4, tokens=128, width=256, feedforward=1024, optimizer="adamw"),
    "gpt2, 24 layers": _workload("gpt2", batch=2, tokens=128, layers=24, width=128, vocabulary=500, optimizer="adamw"),
    "resnet101": _workload("resnet50", depth=101, batch=4, size=64, optimizer="sgd"),
}

WHOLE: dict[str, Maker] = {
    "gpt2": _workload("gpt2", batch=4, tokens=64, layers=6, width=128, vocabulary=VOCABULARY, optimizer="adamw"),
    "llama": _hugging(
        "LlamaForCausalLM", "LlamaConfig", _tokens(4, 64), **_NARROW, **_DECODER, num_key_value_heads=2
    ),
    "t5": _hugging(
        "T5ForConditionalGeneration", "T5Config", _translation(4, 48), **_T5, d_model=128, d_ff=512, num_layers=3
    ),
    "bert": _hugging("BertForMaskedLM", "BertConfig", _tokens(4, 64), **_NARROW, **_LANGUAGE),
    "vit": _hugging("ViTForImageClassification", "ViTConfig", _pictures(4, 96), **_NARROW, **_PICTURE),
    "swin": _hugging(
        "SwinForImageClassification", "SwinConfig", _pictures(4, 64), image_size=64, patch_size=2, embed_dim=32,
        depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=10,
    ),
    "convnext": _hugging(
        "ConvNextForImageClassification", "ConvNextConfig", _pictures(8, 64), hidden_sizes=[16, 32, 64, 128],
        depths=[2, 2, 2, 2], image_size=64, num_labels=10,
    ),
    "resnet18": _workload("resnet50", depth=18, batch=8, size=64, optimizer="sgd"),
    "unet": _workload("unet", batch=1, size=96, width=16, optimizer="sgd"),
}  # fmt: skip
"""Whose steps are one graph."""

BROKEN: dict[str, Maker] = {
    "gpt2, two lines look": _looking(WHOLE["gpt2"]),
    "llama, two lines look": _looking(WHOLE["llama"]),
    "vit, two lines look": _looking(WHOLE["vit"]),
    "resnet18, two lines look": _looking(WHOLE["resnet18"]),
    "unet, two lines look": _looking(WHOLE["unet"]),
    "wav2vec2": _hugging("Wav2Vec2ForCTC", "Wav2Vec2Config", _waves(2, 8000), **_WAVE),
    "hubert": _hugging("HubertForCTC", "HubertConfig", _waves(2, 8000), **_WAVE),
    "bart, layers dropped": _hugging("BartForConditionalGeneration", "BartConfig", _translation(4, 64), **_BART),
    "mixture of experts": _own(Experts, _square, _once(lambda: torch.randn(4, 64, 128))),
    "early end": _own(Pondering, _labelled, lambda: (torch.randn(8, 64, 128), torch.randint(0, 10, (8,)))),
    "tokens dropped": _own(
        lambda: Pondering(drops=True), _labelled, lambda: (torch.randn(8, 64, 128), torch.randint(0, 10, (8,)))
    ),
    "fixed point": _own(Equilibrium, _labelled, lambda: (torch.randn(512, 256), torch.randint(0, 10, (512,)))),
    "packed sentences": _own(Packed, tagging_loss, _sentences),
    "proposals": _own(
        lambda: Detector(proposals=True), detection_loss, _once(lambda: torch.randn(4, 3, 96, 96)), "sgd"
    ),
    "edges by distance": _own(
        lambda: GraphNetwork(layers=4, radius=0.6),
        lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        lambda: (torch.randn(600, 16), torch.randint(0, 10, (600,))),
    ),
}  # fmt: skip
"""Whose graphs are broken, by lines that look at a value, or by data that choose what runs."""

VARYING: dict[str, Maker] = {
    "stochastic depth": _of_loop(
        "stochastic depth", _labelled, lambda: (torch.randn(12, 3, 32, 32), torch.randint(0, 10, (12,)))
    ),
    "experts": _of_loop("experts", _square, lambda: torch.randn(8, int(torch.randint(64, 129, ())), 128)),
    "sentences of 200 lengths": _of_loop(
        "sentences of 200 lengths", _lengths, lambda: torch.randint(0, 5000, (4, int(torch.randint(16, 216, ()))))
    ),
    "trees": _of_loop("trees", _tree_loss, lambda: torch.randn(64, 128)),
}
"""The loops of `eager_mode.py`: models and batches as there."""

CASES: dict[str, Maker] = {
    **{f"own loop: {name}": make for name, make in (OWN_LOOPS | MORE_OWN_LOOPS).items()},
    **WHOLE,
    **BROKEN,
    **{f"loop: {name}": make for name, make in VARYING.items()},
}
"""All of them, by the name that a child process is given."""
