"""Inputs for running one op by itself: a filled storage for each that its call uses, and the views on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memfit.binding import Call, Value, map_values, values_in
from memfit.graph import Storage

# Positive, below 1 and away from both ends: valid for variances, probabilities, logarithms and arc functions alike.
_LEAST, _MOST = 0.25, 0.75
_PATTERN_ELEMENTS = 65_537  # not a power of two, so that rows of a matrix do not repeat
_SEED = 0

# Arguments that kernels on CUDA read on the host, through plain pointers (attention_backward.cu): on the device they
# would end the process. Captures of the two halves have them from fake kernels, which place them on the device.
_READ_ON_HOST = ("philox_seed", "philox_offset")
_READERS = ("aten::_scaled_dot_product_efficient_attention_backward", "aten::_efficient_attention_backward")


class InputMaker:
    """Makes the inputs of calls on one device. The same call always gets the same values."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._patterns: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def make(self, call: Call, storages: tuple[Storage, ...]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return (args, kwargs) of `call` with a tensor for each Value; Values of one storage share it.

        Args:
            call: an op's call.
            storages: those of the graph; they give the bytes to allocate.
        """
        values = tuple(values_in((call.args, call.kwargs)))
        on_host = _storages_on_host(call)
        made = {
            number: self.filled(
                [value for value in values if value.storage == number],
                0 if number in on_host else storages[number].bytes,
            )
            for number in {v.storage for v in values}
        }

        def tensor(value: Value) -> torch.Tensor:
            return value.on(made[value.storage])

        kwargs = {name: _copied_generator(argument) for name, argument in call.kwargs.items()}
        return map_values(call.args, tensor), map_values(kwargs, tensor)

    def filled(self, values: Sequence[Value], size_bytes: int) -> torch.Tensor:
        """Return one storage as a flat tensor of bytes: noise, or zeros if any Value reads it as whole numbers.

        Args:
            values: all views of the storage.
            size_bytes: of the storage in the graph.
        """
        needed_bytes = max(value.reach_bytes for value in values)
        # a graph counts the bytes of its own device: a storage of 0 bytes that has elements lives on the host
        device = self._device if size_bytes >= needed_bytes else torch.device("cpu")
        raw = torch.empty(max(size_bytes, needed_bytes), dtype=torch.uint8, device=device)
        dtype = values[0].dtype
        if not all(holds_noise(value) for value in values):
            return raw.zero_()
        whole = raw[: raw.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        self._fill(whole)
        return raw

    def _fill(self, tensor: torch.Tensor) -> None:
        pattern = self.pattern(tensor.dtype, tensor.device, tensor.numel())
        rows = tensor.numel() // _PATTERN_ELEMENTS
        if rows:
            tensor[: rows * _PATTERN_ELEMENTS].view(rows, _PATTERN_ELEMENTS).copy_(pattern)
        rest = tensor[rows * _PATTERN_ELEMENTS :]
        rest.copy_(pattern[: rest.numel()])

    def pattern(self, dtype: torch.dtype, device: torch.device, elements: int) -> torch.Tensor:
        """Return the noise that is repeated in storages: drawing all of it anew would take longer than the ops.

        Args:
            dtype: floating-point or complex.
            device: that holds it.
            elements: that are filled; the noise is no longer, as ops are also measured within what a budget leaves.
        """
        needed = min(elements, _PATTERN_ELEMENTS)
        known = self._patterns.get((dtype, device))
        if known is None or known.numel() < needed:
            generator = torch.Generator().manual_seed(_SEED)  # shorter noise is the beginning of longer noise
            noise = torch.empty(needed).uniform_(_LEAST, _MOST, generator=generator)
            known = self._patterns[dtype, device] = noise.to(dtype=dtype, device=device)
        return known


def holds_noise(value: Value) -> bool:
    """Return whether a Value reads its storage as floating-point or complex numbers."""
    return value.dtype.is_floating_point or value.dtype.is_complex


def _copied_generator(argument: Any) -> Any:
    """Return a generator of the same state, so that the user's own does not advance; any other argument as it is."""
    if not isinstance(argument, torch.Generator):
        return argument
    return torch.Generator(device=argument.device).set_state(argument.get_state())


def _storages_on_host(call: Call) -> set[int]:
    schema = getattr(call.target, "_schema", None)
    if schema is None or schema.name not in _READERS:
        return set()
    positional = zip((argument.name for argument in schema.arguments), call.args, strict=False)
    named = {**dict(positional), **call.kwargs}
    return {value.storage for value in values_in([named.get(name) for name in _READ_ON_HOST])}
