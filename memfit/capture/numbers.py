"""Numbers of Python's that change between calls: a graph of Dynamo's takes each as a tensor, and reads it by `item`.

No sizes follow from such a number, so a plan holds for all of its values if the graph computes with the tensor itself.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from memfit.capture.lines import line_of

_COMMUTE = {operator.mul, operator.add}
_OF_NUMBERS = {*_COMMUTE, operator.sub, operator.truediv}
_OF_TENSOR = {
    *_OF_NUMBERS,
    *(operator.imul, operator.iadd, operator.isub, operator.itruediv),
    *(torch.mul, torch.add, torch.sub, torch.div),
    *("mul", "add", "sub", "div", "mul_", "add_", "sub_", "div_"),
}


def with_numbers_as_tensors(module: GraphModule) -> GraphModule:
    """Let a graph compute with the tensors of its numbers where that gives the same bits; return it.

    These are sums, differences, products and quotients: of a number and a floating tensor that has dimensions, whose
    dtype they have then, and of numbers. Where a number is used otherwise, it is still read.

    Args:
        module: a graph of Dynamo's; changed in place.
    """
    tensors: dict[Any, Node] = {}  # of numbers
    for node in list(module.graph.nodes):
        if _is_read(node):
            tensors[node] = node.args[0]
        elif len(node.args) > 2 or node.kwargs or not any(isinstance(a, Node) and a in tensors for a in node.args):
            continue
        elif isinstance(node.meta.get("example_value"), torch.SymFloat):
            if _is_exact(node) and all(isinstance(arg, int | float) or arg in tensors for arg in node.args):
                with module.graph.inserting_after(node):
                    of_tensors = tuple(tensors.get(arg, arg) for arg in node.args)
                    tensors[node] = module.graph.call_function(node.target, of_tensors)
        elif _is_tensor(node.args[0]) and node.target in _OF_TENSOR:
            node.args = (node.args[0], tensors[node.args[1]])
        elif _is_tensor(node.args[-1]) and node.target in _COMMUTE:
            node.args = (node.args[1], tensors[node.args[0]])
        elif _is_tensor(node.args[-1]) and node.target is operator.sub:
            node.args = (tensors[node.args[0]], node.args[1])
    for number in reversed(tensors):
        if not number.users:
            module.graph.erase_node(number)
    module.recompile()
    return module


def numbers_read(module: GraphModule) -> str:
    """Return the numbers that a graph still reads, in words: as Dynamo names them, and the user's line.

    Args:
        module: from `with_numbers_as_tensors`.
    """
    found = [node for node in module.graph.nodes if _is_read(node)]
    texts = [f"{str(node.args[0].target).removeprefix('L_').strip('_')} at {line_of(node)}" for node in found]
    return ", ".join(dict.fromkeys(texts))


def _is_read(node: Node) -> bool:
    return node.op == "call_method" and node.target == "item" and node.args[0].op == "placeholder"


def _is_exact(node: Node) -> bool:
    """Return whether the result of numbers is the same as that of tensors: without an error of Python's, too."""
    divisor = node.args[-1]
    if node.target is operator.truediv:
        return isinstance(divisor, int | float) and divisor != 0
    return node.target in {*_OF_NUMBERS, operator.neg}


def _is_tensor(arg: Any) -> bool:
    example = arg.meta.get("example_value") if isinstance(arg, Node) else None
    return isinstance(example, torch.Tensor) and example.is_floating_point() and example.ndim > 0
