"""Batch normalization in training, which updates its running statistics, though some of its schemas do not say so.

It is made to return them as new storages, which are copied back once. Its other results do not depend on the
statistics, so it does not count as reading them while they are buffers. It may therefore be rematerialized after the
copy, unless another op reads the new statistics: then it counts as reading the buffers, whose old content these depend
on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from memfit.binding import values_in
from memfit.capture.traced import Entry
from memfit.errors import UnsupportedStepError
from memfit.torch_private.tensors import storage_key

if TYPE_CHECKING:
    from memfit.capture.trace import Trace

_aten = torch.ops.aten
# Batch normalizations by kernel: the positions of running_mean, running_var, and of `training` (None: always training).
# native_, cudnn_ and miopen_batch_norm mutate their running statistics, which their schemas do not say.
BATCH_NORMS: dict[Any, tuple[int, int, int | None]] = {
    _aten.native_batch_norm: (3, 4, 5),
    _aten._native_batch_norm_legit: (3, 4, 5),
    _aten.cudnn_batch_norm: (3, 4, 5),
    _aten.miopen_batch_norm: (3, 4, 5),
    _aten._batch_norm_with_update: (3, 4, None),
}

# Their functional forms, used by AOTAutograd: these return the statistics.
FUNCTIONAL_BATCH_NORMS: dict[Any, tuple[int, int, int | None]] = {
    _aten._native_batch_norm_legit_functional: (3, 4, 5),
    _aten._batch_norm_with_update_functional: (3, 4, None),
}

# Their gradients: the positions of running_mean, running_var and of `train` (None: always training). In training the
# statistics are not used; left out, they make no backward pass depend on buffers that a second forward pass changes.
BATCH_NORM_GRADIENTS: dict[Any, tuple[int, int, int | None]] = {
    _aten.native_batch_norm_backward: (3, 4, 7),
    _aten.batch_norm_backward: (3, 4, 7),
    _aten.cudnn_batch_norm_backward: (3, 4, None),
    _aten.miopen_batch_norm_backward: (3, 4, None),
}


def updated_places(func: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """Return the positions of the running statistics that a call updates; none in evaluation, and of other operators.

    Args:
        func: any operator overload.
        args: of the call, by position.
    """
    known = BATCH_NORMS.get(func._overloadpacket)
    if known is None or (known[2] is not None and not args[known[2]]):
        return ()
    return tuple(place for place in known[:2] if isinstance(args[place], torch.Tensor))


def without_idle_statistics(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a batch normalization's gradient, without running statistics that it does not use.

    Args:
        func: an operator of `BATCH_NORM_GRADIENTS`.
        args: all that it is called with.
    """
    mean, variance, training = BATCH_NORM_GRADIENTS[func._overloadpacket]
    if training is not None and not args[training]:
        return args
    return tuple(None if position in (mean, variance) else arg for position, arg in enumerate(args))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNorm:
    """Training batch normalization that returns its results, then updated copies of its running statistics.

    Attributes:
        func: the operator overload that mutates.
        mean_position, variance_position: of the running statistics among its arguments.
        momentum_position: of the weight of the new statistics among its arguments.
        is_cumulative: whether the count of steps is its last argument, and one by that count the weight, as in a module
            with momentum=None.
    """

    func: Any
    mean_position: int
    variance_position: int
    momentum_position: int
    is_cumulative: bool = False

    @property
    def __name__(self) -> str:
        return str(self.func)

    @staticmethod
    def of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchNorm | None:
        """Return the functional form of a call, or None if it updates no running statistics.

        Args:
            func: an overload of one of `BATCH_NORMS`.
            args, kwargs: its arguments.
        """
        mean, variance, training = BATCH_NORMS[func._overloadpacket]
        if kwargs or len(args) <= variance or not all(isinstance(args[at], torch.Tensor) for at in (mean, variance)):
            return None  # without statistics, or of an overload that has none
        if training is not None and not args[training]:
            return None
        momentum = (variance if training is None else training) + 1
        return BatchNorm(func=func, mean_position=mean, variance_position=variance, momentum_position=momentum)

    def __call__(self, *args: Any) -> tuple[torch.Tensor, ...]:
        own = list(args)
        if self.is_cumulative:
            count = float(own.pop())
            own[self.momentum_position] = 1.0 / count if count else 0.0
        own[self.mean_position] = args[self.mean_position].clone()
        own[self.variance_position] = args[self.variance_position].clone()
        return (*self.func(*own), own[self.mean_position], own[self.variance_position])


def _batch_norm_gradient(_trace: Trace, entry: Entry, _kwargs: dict[str, Any]) -> None:
    """Leave out the running statistics that the gradient does not use."""
    entry.args = without_idle_statistics(entry.func, entry.args)


def _batch_norm(trace: Trace, entry: Entry, kwargs: dict[str, Any]) -> None:
    """Let training batch normalization return new running statistics in place of mutating them."""
    norm = BatchNorm.of(entry.func, entry.given, kwargs)
    if norm is None:
        return
    positions = (norm.mean_position, norm.variance_position)
    _hide_statistics(trace, entry, positions)
    entry.target = norm
    count = trace.step_count()
    if count is not None:
        entry.target = replace(norm, is_cumulative=True)
        entry.args = (*entry.args, trace.value(count))
    statistics = [entry.given[position] for position in positions]
    for tensor, storage in [(tensor, trace.value(tensor).storage) for tensor in statistics]:
        if trace.storages[storage].resident:
            trace.write_backs[storage_key(tensor)] = (tensor, storage)
        trace.rename(tensor, entry.func)
    entry.outputs, entry.mutated = [*entry.outputs, *statistics], []


def _functional_batch_norm(trace: Trace, entry: Entry, _kwargs: dict[str, Any]) -> None:
    """Training batch normalization does not count as reading its running statistics while they are buffers."""
    mean, variance, training = FUNCTIONAL_BATCH_NORMS[entry.func._overloadpacket]
    if training is None or entry.given[training]:
        _hide_statistics(trace, entry, (mean, variance))


def _hide_statistics(trace: Trace, entry: Entry, positions: tuple[int, int]) -> None:
    """Note the running statistics that a call reads, and hide those that are buffers which no call has written.

    Raises:
        UnsupportedStepError: the kernel would read them through another argument, too, while it writes them.
    """
    others = [arg for position, arg in enumerate(entry.args) if position not in positions]
    entry.statistics = tuple(entry.args[position].storage for position in positions)
    if not {value.storage for value in values_in(others)}.isdisjoint(entry.statistics):
        raise UnsupportedStepError(
            f"{trace.scope()[1] or 'the step'} calls {entry.func} with running statistics that share memory with "
            "another argument (its weight, say): give it a clone of them there"
        )
    entry.hidden = {s for s in entry.statistics if trace.storages[s].resident and not trace.is_mutated(s)}


BATCH_NORM_CASES: dict[Any, Callable[[Trace, Entry, dict[str, Any]], None]] = {
    **dict.fromkeys(BATCH_NORM_GRADIENTS, _batch_norm_gradient),
    **dict.fromkeys(BATCH_NORMS, _batch_norm),
    **dict.fromkeys(FUNCTIONAL_BATCH_NORMS, _functional_batch_norm),
}
