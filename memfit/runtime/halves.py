"""The two halves of a planned joint graph, in the form that AOTAutograd wants from a partitioner.

AOTAutograd passes all primals to the forward half and saves the tensors that it returns after its outputs; the backward
half gets those, then the tangents. Saved are the storages that live across the boundary, as the tensors that hold them,
and the primals that backward needs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from memfit.binding import Binding, Origin, Value
from memfit.capture.joint import JointCapture
from memfit.capture.torch_private import FakeTensorMode
from memfit.runtime.program import Half, Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """The boxed functions, and modules of their signatures for AOTAutograd to look at."""

    forward: Callable[[list[Any]], list[Any]]
    backward: Callable[[list[Any]], list[Any]]
    forward_module: GraphModule
    backward_module: GraphModule


def partitioned(capture: JointCapture, program: Program, joint: GraphModule, mode: FakeTensorMode) -> Halves:
    """Return the halves of a program made from `capture`, and their signatures as modules."""
    first, second = program.halves
    binding = capture.captured.binding
    primal_of = {r.value.storage: int(r.key) for r in reversed(binding.residents) if r.origin is Origin.INPUT}
    constants = {r.value.storage: r.constant for r in binding.residents if r.origin is Origin.CONSTANT}
    tangent_of = {r.value.storage: int(r.key) for r in reversed(binding.residents) if r.origin is Origin.TANGENT}
    primals_saved = tuple(s for s in second.takes if s in primal_of)
    saved = (*first.saved, *primals_saved)
    forward = _forward(first, primal_of, constants, primals_saved)
    backward = _backward(second, saved, tangent_of, constants)
    bases = _bases(binding)
    placeholders = [node for node in joint.graph.nodes if node.op == "placeholder"]
    tangents = [node for node in placeholders if str(node.target).startswith("tangents")]
    primals = [node for node in placeholders if node not in tangents]
    saved_values = [_fake(bases[storage], mode, binding.device) for storage in saved]
    (outputs,) = next(node for node in joint.graph.nodes if node.op == "output").args
    count = len(capture.forward_outputs)
    return Halves(
        forward=forward,
        backward=backward,
        forward_module=_signature(
            [(node.name, node.meta) for node in primals],
            [*map(_example, outputs[:count]), *saved_values],
        ),
        backward_module=_signature(
            [*((f"saved_{i}", {"val": fake}) for i, fake in enumerate(saved_values))]
            + [(node.name, node.meta) for node in tangents],
            [*map(_example, outputs[count:])],
        ),
    )


def _forward(
    half: Half, primal_of: dict[int, int], constants: dict[int, Any], primals_saved: Sequence[int]
) -> Callable[[list[Any]], list[Any]]:
    def forward(arguments: list[Any]) -> list[Any]:
        kept = [arguments[primal_of[storage]] for storage in primals_saved]
        taken = [constants[s] if s in constants else arguments[primal_of[s]] for s in half.takes]
        arguments.clear()
        return [*half.function(taken), *kept]

    return forward


def _backward(
    half: Half, saved: Sequence[int], tangent_of: dict[int, int], constants: dict[int, Any]
) -> Callable[[list[Any]], list[Any]]:
    place = {storage: number for number, storage in enumerate(saved)}
    place |= {storage: len(saved) + number for storage, number in tangent_of.items()}

    def backward(arguments: list[Any]) -> list[Any]:
        taken = [constants[s] if s in constants else arguments[place[s]] for s in half.takes]
        arguments.clear()
        return half.function(taken)

    return backward


def _bases(binding: Binding) -> dict[int, Value]:
    """The Value under which each storage's tensor is handed over: the first result, or the resident itself."""
    bases: dict[int, Value] = {}
    for resident in binding.residents:
        bases.setdefault(resident.value.storage, resident.value)
    for call in binding.calls:
        for value in call.results:
            if value is not None:
                bases.setdefault(value.storage, value)
    return bases


def _fake(value: Value, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    with mode:
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device)


def _example(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, Node) else node


def _signature(inputs: Sequence[tuple[str, dict[str, Any]]], outputs: Sequence[Any]) -> GraphModule:
    """A module of this signature: AOTAutograd reads its placeholders and its output, and never runs it."""
    graph = Graph()
    placeholders: list[Node] = []
    for name, meta in inputs:
        node = graph.placeholder(name)
        node.meta = dict(meta)
        placeholders.append(node)
    body = graph.call_function(_never_run, tuple(placeholders))
    returned: list[Any] = []
    for number, example in enumerate(outputs):
        if example is None or isinstance(example, (int, float, bool)):
            returned.append(example)
            continue
        item = graph.call_function(operator.getitem, (body, number))
        item.meta["val"] = example
        returned.append(item)
    graph.output(tuple(returned))
    return GraphModule(torch.nn.Module(), graph)


def _never_run(*_arguments: Any) -> Any:
    raise AssertionError("the signature of a half was run in place of the half")
