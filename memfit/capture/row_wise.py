"""Calls that work row by row: each row of a result depends on the same row of what is taken by rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memfit.binding import Call, Value, map_values, values_in
from memfit.capture.reuse import all_laid_out_as
from memfit.graph import Op, Phase
from memfit.memory.place import reach
from memfit.torch_private.tensors import contiguous_strides

_aten = torch.ops.aten
# The positions of arguments of which each row of the result needs all rows, whatever their shapes.
_WHOLE: dict[Any, tuple[int, ...]] = {
    _aten.mm: (1,),
    _aten.mv: (1,),
    _aten.addmm: (2,),
    _aten.addmv: (2,),
    _aten.bmm: (),
    _aten.baddbmm: (),
    _aten.convolution: (1, 2),
    _aten.max_pool2d_with_indices: (),
    _aten.avg_pool2d: (),
    _aten._adaptive_avg_pool2d: (),
    _aten.bucketize: (1,),
    _aten.embedding: (0,),
    _aten.index_select: (0,),
    _aten.index: (0,),
    _aten._cdist_forward: (1,),
    _aten._euclidean_dist: (1,),
}
_OF_LAST = (_aten.native_layer_norm, _aten._fused_rms_norm)  # along the last dimensions, whose sizes they are given
_COPIES = (_aten._to_copy, _aten.clone)
_MIXES_ROWS = (_aten.renorm, _aten.unique_dim, _aten.unique_consecutive)  # along the dimensions that they do not name


def is_row_wise(op: Op, call: Call, rows: int) -> bool:
    """Return whether an op may work row by row, as far as shapes tell: trying it decides.

    Args:
        op: of the graph.
        call: its call.
        rows: the first size of all results in the chain.
    """
    if op.random or op.mutates or not op.recomputable or op.phase is not Phase.FORWARD or not call.results:
        return False
    results = [value for value in call.results if value is not None]
    if len(results) != len(call.results) or len({value.storage for value in results}) != len(results):
        return False
    if not _keeps_rows_apart(call) or not all(v.shape[:1] == (rows,) and _is_plain(v) for v in results):
        return False
    return any(by_rows for _, by_rows in arguments_by_rows(call, rows))


def _keeps_rows_apart(call: Call) -> bool:
    """Return whether each row of an operator's result depends on the same row of what it takes by rows.

    Operators that work element by element do; so do those that work along other dimensions than the first, which they
    name (the last one where they name none), products of matrices, and what is picked from a table.
    """
    packet, first = getattr(call.target, "overloadpacket", None), next(values_in(call.args), None)
    if packet is None or first is None or packet in _MIXES_ROWS:
        return False
    if first.dtype.is_complex and not all_laid_out_as(first, (call.args, call.kwargs)):
        return False  # the compiler's loops over complex numbers round otherwise at their ends
    if packet in _WHOLE or packet in _COPIES or torch.Tag.pointwise in call.target.tags:  # pyright: ignore
        return True
    if packet in _OF_LAST:
        return len(call.args[1]) < len(first.shape)
    if packet is _aten.constant_pad_nd:
        return len(call.args[1]) < 2 * len(first.shape)
    arguments = call.target._schema.arguments  # pyright: ignore[reportFunctionMemberAccess]
    given = {argument.name: argument.default_value for argument in arguments}
    given |= {argument.name: arg for argument, arg in zip(arguments, call.args, strict=False)}
    given |= call.kwargs
    along = given.get("dim", given.get("dims"))
    if along is None or along == []:
        return False
    dimensions = along if isinstance(along, list | tuple) else [along]
    return all(isinstance(each, int) and each % len(first.shape) != 0 for each in dimensions)


def arguments_by_rows(call: Call, rows: int) -> list[tuple[Value, bool]]:
    """Return the tensors among the arguments of a call, and whether each is taken row by row."""
    found: list[tuple[Value, bool]] = []
    map_arguments(call, rows, lambda value, by_rows: found.append((value, by_rows)))
    return found


def map_arguments(call: Call, rows: int, function: Callable[[Value, bool], Any]) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments of a call, by position and by name, with another object in the place of each Value.

    Args:
        call: works row by row.
        rows: of its results.
        function: is given a Value, and whether it is taken row by row.
    """
    whole = _WHOLE.get(getattr(call.target, "overloadpacket", None), ())

    def mapped(tree: Any, *, is_whole: bool = False) -> Any:
        return map_values(tree, lambda value: function(value, not is_whole and _takes_rows(value, call, rows)))

    return tuple(mapped(arg, is_whole=place in whole) for place, arg in enumerate(call.args)), mapped(call.kwargs)


def _takes_rows(value: Value, call: Call, rows: int) -> bool:
    """Return whether an argument may be taken row by row: one of fewer dimensions than the result is spread over it."""
    dimensions = min(len(result.shape) for result in values_in(call.results))
    return value.shape[:1] == (rows,) and len(value.shape) >= dimensions


def _is_plain(value: Value) -> bool:
    """Return whether a result is stored row after row, without gaps, and as it is."""
    is_dense = value.is_strided_as(contiguous_strides(value.shape))
    return is_dense and value.offset == 0 and not value.conjugated and not value.negated


def is_by_rows(value: Value, base: Value) -> bool:
    """Return whether each row of a view lies within the same row of the storage's own tensor."""
    row = base.stride[0]
    same_rows = value.shape[:1] == base.shape[:1] and value.stride[:1] == (row,)
    is_within = reach(value.offset, value.shape[1:], value.stride[1:]) <= max(1, row)
    return same_rows and value.dtype == base.dtype and is_within
