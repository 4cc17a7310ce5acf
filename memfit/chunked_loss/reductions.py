"""Reductions of rows: what is computed of each row, and the loss of all, without the rows' results ever whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from memfit.chunked_loss.rows import Chunk, Gradients, Rows, autocast_of
from memfit.torch_private.tensors import without_torch_function

Reduce = Callable[[torch.Tensor, slice], torch.Tensor]
"""Takes results of some rows and where these are; returns one number, or what is left of each row."""

_TWICE = (
    "the gradients of a chunked loss were computed with it, and handed out by the first backward pass: call backward "
    "once, or leave chunk_loss out"
)


def of_each_row(of: Rows, reduce: Reduce) -> torch.Tensor:
    """Return what is computed of each row, `[*lead, ...]`; the rows are computed once more in the backward pass.

    Args:
        of: the rows.
        reduce: of some rows; returns a tensor with as many.
    """
    of.require_unchanged()
    return _OfEachRow.apply(of, reduce, *of.tensors)


def of_all_rows(of: Rows, reduce: Reduce) -> torch.Tensor:
    """Return the sum over chunks of a number of each; its gradients are computed with it, so that rows are made once.

    Args:
        of: the rows.
        reduce: of some rows; returns a number.
    """
    of.require_unchanged()
    return _OfAllRows.apply(of, reduce, *of.tensors)


def whole(of: Rows) -> torch.Tensor:
    """Return the results of all rows at once, as the steps were written, with a graph as eager's.

    Args:
        of: the rows.
    """
    of.require_unchanged()
    made: list[torch.Tensor] = []
    for each in of.projections:
        bias = None if each.bias is None else of.fixed[each.bias]
        with autocast_of(each.autocast, of.device), without_torch_function():
            made.append(torch.nn.functional.linear(of.rows[each.row], of.fixed[each.weight], bias))
    places = {"row": of.rows, "fixed": of.fixed, "step": made}
    for step in of.steps:
        made.append(step.run(lambda by: places[by.kind][by.number], of.device))
    return made[-1]


def _flat(of: Rows) -> list[torch.Tensor]:
    return [each.detach().reshape(of.count, each.shape[-1]) for each in of.rows]


class _OfEachRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, of: Rows, reduce: Reduce, *tensors: torch.Tensor) -> torch.Tensor:
        flat, parts = _flat(of), []
        for at in of.chunks():
            parts.append(reduce(Chunk(of, flat, at, [False] * len(tensors)).result(), at))
        ctx.save_for_backward(*tensors)
        ctx.of, ctx.reduce = replace(of, rows=(), fixed=(), versions=()), reduce
        ctx.rows = len(of.rows)
        found = torch.cat(parts)
        if not found.is_floating_point():
            ctx.mark_non_differentiable(found)
        return found.reshape(*of.lead, *found.shape[1:])

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        saved = ctx.saved_tensors
        of = replace(ctx.of, rows=saved[: ctx.rows], fixed=saved[ctx.rows :])
        gradient = given[0].reshape(of.count, *given[0].shape[len(of.lead) :])
        gradients, flat = Gradients(of), _flat(of)
        for at in of.chunks():
            chunk = Chunk(of, flat, at, ctx.needs_input_grad[2:])
            with torch.enable_grad():
                reduced = chunk.reduced(lambda result, at=at: ctx.reduce(result, at))
            chunk.add_gradients([reduced], [gradient[at]], gradients)
        found = zip(gradients.take(), saved, strict=True)
        return None, None, *(None if each is None else each.to(tensor.dtype) for each, tensor in found)


class _OfAllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, of: Rows, reduce: Reduce, *_: torch.Tensor) -> torch.Tensor:
        wants = [bool(each) for each in ctx.needs_input_grad[2:]]
        gradients, flat = Gradients(of), _flat(of)
        total: torch.Tensor | None = None
        for at in of.chunks():
            chunk = Chunk(of, flat, at, wants)
            with torch.set_grad_enabled(any(wants)):
                loss = chunk.reduced(lambda result, at=at: reduce(result, at))
            if any(wants):
                chunk.add_gradients([loss], [torch.ones_like(loss)], gradients)
            total = loss.detach() if total is None else total + loss.detach()
        ctx.gradients = gradients.take() if any(wants) else None
        ctx.dtypes = [each.dtype for each in of.tensors]
        assert total is not None
        return total

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        found, ctx.gradients = ctx.gradients, None
        if found is None:
            raise RuntimeError(_TWICE)
        return (
            None,
            None,
            *(
                None if each is None else each.mul_(given[0].to(each.dtype)).to(dtype)
                for each, dtype in zip(found, ctx.dtypes, strict=True)
            ),
        )


def loss_of(
    function: Callable[..., torch.Tensor],
    of: Rows,
    target: torch.Tensor,
    *,
    autocast: torch.dtype | None,
    reduction: str = "mean",
    **options: Any,
) -> torch.Tensor:
    """Return `torch.nn.functional.cross_entropy` or `nll_loss` of rows.

    Args:
        function: which of them.
        of: `[*lead, classes]`.
        target: classes, `[*lead]`, or probabilities, `[*lead, classes]`.
        autocast: the dtype that operators are cast to; None outside of autocast.
        reduction: `mean`, `sum` or `none`.
        options: `weight`, `ignore_index`, `label_smoothing`.
    """
    flat = target.reshape(of.count, *target.shape[len(of.lead) :])

    def reduce(rows: torch.Tensor, at: slice) -> torch.Tensor:
        with autocast_of(autocast, of.device):
            return function(rows, flat[at], reduction="none" if reduction == "none" else "sum", **options)

    if reduction == "none":
        return of_each_row(of, reduce)
    total = of_all_rows(of, reduce)
    if reduction == "sum":
        return total
    return total / of.count if target.is_floating_point() else total / _divisor(flat, options)


def _divisor(target: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Return what a mean over rows divides by: the weights of the targets that are not ignored."""
    counts = target != options.get("ignore_index", -100)
    weight = options.get("weight")
    if weight is None:
        return counts.sum()
    return (weight[target.where(counts, 0)] * counts).sum()
