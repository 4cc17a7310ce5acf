"""Comparison of values bit by bit: tensors of every dtype and layout, numbers, and containers of them."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any, cast

import torch

_COMPRESSED_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_COMPRESSED_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors hold the same bits: zeros of different sign differ, NaNs of equal bits are the same.

        >>> import torch
        >>> same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
        False
        >>> same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
        True

    Shape, dtype, layout and device have to be equal too; strides may differ. A lazy view (`tensor.conj()`) is compared
    by the values that it stands for. Sparse, quantized and nested tensors and wrapper subclasses are compared part by
    part.

    Args:
        left: a tensor of any shape, dtype, layout and device.
        right: another.
    """
    if _kind(left) != _kind(right):
        return False
    left, right = left.detach(), right.detach()
    if _is_wrapper(left):
        return _same_wrapped(left, right)
    return all(
        one is not None and other is not None and _same_strided(one, other)
        for one, other in zip_longest(_parts(left), _parts(right))
    )


def same_value(left: Any, right: Any) -> bool:
    """Return whether two values are of one type and hold the same bits: tensors, floats, dicts, lists, tuples of them.

    Values of other types are compared by `==`.

    Args:
        left: a value of any type.
        right: another.
    """
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return same_bits(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, complex):
        return struct.pack("dd", left.real, left.imag) == struct.pack("dd", right.real, right.imag)
    if isinstance(left, Mapping):
        mine, theirs = cast("Mapping[Any, Any]", left), cast("Mapping[Any, Any]", right)
        return mine.keys() == theirs.keys() and all(same_value(mine[key], theirs[key]) for key in mine)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same_value, left, right))
    return bool(left == right)


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All that has to be equal beside the bits; a Parameter is of one kind with a plain tensor."""
    wrapper = type(tensor) if _is_wrapper(tensor) else None
    coalesced = tensor.is_coalesced() if tensor.layout == torch.sparse_coo else None
    shape = None if tensor.is_nested else tensor.shape  # of a nested tensor each part has its own
    scheme = tensor.qscheme() if tensor.is_quantized else None
    return wrapper, shape, tensor.dtype, tensor.layout, tensor.device, tensor.is_nested, coalesced, scheme


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a subclass that holds other tensors and says which: torch's protocol for that."""
    return hasattr(tensor, "__tensor_flatten__")


def _same_wrapped(left: Any, right: Any) -> bool:
    (mine, my_context), (theirs, their_context) = left.__tensor_flatten__(), right.__tensor_flatten__()
    return (
        mine == theirs
        and same_value(my_context, their_context)
        and all(same_bits(getattr(left, name), getattr(right, name)) for name in mine)
    )


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the strided tensors that a tensor of one of torch's own layouts is made of."""
    if tensor.is_nested:
        yield from tensor.unbind()
    elif tensor.layout == torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in _COMPRESSED_ROWS:
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in _COMPRESSED_COLUMNS:
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif tensor.layout != torch.strided:
        yield tensor.to_dense()
    elif tensor.is_quantized:
        yield tensor.int_repr()
        yield from _quantizer(tensor)
    else:
        yield tensor


def _quantizer(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return torch.tensor(tensor.q_scale(), dtype=torch.float64), torch.tensor(tensor.q_zero_point())
    axis = torch.tensor(tensor.q_per_channel_axis())
    return tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points(), axis


def _same_strided(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.equal(as_integers(left), as_integers(right))


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a strided tensor's values, as integers of the same width."""
    values = tensor.resolve_conj().resolve_neg()
    if values.dtype == torch.complex128:
        values = torch.view_as_real(values)  # no integer has 16 bytes
    return values.view(_INTEGERS[values.dtype.itemsize])
