"""Inputs of blocks that are computed again from the block before (Chen's segments), instead of being kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from memfit.checkpointing.contexts import StandIns
from memfit.torch_private.tensors import tensors_in


class Link:
    """One call of a block in a chain: enough to run it again.

    Args:
        run: the block's forward pass, of its arguments.
        args, kwargs: of it, without the chained input.
        place: of the chained input in `args`.
        given: the input, kept; None if it is what `before` returned.
        before: the call that returned the input.
        device: of the model.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        place: int,
        given: torch.Tensor | None,
        before: Link | None,
        device: torch.device,
    ) -> None:
        self._run, self._args, self._kwargs, self._place = run, args, kwargs, place
        self._given, self._before, self._again = given, before, None
        self._device_type = device.type
        self._devices = [device] if device.type == "cuda" else []
        self._states = torch.get_rng_state(), [torch.cuda.get_rng_state(each) for each in self._devices]
        self._casts = [(kind, *_cast_of(kind)) for kind in dict.fromkeys(("cpu", device.type))]
        self.stand_ins: Callable[[], StandIns] | None = None
        self._returned: weakref.ref[torch.Tensor] | None = None
        self._version = 0

    def note_output(self, output: Any) -> None:
        """Remember what the call returned, which the next block's input may be."""
        grown = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if len(grown) == 1:
            self._returned, self._version = weakref.ref(grown[0]), grown[0]._version

    def returned(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is what this call returned, unchanged."""
        return self._returned is not None and self._returned() is tensor and tensor._version == self._version

    def take_input(self) -> torch.Tensor:
        """Return the call's input for the last time."""
        found = self._input()
        self._again = None
        return found

    def _input(self) -> torch.Tensor:
        if self._given is not None:
            return self._given
        if self._again is None:
            assert self._before is not None
            self._again = self._before._output()
        return self._again

    def _output(self) -> torch.Tensor:
        """Run the call again, as the first time, without saving anything; return the output that goes on."""
        given = self._input().detach().requires_grad_()
        args = (*self._args[: self._place], given, *self._args[self._place :])
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(self._devices))
            for kind, enabled, dtype in self._casts:
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
            if self.stand_ins is not None:
                stack.enter_context(self.stand_ins())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_drop, _drop))
            stack.enter_context(torch.enable_grad())
            torch.set_rng_state(self._states[0])
            for each, state in zip(self._devices, self._states[1], strict=True):
                torch.cuda.set_rng_state(state, each)
            output = self._run(*args, **self._kwargs)
        (grown,) = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        return grown.detach().requires_grad_()


def _drop(_: Any) -> None:
    return None


def _cast_of(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
