"""Dropout in low precision on a CPU: AOTAutograd's formula for its gradient rounds otherwise than eager's."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

_ROUNDED = (torch.bfloat16, torch.float16)


def with_eagers_dropout(joint: GraphModule) -> None:
    """Replace the gradients of dropout in a joint graph where eager's has other bits.

    Eager on a CPU multiplies by a mask that was scaled in the dtype of the input; `native_dropout_backward` multiplies
    by the mask and by the scale. On a GPU eager runs the same kernel.

    Args:
        joint: made by AOTAutograd; changed in place.
    """
    aten = torch.ops.aten
    for node in joint.graph.find_nodes(op="call_function", target=aten.native_dropout_backward.default):
        gradient, mask, scale = node.args
        example = node.meta["val"]
        if example.device.type != "cpu" or example.dtype not in _ROUNDED:
            continue
        with joint.graph.inserting_before(node):
            kept = joint.graph.call_function(aten._to_copy.default, (mask,), {"dtype": example.dtype})
            noise = joint.graph.call_function(aten.mul.Tensor, (kept, scale))
            product = joint.graph.call_function(aten.mul.Tensor, (gradient, noise))
        for made in (kept, noise, product):
            _describe(made, node)
        node.replace_all_uses_with(product)
        joint.graph.erase_node(node)
    joint.recompile()


def _describe(made: Node, like: Node) -> None:
    """Give a node the metadata of another one, with a fake of its own."""
    example = like.meta["val"]
    with example.fake_mode:
        made.meta = {**like.meta, "val": torch.empty_like(example)}
