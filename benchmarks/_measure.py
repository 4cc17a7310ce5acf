"""What the benchmarks measure of a training step: its peak, its tensors, and whether two runs gave the same bits."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memfit import TrainingStep
from memfit.system.recorder import Usage, record

SEED = 20240229
MIB, GIB = 1 << 20, 1 << 30
EIGHT = ("resnet50", "vgg16", "densenet121", "inceptionv3", "unet", "gpt2", "lstm", "encoder")  # measured everywhere


def forward_backward(step: TrainingStep, model: Callable[..., Any] | None = None) -> torch.Tensor:
    """Run zero_grad(set_to_none=True), forward, loss and backward, eagerly or through `model`; return the loss."""
    step.model.zero_grad(set_to_none=True)
    loss = step.compute_loss(step.model if model is None else model, step.batch)  # type: ignore[arg-type]
    loss.backward()
    return loss.detach()


def usage_of(run: Callable[[], object], step: TrainingStep, device: torch.device | str = "cpu") -> Usage:
    """Record one run that starts without gradients: its peak is what it holds above parameters, buffers and inputs.

    Gradients are counted, parameters and inputs are not.
    """
    step.model.zero_grad(set_to_none=True)
    gc.collect()
    with record(device) as usage:
        run()
    return usage


def outcome(run: Callable[[], torch.Tensor], step: TrainingStep) -> dict[str, torch.Tensor]:
    """Run once from a fixed seed; return copies, by name, of the loss and all that the step left; put the step back."""
    before = {name: _copied(tensor) for name, tensor in _state(step).items()}
    step.model.zero_grad(set_to_none=True)
    torch.manual_seed(SEED)
    loss = run()
    found = {"loss": _copied(loss)}
    for name, parameter in step.model.named_parameters():
        if parameter.grad is not None:
            found[f"gradient {name}"] = _copied(parameter.grad)
    found |= {name: _copied(tensor) for name, tensor in _state(step).items()}
    _put_back(step, before)
    return found


def same_bits(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], but: Iterable[str] = ()
) -> dict[str, Any]:
    """Compare two outcomes bit by bit: whether loss, gradients and buffers agree, and the first name that does not.

    `but` are names that are not compared.
    """
    left_out = set(but)
    differing = [name for name in differences(found, expected) if name not in left_out]
    kinds = {name.split()[0] for name in differing}
    return {
        **{f"{kind}_same_bits": kind not in kinds for kind in ("loss", "gradient", "buffer", "parameter", "state")},
        "first_difference": differing[0] if differing else None,
    }


def differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Return the names whose bits differ between two outcomes, or that only one of them has."""
    return [
        name
        for name in dict.fromkeys([*expected, *found])
        if name not in found or name not in expected or not _same_bits(found[name], expected[name])
    ]


def all_same(compared: dict[str, Any]) -> bool:
    """Whether `same_bits` found no difference."""
    return compared["first_difference"] is None


def resident_bytes(step: TrainingStep) -> int:
    """Bytes of parameters, buffers, batch and optimizer state, each storage once."""
    batch = [leaf for leaf in tree_leaves(step.batch) if isinstance(leaf, torch.Tensor)]
    return storage_bytes([*_state(step).values(), *batch])


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors' storages, each storage once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host: a GPU's own memory is what is measured."""
    return tensor.detach().to("cpu", copy=True)


def _state(step: TrainingStep) -> dict[str, torch.Tensor]:
    state = {f"parameter {name}": parameter for name, parameter in step.model.named_parameters()}
    state |= {f"buffer {name}": buffer for name, buffer in step.model.named_buffers()}
    if step.optimizer is not None:
        for number, values in enumerate(step.optimizer.state.values()):
            state |= {f"state {number} {key}": value for key, value in values.items() if torch.is_tensor(value)}
    return state


def _put_back(step: TrainingStep, before: dict[str, torch.Tensor]) -> None:
    """Write the copies back; an optimizer state that was not there before goes."""
    step.model.zero_grad(set_to_none=True)
    if step.optimizer is not None and not any(name.startswith("state ") for name in before):
        step.optimizer.state.clear()
    with torch.no_grad():
        for name, tensor in _state(step).items():
            tensor.copy_(before[name])


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    flat_one, flat_other = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(flat_one, flat_other)
