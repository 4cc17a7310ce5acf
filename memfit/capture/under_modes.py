"""Calls that PyTorch makes otherwise while a dispatch mode is on, as one is in a capture: eager's bits are not known.

`benchmarks/dispatch_modes.py` finds them: it runs the operators of PyTorch's own tests with and without a mode.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from memfit.binding import values_in
from memfit.capture.traced import TracedCall
from memfit.errors import NoGraphError
from memfit.torch_private.autograd import TorchDispatchMode

_aten = torch.ops.aten

# Gradients that look for zeros first, in some versions: whether a mode changes them is tried, once a process.
_TRIED = {_aten.prod: lambda tensor: tensor.prod(1), _aten.cumprod: lambda tensor: tensor.cumprod(1)}
_ADVICE = {_aten.prod: "torch.cumprod(x, dim).select(dim, -1) has the same value", _aten.cumprod: "use exp and log"}
_ROWS, _COLUMNS = 64, 5

# Where no gradient is needed, eager computes the values alone: the third argument is False. Under a mode the vectors
# are computed too, which gives other values. Beside each operator: the places of the vectors among its results.
_DECOMPOSITIONS = {_aten._linalg_svd: (0, 2), _aten._linalg_eigh: (1,)}


@dataclass
class UnderModes:
    """Collects what a capture calls otherwise than eager may.

    Attributes:
        decomposed: for each decomposition without gradient the line that called it, the operator, and how many calls
            were entered before.
    """

    decomposed: list[tuple[str, Any, int]] = field(default_factory=list[tuple[str, Any, int]])

    def look_at(self, func: Any, args: Sequence[Any], place: int, line: str) -> None:
        """Look at a call before it is made.

        Args:
            func: the operator overload.
            args: its arguments, of which the first is a tensor.
            place: how many calls were entered before.
            line: that calls it.

        Raises:
            NoGraphError: its gradient is computed in another way than in eager.
        """
        wants_gradient = torch.is_grad_enabled() and args[0].requires_grad
        if func._overloadpacket in gradients_that_differ() and wants_gradient:
            raise NoGraphError(
                f"{line}: PyTorch computes the gradient of torch.{func._overloadpacket.__name__} differently while "
                "a step is recorded",
                _ADVICE[func._overloadpacket],
            )
        if func._overloadpacket in _DECOMPOSITIONS and not wants_gradient and args[2:] != (False,):
            self.decomposed.append((line, func, place))

    def require_read(self, calls: Sequence[TracedCall], kept: Collection[int]) -> None:
        """Refuse a decomposition without gradient whose vectors nobody reads: eager may have computed none.

        Args:
            calls: of the whole capture.
            kept: storages that the user gets.

        Raises:
            NoGraphError: names the line.
        """
        read = {storage for call in calls for storage in (*call.reads, *call.mutates)} | set(kept)
        for line, func, place in self.decomposed:
            call = next(call for call in calls[place:] if call.target is func)
            vectors = {
                value.storage
                for value in values_in([call.results[n] for n in _DECOMPOSITIONS[call.target._overloadpacket]])
            }
            if read.isdisjoint(vectors):
                raise NoGraphError(
                    f"{line}: PyTorch computes singular values and eigenvalues of a tensor without gradient "
                    "differently while a step is recorded (svdvals, eigvalsh, cond, matrix norms)",
                    "compute them outside of the step and pass them in the batch, or of a tensor that requires a "
                    "gradient",
                )


def vectors_in(func: Any, returned: Sequence[Any]) -> list[torch.Tensor]:
    """Return the vectors among the results of a decomposition."""
    return [returned[place] for place in _DECOMPOSITIONS[func._overloadpacket]]


def is_looked_at(func: Any) -> bool:
    """Return whether a call has to be looked at."""
    return func._overloadpacket in _TRIED or func._overloadpacket in _DECOMPOSITIONS


class _Empty(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@cache
def gradients_that_differ() -> frozenset[Any]:
    """Return the operators whose gradients a dispatch mode changes in this version of PyTorch.

    To be called first outside of any mode, where autograd works.
    """
    return frozenset(
        packet
        for packet, operator in _TRIED.items()
        if not torch.equal(_gradient(operator, nullcontext()), _gradient(operator, _Empty()))
    )


def _gradient(operator: Callable[[torch.Tensor], torch.Tensor], mode: AbstractContextManager[Any]) -> torch.Tensor:
    numbers = torch.arange(_ROWS * _COLUMNS, dtype=torch.float32, device="cpu")
    numbers = numbers.mul_(0.37).sin_().add_(1.5).view(_ROWS, _COLUMNS)
    with torch.enable_grad(), mode:
        leaf = numbers.requires_grad_()
        (gradient,) = torch.autograd.grad(operator(leaf).square().mean(), leaf)
    return gradient
