"""Fake kernels whose results have the dtypes and strides of the real ones: traced code then decides as eager does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from memfit.binding import Call, Value
from memfit.capture.batch_norms import BATCH_NORM_GRADIENTS, without_idle_statistics
from memfit.cost.observations import Corrections, RealResult, call_key
from memfit.torch_private.tensors import fakes_corrected, is_fake, storage_key, tree_map


def corrected_fakes(corrections: Corrections) -> AbstractContextManager[None]:
    """Return a context in which fake kernels return the dtypes and strides of real ones.

    Whether a tensor can be viewed, and which kernel multiplies it, is decided by its strides.

    Args:
        corrections: what real kernels return in the place of their fakes' results.
    """
    operators = {key.partition("(")[0] for key in corrections}

    def corrected(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> Any:
        if str(func) not in operators:
            return returned
        real = real_results(corrections, func, args, kwargs)
        tensors = {place: kind for place, kind in real.items() if kind is not None}
        return as_corrected(returned, tensors, lambda leaf: not is_fake(leaf))

    return fakes_corrected(corrected)


def real_results(
    corrections: Corrections, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Mapping[int, RealResult | None]:
    """Return by position what the real kernel of a call returns in the place of wrong fakes.

    Args:
        corrections: by the keys of calls.
        func: the operator overload.
        args, kwargs: its arguments.
    """
    args, kwargs = tree_map(_described, (args, kwargs))
    if func.overloadpacket in BATCH_NORM_GRADIENTS:
        args = without_idle_statistics(func, args)
    return corrections.get(call_key(Call(op=0, target=func, args=args, kwargs=kwargs)) or "", {})


def as_corrected(returned: Any, real: Mapping[int, RealResult | None], is_kept: Callable[[Any], bool]) -> Any:
    """Return the fakes that a call returned with those of other dtypes and strides in the places of wrong ones.

    Args:
        returned: nested as the call returns it.
        real: by position what the real kernel returns; None is no tensor.
        is_kept: whether a leaf is right anyhow.
    """
    places = itertools.count()

    def corrected(leaf: Any) -> Any:
        place = next(places)
        if place not in real or is_kept(leaf):
            return leaf
        kind = real[place]
        return kind and leaf.new_empty_strided(leaf.shape, kind.stride, dtype=getattr(torch, kind.dtype))

    return tree_map(corrected, returned) if real else returned


def _described(leaf: Any) -> Any:
    return Value.of(leaf, storage_key(leaf)) if isinstance(leaf, torch.Tensor) else leaf
