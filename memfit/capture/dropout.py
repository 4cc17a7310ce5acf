"""Dropout on a CPU: eager's formula, in place of the ones that AOTAutograd writes."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

_aten = torch.ops.aten


def with_eagers_dropout(joint: GraphModule) -> None:
    """Replace dropout and its gradient in a joint graph by what eager computes.

    Eager on a CPU multiplies input and gradient by the mask divided by the probability of keeping, in the dtype of the
    input. `native_dropout` and its backward multiply by the mask and by the inverse of the probability, which takes
    longer, and rounds otherwise where the inverse is not the quotient. Here the mask is drawn in bytes, which are what
    backward keeps, and divided in each half. On a GPU eager runs the same kernels as the graph.

    Args:
        joint: made by AOTAutograd; changed in place.
    """
    kept_of_mask: dict[Node, float] = {}
    for node in joint.graph.find_nodes(op="call_function", target=_aten.native_dropout.default):
        factor, kept = node.args[0], 1.0 - float(node.args[1])
        found = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        if kept in (0.0, 1.0) or len(found) < 2 or factor.meta["val"].device.type != "cpu":
            continue
        with joint.graph.inserting_before(node):
            empty = _call(joint, _aten.empty_like.default, factor, dtype=torch.bool)
            mask = _call(joint, _aten.bernoulli_.float, empty, kept)  # in the order of the input's strides, as eager
            result = _masked(joint, factor, mask, kept)
        kept_of_mask[mask] = kept
        for old, new in ((found[0], result), (found[1], mask)):
            old.replace_all_uses_with(new)
            joint.graph.erase_node(old)
        joint.graph.erase_node(node)
    for node in joint.graph.find_nodes(op="call_function", target=_aten.native_dropout_backward.default):
        gradient, mask, _ = node.args
        if mask in kept_of_mask:
            with joint.graph.inserting_before(node):
                product = _masked(joint, gradient, mask, kept_of_mask[mask])
            node.replace_all_uses_with(product)
            joint.graph.erase_node(node)
    joint.recompile()


def _masked(joint: GraphModule, factor: Node, mask: Node, kept: float) -> Node:
    """Return `factor * (mask / kept)`."""
    bytes_ = _call(joint, _aten.view.dtype, mask, torch.uint8)  # torch converts bytes far faster than booleans
    ones = _call(joint, _aten._to_copy.default, bytes_, dtype=factor.meta["val"].dtype)
    return _call(joint, _aten.mul.Tensor, factor, _call(joint, _aten.div.Tensor, ones, kept))


def _call(joint: GraphModule, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Return a new call, with a fake result of its own."""
    node = joint.graph.call_function(target, args, kwargs)
    first = args[0].meta
    given = [each.meta["val"] if isinstance(each, Node) else each for each in args]
    with first["val"].fake_mode:
        node.meta = {**first, "val": target(*given, **kwargs)}
    return node
