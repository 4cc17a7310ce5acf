"""The device of a training step, what kinds of tensors it can be given, and tensors alone on their memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from memfit.errors import InvalidDeviceError, UnsupportedStepError
from memfit.memory.place import Place, span_bytes
from memfit.torch_private.tensors import WITHOUT_BASE


def step_device(model: torch.nn.Module, batch: Any, where: str = "the step") -> torch.device:
    """Return the one device that a model and its batch are on.

    Args:
        model: its parameters and buffers count.
        batch: tensors in nested tuples, lists and dicts. A tensor without dimensions on the CPU may stand beside any
            device: torch takes it as a number.
        where: names the step's maker in error messages.

    Raises:
        InvalidDeviceError: the model is on several devices, or a tensor of the batch is on another one.
    """
    own = [("parameter", *named) for named in model.named_parameters()]
    own += [("buffer", *named) for named in model.named_buffers()]
    tensors = list(_tensors(batch, "batch"))
    first = own[0][2] if own else tensors[0][1] if tensors else None
    device = torch.device("cpu") if first is None else first.device
    for kind, name, tensor in own:
        if tensor.device != device:
            raise InvalidDeviceError(
                f"{where}: {kind} {name!r} is on {tensor.device} and {own[0][1]!r} on {device}; "
                "memfit plans for one device: move the model to one"
            )
    for place, tensor in tensors:
        is_number = tensor.ndim == 0 and tensor.device.type == "cpu"
        if tensor.device != device and not is_number:
            raise InvalidDeviceError(
                f"{where}: {place} is on {tensor.device} and the model on {device}; move the batch to {device}"
            )
    return device


def require_dense(tree: Any, place: str) -> None:
    """Refuse sparse, nested and quantized tensors: a plan is made for memory of a known size, element by element.

    Args:
        tree: tensors in nested tuples, lists and dicts.
        place: names it in the message.

    Raises:
        UnsupportedStepError: names the first of them.
    """
    for where, tensor in _tensors(tree, place):
        if not is_dense(tensor):
            kind, instead = _kind_of(tensor)
            raise UnsupportedStepError(
                f"{where} is {kind}, and plans are made for dense tensors: give {instead}, or run the loop in "
                "memfit.eager"
            )


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is neither sparse nor nested nor quantized."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def _kind_of(tensor: torch.Tensor) -> tuple[str, str]:
    """Return the kind of a tensor that is not dense, and the dense tensors that can be given in its place."""
    if tensor.is_nested:
        return "a nested tensor", "its values and their lengths, or one padded tensor"
    if tensor.is_quantized:
        return f"a quantized tensor ({str(tensor.dtype).removeprefix('torch.')})", "it dequantized (`dequantize()`)"
    return f"a tensor of layout {str(tensor.layout).removeprefix('torch.')}", "it dense (`to_dense()`)"


def _tensors(tree: Any, place: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield place, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _tensors(value, f"{place}[{key!r}]")
    elif isinstance(tree, tuple | list):
        for number, value in enumerate(tree):
            yield from _tensors(value, f"{place}[{number}]")


def on_its_own(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or a tensor over the same memory whose storage holds nothing else, for capture to look at.

    A slice of a larger tensor has a storage of the larger one's bytes, and starts within it.
    """
    start, end = span_bytes(tensor)
    storage = tensor.untyped_storage()
    if (start, end) == (0, storage.nbytes()):
        return tensor
    own = replace(Place.of(tensor), offset=0).on(storage[start:end])
    own.requires_grad_(tensor.requires_grad)
    if tensor.is_leaf:
        return own
    with torch.enable_grad():  # a leaf would be written to without a trace in autograd; and this is no view of one
        return WITHOUT_BASE(own, own.shape)
