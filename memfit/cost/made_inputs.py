"""Arguments made for one call, so that it can be run by itself: a storage for each that it uses, filled and viewed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from memfit.binding import Call, Value
from memfit.cost.views import lazy_view
from memfit.graph import Storage

# Positive, below 1 and away from both ends: right for variances, probabilities, logarithms and arc functions alike.
_LEAST, _MOST = 0.25, 0.75
_PATTERN_ELEMENTS = 65_537  # not a power of two, so that repeats do not fall on the same rows
_SEED = 0

# Arguments that kernels on CUDA read on the host, through plain pointers (attention_backward.cu): on the device they
# would end the process. Captures of the two halves know them from fake kernels, which say on the device.
_READ_ON_HOST = ("philox_seed", "philox_offset")
_READERS = ("aten::_scaled_dot_product_efficient_attention_backward", "aten::_efficient_attention_backward")


class InputMaker:
    """Makes arguments on one device. The same call always gets the same values."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._patterns: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def make(self, call: Call, storages: tuple[Storage, ...]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return (args, kwargs) of `call` with a tensor for each Value; equal storages are shared among them."""
        values = tuple(values_in((call.args, call.kwargs)))
        on_host = _storages_on_host(call)
        made = {
            number: self._made(number, values, 0 if number in on_host else storages[number].bytes)
            for number in {v.storage for v in values}
        }

        def tensor(value: Value) -> torch.Tensor:
            return window(made[value.storage], value)

        return mapped(call.args, tensor), mapped(call.kwargs, tensor)

    def _made(self, number: int, values: tuple[Value, ...], size_bytes: int) -> torch.Tensor:
        """Return all of a storage as one flat tensor: noise, or zeros where anything reads it as whole numbers."""
        seen = [value for value in values if value.storage == number]
        needed_bytes = max(_reach_bytes(value) for value in seen)
        # a graph counts the bytes of its own device: a storage of 0 bytes that has elements lives on the host
        device = self._device if size_bytes >= needed_bytes else torch.device("cpu")
        raw = torch.empty(max(size_bytes, needed_bytes), dtype=torch.uint8, device=device)
        dtype = seen[0].dtype
        if not all(value.dtype.is_floating_point or value.dtype.is_complex for value in seen):
            return raw.zero_()
        whole = raw[: raw.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        self._fill(whole)
        return raw

    def _fill(self, tensor: torch.Tensor) -> None:
        pattern = self._pattern(tensor.dtype, tensor.device)
        rows = tensor.numel() // _PATTERN_ELEMENTS
        tensor[: rows * _PATTERN_ELEMENTS].view(rows, _PATTERN_ELEMENTS).copy_(pattern)
        rest = tensor[rows * _PATTERN_ELEMENTS :]
        rest.copy_(pattern[: rest.numel()])

    def _pattern(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Noise that fills a storage by repetition: drawing new noise for all of it would take longer than the ops."""
        if (dtype, device) not in self._patterns:
            generator = torch.Generator().manual_seed(_SEED)
            noise = torch.empty(_PATTERN_ELEMENTS).uniform_(_LEAST, _MOST, generator=generator)
            self._patterns[dtype, device] = noise.to(dtype=dtype, device=device)
        return self._patterns[dtype, device]


def window(storage: torch.Tensor, value: Value) -> torch.Tensor:
    """Return the tensor that `value` says, on the storage of `storage`."""
    empty = torch.empty(0, dtype=value.dtype, device=storage.device)
    tensor = empty.set_(storage.untyped_storage(), value.offset, value.shape, value.stride)
    return lazy_view(tensor, conjugated=value.conjugated, negated=value.negated)


def values_in(tree: Any) -> Iterator[Value]:
    """Yield the Values in nested tuples, lists and dicts, in order."""
    if isinstance(tree, Value):
        yield tree
    elif isinstance(tree, Mapping):
        for branch in tree.values():
            yield from values_in(branch)
    elif isinstance(tree, tuple | list):
        for branch in tree:
            yield from values_in(branch)


def mapped(tree: Any, function: Callable[[Value], Any]) -> Any:
    """Return nested tuples, lists and dicts with `function` of each Value in its place."""
    if isinstance(tree, Value):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: mapped(branch, function) for key, branch in tree.items()}
    if isinstance(tree, tuple):
        return tuple(mapped(branch, function) for branch in tree)
    if isinstance(tree, list):
        return [mapped(branch, function) for branch in tree]
    return tree


def _storages_on_host(call: Call) -> set[int]:
    schema = getattr(call.target, "_schema", None)
    if schema is None or schema.name not in _READERS:
        return set()
    positional = zip((argument.name for argument in schema.arguments), call.args, strict=False)
    named = {**dict(positional), **call.kwargs}
    return {value.storage for value in values_in([named.get(name) for name in _READ_ON_HOST])}


def elements_of(value: Value) -> int:
    """Return how many different elements a Value touches: what is expanded (stride 0) counts once."""
    count = 1
    for size, stride in zip(value.shape, value.stride, strict=True):
        count *= min(size, 1) if stride == 0 else size
    return count


def _reach_bytes(value: Value) -> int:
    """Return the bytes from the start of the storage to the end of the last element seen."""
    if 0 in value.shape:
        return 0
    last = value.offset + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride, strict=True))
    return (last + 1) * value.dtype.itemsize
