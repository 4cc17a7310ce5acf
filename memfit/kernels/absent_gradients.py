"""Gradients that are not there: autograd hands None for an output that no loss uses.

Eager then computes nothing from it, and leaves `.grad` None where no other gradient comes. A backward half that is
lowered for a set of absent tangents does the same: a call whose gradients are all absent is not made; a sum of a
gradient with an absent one is that gradient; any other call gets zeros, as autograd's own formulas do.

Where no plan fits with all gradients, a joint module is planned without those that are most likely absent: a model that
returns its loss and its logits is one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from memfit.binding import Binding, Call, Value, values_in
from memfit.capture.joint import is_tangent
from memfit.graph import Graph
from memfit.torch_private.tensors import fake_mode_of

_SUM = torch.ops.aten.add.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """What is not computed where some tangents are absent.

    Attributes:
        tangents: the storages of the absent ones.
        ops: that are not computed.
        passed_on: by the op of a sum, its operand that is there.
        left_out: the storages that hold no gradient at the end. They may exist: writes of absent gradients to parts of
            a storage are not made.
    """

    tangents: frozenset[int]
    ops: frozenset[int]
    passed_on: dict[int, Value]
    left_out: frozenset[int]

    @staticmethod
    def of(graph: Graph, binding: Binding, tangents: Collection[int]) -> Absent:
        """Return what is absent with some tangents.

        Args:
            graph, binding: of a joint graph.
            tangents: the storages of the absent ones.
        """
        gradients = {storage for boundary in graph.boundaries for storage in boundary.arrivals}
        absent, ops = set(tangents), set[int]()
        passed_on: dict[int, Value] = {}
        for op in graph.ops:
            given = gradients & {*op.reads, *op.mutates}
            if not given:
                continue
            gradients |= {*op.writes, *op.mutates}
            if given <= absent:
                ops.add(op.id)
                absent |= {*op.writes, *op.mutates}
                continue
            call = binding.calls[op.id]
            operand = _operand(call, absent) if given & absent else None
            if operand is not None:
                passed_on[op.id] = operand
            absent -= {*op.mutates}
        return Absent(tangents=frozenset(tangents), ops=frozenset(ops), passed_on=passed_on, left_out=frozenset(absent))


def _operand(call: Call, absent: set[int]) -> Value | None:
    """Return the operand of a sum that is there, if the result is it."""
    if call.target is not _SUM or call.kwargs or len(call.results) != 1:
        return None
    (result,), there = call.results, [value for value in values_in(call.args) if value.storage not in absent]
    is_it = len(there) == 1 and result is not None and (there[0].shape, there[0].dtype) == (result.shape, result.dtype)
    return there[0] if is_it else None


def zeros(base: Value, device: torch.device) -> torch.Tensor:
    """Return a tensor of zeros in the place of an absent gradient.

    Args:
        base: of its storage.
        device: that it is on.
    """
    return torch.empty_strided(base.shape, base.stride, dtype=base.dtype, device=device).zero_()


def copied(gradient: torch.Tensor, base: Value) -> torch.Tensor:
    """Return a gradient in the form that a sum with it would have.

    Args:
        gradient: of the form's shape and dtype.
        base: of the sum's storage.
    """
    return torch.empty_strided(base.shape, base.stride, dtype=base.dtype, device=gradient.device).copy_(gradient)


def beside_a_loss(joint: GraphModule) -> set[Node]:
    """Return the tangents that are most likely absent: of all outputs but the only one with one element, a loss.

    Args:
        joint: the module that AOTAutograd made.

    Returns:
        placeholders; none where no output, or several, have one element.
    """
    tangents = [node for node in joint.graph.find_nodes(op="placeholder") if is_tangent(node)]
    losses = [node for node in tangents if node.meta["val"].numel() == 1]
    return set(tangents) - set(losses) if len(losses) == 1 else set()


def leave_out(joint: GraphModule, absent: Collection[Node]) -> None:
    """Take what is made of absent tangents out of a joint module, as `Absent` does.

    Args:
        joint: is changed; the placeholders of the tangents stay.
        absent: those placeholders.
    """
    gradients = {node for node in joint.graph.find_nodes(op="placeholder") if is_tangent(node)}
    gone, without_use = set(absent), set[Node]()
    for node in list(joint.graph.nodes):
        given = [each for each in node.all_input_nodes if each in gradients]
        if not given or node.op == "output":
            continue
        gradients.add(node)
        lost = [each for each in given if each in gone]
        if len(lost) == len(given):
            gone.add(node)
        elif lost and _passed_on(node, lost):
            without_use.add(node)
        elif lost:
            for each in lost:
                with joint.graph.inserting_before(node):
                    node.replace_input_with(each, _zeros_node(joint, each))
    output = next(iter(joint.graph.find_nodes(op="output")))
    output.args = (tuple(None if each in gone else each for each in output.args[0]),)  # pyright: ignore
    for node in reversed(list(joint.graph.nodes)):
        if node in without_use or (node in gone and node.op != "placeholder"):
            joint.graph.erase_node(node)
    joint.recompile()


def _passed_on(node: Node, lost: Collection[Node]) -> bool:
    """Put the operand of a sum that is there in its place, if the sum is it; return whether it is."""
    there = [each for each in node.all_input_nodes if each not in lost]
    if node.target is not _SUM or node.kwargs or len(there) != 1:
        return False
    mine, its = node.meta["val"], there[0].meta["val"]
    if (mine.shape, mine.dtype) != (its.shape, its.dtype):
        return False
    node.replace_all_uses_with(there[0])
    return True


def _zeros_node(joint: GraphModule, like: Node) -> Node:
    fake = like.meta["val"]
    form = {"dtype": fake.dtype, "layout": torch.strided, "device": fake.device}
    made = joint.graph.call_function(torch.ops.aten.zeros.default, (list(fake.shape),), form)
    with fake_mode_of(fake):
        made.meta = {**like.meta, "val": torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device)}
    return made
