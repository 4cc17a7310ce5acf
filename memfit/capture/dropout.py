"""Dropout on a CPU: AOTAutograd's formulas for its results and gradients round otherwise than eager's."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from memfit.torch_private.tensors import real_tensors

_aten = torch.ops.aten
_ROUNDED = (torch.bfloat16, torch.float16)


def with_eagers_dropout(joint: GraphModule) -> None:
    """Replace results and gradients of dropout in a joint graph where eager's have other bits.

    Eager on a CPU multiplies by a mask that was divided by the probability of keeping, in the dtype of the input.
    `native_dropout` and its backward multiply by the mask and by the inverse of the probability. On a GPU eager runs
    the same kernels.

    Args:
        joint: made by AOTAutograd; changed in place.
    """
    kept_of_scale: dict[float, float] = {}
    for node in joint.graph.find_nodes(op="call_function", target=_aten.native_dropout.default):
        kept = 1.0 - float(node.args[1])
        if kept in (0.0, 1.0):
            continue
        kept_of_scale[1.0 / kept] = kept
        found = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        if len(found) == 2 and _differs(found[0], kept):
            found[0].prepend(found[1])
            _replace(joint, found[0], node.args[0], found[1], kept)
    for node in joint.graph.find_nodes(op="call_function", target=_aten.native_dropout_backward.default):
        gradient, mask, scale = node.args
        kept = kept_of_scale.get(scale)
        if kept is not None and (_differs(node, kept) or _is_rounded(node)):
            _replace(joint, node, gradient, mask, kept)
    joint.recompile()


def _is_rounded(node: Node) -> bool:
    example = node.meta["val"]
    return example.device.type == "cpu" and example.dtype in _ROUNDED


def _differs(node: Node, kept: float) -> bool:
    """Return whether the quotient and the inverse differ once they are rounded."""
    example = node.meta["val"]
    with real_tensors():
        one = torch.ones(1, dtype=example.dtype)
        return example.device.type == "cpu" and not torch.equal(one / kept, one * (1.0 / kept))


def _replace(joint: GraphModule, node: Node, factor: Any, mask: Node, kept: float) -> None:
    """Replace a node by `factor * (mask / kept)`."""
    call, example = joint.graph.call_function, node.meta["val"]
    with joint.graph.inserting_before(node):
        ones = call(_aten._to_copy.default, (mask,), {"dtype": example.dtype})
        noise = call(_aten.div.Tensor, (ones, kept))
        product = call(_aten.mul.Tensor, (factor, noise))
    for made in (ones, noise, product):
        with example.fake_mode:  # a fake of its own
            made.meta = {**node.meta, "val": torch.empty_like(example)}
    node.replace_all_uses_with(product)
    joint.graph.erase_node(node)
