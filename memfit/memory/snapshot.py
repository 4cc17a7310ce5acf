"""What a step, or a call of a block, may change: copied, compared, and put back, so that running it leaves no trace."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.capture import TrainingStep
from memfit.capture.copies import MISSING
from memfit.capture.draws import HostGenerators
from memfit.capture.generators import all_states, set_states
from memfit.capture.model_tables import Tables, put_tables_back, tables_now
from memfit.capture.reads import Reads
from memfit.capture.training_step import parameters_of
from memfit.errors import UnsupportedStepError
from memfit.memory.bits import same_bits, same_value
from memfit.memory.python_places import PythonPlace, of_generator, places_of
from memfit.torch_private.sharding import is_sharded, local, local_gradient, with_local
from memfit.torch_private.tensors import is_freed, is_plain_dense, storage_key, tree_flatten

_MOST_COPIED_BYTES = 1 << 28  # of tensors that are neither the model's nor the optimizer's


class Snapshot:
    """What places hold, copied to be put back.

    Args:
        places: whose contents are copied now.

    Attributes:
        held: each place, with what it held.
    """

    def __init__(self, places: Iterable[PythonPlace]) -> None:
        self.held: list[tuple[PythonPlace, Any]] = []
        self.add(places)

    def add(self, places: Iterable[PythonPlace]) -> None:
        """Copy what more places hold."""
        self.held += [(place, place.read()) for place in places]

    def changed(self) -> list[PythonPlace]:
        """Return the places that hold something else now."""
        return [place for place, held in self.held if not place.is_same(held, place.read())]

    def put_back(self) -> None:
        """Let all places hold what they did."""
        self._put_over(place.read() for place, _ in self.held)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Put all places back for the block, and give them their present contents after it."""
        present = Snapshot(place for place, _ in self.held)
        self._put_over(now for _, now in present.held)
        try:
            yield
        finally:
            present.put_back()

    def _put_over(self, present: Iterable[Any]) -> None:
        for (place, held), now in zip(self.held, present, strict=True):
            if not place.is_same(now, held):
                place.write(held)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepState:
    """Copies of the tensors and the random state of a step, in host memory: a GPU may have no room for them.

    Attributes:
        tensors: parameters and buffers, by name, and the leaves of a function's first state, which it may write to.
        gradients: `.grad` of each parameter, by the parameter's name.
        optimizer: the optimizer's state of each parameter, by the parameter's number in the optimizer's groups.
        scaler: the gradient scaler's state, if there is one.
        generators: the state of each device's default random generator, by device.
        handed: the state of each generator that the step's code hands to torch.
        groups: what the optimizer's groups hold besides parameters: a count of steps, or a rate that follows from it.
        devices: where the tensors of `optimizer` were, by the same number and the state's name.
        sharded: which of them are sharded as their parameters; of these, as of parameters and gradients, this rank's
            parts are copied.
        tables: each module's tables of parameters and buffers, with what is in them.
    """

    tensors: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    optimizer: dict[int, dict[str, Any]]
    scaler: dict[str, Any] | None
    generators: dict[str, torch.Tensor]
    handed: tuple[tuple[torch.Generator, torch.Tensor], ...] = ()
    groups: tuple[dict[str, Any], ...] = ()
    devices: dict[tuple[int, str], torch.device] = field(default_factory=dict[tuple[int, str], torch.device])
    sharded: frozenset[tuple[int, str]] = frozenset()
    tables: Tables = ()

    @staticmethod
    def take(step: TrainingStep, handed: Sequence[torch.Generator] = ()) -> StepState:
        """Return copies of the step's state as it is now.

        Args:
            step: the step.
            handed: generators that its code hands to torch.
        """
        states = step.optimizer.state if step.optimizer is not None else {}
        groups = step.optimizer.param_groups if step.optimizer is not None else []
        present = {number: states[each] for number, each in enumerate(parameters_of(step.optimizer)) if each in states}
        values = {(number, key): value for number, state in present.items() for key, value in state.items()}
        gradients = {name: local_gradient(parameter) for name, parameter in step.model.named_parameters()}
        return StepState(
            tensors={name: _on_host(tensor) for name, tensor in _tensors(step).items()},
            gradients={name: None if each is None else _on_host(each) for name, each in gradients.items()},
            optimizer={
                number: {key: _copied(value, "cpu") for key, value in state.items()}
                for number, state in present.items()
            },
            devices={where: value.device for where, value in values.items() if isinstance(value, torch.Tensor)},
            sharded=frozenset(where for where, value in values.items() if is_sharded(value)),
            scaler=copy.deepcopy(step.scaler.state_dict()) if step.scaler is not None else None,
            generators=all_states(),
            handed=tuple((generator, generator.get_state()) for generator in handed),
            groups=tuple({key: _setting(value) for key, value in g.items() if key != "params"} for g in groups),
            tables=tables_now(step.model),
        )

    def put_back(self, step: TrainingStep) -> None:
        """Write the copies back into the step's own tensors; what the step has made goes."""
        put_tables_back(self.tables)
        with torch.no_grad():
            for name, tensor in _tensors(step).items():
                _write(tensor, self.tensors[name])
        for name, parameter in step.model.named_parameters():
            gradient = self.gradients[name]
            parameter.grad = None if gradient is None else with_local(parameter, _on(gradient, parameter.device))
        if step.optimizer is not None:
            present = dict(step.optimizer.state)
            step.optimizer.state.clear()
            parameters = parameters_of(step.optimizer)
            for number, state in self.optimizer.items():
                parameter = parameters[number]
                held = present.get(parameter, {})
                devices = {key: self.devices.get((number, key)) for key in state}
                copies = {key: _put_into(held.get(key), value, devices[key]) for key, value in state.items()}
                step.optimizer.state[parameter] = {
                    key: with_local(parameter, value) if (number, key) in self.sharded else value
                    for key, value in copies.items()
                }
            for group, before in zip(step.optimizer.param_groups, self.groups, strict=True):
                _put_back_group(group, before)
        if step.scaler is not None and self.scaler is not None:
            step.scaler.load_state_dict(self.scaler)
        set_states({**self.generators, **dict(self.handed)})

    def first_difference(self, other: StepState) -> str | None:
        """Return the name of the first thing whose bits differ in `other`, or None."""
        devices = self.generators.keys() & other.generators.keys()  # others were not in use yet
        mine, theirs = dict(self._named(devices)), dict(other._named(devices))
        names = {**mine, **theirs}
        return next((n for n in names if not same_value(mine.get(n, MISSING), theirs.get(n, MISSING))), None)

    def _named(self, devices: Set[str]) -> Iterator[tuple[str, Any]]:
        """Yield all that is compared, by what it is called; of the default generators those of some devices."""
        yield from self.tensors.items()
        for name, gradient in self.gradients.items():
            yield f"the gradient of {name}", gradient
        for number, state in sorted(self.optimizer.items()):
            for key, value in state.items():
                yield f"optimizer state {key!r} of parameter {number}", value
        for (number, key), device in self.devices.items():
            yield f"the device of optimizer state {key!r} of parameter {number}", device
        for number, group in enumerate(self.groups):
            for key, value in sorted(group.items()):
                yield f"{key!r} of the optimizer's group {number}", value
        yield "the gradient scaler", self.scaler
        for device in sorted(devices):
            yield f"the state of the random generator of {device}", self.generators[device]
        for number, (_, state) in enumerate(self.handed):
            yield f"the state of generator {number} that the step hands to torch", state


def _write(tensor: torch.Tensor, before: torch.Tensor) -> None:
    """Write what a tensor held before into it; it may have been resized since, as observers of quantization are."""
    if tensor.shape != before.shape:
        tensor.resize_(before.shape)
    tensor.copy_(before)


class _Reached:
    """Tensors that code of the step reaches beside the model's own, copied but for large ones.

    Args:
        step: the step.
        reads: what its code reaches.
    """

    def __init__(self, step: TrainingStep, reads: Reads) -> None:
        own = {storage_key(tensor) for tensor in _tensors(step).values()}
        held = [(path, local(tensor)) for path, tensor in reads.tensors.values()]
        found = [
            (path, tensor)
            for path, tensor in held
            if not (tensor.is_inference() or is_freed(tensor))
            and not (is_plain_dense(tensor) and storage_key(tensor) in own)
        ]
        found.sort(key=lambda each: each[1].numel())
        self._tensors: list[tuple[str, torch.Tensor, int, torch.Tensor | None]] = []
        left_bytes = _MOST_COPIED_BYTES  # a loss may hold a data set
        for path, tensor in found:
            left_bytes -= tensor.numel() * tensor.element_size()
            copied = _on_host(tensor) if left_bytes >= 0 and tensor.layout is torch.strided else None
            self._tensors.append((path, tensor, tensor._version, copied))

    def put_back(self) -> None:
        """Write the copies back into tensors that were written to.

        Raises:
            UnsupportedStepError: there is none of such a tensor.
        """
        lost: list[str] = []
        with torch.no_grad():
            for number, (path, tensor, version, copied) in enumerate(self._tensors):
                is_shared = copied is not None and tensor.device.type == "cpu"  # NumPy may write to it
                if tensor._version == version and not (is_shared and not same_bits(tensor, copied)):
                    continue
                if copied is None:
                    lost.append(path)
                else:
                    _write(tensor, copied)
                    self._tensors[number] = path, tensor, tensor._version, copied
        if lost:
            raise UnsupportedStepError(
                f"the step writes to {lost[0]}, neither a parameter nor a buffer of the model, and too large to be "
                "put back after steps that memfit takes by itself: register it as a buffer, or write to it outside "
                "of the step"
            )


def generators_of(step: TrainingStep) -> tuple[torch.Generator, ...]:
    """Return torch's generators that model, loss and optimizer hold."""
    return tuple(_reads_of(step).generators)


def _reads_of(step: TrainingStep) -> Reads:
    reads = Reads(step)
    if step.optimizer is not None:
        reads.look_at_optimizer(step.optimizer)
    reads.look_everywhere()
    return reads


@contextmanager
def left_as_it_was(step: TrainingStep, handed: Sequence[torch.Generator] = ()) -> Iterator[Callable[[], None]]:
    """Put all that a step changes back at the end of the block, which is given a function that does so at once.

    Args:
        step: the step.
        handed: generators that its code hands to torch.
    """
    reads = _reads_of(step)
    reached = _Reached(step, reads)
    before = StepState.take(step, tuple(dict.fromkeys((*handed, *reads.generators))))
    of_host = map(of_generator, HostGenerators().owners())
    python = Snapshot([*places_of(reads), *of_host])

    def put_back() -> None:
        before.put_back(step)
        python.put_back()
        reads.put_iterators_back()
        reached.put_back()

    _undone[id(step.model)] += 1
    try:
        yield put_back
    finally:
        _undone[id(step.model)] -= 1
        put_back()


_undone: Counter[int] = Counter()  # blocks of `left_as_it_was` that are open, by their models


def is_undone(model: torch.nn.Module) -> bool:
    """Return whether a block of `left_as_it_was` is open, so that copies are on the device, of the step of a model."""
    return _undone[id(model)] > 0


def _put_back_group(group: dict[str, Any], before: dict[str, Any]) -> None:
    """Reset what an optimizer's group holds besides its parameters; a tensor, such as a rate, stays the same object."""
    for key in group.keys() - before.keys() - {"params"}:
        del group[key]
    for key, value in before.items():
        present = group.get(key)
        if same_value(present, value):
            continue
        if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
            present.copy_(value)
        else:
            group[key] = _copied(value)


def _put_into(present: Any, value: Any, device: torch.device | None) -> Any:
    """Return the present tensor with a copied one's values, so that it keeps its address, or else another copy."""
    if _form(present) is None or _form(present) != _form(value) or present.device != device:
        return _copied(value, device)
    with torch.no_grad():
        return present.copy_(value)


def _form(value: Any) -> tuple[Any, ...] | None:
    """Return all but the device and the values of a tensor whose values can be replaced; None for anything else."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_inference():
        return None
    return type(value), value.dtype, value.shape, value.stride()


def _setting(value: Any) -> Any:
    """Return a copy of a group's value, or the value itself if copies of it are not equal to it."""
    copied = _copied(value)
    return copied if same_value(copied, value) else value


def _copied(value: Any, device: torch.device | str | None = None) -> Any:
    """Return a copy; a tensor's is on `device`, or where the tensor is."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    value = local(value)
    return value.detach().clone() if device is None else _on(value, torch.device(device))


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return _on(tensor, torch.device("cpu"))


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on a device; of what is there already a clone, which every kind of tensor has."""
    tensor = tensor.detach()
    return tensor.clone() if tensor.device == device else tensor.to(device)


def _tensors(step: TrainingStep) -> dict[str, torch.Tensor]:
    states = () if step.has_backward else tree_flatten(step.batch[0])[0]
    own = {f"leaf {number} of the state": leaf for number, leaf in enumerate(states)}
    parameters = {name: local(parameter) for name, parameter in step.model.named_parameters()}
    return {**parameters, **dict(step.model.named_buffers()), **own}
