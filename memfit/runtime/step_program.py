"""Step programs: a captured step's program, where its arguments are found, and the gradients that it returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfit.binding import Origin, Resident, Value
from memfit.capture import Captured, Guards, TrainingStep
from memfit.cost.views import at_offset_zero
from memfit.cost.warming import warm
from memfit.errors import InvalidOptionError
from memfit.plan import Plan
from memfit.planning import Settings
from memfit.runtime.host.store import HostStore
from memfit.runtime.prepare import ANEW, Planning, Prepared, prepare
from memfit.runtime.program import make_program
from memfit.system.recorder import taken_bytes
from memfit.torch_private.tensors import storage_key, storage_users, tree_flatten

Fetch = Callable[[Sequence[Any]], Any]
"""Given the leaves of a batch, returns one argument of a program."""

_GRADIENT = "grad:"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgram:
    """A program for one signature of a step's calls.

    Attributes:
        prepared: the captured step, its plan and the compiled program.
        fetchers: for each argument of the program, the function that finds its tensor.
        written: by position, the names of the arguments among them that the step writes to, but for its batch.
        library_bytes: that libraries keep on a GPU for the program's ops, from step to step.
    """

    prepared: Prepared
    fetchers: tuple[Fetch, ...]
    written: Mapping[int, str]
    library_bytes: int = 0

    @property
    def plan(self) -> Plan:
        """The plan that the program carries out."""
        return self.prepared.plan

    def op_seconds(self, batch: Any) -> tuple[float, ...]:
        """Run all ops on `batch`, and return the seconds of each op in its place in the step; outputs are dropped.

        An op that is computed several times gets the mean. Only a CPU's ops are timed so: on a GPU they run later.
        """
        captured, plan = self.prepared.captured, self.plan
        totals, counts = [0.0] * len(plan.graph.ops), [0] * len(plan.graph.ops)
        began = 0.0

        def tick(op: int) -> None:
            nonlocal began
            now = time.perf_counter()
            if op >= 0:
                totals[op] += now - began
                counts[op] += 1
            began = now

        outputs = [list(captured.binding.outputs.values())]
        (half,) = make_program(captured, plan.schedule, outputs, tick=tick).halves
        leaves = tree_flatten(batch)[0]
        half.function([fetch(leaves) for fetch in self.fetchers])
        return tuple(total / max(1, count) for total, count in zip(totals, counts, strict=True))

    def run(self, batch: Any) -> dict[str, torch.Tensor]:
        """Run all ops of the step on `batch`; return its outputs by name (see `memfit.binding.Binding`).

        Raises:
            InvalidOptionError: a tensor of the batch shares memory with a tensor that the step writes to.
        """
        leaves = tree_flatten(batch)[0]
        (half,) = self.prepared.program.halves
        arguments = [fetch(leaves) for fetch in self.fetchers]
        self._require_apart(leaves, arguments)
        outputs = half.function(arguments)
        return dict(zip(self.prepared.captured.binding.outputs, outputs, strict=True))

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
    plan: Plan | None = None,
    store: HostStore | None = None,
    planning: Planning = ANEW,
) -> StepProgram:
    """Plan a captured step, and return its program.

    Args:
        step: what was captured; parameters and buffers of its model are found anew at each step.
        captured: the step.
        settings: the budget, and how a plan is searched.
        plan: a plan made before, used instead of searching.
        store: for host copies; one of its own if None.
        planning: where costs and plan come from.

    Raises:
        HostMemoryError: the host, or the disk, has no room for what the plan offloads.
        InfeasibleBudgetError, TimeLimitError: there is no plan.
        PlanMismatchError: `plan` is for another graph, or another torch.
    """
    outputs: list[Value] = list(captured.binding.outputs.values())
    library_bytes = warm(captured.graph, captured.binding) if captured.binding.device.type == "cuda" else 0
    outside = bytes_of_others(step, captured) + library_bytes
    prepared = prepare(
        captured, settings, outputs=[outputs], plan=plan, bytes_outside=outside, store=store, planning=planning
    )
    (half,) = prepared.program.halves
    found = fetchers(step.model, captured, half.takes)
    written = _written(captured, half.takes)
    return StepProgram(prepared=prepared, fetchers=found, written=written, library_bytes=library_bytes)


def _has_others(tensor: torch.Tensor) -> bool:
    """Return whether another tensor may have the memory of a tensor; by its own and the caller's references."""
    return tensor.layout is torch.strided and storage_users(tensor.untyped_storage()) > 2


def _written(captured: Captured, takes: Sequence[int]) -> dict[int, str]:
    """Return the positions and names of a program's arguments that the step writes to, but for its batch."""
    written = {storage for op in captured.graph.ops for storage in op.mutates}
    inputs = {each.value.storage for each in captured.binding.residents if each.origin is Origin.INPUT}
    names = {storage.id: storage.name for storage in captured.graph.storages}
    return {at: names[each] for at, each in enumerate(takes) if each in written - inputs}


def bytes_of_others(step: TrainingStep, captured: Captured) -> int:
    """Return the bytes on the step's device that the optimizer holds and the captured step does not touch.

    These are the states of frozen parameters, which some optimizers make for all, and parameters with their states that
    are no longer the model's, because a layer was replaced.

    Args:
        step: the training step.
        captured: its capture.
    """
    if step.optimizer is None:
        return 0
    names = {parameter: name for name, parameter in step.model.named_parameters()}
    touched = {resident.key for resident in captured.binding.residents if resident.origin is Origin.STATE}
    held: list[Any] = []
    for parameter in (each for group in step.optimizer.param_groups for each in group["params"]):
        name = names.get(parameter)
        state = step.optimizer.state.get(parameter, {})
        held += [parameter] if name is None else []
        held += [value for key, value in state.items() if name is None or f"{name}.{key}" not in touched]
    device = captured.binding.device
    storages = {
        tensor.untyped_storage().data_ptr(): taken_bytes(tensor.untyped_storage().nbytes(), device)
        for tensor in held
        if isinstance(tensor, torch.Tensor) and tensor.device.type == device.type
    }
    own = {parameter.untyped_storage().data_ptr() for parameter in names}
    return sum(size for pointer, size in storages.items() if pointer not in own)


def set_gradients(outputs: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Set `.grad` of each parameter that has none. A gradient that was there before the step was added to in place.

    Args:
        outputs: returned by the program; the gradients among them are set.
        parameters: the model's, by name.
    """
    for name, gradient in outputs.items():
        parameter = parameters[name.removeprefix(_GRADIENT)] if name.startswith(_GRADIENT) else None
        if parameter is not None and parameter.grad is None:
            parameter.grad = gradient.data  # no view, as eager's is none


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
        position = guards.number_of(constant) if guards is not None else None
        if guards is None or position is None:
            return lambda _leaves: constant
        guarded = guards.tensors
        return lambda _leaves: guarded[position]
    if resident.origin is Origin.INPUT:
        number = int(resident.key)
        return lambda leaves: at_offset_zero(leaves[number])
    module_name, _, name = str(resident.key).rpartition(".")
    module = model.get_submodule(module_name)
    table = module._buffers if resident.origin is Origin.BUFFER else module._parameters
    if resident.origin is Origin.GRADIENT:
        return lambda _leaves: table[name].grad  # pyright: ignore[reportOptionalMemberAccess]
    assert resident.origin in (Origin.PARAMETER, Origin.BUFFER), resident
    return lambda _leaves: table[name]
