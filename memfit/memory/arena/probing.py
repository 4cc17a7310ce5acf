"""The orders of a step's ops, each seen by running the op once by itself while the arena records it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import torch

from memfit.binding import Binding, Call
from memfit.capture.optimizer import ParameterUpdate, WholeUpdate, alone, has_room, is_tried, trial_of
from memfit.capture.training_step import clip_and_step
from memfit.cost.observations import call_key
from memfit.cost.op_inputs import InputMaker
from memfit.cost.single_op import Measurer, uncollected, undisturbed
from memfit.graph import Graph, Op
from memfit.memory.arena.layout import Recording
from memfit.memory.arena.library import ArenaLibrary
from memfit.memory.arena.orders import ELSEWHERE, SPARE, Order, arranged
from memfit.torch_private.modules import no_hooks_on_all_optimizers
from memfit.torch_private.tensors import tree_flatten

Orders = Mapping[int, Order]
"""Op -> the order of its requests, where it is known and needed."""

_seen: dict[tuple[torch.device, str], Order] = {}  # by call; results are positions among the call's


def orders_of(graph: Graph, binding: Binding, library: ArenaLibrary, alignment_bytes: int) -> dict[int, Order]:
    """Return the order of each op that takes workspace, or has two results of one size.

    Ops that refuse made inputs, or that have no room, are left out. Equal ops are run once in a process.

    Args:
        graph: a captured graph with its costs.
        binding: its calls, on a device at hand.
        library: of the arena on that device; no step of it runs.
        alignment_bytes: of its addresses.
    """
    orders: dict[int, Order] = {}
    device: torch.device = binding.device
    measurer = Measurer(graph=graph, device=device, inputs=InputMaker(device), clock=lambda: 0.0, most_runs=1)
    for op, call in zip(graph.ops, binding.calls, strict=True):
        if not _needs_order(graph, op, alignment_bytes):
            continue
        key = call_key(call)
        order = _seen.get((device, key or ""))
        if order is None:
            order = _probed(measurer, op, call, library, alignment_bytes)
        if order is not None and key is not None:
            _seen[device, key] = order
        if order is not None:
            storages = [SPARE if value is None else value.storage for value in call.results]
            orders[op.id] = replace(order, results=tuple(at if at < 0 else storages[at] for at in order.results))
    return orders


def with_arena_workspaces(graph: Graph, orders: Orders, alignment_bytes: int) -> Graph:
    """Return a graph whose ops have as much workspace as the places of their requests take.

    Args:
        graph: with its costs.
        orders: of its ops.
        alignment_bytes: of the arena's addresses.
    """
    ops = list(graph.ops)
    for number, order in orders.items():
        op, storages = graph.ops[number], graph.storages
        rooms = {s: -(-storages[s].bytes // alignment_bytes) * alignment_bytes for s in op.writes}
        inside = {storage: room for storage, room in rooms.items() if not storages[storage].required_at_end}
        needed_bytes = max(op.workspace_bytes or 0, arranged(order, inside, rooms)[1])
        ops[number] = msgspec.structs.replace(op, workspace_bytes=needed_bytes)
    return msgspec.structs.replace(graph, ops=tuple(ops))


def orders_of_first_updates(
    graph: Graph, binding: Binding, library: ArenaLibrary, alignment_bytes: int
) -> tuple[dict[int, Order], list[int]]:
    """Return the orders of updates that make the optimizer's state, as far as they are known, and all such updates.

    The state outlives the step, and must not lie among what is laid out anew later. The arguments are those of
    `orders_of`.
    """
    orders: dict[int, Order] = {}
    making: list[int] = []
    for op, call in zip(graph.ops, binding.calls, strict=True):
        target = call.target
        if not isinstance(target, ParameterUpdate | WholeUpdate):
            continue
        if all(target.optimizer.state.get(parameter) for parameter in target.parameters):
            continue
        making.append(op.id)
        if is_tried(target.optimizer) and has_room(target.optimizer, target.parameters):
            orders[op.id] = _first_update(target, binding.device, library, alignment_bytes)
    return orders, making


def _needs_order(graph: Graph, op: Op, alignment_bytes: int) -> bool:
    """Return whether bytes alone may not tell the places of an op's requests."""
    results = [-(-graph.storages[storage].bytes // alignment_bytes) for storage in op.writes]
    return bool(results) and (bool(op.workspace_bytes) or len(set(results)) < len(results))


def _probed(measurer: Measurer, op: Op, call: Call, library: ArenaLibrary, alignment_bytes: int) -> Order | None:
    """Run an op on made inputs; return its order, or None if it cannot be run so."""
    if not getattr(call.target, "measurable", True) or not measurer.has_room(op, call):
        return None
    numbers: list[int] = []
    with undisturbed(measurer.device), uncollected():
        try:
            args, kwargs = measurer.inputs.make(call, measurer.graph.storages)

            def run() -> Any:
                returned = call.target(*args, **kwargs)
                for leaf in tree_flatten(returned)[0]:
                    is_tensor = isinstance(leaf, torch.Tensor)
                    numbers.append(library.number(leaf.untyped_storage().data_ptr()) if is_tensor else -1)
                return returned

            recording = _recorded(library, run)
        except (RuntimeError, ValueError, IndexError):
            return None
    if len(numbers) != len(call.results):
        return None
    result_of = {number: position for position, number in reversed(list(enumerate(numbers))) if number >= 0}
    stays: list[int] = recording.outlives.tolist()
    results = [result_of.get(n, ELSEWHERE if outlives else SPARE) for n, outlives in enumerate(stays)]
    return _order(recording, results, alignment_bytes)


def _first_update(
    target: ParameterUpdate | WholeUpdate, device: torch.device, library: ArenaLibrary, alignment_bytes: int
) -> Order:
    """Update copies; what is still there afterwards is the optimizer's state."""
    optimizer, clip_norm = target.optimizer, None
    if isinstance(target, WholeUpdate):
        clip_norm = target.step.clip_norm
    else:  # the copies are updated in the order of its parameters, too
        optimizer = alone(optimizer)
        optimizer.param_groups = [{**optimizer.param_groups[target.group], "params": list(target.parameters)}]
    trial = trial_of(optimizer, target.parameters)
    with undisturbed(device), uncollected(), no_hooks_on_all_optimizers():
        recording = _recorded(library, lambda: clip_and_step(trial, clip_norm, None))
    results = [ELSEWHERE if outlives else SPARE for outlives in recording.outlives.tolist()]
    return _order(recording, results, alignment_bytes)


def _recorded(library: ArenaLibrary, run: Callable[[], Any]) -> Recording:
    """Return the requests of a call, whose result is kept until the recording ends."""
    handle = library.create()
    returned: Any = None
    try:
        library.begin_step(handle, None)
        try:
            returned = run()
        finally:
            _, requests = library.end_step(handle)
        del returned
        return library.seen(handle, requests)
    finally:
        library.destroy(handle)


def _order(recording: Recording, results: list[int], alignment_bytes: int) -> Order:
    count = len(results)
    sizes = -(-recording.sizes_bytes // alignment_bytes) * alignment_bytes
    ends: list[int] = recording.ends.tolist()
    return Order(
        sizes_bytes=tuple(sizes.tolist()),
        starts=tuple(range(count)),
        ends=tuple(end if end >= 0 else count + 1 for end in ends),
        results=tuple(results),
    )
