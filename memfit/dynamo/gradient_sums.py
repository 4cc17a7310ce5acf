"""Warns where the gradients of a tensor are summed in another order than eager's.

A graph first sums the gradients of its own uses of a tensor, and autograd then adds those of uses outside of the graph.
Eager adds them use by use, in one order over the whole model. Both have the same bits unless a graph uses a tensor
several times, and code outside of it does, too. Under autocast eager casts a parameter once for all calls, and sums
their gradients in the lower precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from memfit.memory.contract import Warnings

_SUMMED = (
    "a tensor that a graph uses several times, or casts under autocast, gets gradients from elsewhere, too (tied "
    "parameters, or autocast, in two calls before one backward pass; a residual connection around a block that is "
    "compiled by itself or lies between graph breaks): those of the graph are summed first, eager's use by use, and "
    "last bits may differ; memfit.checkpoint, memfit.eager and memfit.fit have eager's"
)


def used_often(module: torch.fx.GraphModule) -> list[int]:
    """Return the places of the inputs of a graph of Dynamo's that several of its nodes may give gradients.

    Args:
        module: the graph.
    """
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    return [place for place, node in enumerate(placeholders) if sum(map(_may_differentiate, node.users)) > 1]


def _may_differentiate(node: torch.fx.Node) -> bool:
    value = node.meta.get("example_value")
    return value.requires_grad if isinstance(value, torch.Tensor) else not isinstance(value, _OF_SIZES)


_OF_SIZES = (bool, int, torch.SymInt, torch.SymBool, torch.Size)


def watch_sums(node: Node, tensors: Sequence[Any], warnings: Warnings) -> None:
    """Warn if somebody else than one call of a graph gives gradients to tensors that the graph uses several times.

    Args:
        node: of the call, in autograd's graph.
        tensors: that the graph uses several times.
        warnings: of the graph.
    """
    trained = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.requires_grad]
    edges = [(edge.node, edge.output_nr) for edge in map(get_gradient_edge, trained)]
    sources = {node.next_functions.index(edge): edge for edge in edges if edge in node.next_functions}
    given: dict[int, tuple[int, int]] = {}  # by place: of the gradient that the call has given

    def gave(gradients: Sequence[torch.Tensor | None], _outputs: Any) -> None:
        given.update({place: _of(it) for place in hooks if (it := gradients[place]) is not None})

    def gets(place: int, output: int, gradients: Sequence[torch.Tensor | None]) -> None:
        gradient = gradients[output]
        if place not in given or gradient is None:
            return  # in the backward pass of another call
        hooks.pop(place).remove()  # a parameter may have its node for good
        if given.pop(place) != _of(gradient):
            warnings.warn(_SUMMED, "sums", most=1)

    # no hook refers to a node: a pass without backward would never be freed
    hooks = {at: source.register_prehook(partial(gets, at, output)) for at, (source, output) in sources.items()}
    if hooks:
        node.register_hook(gave)


def _of(gradient: torch.Tensor) -> tuple[int, int]:
    """Return what changes if autograd adds to a gradient, without a reference to it."""
    return gradient.data_ptr(), gradient._version
