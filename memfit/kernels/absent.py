"""Gradients that are not there: autograd hands None for an output that no loss uses.

Eager then computes nothing from it, and leaves `.grad` None where no other gradient comes. A backward half that is
lowered for a set of absent tangents does the same: a call whose gradients are all absent is not made; a sum of a
gradient with an absent one is that gradient; any other call gets zeros, as autograd's own formulas do.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from memfit.binding import Binding, Call, Value, values_in
from memfit.graph import Graph

_SUM = torch.ops.aten.add.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """What is not computed where some tangents are absent.

    Attributes:
        tangents: the storages of the absent ones.
        ops: that are not computed.
        passed_on: by the op of a sum, its operand that is there.
        left_out: the storages that hold no gradient at the end. They may exist: writes of absent gradients to parts of
            a storage are not made.
    """

    tangents: frozenset[int]
    ops: frozenset[int]
    passed_on: dict[int, Value]
    left_out: frozenset[int]

    @staticmethod
    def of(graph: Graph, binding: Binding, tangents: Collection[int]) -> Absent:
        """Return what is absent with some tangents.

        Args:
            graph, binding: of a joint graph.
            tangents: the storages of the absent ones.
        """
        gradients = {storage for boundary in graph.boundaries for storage in boundary.arrivals}
        absent, ops = set(tangents), set[int]()
        passed_on: dict[int, Value] = {}
        for op in graph.ops:
            given = gradients & {*op.reads, *op.mutates}
            if not given:
                continue
            gradients |= {*op.writes, *op.mutates}
            if given <= absent:
                ops.add(op.id)
                absent |= {*op.writes, *op.mutates}
                continue
            call = binding.calls[op.id]
            operand = _operand(call, absent) if given & absent else None
            if operand is not None:
                passed_on[op.id] = operand
            absent -= {*op.mutates}
        return Absent(tangents=frozenset(tangents), ops=frozenset(ops), passed_on=passed_on, left_out=frozenset(absent))


def _operand(call: Call, absent: set[int]) -> Value | None:
    """Return the operand of a sum that is there, if the result is it."""
    if call.target is not _SUM or call.kwargs or len(call.results) != 1:
        return None
    (result,), there = call.results, [value for value in values_in(call.args) if value.storage not in absent]
    is_it = len(there) == 1 and result is not None and (there[0].shape, there[0].dtype) == (result.shape, result.dtype)
    return there[0] if is_it else None


def zeros(base: Value, device: torch.device) -> torch.Tensor:
    """Return a tensor of zeros in the place of an absent gradient.

    Args:
        base: of its storage.
        device: that it is on.
    """
    return torch.empty_strided(base.shape, base.stride, dtype=base.dtype, device=device).zero_()


def copied(gradient: torch.Tensor, base: Value) -> torch.Tensor:
    """Return a gradient in the form that a sum with it would have.

    Args:
        gradient: of the form's shape and dtype.
        base: of the sum's storage.
    """
    return torch.empty_strided(base.shape, base.stride, dtype=base.dtype, device=gradient.device).copy_(gradient)
