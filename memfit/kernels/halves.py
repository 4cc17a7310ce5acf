"""The two halves of a planned joint graph, in the form that AOTAutograd expects from a partitioner.

AOTAutograd passes all primals to the forward half, and saves the tensors that it returns after its outputs. The
backward half gets those, then the tangents. The storages that are live across the boundary are saved, and the primals
that backward reads, with what names their storages: who gives a parameter another storage between the halves
(`parameter.data = ...`) would get gradients of neither. FSDP2 frees a storage between them, and fills it again.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.fx import Graph, GraphModule, Node

from memfit.binding import Origin, Value
from memfit.capture.joint import JointCapture, arguments_of, outputs_of
from memfit.errors import UnsupportedStepError
from memfit.kernels.absent_gradients import Absent
from memfit.kernels.program import TICKET, Half, Program
from memfit.memory.place import at_offset_zero
from memfit.torch_private.autograd import default_saved_hooks
from memfit.torch_private.tensors import FakeTensorMode, storage_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """Both halves.

    Attributes:
        forward, backward: the boxed functions.
        forward_module, backward_module: modules of their signatures, which AOTAutograd reads and never runs.
    """

    forward: Callable[[list[Any]], list[Any]]
    backward: Callable[[list[Any]], list[Any]]
    forward_module: GraphModule
    backward_module: GraphModule


def partitioned(
    capture: JointCapture,
    program: Program,
    without: Callable[[Absent], Program],
    joint: GraphModule,
    mode: FakeTensorMode,
) -> Halves:
    """Return the halves of a program, and their signatures as modules.

    Args:
        capture: the joint graph.
        program: its two functions.
        without: returns the program where gradients are absent.
        joint: the module that AOTAutograd made.
        mode: the mode of its fakes.
    """
    first, second = program.halves
    binding = capture.captured.binding
    given = [r.value for r in binding.residents if r.origin in (Origin.INPUT, Origin.TANGENT)]
    on_storage = Counter(value.storage for value in given)
    # Captured as if it had a storage of its own: what a call gives may start within a larger one.
    rebased = {value.storage for value in given if value.offset == 0 and on_storage[value.storage] == 1}
    primal_of = {r.value.storage: int(r.key) for r in reversed(binding.residents) if r.origin is Origin.INPUT}
    constants = {r.value.storage: r.constant for r in binding.residents if r.origin is Origin.CONSTANT}
    tangent_of = {r.value.storage: int(r.key) for r in reversed(binding.residents) if r.origin is Origin.TANGENT}
    primals_saved = tuple(s for s in second.takes if s in primal_of)
    saved = (*first.saved, *primals_saved)
    read = {storage for op in capture.captured.graph.ops for storage in op.reads}
    forward = _forward(first, primal_of, constants, primals_saved, rebased, read)

    def half_without(absent: frozenset[int]) -> Half:
        return without(Absent.of(capture.captured.graph, binding, absent)).halves[1] if absent else second

    bases = binding.bases()
    primals, tangents = arguments_of(joint)
    backward = _backward(half_without, saved, len(primals_saved), tangent_of, len(tangents), constants, rebased)
    saved_values = [
        *(_numbers(mode) if s == TICKET else _fake(bases[s], mode, binding.device) for s in saved),
        _numbers(mode, len(primals_saved)),
    ]
    outputs = outputs_of(joint)
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
    half: Half,
    primal_of: dict[int, int],
    constants: dict[int, Any],
    primals_saved: Sequence[int],
    rebased: Collection[int],
    read: Collection[int],
) -> Callable[[list[Any]], list[Any]]:
    take = _taking(half.takes, primal_of, constants, rebased)
    places_kept = [(primal_of[storage], storage in read) for storage in primals_saved]

    def forward(arguments: list[Any]) -> list[Any]:
        # Running statistics are handed to a normalization in training and not read, so that anybody may write to them:
        # `data` has no part in autograd's count of writes.
        kept = [arguments[place] if is_read else arguments[place].data for place, is_read in places_kept]
        taken = take(arguments)
        arguments.clear()
        storages = list(map(storage_key, kept)) if default_saved_hooks() is None else []  # hooks may give copies back
        numbers = torch.from_numpy(np.array(storages, dtype=np.int64))  # no memory of torch's allocators
        return [*half.function(taken), *kept, numbers]

    return forward


def _backward(
    half_without: Callable[[frozenset[int]], Half],
    saved: Sequence[int],
    primals: int,
    tangent_of: dict[int, int],
    tangents: int,
    constants: dict[int, Any],
    rebased: Collection[int],
) -> Callable[[list[Any]], list[Any]]:
    place = {storage: number for number, storage in enumerate(saved)}
    place |= {storage: len(saved) + 1 + number for storage, number in tangent_of.items()}
    left_out = [len(saved) + 1 + number for number in range(tangents) if number not in tangent_of.values()]

    @cache
    def taking(absent: frozenset[int]) -> tuple[Half, Callable[[list[Any]], list[Any]]]:
        half = half_without(absent)
        return half, _taking(half.takes, place, constants, rebased)

    def backward(arguments: list[Any]) -> list[Any]:
        _require_unmoved(arguments[len(saved) - primals : len(saved)], arguments[len(saved)])
        if any(arguments[number] is not None for number in left_out):
            raise UnsupportedStepError(
                "the loss depends on an output of the model beside its scalar one, with whose gradient no plan fits "
                "the budget: raise it, or train under memfit.checkpoint, which holds less"
            )
        half, take = taking(frozenset(storage for storage in tangent_of if arguments[place[storage]] is None))
        taken = take(arguments)
        arguments.clear()
        return half.function(taken)

    return backward


def _taking(
    takes: Sequence[int], place: dict[int, int], constants: dict[int, Any], rebased: Collection[int]
) -> Callable[[list[Any]], list[Any]]:
    """Return what gives a half the storages that it takes, from the arguments in their places and from constants."""
    sources = [(None, constants[storage]) if storage in constants else (place[storage], None) for storage in takes]
    moved = [number for number, storage in enumerate(takes) if storage in rebased]

    def take(arguments: list[Any]) -> list[Any]:
        taken = [constant if place is None else arguments[place] for place, constant in sources]
        for number in moved:
            taken[number] = at_offset_zero(taken[number])
        return taken

    return take


def _fake(value: Value, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    with mode:
        return value.empty(device)


def _numbers(mode: FakeTensorMode, *shape: int) -> torch.Tensor:
    with mode:
        return torch.empty(shape, dtype=torch.int64, device="cpu")


def _require_unmoved(saved: Sequence[torch.Tensor], storages: torch.Tensor) -> None:
    """Refuse a backward pass whose saved primals are on other storages now than forward read, or on freed ones.

    Args:
        saved: the primals.
        storages: that they were on in forward, by `storage_key`; none where hooks of saved tensors were on.

    Raises:
        UnsupportedStepError: gives the shape of the first one.
    """
    for tensor, storage in zip(saved, storages.tolist(), strict=False):
        if storage_key(tensor) != storage or (tensor.numel() and not tensor.untyped_storage().nbytes()):
            raise UnsupportedStepError(
                f"a tensor of shape {list(tensor.shape)} that the compiled forward pass read, such as a parameter, was "
                "given other memory before backward (tensor.data = ..., or a move to another device), so that its "
                "gradients would be neither of the old content nor of the new: call backward first, or write into it "
                "with copy_"
            )


def _example(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, Node) else node


def _signature(inputs: Sequence[tuple[str, dict[str, Any]]], outputs: Sequence[Any]) -> GraphModule:
    """Return a module of this signature: AOTAutograd reads its placeholders and its output, and never runs it."""
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
