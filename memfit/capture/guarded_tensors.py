"""The tensors that a captured step depends on, held against later steps: metadata, memory, gradients and hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any, cast

import torch

from memfit.capture.guarded_table import Difference
from memfit.torch_private.guarding import TensorAddresses, TensorMetadata
from memfit.torch_private.modules import leaf_hooks
from memfit.torch_private.sharding import local, local_gradient
from memfit.torch_private.tensors import storage_key


class GuardedTensors:
    """Dense tensors by number; first the parameters whose gradients and hooks count.

    Attributes:
        now: the tensors, each as it is now.
        paths: what they are called in messages.
        watched: how many of them are such parameters.
    """

    def __init__(self) -> None:
        self.now: list[torch.Tensor] = []
        self.paths: list[str] = []
        self.watched = 0
        self._number_of: dict[int, int] = {}

    def add(self, tensor: torch.Tensor, path: str, *, is_watched: bool = False) -> int:
        """Add a tensor; return its number.

        Args:
            tensor: dense; a later step may have another one in its place.
            path: names it in messages.
            is_watched: whether it is a parameter whose gradient and hooks count; these are added before all others.
        """
        self.now.append(tensor)
        self.paths.append(path)
        self.watched += is_watched
        number = self._number_of[id(tensor)] = len(self.now) - 1
        return number

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor that the step was captured with, or None."""
        number = self._number_of.get(id(tensor))
        return number if number is not None and self.now[number] is tensor else None

    def at_hand(self, constant: torch.Tensor) -> torch.Tensor:
        """Return the tensor that has taken the place of one that the step was captured with; or that itself."""
        number = self._number_of.get(id(constant))
        return constant if number is None else self.now[number]

    def arm(self) -> None:
        """Take the present metadata for those that later steps must have."""
        self._tuple = tuple(self.now)
        self._metadata = TensorMetadata(self._tuple, self.watched)
        self._signatures = [_signature(tensor) for tensor in self._tuple]
        self._hooks_before = self._hooks()
        self._gradients = [p.grad is None for p in self._tuple[: self.watched]]
        self._ties = self._present_ties()
        self._addresses: TensorAddresses | None = TensorAddresses(self._tuple)

    def take(self, tensors: list[torch.Tensor]) -> None:
        """Let tensors have the places of those before."""
        self.now[:] = tensors
        if not all(map(is_, self._tuple, tensors)):
            self._tuple = tuple(tensors)
            self._addresses = None

    def metadata_difference(self) -> Difference | None:
        """Return the first tensor of other metadata, gradient or hooks, or None."""
        if self._metadata.matches(self._tuple):
            return None
        for path, tensor, signature in zip(self.paths, self._tuple, self._signatures, strict=True):
            now = _signature(tensor)
            if now != signature:
                is_frozen = now[:4] == signature[:4] and now[5] is signature[5]
                return Difference(what=f"{path} ({_words(signature, now)})", is_routine=is_frozen)
        if self._hooks() != self._hooks_before:
            return Difference(what="the hooks of a parameter")
        return Difference(what="the gradients that are there", is_routine=True)

    def memory_difference(self) -> Difference | None:
        """Compare offsets, and which tensors share memory, where a tensor has another address than in the last step."""
        if self._addresses is not None and self._addresses.match() and all(self._gradients):
            return None
        ties = self._present_ties()
        if ties != self._ties:
            what = next(i for i, (a, b) in enumerate(zip(ties, self._ties, strict=True)) if a != b)
            path = self.paths[what] if what < len(self.paths) else "the gradients"
            return Difference(what=f"the memory of {path}")
        self._addresses = TensorAddresses(self._tuple)
        return None

    def _hooks(self) -> list[int]:
        return [id(hooks) for parameter in self._tuple[: self.watched] for hooks in leaf_hooks(parameter)]

    def _present_ties(self) -> list[tuple[int, int]]:
        """Return for each tensor its offset, and the number of the first tensor on the same storage."""
        first: dict[int, int] = {}
        watched = self._tuple[: self.watched]
        gradients = (p.grad for p, absent in zip(watched, self._gradients, strict=True) if not absent)
        return [
            (int(tensor.storage_offset()), first.setdefault(storage_key(tensor), number))
            for number, tensor in enumerate((*self._tuple, *cast("Iterator[torch.Tensor]", gradients)))
        ]


class GuardedShards:
    """What a step takes from each sharded parameter beside its values.

    Args:
        parameters: with their names.
    """

    def __init__(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._parameters = parameters
        self.arm()

    def arm(self) -> None:
        """Take the present state for that of later steps."""
        self._before = self._present()

    def difference(self) -> Difference | None:
        """Return the first parameter that differs, or None."""
        present = self._present() if self._parameters else self._before
        if present == self._before:
            return None
        pairs = zip(self._parameters, present, self._before, strict=True)
        name, now, before = next((name, now, before) for (name, _), now, before in pairs if now != before)
        return Difference(what=f"model.{name}, or its gradient", is_routine=now[:-2] == before[:-2])

    def _present(self) -> list[tuple[Any, ...]]:
        """Return the state of each parameter; what changes in training last.

        Of a gradient this is its offset, and the number of the first one on its storage.
        """
        first: dict[int, int] = {}
        found: list[tuple[Any, ...]] = []
        for number, (_, parameter) in enumerate(self._parameters):
            part, gradient = local(parameter), local_gradient(parameter)
            offset = None if gradient is None else int(gradient.storage_offset())
            place = offset, None if gradient is None else first.setdefault(storage_key(gradient), number)
            found.append((tuple(part.shape), part.dtype, part.device, parameter.requires_grad, place))
        return found


def _signature(tensor: torch.Tensor) -> Sequence[Any]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, type(tensor)


def _words(before: Sequence[Any], now: Sequence[Any]) -> str:
    names = ("shape", "strides", "dtype", "device", "requires_grad", "type")
    return ", ".join(
        f"{name} {new}, was {old}" for name, old, new in zip(names, before, now, strict=True) if old != new
    )
