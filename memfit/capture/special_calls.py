"""Calls that are entered into a trace in another way than their schemas say."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from memfit.capture.batch_norms import BATCH_NORM_CASES
from memfit.capture.functionalize import (
    CAST_INSIDE,
    SCATTERS,
    Counts,
    PartOverwritten,
    WithGradients,
    as_cast,
    functional_variant,
    overwrite_like,
)
from memfit.capture.lines import calling_line
from memfit.capture.traced import Entry
from memfit.memory.place import Place

if TYPE_CHECKING:
    from memfit.capture.trace import Trace

_aten = torch.ops.aten


def functionalize(trace: Trace, entry: Entry, kwargs: dict[str, Any]) -> None:
    """Replace an in-place call over the whole of a storage that is not resident by its functional form.

    Args:
        trace: gets a new storage for the result.
        entry: the call; is changed if it has a functional form, and left as it is if not.
        kwargs: of the call, with tensors.
    """
    if len(entry.mutated) != 1:
        return
    (tensor,) = entry.mutated
    if trace.storages[trace.value(tensor).storage].resident:
        return
    variant = functional_variant(entry.func, entry.given, kwargs, tensor)
    if variant is None:
        return
    entry.target, keeps_input = variant
    if not keeps_input:
        entry.args = entry.args[1:]
    trace.rename(tensor, entry.func)
    entry.outputs, entry.mutated = [tensor], []


def _copy(_trace: Trace, entry: Entry, _kwargs: dict[str, Any]) -> None:
    """Write into a new tensor at the result's place: real kernels keep their first argument's, fake ones may not."""
    entry.target = overwrite_like(entry.outputs[0], torch.ops.aten.copy_.default)
    entry.args = entry.args[1:]


def _scatter(_trace: Trace, entry: Entry, _kwargs: dict[str, Any]) -> None:
    """Give the result its place where the real kernel would give it that of its first argument in a storage."""
    (result,) = entry.outputs
    if result.storage_offset() != entry.given[0].storage_offset():
        entry.target = PartOverwritten(
            view=SCATTERS[entry.func._overloadpacket],
            place=Place.of(result),
            length=result.untyped_storage().nbytes() // result.itemsize,
        )


def _lift(_trace: Trace, entry: Entry, _kwargs: dict[str, Any]) -> None:
    """Copy a tensor that the step makes of numbers: each step makes it anew, and may write to it."""
    entry.target = overwrite_like(entry.outputs[0], torch.ops.aten.copy_.default)


def _recurrent_layer(_trace: Trace, entry: Entry, _kwargs: dict[str, Any]) -> None:
    """Run the kernel with gradients enabled if it ran so in the step."""
    if torch.is_grad_enabled():
        entry.target = WithGradients(entry.func)


def _counts(_trace: Trace, entry: Entry, _kwargs: dict[str, Any]) -> None:
    """Check that the result has the size that it was recorded with."""
    entry.target = Counts(func=entry.func, line=calling_line(), length=entry.outputs[0].shape[0])


def _cast_inside(trace: Trace, entry: Entry, _kwargs: dict[str, Any]) -> None:
    """Run the kernel inside autocast if it ran there in the step."""
    entry.target = as_cast(entry.func, entry.given, trace.has_autocast)


# By operator; all others are made functional where they can be.
SPECIAL_CASES: dict[Any, Callable[[Trace, Entry, dict[str, Any]], None]] = {
    _aten.copy: _copy,
    _aten.lift_fresh: _lift,
    _aten.mkldnn_rnn_layer: _recurrent_layer,
    _aten.bincount: _counts,
    **dict.fromkeys(SCATTERS, _scatter),
    **dict.fromkeys(CAST_INSIDE, _cast_inside),
    **BATCH_NORM_CASES,
}
