"""Inputs of blocks that are recomputed from the block before (Chen's segments), instead of being kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from memfit.checkpointing.groups import kept_on_the_way
from memfit.memory.host.room import OnHost
from memfit.memory.python_places import of_generator
from memfit.memory.snapshot import Snapshot
from memfit.torch_private.autograd import saved_with
from memfit.torch_private.tensors import tensors_in


class Link:
    """One call of a block in a chain: enough to run it again.

    Args:
        run: the block's forward pass, of its arguments.
        args, kwargs: of it, without the chained input.
        place: of the chained input in `args`; None if the call is the first, and has all of its arguments in `args`.
        given: the input, kept or on the host; None if it is what `before` returned.
        before: the call that returned the input.
        device: of the model.
        is_halved: whether few of the inputs before it stay when it is recomputed.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        place: int | None,
        given: torch.Tensor | OnHost | None,
        before: Link | None,
        device: torch.device,
        *,
        is_halved: bool = False,
    ) -> None:
        self._is_halved = is_halved
        self._run, self._args, self._kwargs, self._place = run, args, kwargs, place
        self._given, self._before, self._again = given, before, None
        of_device = [torch.cuda.default_generators[device.index]] if device.type == "cuda" else []
        self._random = Snapshot(map(of_generator, [torch.default_generator, *of_device]))
        self._casts = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys(("cpu", device.type))
        ]
        self.again: Callable[[], AbstractContextManager[None]] | None = None
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
        path, link = list[Link](), self
        while link._given is None and link._again is None and link._place is not None:
            assert link._before is not None
            path.append(link)
            link = link._before
        tensor = link._there()
        kept = kept_on_the_way(len(path)) if self._is_halved else None
        for distance, later in enumerate(reversed(path), start=1):
            tensor = link._output(tensor)
            link = later
            if kept is None or distance in kept:
                link._again = tensor
        self._again = None
        assert tensor is not None
        return tensor

    def _there(self) -> torch.Tensor | None:
        if isinstance(self._given, OnHost):
            return self._given.back().requires_grad_()
        return self._again if self._given is None else self._given

    def _output(self, given: torch.Tensor | None) -> torch.Tensor:
        """Run the call again, as the first time, without saving anything; return the output that goes on.

        Args:
            given: its input; None of the first.
        """
        args = self._args
        if self._place is not None:
            assert given is not None
            args = (*args[: self._place], given.detach().requires_grad_(), *args[self._place :])
        del given
        with ExitStack() as stack:
            stack.enter_context(self._random.again())
            for kind, enabled, dtype in self._casts:
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
            if self.again is not None:
                stack.enter_context(self.again())
            stack.enter_context(saved_with(_drop, _drop))
            stack.enter_context(torch.enable_grad())
            output = self._run(*args, **self._kwargs)
        (grown,) = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        return grown.detach().requires_grad_()


def _drop(_: Any) -> None:
    return None
