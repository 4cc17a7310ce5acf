"""Layers, as the planners of vDNN and SuperNeurons name them: one forward op each.

The papers plan for frameworks whose layers bring their own backward. In a graph, a backward op belongs to the layer
with which it shares the most storages, parameters included: the backward of a convolution reads the input and the
weight that the convolution read. Of several such layers it is the last.
"""

from __future__ import annotations

import re
from collections import Counter

from memfit.graph import Graph, Op, Phase

_FULLY_CONNECTED = {"addmm", "mm", "linear"}


def is_convolution(op: Op) -> bool:
    """Return whether an op convolves, by its target, or by its name if it has none."""
    return "convolution" in (op.target or op.name)


def is_fully_connected(op: Op) -> bool:
    """Return whether an op is the product of a fully connected layer, by its target, or by its name if it has none."""
    return not _FULLY_CONNECTED.isdisjoint(re.split(r"\W+", op.target or op.name))


def layer_of_backward(graph: Graph) -> dict[int, int]:
    """Return backward op -> the forward op whose layer it belongs to; those that share nothing with one are left out.

    Args:
        graph: the step.
    """
    touching: dict[int, list[int]] = {}
    for op in graph.ops:
        if op.phase is Phase.FORWARD:
            for storage in {*op.reads, *op.mutates, *op.writes}:
                touching.setdefault(storage, []).append(op.id)
    found: dict[int, int] = {}
    for op in graph.ops:
        if op.phase is Phase.BACKWARD:
            shared = Counter(layer for storage in {*op.reads, *op.mutates} for layer in touching.get(storage, ()))
            if shared:
                found[op.id] = max(shared, key=lambda layer: (shared[layer], layer))
    return found
