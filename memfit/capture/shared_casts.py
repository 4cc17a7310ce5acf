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
from memfit.torch_private.autocast import autocast_nesting, is_cast_itself
from memfit.torch_private.tensors import tree_flatten

_CONVERSIONS = {"to", "type", "type_as", "half", "bfloat16"}  # which the user's code asks for: each is one of its own
_OF_VIEWS = {"einsum"}  # casts views of what it is given, which eager does not keep


def with_casts_shared(module: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    """Return a graph that casts each parameter once where eager does; the same one if it does so already.

    Args:
        module: a graph of Dynamo's.
        inputs: of it. Whether autocast is on around the graph is asked now.

    Raises:
        NotOneGraphError: a function that is one node, a region with code of its own say, casts the parameter inside.
    """
    graph = copy.deepcopy(module.graph)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    kept = {node: it.device.type for node, it in zip(placeholders, inputs, strict=True) if _is_kept(it)}
    uses: dict[tuple[Node, torch.dtype, int], list[Node]] = {}
    for node, region, casts in _under_autocast(graph):
        for given in [each for each in tree_flatten((node.args, node.kwargs))[0] if isinstance(each, Node)]:
            device_type = kept.get(given, "")
            dtype = casts.get(device_type)
            if dtype is not None and _has_result(node, dtype) and not _is_of_its_own(node, device_type):
                uses.setdefault((given, dtype, region), []).append(node)
    several = {key: nodes for key, nodes in uses.items() if len(nodes) > 1}
    for (given, dtype, _), nodes in several.items():
        hidden = next((each for each in nodes if not is_cast_itself(_name(each), kept[given])), None)
        if hidden is not None:
            raise NotOneGraphError(
                f"autocast casts a parameter that is used several times inside of {_name(hidden)}: {BY_CHECKPOINT}"
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
        name = _name(node)
        if name == "_enter_autocast":
            (device, dtype, is_on, keeps), (casts, kept) = node.args, states[-1]
            casts = {each: to for each, to in casts.items() if each != device}
            region += len(states) == 1 and not is_inside
            casts |= {device: dtype or torch.get_autocast_dtype(device)} if is_on else {}
            states.append((casts, kept if keeps is None else keeps))
        elif name == "_exit_autocast":
            states.pop()
        elif name == "clear_autocast_cache":
            region += 1
        elif node.op.startswith("call") and states[-1][1]:
            yield node, region, states[-1][0]


def _is_of_its_own(node: Node, device_type: str) -> bool:
    name = _name(node)
    return name in _CONVERSIONS or (name in _OF_VIEWS and not is_cast_itself(name, device_type))


def _has_result(node: Node, dtype: torch.dtype) -> bool:
    """Return whether a call that is given a parameter computes with gradients in the lower precision."""
    value = node.meta.get("example_value")
    results = value if isinstance(value, tuple | list) else [value]
    found = [each for each in results if isinstance(each, torch.Tensor)]
    return any(each.dtype == dtype and each.requires_grad for each in found) and not _name(node).endswith("_")


def _name(node: Node) -> str:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return name.partition(".")[0]
