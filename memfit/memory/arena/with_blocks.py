"""The `with` block of an arena's step, and what tells its calls apart."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

import torch

from memfit.torch_private.tensors import tree_flatten

A = TypeVar("A")


class ArenaStep(Generic[A]):
    """The `with` block of `Arena.step`; a class, because a generator of contextlib keeps a frame, and its tensors."""

    __slots__ = ("_arena", "_begin", "_end")

    def __init__(self, arena: A, begin: Callable[[], None], end: Callable[[bool], None]) -> None:
        self._arena, self._begin, self._end = arena, begin, end

    def __enter__(self) -> A:
        self._begin()
        return self._arena

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(kind is None)


def call_signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Return all of a call's arguments that may change which memory it requests."""
    leaves, structure = tree_flatten((args, kwargs))
    return structure, tuple(map(_leaf_signature, leaves)), torch.is_grad_enabled()


def _leaf_signature(leaf: Any) -> Hashable:
    # of a number only the type counts: otherwise a counter of steps would give each step a key of its own
    return (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else cast("type[Any]", type(leaf))
