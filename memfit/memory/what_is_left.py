"""What a step that fails leaves of the model and the optimizer: as it was, or lost."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from memfit.capture.training_step import states_of
from memfit.torch_private.sharding import local
from memfit.torch_private.tensors import tensors_in


@contextmanager
def saying_what_is_left(
    parameters: Iterable[torch.nn.Parameter],
    others: Iterable[torch.Tensor],
    optimizer: torch.optim.Optimizer | None,
) -> Iterator[None]:
    """Run a step; to its error, if there is one, add a note that says whether the step can be run again.

    Gradients that the step has set by then are dropped: the next step would add its own to them.

    Args:
        parameters: the model's.
        others: that the step may write to: buffers. Parameters among them do not matter.
        optimizer: that updates the parameters, if there is one.
    """
    before = _Before(tuple(parameters), others, optimizer)
    try:
        yield
    except BaseException as error:
        error.add_note(before.note())
        raise


class _Before:
    """The versions of all tensors that a step may write to, before it."""

    def __init__(
        self,
        parameters: tuple[torch.nn.Parameter, ...],
        others: Iterable[torch.Tensor],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self._optimizer = optimizer
        self._parameters = [(part, part._version) for part in map(local, parameters)]
        self._others = [(tensor, tensor._version) for tensor in others]
        # Not the tensors: the optimizer may replace them, and gradients are freed when they have been used.
        self._states = {id(tensor): tensor._version for tensor in _states(optimizer)}
        self._gradients = [
            (parameter, None if (gradient := parameter.grad) is None else (weakref.ref(gradient), _version(gradient)))
            for parameter in parameters
        ]

    def note(self) -> str:
        """Drop the step's gradients, and say what else it has changed."""
        gradients = self._take_back_gradients()
        changed = sum(part._version != version for part, version in self._parameters)
        if changed:
            return (
                f"memfit: {changed} of {len(self._parameters)} parameters had been updated when the step failed, so "
                "the step is lost: go on from a checkpoint"
            )
        buffers = sum(tensor._version != version for tensor, version in self._others)
        states = sum(self._states.get(id(tensor)) != tensor._version for tensor in _states(self._optimizer))
        if buffers + states + gradients == 0:
            return "memfit: no parameter had been updated when the step failed; it can be run again"
        return (
            f"memfit: no parameter had been updated when the step failed, but {buffers} buffers, {states} states of "
            f"the optimizer and {gradients} gradients had been, so the step is lost: go on from a checkpoint"
        )

    def _take_back_gradients(self) -> int:
        """Set `.grad` to what it was, and return how many of them the step has written to."""
        written = 0
        for parameter, before in self._gradients:
            gradient, version = (None, 0) if before is None else (before[0](), before[1])
            parameter.grad = gradient
            written += before is not None and (gradient is None or _version(gradient) != version)
        return written


def _version(tensor: torch.Tensor) -> int:
    return local(tensor)._version


def _states(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    held = states_of(optimizer)
    plain = [each for each in held if type(each) is torch.Tensor]  # most, of which this asks before each step
    return plain + [local(t) for each in held if type(each) is not torch.Tensor for t in tensors_in(each)]
