"""What a call will take of its device: known from the first call like it, bounded from above before that."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from memfit.capture.generators import without_generator
from memfit.cost.single_op import uncollected
from memfit.system.recorder import record, taken_bytes
from memfit.torch_private import (
    DATA_DEPENDENT_ERRORS,
    FakeTensorMode,
    failing_fakes_unlogged,
    storage_key,
    tensors_in,
    tree_map,
)

# Workspace of an operator that was never called, as a share of its inputs and results: of libraries, and of others.
_OF_LIBRARIES, _OF_OTHERS = 1.0, 0.1
_IN_LIBRARIES = ("conv", "mm", "attention", "rnn", "lstm", "gru", "linalg", "fft", "sort", "topk", "unique", "index")
_MARGIN = 1.5  # on the largest share that was seen
_SMALL_BYTES = 1 << 12  # workspaces below it do not grow with the inputs
_POINTWISE = torch.Tag.pointwise  # such operators work without any
_WITHOUT_BYTES = (torch.Generator, torch.ScriptObject)  # which of them a call is given changes no need
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter


class Need(NamedTuple):
    """What a call takes.

    Attributes:
        peak_bytes: the most during the call: results and workspace.
        result_bytes: what it takes more after it.
        seconds: it took.
        number: tells calls of different keys apart.
    """

    peak_bytes: int
    result_bytes: int
    seconds: float
    number: int


class Needs:
    """What calls took so far.

    Attributes:
        bounded: how many calls were bounded because none like them had been seen, and how many took more than that.
        exceeded: how many of those took more than their bound.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bounded = self.exceeded = 0
        self._shares: dict[Any, float] = {}  # operator -> the largest share of workspace seen

    def bound(self, function: Any, args: Any, kwargs: Any) -> int:
        """Return an upper bound of the bytes that a call takes that was not seen before.

        Its results are known from their shapes. The workspace is bounded by those of the same operator's calls, as a
        share of inputs and results.
        """
        results = self._result_bytes(function, args, kwargs)
        share = _MARGIN * self._shares.get(function, _never_seen(function))
        return results + _SMALL_BYTES + math.ceil(share * (_input_bytes(args, kwargs) + results))

    def learn(self, function: Any, args: Any, kwargs: Any, bound_bytes: int) -> tuple[Any, Need]:
        """Make a call for the first time; return what it returned, and what it took."""
        began = _now(self.device)
        with uncollected(), record(self.device) as usage:
            returned = function(*args, **kwargs)
        seconds = _now(self.device) - began
        result_bytes = max(0, usage.end_bytes - usage.start_bytes)
        need = Need(usage.peak_bytes, result_bytes, seconds, self.bounded)
        share = max(0, usage.peak_bytes - result_bytes - _SMALL_BYTES) / max(
            1, _input_bytes(args, kwargs) + result_bytes
        )
        self._shares[function] = max(share, self._shares.get(function, 0.0))
        self.bounded += 1
        self.exceeded += usage.peak_bytes > bound_bytes
        return returned, need

    def _result_bytes(self, function: Any, args: Any, kwargs: Any) -> int:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        given = tensors_in((args, kwargs))
        try:
            with failing_fakes_unlogged(), mode:
                fakes = {id(tensor): _like(tensor) for tensor in given}
                filled = tree_map(lambda leaf: fakes.get(id(leaf), leaf), (args, kwargs))
                returned = function(*filled[0], **without_generator(filled[1]))
        except DATA_DEPENDENT_ERRORS:  # as many results as there are elements, each with an index for each dimension
            return 2 * sum(8 * tensor.numel() * max(1, tensor.ndim) for tensor in given)
        except Exception:  # noqa: BLE001 (fakes raise all kinds of errors)
            return 2 * _input_bytes(args, kwargs)
        own = {storage_key(fake) for fake in fakes.values()}
        results = {storage_key(tensor): tensor for tensor in tensors_in(returned) if _is_dense(tensor)}
        sizes = (tensor.untyped_storage().nbytes() for key, tensor in results.items() if key not in own)
        return sum(taken_bytes(size, self.device) for size in sizes)


def key_of(args: Any, kwargs: Any = None, *, is_whole: bool = True) -> Hashable:
    """Return what decides the needs of an operator's call: shapes and dtypes of its tensors, and its other arguments.

    Args:
        args, kwargs: of the call.
        is_whole: whether these are all of its arguments.

    Raises:
        RuntimeError: an argument is a tensor without a shape.
    """
    parts: list[Any] = []
    has_tensor = has_list = False
    for arg in args:
        kind = type(arg)
        if kind is _Tensor or kind is _Parameter or isinstance(arg, _Tensor):
            parts += (arg.shape, arg.stride(), arg.dtype, arg.device)
            has_tensor = True
        elif kind is float:
            parts.append(float)  # a number that changes in each step changes no need
        elif kind is bool:
            parts.append((arg,))  # or it would equal a number, which gives other dtypes
        elif kind is list or kind is tuple:
            parts.append(tuple(arg) if not arg or type(arg[0]) is int else key_of(arg, is_whole=False))
            has_list = True
        else:
            parts.append(kind if kind in _WITHOUT_BYTES else arg)
    if not has_tensor:
        parts.append(torch.get_default_dtype())
        if not has_list and is_whole:
            parts += args  # numbers decide the size of what is made of them alone
    if kwargs:
        parts.append(key_of(tuple(kwargs.values()), is_whole=False))
    return tuple(parts)


def _never_seen(function: Any) -> float:
    if _POINTWISE in function.tags:
        return 0.0
    return _OF_LIBRARIES if any(word in str(function) for word in _IN_LIBRARIES) else _OF_OTHERS


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _input_bytes(args: Any, kwargs: Any) -> int:
    """Return the bytes of the elements that a call is given."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in((args, kwargs)) if _is_dense(tensor))


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
