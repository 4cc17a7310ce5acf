"""Draws in compiled graphs: eager's formulas and kernels, in place of the ones that AOTAutograd writes."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from memfit.torch_private.tensors import fake_mode_of, tensors_in

_aten = torch.ops.aten


def with_eagers_draws(joint: GraphModule) -> GraphModule:
    """Replace draws in a graph by those of eager, where they give other numbers; return the graph.

    Args:
        joint: made by AOTAutograd, of both halves or without gradients; changed in place.
    """
    _put_dropout(joint)
    _put_in_place(joint)
    joint.recompile()
    return joint


# In-place draws whose kernels give other numbers to memory of other strides, by their functional forms.
_IN_PLACE = {
    _aten.normal_functional.default: _aten.normal_.default,
    _aten.bernoulli.p: _aten.bernoulli_.float,
}


def _put_in_place(joint: GraphModule) -> None:
    """Let draws be made in memory of the strides that eager draws into; the functional forms lose them."""
    for node in [each for each in joint.graph.nodes if each.target in _IN_PLACE]:
        view, (_, *given), result = node.args[0].meta["val"], node.args, node.meta["val"]
        if view.stride() == result.stride():
            continue
        with joint.graph.inserting_before(node):
            how = {"dtype": view.dtype, "device": view.device}
            empty = _call(node, _aten.empty_strided.default, view.shape, view.stride(), **how)
            drawn = _call(node, _IN_PLACE[node.target], empty, *given, **node.kwargs)
            kept = torch.contiguous_format if result.is_contiguous() else torch.preserve_format
            dense = _call(node, _aten.clone.default, drawn, memory_format=kept)
        _replace(node, dense)


def _put_dropout(joint: GraphModule) -> None:
    """Replace dropout and its gradient by what eager computes.

    Eager on a CPU multiplies input and gradient by the mask divided by the probability of keeping, in the dtype of the
    input. `native_dropout` and its backward multiply by the mask and by the inverse of the probability, which takes
    longer, and rounds otherwise where the inverse is not the quotient. Here the mask is drawn in bytes, which are what
    backward keeps, and divided in each half. On a GPU eager runs the same kernels as the graph.
    """
    kept_of_scale: dict[float, float] = {}
    for node in joint.graph.find_nodes(op="call_function", target=_aten.native_dropout.default):
        factor, kept = node.args[0], 1.0 - float(node.args[1])
        found = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        if kept in (0.0, 1.0) or 0 not in found or factor.meta["val"].device.type != "cpu":
            continue
        with joint.graph.inserting_before(node):
            empty = _call(node, _aten.empty_like.default, factor, dtype=torch.bool)
            mask = _call(node, _aten.bernoulli_.float, empty, kept)  # in the order of the input's strides, as eager
            result = _masked(node, factor, mask, kept)
        kept_of_scale[1.0 / kept] = kept
        if 1 in found:  # of a batch's own dropout nobody needs the mask
            _stand_for(found[1], empty)
            _replace(found[1], mask)
        _replace(found[0], result)
        joint.graph.erase_node(node)
    for node in joint.graph.find_nodes(op="call_function", target=_aten.native_dropout_backward.default):
        gradient, mask, scale = node.args  # the mask may come by way of a detached one
        if scale in kept_of_scale and gradient.meta["val"].device.type == "cpu":
            with joint.graph.inserting_before(node):
                product = _masked(node, gradient, mask, kept_of_scale[scale])
            _replace(node, product)


def _replace(old: Node, new: Node) -> None:
    """Put a node in the place of another one, of which there may be views."""
    _stand_for(old, new)
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def _stand_for(old: Node, new: Node) -> None:
    """Let the new node have the old one's fake, on whose storage the fakes of its views are."""
    before, after = old.meta["val"], new.meta["val"]
    if (before.dtype, before.shape, before.stride()) == (after.dtype, after.shape, after.stride()):
        new.meta["val"] = before


def _masked(node: Node, factor: Node, mask: Node, kept: float) -> Node:
    """Return `factor * (mask / kept)`, which stands for `node`."""
    bytes_ = _call(node, _aten.view.dtype, mask, torch.uint8)  # torch converts bytes far faster than booleans
    ones = _call(node, _aten._to_copy.default, bytes_, dtype=factor.meta["val"].dtype)
    return _call(node, _aten.mul.Tensor, factor, _call(node, _aten.div.Tensor, ones, kept))


def _call(node: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Return a new call in the place of `node`, with a fake result of its own."""
    call = node.graph.call_function(target, args, kwargs)
    given = [each.meta["val"] if isinstance(each, Node) else each for each in args]
    with fake_mode_of(tensors_in(node.meta["val"])[0]):
        call.meta = {**node.meta, "val": target(*given, **kwargs)}
    return call
