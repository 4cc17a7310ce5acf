"""The models of `make gpu`, made on the device itself: a step, and how others would place checkpoints in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from _chen_models import ResNet
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

from memfit import TrainingStep
from memfit.workloads import registry
from memfit.workloads.building import checkpoints_placed
from memfit.workloads.gpt2 import LanguageLoss
from memfit.workloads.parts import SupervisedLoss

LEARNING_RATE = 1e-4
SEED = 20240229


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A step, and the block in which it runs with checkpoints."""

    step: TrainingStep
    checkpoints: Callable[[], AbstractContextManager[None]]


def make_model(
    name: str,
    options: dict[str, Any],
    *,
    optimizer: dict[str, Any] | None = None,
    with_state: bool = True,
    device: int = 0,
) -> Model:
    """Return a model on the GPU with AdamW.

    Args:
        name: a built-in workload, or one of `_MAKERS`.
        options: of the model.
        optimizer: arguments of AdamW, fused if None; `{"sgd": True}` for plain SGD, `{"none": True}` for none.
        with_state: whether the optimizer has its state. Made amid eager's first step it would keep segments of
            activations reserved for all ways that are measured later.
        device: index of the GPU.
    """
    torch.manual_seed(SEED)
    with torch.device("cuda", device):
        step, checkpoints = (_MAKERS.get(name) or partial(_workload, name))(**options)
    step.model.train()
    lay_together(step.model)
    if optimizer == {"none": True}:
        return Model(step=step, checkpoints=checkpoints)
    if optimizer == {"sgd": True}:
        return Model(step=replace(step, optimizer=torch.optim.SGD(step.model.parameters())), checkpoints=checkpoints)
    adam = torch.optim.AdamW(
        step.model.parameters(), lr=LEARNING_RATE, **({"fused": True} if optimizer is None else optimizer)
    )
    if with_state:
        _make_state(adam)
    return Model(step=replace(step, optimizer=adam), checkpoints=checkpoints)


def lay_together(model: torch.nn.Module) -> None:
    """Move parameters and buffers to memory of their own.

    What lay between them, as the model was made or trained before, would keep their segments half empty, and reserved.
    """
    device = next(model.parameters()).device
    model.to("cpu")
    torch.cuda.empty_cache()
    model.to(device)


def _make_state(adam: torch.optim.AdamW) -> None:
    """Make the state as AdamW's first step does, from zeros, and without gradients that leave room between it."""
    for group in adam.param_groups:
        on_device = group["fused"] or group["capturable"]
        for parameter in group["params"]:
            step = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            adam.state[parameter] = {"step": step, **moments}


Made = tuple[TrainingStep, Callable[[], AbstractContextManager[None]]]


def _workload(name: str, **given: Any) -> Made:
    workload = registry.find(name)
    options = workload.read_options(given)
    parts = import_module(f"memfit.workloads.{workload.module}").make(name, options)
    model, batch = parts.model, parts.batch
    if options.get("channels_last"):
        model = model.to(memory_format=torch.channels_last)
        batch = (batch[0].contiguous(memory_format=torch.channels_last), *batch[1:])
    step = TrainingStep(model=model, loss=parts.loss, batch=batch, name=name)
    return step, lambda: checkpoints_placed(step, "block")


def _llama(*, batch: int, tokens: int, **shape: int) -> Made:
    """A Llama 3.2 of 1B: https://huggingface.co/meta-llama/Llama-3.2-1B, config.json; all in bfloat16."""
    usual = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    usual |= {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
    config = LlamaConfig(**(usual | shape), tie_word_embeddings=True, use_cache=False, dtype=torch.bfloat16)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # converted, its parameters would lie in halves of larger blocks
    model = LlamaForCausalLM(config)
    torch.set_default_dtype(before)
    identifiers = torch.randint(config.vocab_size, (batch, tokens))
    step = TrainingStep(
        model=model,
        loss=LanguageLoss(autocast=None),
        batch={"input_ids": identifiers, "labels": identifiers.clone()},
        name="llama",
    )
    return step, _transformers_checkpoints(model)


def _vit(*, batch: int, **shape: int) -> Made:
    """ViT-L/16 of Dosovitskiy et al. 2020, arXiv:2010.11929, Table 1, under autocast to bfloat16."""
    usual = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    with patch(
        "torch.Tensor.erfinv_", torch.Tensor.sinh_
    ):  # in truncated normals: CUDA compiles its kernel at run time
        model = ViTForImageClassification(ViTConfig(**(usual | shape | {"num_labels": 1000})))
    loss = SupervisedLoss(criterion=_cross_entropy_of_logits, autocast=torch.bfloat16)
    images = torch.randn(batch, 3, model.config.image_size, model.config.image_size)
    step = TrainingStep(model=model, loss=loss, batch=(images, torch.randint(1000, (batch,))), name="vit")
    return step, _transformers_checkpoints(model)


def _chen(*, layers: int, batch: int, size: int = 224) -> Made:
    """The ResNet of Chen et al. 2016, section 5, of any depth, in float32."""
    images, labels = torch.randn(batch, 3, size, size), torch.randint(1000, (batch,))
    model = ResNet(layers)
    step = TrainingStep(model=model, loss=functional.cross_entropy, batch=(images, labels), name=f"resnet{layers}")
    return step, _none_placed


def _mlp(*, width: int = 512, depth: int = 6, rows: int = 4096) -> Made:
    """Perceptrons with dropout, small enough for a case of a few seconds."""
    return _layered(torch.nn.Sequential(*_layers(width, depth), torch.nn.Linear(width, 16)), width, rows)


def _broken_mlp(*, width: int = 512, depth: int = 6, rows: int = 4096) -> Made:
    """The same with a branch on a value of a tensor in the middle: no graph holds the whole step."""
    return _layered(_Branching(width, depth), width, rows)


class _Branching(torch.nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.below = torch.nn.Sequential(*_layers(width, depth // 2))
        self.above = torch.nn.Sequential(*_layers(width, depth - depth // 2), torch.nn.Linear(width, 16))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.below(features)
        if hidden.sum() > 1e30:
            hidden = hidden * 2
        return self.above(hidden)


def _layers(width: int, depth: int) -> Iterator[torch.nn.Module]:
    for _ in range(depth):
        yield from (torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Dropout(0.1))
        yield from (torch.nn.Linear(4 * width, width), torch.nn.LayerNorm(width))


def _layered(model: torch.nn.Module, width: int, rows: int) -> Made:
    batch = torch.randn(rows, width), torch.randint(16, (rows,))
    loss = SupervisedLoss(criterion=functional.cross_entropy, autocast=None)
    return TrainingStep(model=model, loss=loss, batch=batch, name="mlp"), _none_placed


def _none_placed() -> AbstractContextManager[None]:
    raise NotImplementedError("no checkpoints are placed in this model")


def _cross_entropy_of_logits(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.logits, labels)


def _transformers_checkpoints(model: Any) -> Callable[[], AbstractContextManager[None]]:
    """The model's own checkpoints, switched on for a block; all else stays, or memfit would capture the model anew."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    switched = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    assert switched, "a model without checkpoints"
    model.gradient_checkpointing_disable()

    @contextmanager
    def switched_on() -> Iterator[None]:
        for module in switched:
            module.gradient_checkpointing = True
        try:
            yield
        finally:
            for module in switched:
                module.gradient_checkpointing = False

    return switched_on


_MAKERS: dict[str, Callable[..., Made]] = {
    "llama": _llama,
    "vit": _vit,
    "chen resnet": _chen,
    "mlp": _mlp,
    "broken mlp": _broken_mlp,
}
