"""Step programs: a captured step's program, where its arguments are found, and the gradients that it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.binding import Origin, Resident
from memfit.capture import Captured, Guards, TrainingStep
from memfit.capture.training_step import parameters_of
from memfit.cost.warming import warm
from memfit.errors import InvalidOptionError
from memfit.memory.arena.places import Places
from memfit.memory.footprint import footprint
from memfit.memory.host.store import HostStore
from memfit.memory.in_arena import InArena
from memfit.memory.place import at_offset_zero, span_bytes
from memfit.memory.placed_plans import allocator_settings, taken_bytes, unused_bytes_on
from memfit.plan import Plan
from memfit.planning import Settings
from memfit.step.host_states import Kept, bytes_of_kept, kept_by, names_of
from memfit.step.prepare import ANEW, Planning, Prepared, prepare
from memfit.system.recorder import taken_bytes as device_bytes
from memfit.torch_private.sharding import is_sharded, local_gradient, whole_part, with_local
from memfit.torch_private.tensors import storage_key, storage_users, tree_flatten

Fetch = Callable[[Sequence[Any]], Any]
"""Given the leaves of a batch, returns one argument of a program."""

_GRADIENT = "grad:"
_GRAPH_POOL_BYTES = 2 << 20  # a CUDA graph's own results, which are small, take one segment of torch's allocator


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgram:
    """A program for one signature of a step's calls.

    Attributes:
        prepared: the captured step, its plan and the compiled program.
        fetchers: for each argument of the program, the function that finds its tensor.
        written: by position, the names of the arguments among them that the step writes to, but for its batch.
        written_batch: those of the batch among them.
        names: of all arguments.
        library_bytes: that libraries keep on a GPU for the program's ops, from step to step.
        places: of the plan's requests in an arena; None without one.
        predicted_bytes: that the plan takes as it is placed.
        kept: the optimizer's states that are on the host between steps.
    """

    prepared: Prepared
    fetchers: tuple[Fetch, ...]
    written: Mapping[int, str]
    written_batch: tuple[int, ...]
    names: tuple[str, ...]
    library_bytes: int = 0
    places: Places | None = None
    predicted_bytes: int = 0
    kept: tuple[Kept, ...] = ()

    def first_places(self) -> Places | None:
        """Return the places for a step that makes the optimizer's state, which is ordinary memory."""
        if self.places is None:
            return None
        arena = InArena(self.prepared.captured.binding.device, self.plan.seed)
        return arena.first_places(self.prepared.captured, self.plan)

    @property
    def plan(self) -> Plan:
        """The plan that the program carries out."""
        return self.prepared.plan

    @property
    def peak_bytes(self) -> int:
        """The bytes that a step is predicted to take."""
        return max(self.plan.predicted.peak_bytes, self.predicted_bytes)

    def run(self, batch: Any) -> dict[str, torch.Tensor]:
        """Run all ops of the step on `batch`; return its outputs by name (see `memfit.binding.Binding`).

        Raises:
            InvalidOptionError: as `arguments`.
        """
        (half,) = self.prepared.program.halves
        outputs = half.function(self.arguments(batch))
        return dict(zip(self.prepared.captured.binding.outputs, outputs, strict=True))

    def arguments(self, batch: Any) -> list[torch.Tensor]:
        """Return the program's arguments.

        Raises:
            InvalidOptionError: a tensor of the batch shares memory with a tensor that the step writes to, or is one
                that the step writes to, and shares memory with another.
        """
        leaves = tree_flatten(batch)[0]
        arguments = [fetch(leaves) for fetch in self.fetchers]
        self._require_apart(leaves, arguments)
        for position in self.written_batch:
            self._require_alone(position, arguments)
        return arguments

    def _require_alone(self, position: int, arguments: Sequence[torch.Tensor]) -> None:
        """Refuse a tensor of the batch that is written to, and on whose memory another is, which has its own place."""
        start, end = _addresses(arguments[position])
        for other, argument in enumerate(arguments):
            if other != position and argument.layout is torch.strided:
                begin, stop = _addresses(argument)
                if begin < end and start < stop:
                    raise InvalidOptionError(
                        f"{self.names[position]!r}, which the step writes to, shares memory with "
                        f"{self.names[other]!r}: give a clone of it"
                    )

    def _require_apart(self, leaves: Sequence[Any], arguments: Sequence[torch.Tensor]) -> None:
        """Refuse a batch on the memory of a parameter, say, which would be updated before its last use in backward."""
        shared = {storage_key(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and _has_others(leaf)}
        if not shared:
            return
        for position, name in self.written.items():
            if storage_key(arguments[position]) in shared:
                raise InvalidOptionError(
                    f"a tensor of the batch shares memory with {name!r}, which the step writes to: give a clone of it"
                )


def make_step_program(
    step: TrainingStep,
    captured: Captured,
    settings: Settings,
    plan: Plan | None,
    store: HostStore,
    planning: Planning = ANEW,
) -> StepProgram:
    """Plan a captured step, and return its program.

    Args:
        step: what was captured; parameters and buffers of its model are found anew at each step.
        captured: the step.
        settings: the budget, and how a plan is searched.
        plan: made before; None searches one.
        store: for host copies.
        planning: where costs and plan come from.

    Raises:
        HostMemoryError: the host, or the disk, has no room for what the plan offloads.
        InfeasibleBudgetError, TimeLimitError: there is no plan.
        PlanMismatchError: `plan` is for another graph, or another torch.
    """
    kept = kept_by(captured)
    if kept:
        left_bytes = max(0, settings.host_budget_bytes - bytes_of_kept(captured))
        settings = replace(settings, host_budget_bytes=left_bytes, host_dir=settings.host_dir if left_bytes else None)
    device = captured.binding.device
    library_bytes = _library_bytes(captured)
    arena = InArena(device, settings.seed) if settings.arena else None
    prepared = prepare(
        captured,
        settings,
        outputs=[list(captured.binding.outputs.values())],
        plan=plan,
        bytes_outside=bytes_outside(step, captured, settings),
        store=store,
        planning=planning,
        arena=arena,
    )
    places = None if arena is None else arena.places(prepared.captured, prepared.plan)
    (half,) = prepared.program.halves
    written, written_batch = _written(captured, half.takes)
    allocator, unused_bytes = allocator_settings(device), unused_bytes_on(device)
    return StepProgram(
        prepared=prepared,
        fetchers=fetchers(step.model, captured, half.takes),
        written=written,
        written_batch=written_batch,
        names=tuple(captured.graph.storages[each].name for each in half.takes),
        library_bytes=library_bytes,
        places=places,
        predicted_bytes=taken_bytes(prepared.plan, places, allocator, unused_bytes) if places or allocator else 0,
        kept=kept,
    )


def bytes_outside(step: TrainingStep, captured: Captured, settings: Settings) -> int:
    """Return the bytes on the device that a captured step does not touch, and that are there beside it.

    Args:
        step: with the user's model and optimizer.
        captured: of it.
        settings: of the plan; a CUDA graph's own batch and results count, too.
    """
    graph_bytes = _bytes_of_graph(captured) if settings.cuda_graph else 0
    return bytes_of_others(step, captured) + _library_bytes(captured) + graph_bytes


def _library_bytes(captured: Captured) -> int:
    return warm(captured.graph, captured.binding) if captured.binding.device.type == "cuda" else 0


def _bytes_of_graph(captured: Captured) -> int:
    """Return the bytes that a CUDA graph of a step holds beside the step's own: a batch, and its results."""
    device = captured.binding.device
    inputs = {resident.value.storage for resident in captured.binding.residents if resident.origin is Origin.INPUT}
    batch = sum(device_bytes(captured.graph.storages[storage].bytes, device) for storage in inputs)
    return batch + (_GRAPH_POOL_BYTES if device.type == "cuda" else 0)


def _has_others(tensor: torch.Tensor) -> bool:
    """Return whether another tensor may have the memory of a tensor; by its own and the caller's references."""
    return tensor.layout is torch.strided and storage_users(tensor.untyped_storage()) > 2


def _written(captured: Captured, takes: Sequence[int]) -> tuple[dict[int, str], tuple[int, ...]]:
    """Return the positions of a program's arguments that the step writes to: of no batch, by name, and of its batch."""
    written = {storage for op in captured.graph.ops for storage in op.mutates}
    inputs = {each.value.storage for each in captured.binding.residents if each.origin is Origin.INPUT}
    positions = [at for at, each in enumerate(takes) if each in written]
    own = tuple(at for at in positions if takes[at] in inputs)
    return {at: captured.graph.storages[takes[at]].name for at in positions if at not in own}, own


def _addresses(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of the first byte that a tensor uses, and the one after the last."""
    start, end = span_bytes(tensor)
    at = tensor.untyped_storage().data_ptr()
    return at + start, at + end


def adds_to_gradients(captured: Captured) -> bool:
    """Return whether a step finds gradients that it adds to."""
    return any(resident.origin is Origin.GRADIENT for resident in captured.binding.residents)


def bytes_of_others(step: TrainingStep, captured: Captured) -> int:
    """Return the bytes on the step's device that the optimizer or a wrapper holds and the captured step does not touch.

    These are buckets of a wrapper, the states of parameters that are frozen or in no group any more, and parameters
    with their states that are no longer the model's, because a layer was replaced.

    Args:
        step: the training step.
        captured: its capture.
    """
    kept_bytes = 0 if step.across is None else step.across.kept_bytes
    if step.optimizer is None:
        return kept_bytes
    names = {parameter: name for name, parameter in step.model.named_parameters()}
    touched = {resident.key for resident in captured.binding.residents if resident.origin is Origin.STATE}
    touched |= names_of(step, kept_by(captured))
    held: list[Any] = []
    # A group that was removed leaves its states.
    for parameter in dict.fromkeys([*parameters_of(step.optimizer), *step.optimizer.state]):
        name = names.get(parameter)
        state = step.optimizer.state.get(parameter, {})
        held += [parameter] if name is None else []
        held += [value for key, value in state.items() if name is None or f"{name}.{key}" not in touched]
    device = captured.binding.device
    own = footprint(names, device)
    return kept_bytes + sum(size for pointer, size in footprint(held, device).items() if pointer not in own)


def set_gradients(outputs: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Set `.grad` of each parameter that has none. A gradient that was there before the step was added to in place.

    Args:
        outputs: returned by the program; the gradients among them are set.
        parameters: the model's, by name.
    """
    for name, gradient in outputs.items():
        parameter = parameters[name.removeprefix(_GRADIENT)] if name.startswith(_GRADIENT) else None
        if parameter is not None and parameter.grad is None:
            parameter.grad = with_local(parameter, gradient.data)  # no view, as eager's is none


def fetchers(model: torch.nn.Module, captured: Captured, takes: Sequence[int]) -> tuple[Fetch, ...]:
    """Return a function for each storage that a program takes.

    Parameters, buffers and the tensors that guards hold are found anew at every step: load_state_dict, `.to` and user
    code may replace them.

    Args:
        model: the model whose parameters and buffers are residents.
        captured: says where each resident storage was found.
        takes: the storages of the program's arguments, in order.
    """
    first = {resident.value.storage: resident for resident in reversed(captured.binding.residents)}
    return tuple(_fetcher(model, first[storage], captured.guards) for storage in takes)


def _fetcher(model: torch.nn.Module, resident: Resident, guards: Guards | None) -> Fetch:
    if resident.origin is Origin.CONSTANT:
        constant = resident.constant
        position = guards.tensors.number_of(constant) if guards is not None else None
        if guards is None or position is None:
            return lambda _leaves: constant
        guarded = guards.tensors.now
        return lambda _leaves: guarded[position]
    if resident.origin is Origin.INPUT:
        number = int(resident.key)
        return lambda leaves: at_offset_zero(leaves[number])
    module_name, _, name = str(resident.key).rpartition(".")
    module = model.get_submodule(module_name)
    table = module._buffers if resident.origin is Origin.BUFFER else module._parameters
    if resident.origin is Origin.GRADIENT:
        return lambda _leaves: local_gradient(table[name])  # pyright: ignore[reportArgumentType]
    assert resident.origin in (Origin.PARAMETER, Origin.BUFFER), resident
    if is_sharded(table[name]):
        return lambda _leaves: whole_part(table[name])
    return lambda _leaves: table[name]
