"""The head of a model, whose logits are computed some rows at a time."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memfit.chunked_loss.logits import ChunkedLogits, project
from memfit.errors import InvalidOptionError, UnsupportedStepError
from memfit.torch_private.sharding import is_sharded

_log = logging.getLogger("memfit")
_NUMBER = re.compile(r"\b\d+\b")


class ChunkedHead(TorchFunctionMode):
    """A block in which a model's head returns logits that are computed some rows at a time, where they are used.

    Without gradients the head runs as it is.

    Args:
        model: has the head.
        head: its name, or that of a module around it; True finds it: the projection to the most classes that is not
            repeated.

    Raises:
        InvalidOptionError: there is no such module, or it projects nothing.
        UnsupportedStepError: the head's weight is computed by a parametrization, or gathered by `fully_shard`.
    """

    def __init__(self, model: torch.nn.Module, head: str | bool = True) -> None:
        super().__init__()
        self._model, self._named = model, _projections_of(model, head)
        self._projections = tuple(self._named.values())
        self._has_projected = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if func is torch.nn.functional.linear and torch.is_grad_enabled():
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | named
            row, weight = given["input"], given["weight"]
            is_plain = not isinstance(row, ChunkedLogits) and not is_sharded(row) and row.dim() > 1
            if is_plain and any(weight is each.weight for each in self._projections):
                self._has_projected = True
                return project(row, weight, given.get("bias"))
        return func(*args, **named)

    def require_used(self) -> None:
        """Raise UnsupportedStepError if the head was not called: what was asked for would be left out in silence."""
        if not self._has_projected:
            raise UnsupportedStepError(f"{self._unused}; name the head (chunk_loss='lm_head'), or leave chunk_loss out")

    @property
    def _unused(self) -> str:
        return f"chunk_loss: the head that was found, {', '.join(self._named)}, was not called with gradients"

    def hooked(self, hook: Callable[[Callable[..., Any]], Callable[..., Any]]) -> list[Any]:
        """Enter the block before each call of the projections, and leave it behind; return the hooks, to remove.

        A call of the model in training that does not call them is said once: the loop may do so itself.

        Args:
            hook: makes a hook of a function.
        """

        def enter(*_: Any) -> None:
            self.__enter__()

        def leave(*_: Any) -> None:
            self.__exit__(None, None, None)

        def returned(*_: Any) -> None:
            if torch.is_grad_enabled() and not self._has_projected:
                self._has_projected = True
                _log.warning("memfit: %s by the model; if nothing else calls it, name another head", self._unused)

        hooks: list[Any] = [self._model.register_forward_hook(hook(returned))]
        for each in self._projections:
            hooks.append(each.register_forward_pre_hook(hook(enter), prepend=True))
            hooks.append(each.register_forward_hook(hook(leave), always_call=True))
        return hooks


def _projections_of(model: torch.nn.Module, head: str | bool) -> dict[str, torch.nn.Linear]:
    """Return the projections of the head by name: several where an adapter stands beside it."""
    linear = {name: each for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    if isinstance(head, str):
        inside = {name: each for name, each in linear.items() if name == head or name.startswith(f"{head}.")}
        if not inside:
            raise InvalidOptionError(
                f"chunk_loss={head!r}: the model has no projection (nn.Linear) of that name or in it"
            )
    else:
        alike = Counter((_NUMBER.sub("N", name), *each.weight.shape) for name, each in linear.items())
        single = {n: each for n, each in linear.items() if alike[_NUMBER.sub("N", n), *each.weight.shape] == 1}
        inside = {name: each for name, each in single.items() if each.out_features > each.in_features}
        if not inside:
            raise InvalidOptionError(
                "chunk_loss=True: no projection (nn.Linear) of the model is found that is not repeated and has more "
                "outputs than inputs; name it: chunk_loss='lm_head'"
            )
    width = max(each.out_features for each in inside.values())
    found = {name: each for name, each in inside.items() if each.out_features == width}
    for name, each in found.items():
        if "weight" in getattr(each, "parametrizations", {}):
            raise UnsupportedStepError(
                f"chunk_loss: the weight of {name} is computed by a parametrization; leave chunk_loss out"
            )
        if is_sharded(each.weight):
            raise UnsupportedStepError(
                f"chunk_loss: the weight of {name} is sharded (a DTensor), and is not there after its forward pass; "
                "leave chunk_loss out"
            )
    return found
