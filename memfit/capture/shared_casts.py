"""Casts of parameters under autocast: eager casts each once in the outermost `with torch.autocast`, and keeps the cast.

AOTAutograd switches that cache off, and traces one cast for each use. Where there are several, eager sums their
gradients in the lower precision, before they are cast back, and a graph would have other bits.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from memfit.errors import BY_CHECKPOINT, NotOneGraphError
from memfit.torch_private.autocast import autocast_nesting

_CONVERSIONS = {"to", "type", "type_as", "half", "bfloat16"}  # which the user's code asks for: each is one of its own


def with_casts_shared(module: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    """Return a graph that casts each parameter once where eager does; the same one if it does so already.

    Args:
        module: a graph of Dynamo's.
        inputs: of it. Whether autocast is on around the graph is asked now.

    Raises:
        NotOneGraphError: the casts are hidden in a region that is an operator by itself.
    """
    graph = copy.deepcopy(module.graph)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    kept = {node: it.device.type for node, it in zip(placeholders, inputs, strict=True) if _is_kept(it)}
    uses: dict[tuple[Node, torch.dtype, int], list[Node]] = {}
    for node, region, casts in _under_autocast(graph):
        for given in [each for each in node.all_input_nodes if each in kept]:
            dtype = casts.get(kept[given])
            if dtype is not None and _is_cast(node, dtype):
                uses.setdefault((given, dtype, region), []).append(node)
    several = {key: nodes for key, nodes in uses.items() if len(nodes) > 1}
    for (given, dtype, _), nodes in several.items():
        if any(_is_region(node, module) for node in nodes):
            raise NotOneGraphError(
                f"autocast casts a parameter in a region that is an operator by itself, and outside: {BY_CHECKPOINT}"
            )
        with graph.inserting_before(nodes[0]):
            cast = graph.call_method("to", (given, dtype))
        for node in nodes:
            node.replace_input_with(given, cast)
    return GraphModule(module, graph) if several else module


def _is_kept(value: Any) -> bool:
    """Return whether autocast keeps the cast of an input."""
    is_trained = isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad and not value._is_view()
    return is_trained and value.dtype == torch.float32


def _under_autocast(graph: torch.fx.Graph) -> Iterator[tuple[Node, int, dict[str, torch.dtype]]]:
    """Give the nodes that run where autocast keeps casts, a number of the outermost block, and device -> dtype."""
    is_inside, region = autocast_nesting() > 0, 0  # in a block that switches it off, too
    outer = {each: torch.get_autocast_dtype(each) for each in ("cpu", "cuda") if torch.is_autocast_enabled(each)}
    states = [(outer, torch.is_autocast_cache_enabled())]
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if name == "_enter_autocast":
            (device, dtype, is_on, keeps), (casts, kept) = node.args, states[-1]
            casts = {each: to for each, to in casts.items() if each != device}
            region += len(states) == 1 and not is_inside
            casts |= {device: dtype or torch.get_autocast_dtype(device)} if is_on else {}
            states.append((casts, kept if keeps is None else keeps))
        elif name == "_exit_autocast":
            states.pop()
        elif node.op.startswith("call") and states[-1][1]:
            yield node, region, states[-1][0]


def _is_region(node: Node, module: GraphModule) -> bool:
    """Return whether an operator is given code, as that of a checkpoint is."""
    read = [each.target for each in node.all_input_nodes if each.op == "get_attr"]
    return any(isinstance(getattr(module, str(name), None), GraphModule) for name in read)


def _is_cast(node: Node, dtype: torch.dtype) -> bool:
    """Return whether an operator that is given a parameter computes in the lower precision, as its result shows."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    value = node.meta.get("example_value")
    results = value if isinstance(value, tuple | list) else [value]
    is_lower = any(isinstance(each, torch.Tensor) and each.dtype == dtype for each in results)
    return is_lower and name not in _CONVERSIONS and not name.endswith("_")
