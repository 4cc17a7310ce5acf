"""Gradients that are not there: autograd hands None for an output that no loss uses.

Eager then computes nothing from it, and leaves `.grad` None where no other gradient comes. A backward half that is
lowered for a set of absent tangents does the same: a call whose gradients are all absent is not made; a sum of a
gradient with an absent one is that gradient; any other call gets zeros, as autograd's own formulas do.

Where no plan fits with all gradients, a joint module is planned without those that are most likely absent: a model that
returns its loss and its logits is one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule, Node

from memfit.binding import Binding, Value, values_in
from memfit.capture.joint import arguments_of, is_tangent, outputs_of
from memfit.graph import Graph
from memfit.torch_private.tensors import fake_mode_of

_Call = TypeVar("_Call")
_Held = TypeVar("_Held")  # a storage, or a node


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
        absent, ops = set(tangents), set[int]()
        passed_on: dict[int, Value] = {}
        gradients = {storage for boundary in graph.boundaries for storage in boundary.arrivals}
        calls = ((op, {*op.reads, *op.mutates}, op.writes, op.mutates) for op in graph.ops)
        for op, lost, is_gone in _followed(calls, gradients, absent):
            if is_gone:
                ops.add(op.id)
            elif lost:
                call = binding.calls[op.id]
                there = [value for value in values_in(call.args) if value.storage not in lost]
                if len(call.results) == 1 and _is_passed_on(call.target, call.kwargs, there, call.results[0]):
                    passed_on[op.id] = there[0]
        return Absent(tangents=frozenset(tangents), ops=frozenset(ops), passed_on=passed_on, left_out=frozenset(absent))


def _followed(
    calls: Iterable[tuple[_Call, Collection[_Held], Collection[_Held], Collection[_Held]]],
    gradients: set[_Held],
    absent: set[_Held],
) -> Iterator[tuple[_Call, set[_Held], bool]]:
    """Yield each call that takes gradients, with those that are absent, and whether all are: then it is not made.

    Args:
        calls: in order; each with its inputs, its results, and the inputs that it writes to.
        gradients: the tangents; everything computed from them is added.
        absent: the absent tangents; everything computed from these alone is added.
    """
    for call, taken, made, written in calls:
        given = gradients.intersection(taken)
        if not given:
            continue
        gradients.update(made, written)
        lost = given & absent
        is_gone = lost == given
        yield call, lost, is_gone
        if is_gone:
            absent.update(made, written)
        else:
            absent.difference_update(written)


def _is_passed_on(target: Any, kwargs: Mapping[str, Any], there: Sequence[Any], result: Any) -> bool:
    """Return whether a call is a sum whose only operand that is there has the result's form."""
    if target is not torch.ops.aten.add.Tensor or kwargs or len(there) != 1 or result is None:
        return False
    return (there[0].shape, there[0].dtype) == (result.shape, result.dtype)


def zeros(base: Value, device: torch.device) -> torch.Tensor:
    """Return a tensor of zeros in the place of an absent gradient.

    Args:
        base: of its storage.
        device: that it is on.
    """
    return base.empty(device).zero_()


def copied(gradient: torch.Tensor, base: Value) -> torch.Tensor:
    """Return a gradient in the form that a sum with it would have.

    Args:
        gradient: of the form's shape and dtype.
        base: of the sum's storage.
    """
    return base.empty(gradient.device).copy_(gradient)


def beside_a_loss(joint: GraphModule) -> set[Node]:
    """Return the tangents that are most likely absent: of all outputs but the only one with one element, a loss.

    Args:
        joint: the module that AOTAutograd made.

    Returns:
        placeholders; none where no output, or several, have one element.
    """
    _, tangents = arguments_of(joint)
    losses = [node for node in tangents if node.meta["val"].numel() == 1]
    return set(tangents) - set(losses) if len(losses) == 1 else set()


def leave_out(joint: GraphModule, absent: Collection[Node]) -> None:
    """Take what is made of absent tangents out of a joint module, as `Absent` does.

    Args:
        joint: is changed; the placeholders of the tangents stay.
        absent: those placeholders.
    """
    gone, erased = set(absent), list[Node]()
    for node, lost, is_gone in _followed_nodes(joint, gone):
        there = [each for each in node.all_input_nodes if each not in lost]
        if is_gone:
            erased.append(node)
        elif lost and _is_passed_on(node.target, node.kwargs, [each.meta["val"] for each in there], node.meta["val"]):
            node.replace_all_uses_with(there[0])
            erased.append(node)
        for each in () if is_gone or node in erased else lost:
            with joint.graph.inserting_before(node):
                node.replace_input_with(each, _zeros_node(joint, each))
    output = next(iter(joint.graph.find_nodes(op="output")))
    output.args = (tuple(None if each in gone else each for each in output.args[0]),)  # pyright: ignore
    for node in reversed(erased):
        joint.graph.erase_node(node)
    joint.recompile()


def with_zeros_for_absent(
    backward: GraphModule, call: Callable[[list[Any]], Sequence[Any]]
) -> Callable[[list[Any]], Sequence[Any]]:
    """Return a backward half that takes None for absent gradients, and returns None for what is made of none else.

    Args:
        backward: the half; its placeholders are the arguments.
        call: takes tensors, also for tangents.
    """
    given = backward.graph.find_nodes(op="placeholder")
    tangents = {number: node for number, node in enumerate(given) if is_tangent(node)}
    outputs = outputs_of(backward)

    @cache
    def there(absent: frozenset[int]) -> list[bool]:
        gone = {tangents[number] for number in absent}
        for _ in _followed_nodes(backward, gone):
            pass
        return [each not in gone for each in outputs]

    def half(arguments: list[Any]) -> Sequence[Any]:
        absent = frozenset(number for number in tangents if arguments[number] is None)
        for number in absent:
            fake = tangents[number].meta["val"]
            arguments[number] = zeros(Value.of(fake, number), fake.device)
        returned = call(arguments)
        return [each if is_there else None for each, is_there in zip(returned, there(absent), strict=True)]

    return half


def _followed_nodes(module: GraphModule, absent: set[Node]) -> Iterator[tuple[Node, set[Node], bool]]:
    _, tangents = arguments_of(module)
    nodes = ((node, node.all_input_nodes, (node,), ()) for node in list(module.graph.nodes) if node.op != "output")
    return _followed(nodes, set(tangents), absent)


def _zeros_node(joint: GraphModule, like: Node) -> Node:
    fake = like.meta["val"]
    form = {"dtype": fake.dtype, "layout": torch.strided, "device": fake.device}
    made = joint.graph.call_function(torch.ops.aten.zeros.default, (list(fake.shape),), form)
    with fake_mode_of(fake):
        made.meta = {**like.meta, "val": torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device)}
    return made
