"""The order in which gradients are ready: DistributedDataParallel sorts its buckets by it, and bits of sums follow.

A compiled graph has all gradients at its end. For the backward pass after which DDP makes its buckets anew, they are
handed to it in eager's order, which is that of the trace: autograd goes on at the latest node that it can reach.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx


def noting_order(module: torch.fx.GraphModule, order: list[int]) -> torch.fx.GraphModule:
    """Return a copy of a graph that notes the order in which a backward pass has the gradients of its inputs.

    Args:
        module: is run by AOTAutograd, whose trace has a backward pass.
        order: gets the places of the inputs.
    """

    def note(tensor: Any, place: int) -> None:
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            order.clear()
            tensor.register_hook(lambda _: order.append(place))

    graph = copy.deepcopy(module.graph)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before():
        for place, node in enumerate(inputs):
            graph.call_function(note, (node, place))
    return torch.fx.GraphModule(module, graph)


def in_order(inputs: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """Return the inputs of a graph so that autograd hands on gradients of leaves in an order.

    Args:
        inputs: of the graph.
        order: places of the inputs, the first of which is to have its gradient first.
    """
    given = list(inputs)
    for place in reversed(order):
        if given[place].is_leaf:
            given[place] = given[place].view_as(given[place])
    return given
