"""Optimizer's state that is on the host between steps: a rewrite of a captured step, and what it runs.

Each update gets its states by an op that brings them from the host, and followed by ops that bring them back and wait
for that. To a plan these are ordinary ops and storages: a state takes memory from its arrival to the end of its copy
back. On a GPU the copies run beside compute, on streams of their own, and are planned as gathers and sums between ranks
are: states are brought as far ahead of need as the budget has room for.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from memfit.binding import Call, Origin, Value
from memfit.capture import Captured, TrainingStep
from memfit.capture.optimizer import ParameterUpdate, WholeUpdate, alone, is_of_torch
from memfit.capture.training_step import with_groups
from memfit.capture.update_trial import is_update
from memfit.device import Device
from memfit.graph import Graph, Op, Phase, Role
from memfit.memory.host.slab import PinnedTransfer, Transfer, copy_streams
from memfit.memory.kept_on_host import any_kept_on_host, is_kept_on_host, kept_on_host, on_device
from memfit.memory.place import Place, bytes_of
from memfit.system.recorder import empty_cache

LINK = "host"
"""The group of the copies on a GPU: they run beside compute, one after the other."""

SHARES = (0.5, 1.0)
"""Of the optimizer's state, that a plan is tried with on the host."""

_LEAST_SHARE = 1e-3  # of all states: a smaller one stays, since its copies cost more than its bytes are worth


class Kept(NamedTuple):
    """A state that is on the host between steps.

    Attributes:
        parameter: whose state it is.
        name: of the state; None for a parameter whose states are made with the others', and stay on the device.
    """

    parameter: torch.nn.Parameter
    name: str | None


class _Copies:
    """The copies of one update's states, from the host and back; a program never runs twice at the same time."""

    def __init__(self, kept: Sequence[Kept], optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.kept, self.optimizer, self.device = tuple(kept), optimizer, device
        self.under_way: list[Transfer] = []
        self.held: list[torch.Tensor] = []

    def start(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], direction: int) -> None:
        """Start to copy storages; on a CPU they are copied at once.

        Args:
            pairs: (target, source); the whole storage of a source is copied into that of its target.
            direction: 0 to the host, 1 to the device.
        """
        for target, source in pairs:
            to, whole = bytes_of(target), bytes_of(source)
            if self.device.type == "cuda":
                self.under_way.append(PinnedTransfer(copy_streams(self.device)[direction], to, whole))
            else:
                to.copy_(whole)

    def wait(self) -> None:
        """Let compute wait for the copies that were started."""
        for transfer in self.under_way:
            transfer.wait()
        self.under_way.clear()

    def put(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Put tensors into the optimizer's state, and return those that were there."""
        states = [self.optimizer.state[parameter] for parameter, _ in self.kept]
        before = [state[name] for state, (_, name) in zip(states, self.kept, strict=True)]
        for state, (_, name), tensor in zip(states, self.kept, tensors, strict=True):
            state[name] = tensor
        return before


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class BringStates:
    """Returns the states of an update on the device; their copies are under way until the update waits for them."""

    copies: _Copies
    measurable = False
    __name__ = "bring_states"

    def __call__(self) -> Any:
        copies = self.copies
        held = [copies.optimizer.state[parameter][name] for parameter, name in copies.kept]
        made = [Place.of(each).empty(copies.device) for each in held]
        copies.start(zip(made, held, strict=True), 1)
        return made[0] if len(made) == 1 else made


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class UpdateWithStates:
    """Runs an update with its states on the device: `UpdateWithStates(...)(states, *gradients)`."""

    copies: _Copies
    update: ParameterUpdate | WholeUpdate
    measurable = False
    __name__ = "optimizer_update"

    def __call__(self, states: Sequence[torch.Tensor], *gradients: Any) -> None:
        self.copies.wait()
        self.copies.held = self.copies.put(states)
        self.update(*gradients)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ReturnStates:
    """Starts the copies of an update's states to the host."""

    copies: _Copies
    measurable = False
    __name__ = "return_states"

    def __call__(self, states: Sequence[torch.Tensor]) -> None:
        self.copies.start(zip(self.copies.held, states, strict=True), 0)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AwaitStates:
    """Waits for the copies to the host, after which the states on the device may be freed.

    After the last of a step the host waits as well: whoever reads the optimizer's state then finds the values of now.
    """

    copies: _Copies
    is_last: bool
    measurable = False
    __name__ = "await_states"

    def __call__(self, states: Sequence[torch.Tensor]) -> None:  # noqa: ARG002
        self.copies.wait()
        self.copies.put(self.copies.held)
        self.copies.held = []
        if self.is_last and self.copies.device.type == "cuda":
            copy_streams(self.copies.device)[0].synchronize()


def with_states_on_host(
    step: TrainingStep, captured: Captured, device: Device, *, share: float, room_bytes: int
) -> Captured | None:
    """Return a captured step whose optimizer's state is on the host between steps; None if there is nothing to gain.

    Args:
        step: the step.
        captured: its capture, with the seconds of each op.
        device: with a link.
        share: of the state's bytes; the states that are updated last are taken, since those updated first would be on
            the device when most activations are.
        room_bytes: the most bytes on the host.
    """
    optimizer, graph = step.optimizer, captured.graph
    assert optimizer is not None
    parts = _parts(step, captured)
    most_bytes = min(room_bytes, share * sum(graph.storages[s].bytes for part in parts.values() for s in part))
    chosen: dict[int, dict[int, Kept]] = {}
    for op in sorted(parts, reverse=True):
        size_bytes = sum(graph.storages[s].bytes for s in parts[op])
        if size_bytes > most_bytes:
            break
        chosen[op] = parts[op]
        most_bytes -= size_bytes
    if not chosen:
        return None
    kept = {storage for part in chosen.values() for storage in part}
    values = {each.value.storage: each.value for each in captured.binding.residents}
    made: list[tuple[Op, Call]] = []
    for op, call in zip(graph.ops, captured.binding.calls, strict=True):
        if op.id not in chosen:
            made.append((op, call))
            continue
        copies = _Copies(tuple(chosen[op.id].values()), optimizer, captured.binding.device)
        states = [values[storage] for storage in chosen[op.id]]
        made += _around(op, call, copies, states, graph, device, is_last=op.id == max(chosen))
    storages = tuple(
        msgspec.structs.replace(storage, resident=storage.resident and storage.id not in kept)
        for storage in graph.storages
    )
    residents = tuple(each for each in captured.binding.residents if each.value.storage not in kept)
    between_steps = replace(
        captured,
        graph=msgspec.structs.replace(graph, storages=storages),
        binding=replace(captured.binding, residents=residents),
    )
    return between_steps.with_ops(made)


def kept_by(captured: Captured) -> tuple[Kept, ...]:
    """Return the states that a captured step has on the host between its steps."""
    found: list[Kept] = []
    for call in captured.binding.calls:
        if isinstance(call.target, UpdateWithStates):
            found += call.target.copies.kept
            found += [Kept(parameter, None) for parameter in call.target.update.parameters]
    return tuple(found)


def names_of(step: TrainingStep, kept: Iterable[Kept]) -> set[str]:
    """Return what the residents of states are called that are on the host."""
    names = {parameter: name for name, parameter in step.model.named_parameters()}
    return {f"{names[parameter]}.{name}" for parameter, name in kept if name is not None}


def bytes_of_kept(captured: Captured) -> int:
    """Return the bytes on the host of the states that a captured step has there between its steps."""
    graph = captured.graph
    brought = (op for op in graph.ops if op.target == BringStates.__name__)
    return sum(graph.storages[storage].bytes for op in brought for storage in op.writes)


def settle(
    optimizer: torch.optim.Optimizer | None, kept: Sequence[Kept], device: torch.device, directory: Path | None
) -> None:
    """Have these states on the host, and all others of the optimizer on their device, before a step.

    What is missing is made as the optimizer makes it. What the user has replaced, by `load_state_dict`, is moved.

    Args:
        optimizer: the step's.
        kept: what the next step expects on the host.
        device: of the step.
        directory: for the files of a CPU.

    Raises:
        HostMemoryError: the host, or the disk, has no room.
    """
    if optimizer is None or not (kept or any_kept_on_host()):
        return
    wanted: dict[torch.Tensor, set[str | None]] = defaultdict(set)
    for parameter, name in kept:
        wanted[parameter].add(name)
    moved = False
    for number, parameter in with_groups(optimizer):
        names = wanted.get(parameter, ())
        if names and not optimizer.state.get(parameter):
            _make_state(optimizer, number, parameter)
        for name, held in optimizer.state.get(parameter, {}).items():
            if not isinstance(held, torch.Tensor) or is_kept_on_host(held) == (name in names):
                continue
            to_host = name in names
            made = kept_on_host(held, device, directory) if to_host else on_device(held, parameter.device)
            optimizer.state[parameter][name] = made
            moved |= to_host
    if moved:
        empty_cache(device)


def _parts(step: TrainingStep, captured: Captured) -> dict[int, dict[int, Kept]]:
    """Return for each update the states that may be kept on the host, by storage."""
    optimizer, graph = step.optimizer, captured.graph
    assert optimizer is not None
    parameters = dict(step.model.named_parameters())
    found: dict[int, Kept] = {}
    whole_bytes = 0
    makes = _Makes(optimizer)
    for resident in captured.binding.residents:
        storage = graph.storages[resident.value.storage]
        if resident.origin is not Origin.STATE or storage.role is not Role.STATE:
            continue
        whole_bytes += storage.bytes
        parameter_name, _, name = str(resident.key).rpartition(".")
        parameter = parameters.get(parameter_name)
        if parameter is not None and _is_plain(resident.value, storage.bytes) and makes(parameter, name):
            found[storage.id] = Kept(parameter, name)
    users: dict[int, list[Op]] = defaultdict(list)
    for op in graph.ops:
        for storage in {*op.reads, *op.mutates} & found.keys():
            users[storage].append(op)
    parts: dict[int, dict[int, Kept]] = defaultdict(dict)
    for storage, kept in found.items():
        (op, *others) = users.get(storage) or [None]
        is_large = graph.storages[storage].bytes >= _LEAST_SHARE * whole_bytes
        if op is not None and not others and is_large and is_update(captured.binding.calls[op.id]):
            parts[op.id][storage] = kept
    return parts


def _is_plain(value: Value, size_bytes: int) -> bool:
    return value.offset == 0 and value.reach_bytes == size_bytes > 0 and not value.conjugated and not value.negated


class _Makes:
    """Says whether a state is there, or the optimizer can make it before it is first needed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = {parameter: number for number, parameter in with_groups(optimizer)}
        self._made: dict[int, set[str]] = {}

    def __call__(self, parameter: torch.nn.Parameter, name: str) -> bool:
        number = self._groups[parameter]
        if state := self._optimizer.state.get(parameter):
            return name in state
        if number not in self._made:
            self._made[number] = set(_tried(self._optimizer, number))
        return name in self._made[number]


def _tried(optimizer: torch.optim.Optimizer, number: int) -> Mapping[str, Any]:
    """Return the states that the optimizer makes before its first update of a parameter of a group."""
    if not (is_of_torch(optimizer) and hasattr(optimizer, "_init_group")):
        return {}
    trial = alone(optimizer)
    trial.state = defaultdict(dict)
    parameter = torch.nn.Parameter(torch.zeros(1, device=optimizer.param_groups[number]["params"][0].device))
    trial.param_groups = [{**group} for group in optimizer.param_groups]
    _init(trial, number, parameter)
    return trial.state[parameter]


def _make_state(optimizer: torch.optim.Optimizer, number: int, parameter: torch.nn.Parameter) -> None:
    mine = alone(optimizer)
    mine.state = optimizer.state
    mine.param_groups = [{**group} for group in optimizer.param_groups]
    _init(mine, number, parameter)


def _init(optimizer: Any, number: int, parameter: torch.nn.Parameter) -> None:
    """Let an optimizer of torch make the state of a parameter, as it does when it is about to update it first."""
    before = parameter.grad
    parameter.grad = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
    try:
        lists = [[] for each in list(inspect.signature(optimizer._init_group).parameters)[1:]]
        with torch.no_grad():
            optimizer._init_group({**optimizer.param_groups[number], "params": [parameter]}, *lists)
    finally:
        parameter.grad = before


def _around(
    op: Op,
    call: Call,
    copies: _Copies,
    states: Sequence[Value],
    graph: Graph,
    device: Device,
    *,
    is_last: bool,
) -> list[tuple[Op, Call]]:
    """Return an update's ops and calls: its states come, it runs, they go back, and that is waited for."""
    numbers = tuple(value.storage for value in states)
    size_bytes = sum(graph.storages[storage].bytes for storage in numbers)
    group = LINK if copies.device.type == "cuda" else None
    latency = device.copy_latency_seconds * len(numbers)

    def made(target: Any, seconds: float, **facts: Any) -> Op:
        name = f"{target.__name__}_{op.name.rpartition('_')[2]}"
        return Op(
            id=0, name=name, target=target.__name__, phase=Phase.UPDATE, module=op.module, seconds=seconds, **facts
        )

    def called(target: Any, *, args: tuple[Any, ...] = (), results: tuple[Value, ...] = ()) -> Call:
        return Call(op=0, target=target, args=args, results=results)

    bring, give, end = BringStates(copies), ReturnStates(copies), AwaitStates(copies, is_last)
    coming = latency + size_bytes / (device.to_device_bytes_per_second or 1)
    going = latency + size_bytes / (device.to_host_bytes_per_second or 1)
    given = list(states)
    return [
        (made(bring, coming, reads=(), writes=numbers, group=group), called(bring, results=tuple(states))),
        (op, replace(call, target=UpdateWithStates(copies, call.target), args=(given, *call.args))),
        (made(give, going, reads=(), writes=(), mutates=numbers, group=group), called(give, args=(given,))),
        (made(end, 0.0, reads=numbers, writes=(), recomputable=False), called(end, args=(given,))),
    ]
