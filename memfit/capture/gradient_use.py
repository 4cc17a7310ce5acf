"""What a captured step does with its gradients: it updates parameters, averages over ranks, or returns them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from memfit.binding import Origin, Value, values_in
from memfit.capture.data_parallel import DataParallel
from memfit.capture.fully_sharded import FullySharded
from memfit.capture.optimizer import (
    ParameterUpdate,
    UpdateCosts,
    WholeUpdate,
    is_of_torch,
    overlap,
    updates_many_at_once,
    updates_one_by_one,
)
from memfit.capture.reductions import Reductions
from memfit.capture.shard_reductions import ShardReductions
from memfit.capture.shards import Shards
from memfit.capture.trace import Trace
from memfit.capture.traced import TracedCall
from memfit.capture.training_step import TrainingStep, with_groups
from memfit.graph import Phase, Role
from memfit.torch_private.tensors import FakeTensorMode, storage_key

_UPDATE = "optimizer_update"  # the name of its calls
_BATCH_SHARE = 0.08  # of the bytes of all gradients: those that wait to be used together


class _Update(NamedTuple):
    """How the optimizer updates a parameter: by its group's number, with the storages of its state."""

    parameter: torch.nn.Parameter
    group: int
    states: tuple[int, ...]
    workspace_bytes: int


class GradientUse:
    """The use of all gradients of one step.

    Args:
        step: that is captured.
        trace: of its calls.
        mode: of the fakes.
        names: of the model's parameters.
        fakes: of parameters, filled before anything is entered.
        shards: of a sharded model; the optimizer updates its parts.
    """

    def __init__(
        self,
        step: TrainingStep,
        trace: Trace,
        *,
        mode: FakeTensorMode,
        names: Mapping[torch.Tensor, str],
        fakes: Mapping[torch.Tensor, torch.Tensor],
        shards: Shards | None = None,
    ) -> None:
        self._step, self._trace, self._mode = step, trace, mode
        self._names, self._fakes = names, fakes
        self._updated: set[torch.Tensor] = set()
        self._memory: dict[torch.Tensor, int] = {}  # of each fake, as it was before the step
        self._updates: dict[torch.Tensor, _Update] = {}  # by the parameter's fake
        self._ready: dict[int, dict[torch.Tensor, _Update]] = {}  # by group: those whose gradients wait for an update
        self._parts = {} if shards is None else shards.parts
        self._reductions = _reductions(step, trace, mode, shards)

    def enter_states(self) -> None:
        """Enter the optimizer's state as residents, and find out how it updates each parameter."""
        self._memory = {fake: storage_key(fake) for fake in self._fakes.values()}
        optimizer = self._step.optimizer
        if optimizer is None:
            return
        costs = UpdateCosts(optimizer, self._mode)
        for number, parameter in with_groups(optimizer):
            if not parameter.requires_grad or parameter not in self._fakes:
                continue
            fake = self._fakes[parameter]
            cost = costs.of(parameter, self._updated_tensor(fake), number)
            states: list[int] = []
            for key, tensor in cost.state.items():
                name = f"{self._names[parameter]}.{key}"
                value = self._trace.add_resident(
                    tensor, role=Role.STATE, origin=Origin.STATE, key=name, name=f"optimizer:{name}"
                )
                states.append(value.storage)
            self._updates[fake] = _Update(parameter, number, tuple(states), cost.workspace_bytes)

    def hooks(self) -> list[Any]:
        """Register what uses a gradient as soon as it is there, and return the hooks' handles."""
        reductions = self._reductions
        reduced = (
            {} if reductions is None else {p: n for p, n in self._names.items() if reductions.takes(self._fakes[p])}
        )
        hooks = [
            self._fakes[parameter].register_post_accumulate_grad_hook(partial(reductions.add, name))
            for parameter, name in reduced.items()
            if parameter.requires_grad and reductions is not None
        ]
        own = [fake for fake, update in self._updates.items() if update.parameter not in reduced]
        if own and self._is_at_once():
            hooks += [fake.register_post_accumulate_grad_hook(self._update_when_ready) for fake in own]
        return hooks

    def enter_waiting(self) -> None:
        """Enter the updates whose gradients wait for others at the end of backward."""
        for number in tuple(self._ready):
            self._update_ready(number)

    def collect(self, outputs: dict[str, Value]) -> None:
        """Enter one update of all gradients that are left in `.grad`, or make them outputs for the user.

        Args:
            outputs: of the step; gradients are added.
        """
        averaged = self._reduce()
        waiting = [fake for fake in self._updates if fake.grad is not None]
        if waiting and self._step.optimizer is not None:
            gradients = tuple(
                averaged.get(fake) or self._trace.gradient(fake.grad) for fake in waiting if fake.grad is not None
            )
            own = tuple(self._updates[fake] for fake in waiting)
            # torch's optimizers may update many parameters at once, others are assumed to loop over them
            join = sum if is_of_torch(self._step.optimizer) else max
            workspace = join(update.workspace_bytes for update in own)
            target = WholeUpdate(self._step, [update.parameter for update in own], workspace)
            self._trace.calls.append(self._update_call(target, gradients, tuple(waiting), own))
        self._forget_states_never_made()
        for parameter, name in self._names.items():
            fake = self._fakes[parameter]
            if fake.grad is not None and fake not in self._updates:
                value = outputs[f"grad:{name}"] = averaged.get(fake) or self._trace.value(fake.grad)
                self._trace.storages[value.storage].role = Role.GRADIENT

    def _is_at_once(self) -> bool:
        is_split = bool(self._updates) and updates_one_by_one(self._step) and not overlap(tuple(self._updates))
        return is_split and not any(map(self._has_other_memory, self._updates))  # whose values are written at the end

    def _has_other_memory(self, fake: torch.Tensor) -> bool:
        """Return whether the step gave a parameter of the optimizer other memory, by `parameter.data = ...`."""
        return storage_key(fake) != self._memory[fake]

    def is_updated_early(self, fake: torch.Tensor) -> bool:
        """Return whether the update of a parameter was entered during backward, or may be moved there."""
        return fake in self._updated or (fake in self._updates and self._reductions is not None)

    def _updated_tensor(self, fake: torch.Tensor) -> torch.Tensor:
        """Return the fake of what the optimizer updates: of a sharded parameter this rank's part."""
        return self._parts.get(fake, fake)

    def _update_when_ready(self, fake: torch.Tensor) -> None:
        """Enter the update of a parameter whose gradient is there, with others of its group if that takes less time.

        The gradients of a batch wait for one another, and take memory meanwhile: a twelfth of all gradients at most.
        """
        assert self._step.optimizer is not None
        number = self._updates[fake].group
        ready = self._ready.setdefault(number, {})
        ready[fake] = self._updates[fake]
        is_batched = updates_many_at_once(self._step.optimizer.param_groups[number], fake.device)
        if not is_batched or _bytes_of(ready) > _BATCH_SHARE * _bytes_of(self._updates):
            self._update_ready(number)

    def _update_ready(self, number: int) -> None:
        """Enter one update of all parameters of a group whose gradients wait."""
        assert self._step.optimizer is not None
        ready = self._ready.pop(number, {})
        gradients = tuple(self._trace.gradient(fake.grad) for fake in ready if fake.grad is not None)
        workspace_bytes = sum(update.workspace_bytes for update in ready.values())
        parameters = [update.parameter for update in ready.values()]
        target = ParameterUpdate(self._step.optimizer, parameters, number, workspace_bytes)
        self._trace.calls.append(self._update_call(target, gradients, tuple(ready), tuple(ready.values())))
        self._updated.update(ready)
        for fake in ready:
            fake.grad = None

    def _reduce(self) -> dict[torch.Tensor, Value]:
        """Enter the calls that average gradients over ranks, with the updates of parameters that need no others."""
        if self._reductions is None:
            return {}
        is_at_once = self._is_at_once()

        def update(fake: torch.Tensor, gradient: Value) -> TracedCall | None:
            return self._one_update(fake, gradient) if is_at_once and fake in self._updates else None

        return self._reductions.enter(update, is_at_once=is_at_once)

    def _one_update(self, fake: torch.Tensor, gradient: Value | tuple[Value, Value]) -> TracedCall:
        assert self._step.optimizer is not None
        update = self._updates[fake]
        target = ParameterUpdate(self._step.optimizer, [update.parameter], update.group, update.workspace_bytes)
        return self._update_call(target, (gradient,), (fake,), (update,))

    def _update_call(
        self,
        target: Any,
        gradients: tuple[Value | tuple[Value, Value], ...],
        fakes: tuple[torch.Tensor, ...],
        updates: tuple[_Update, ...],
    ) -> TracedCall:
        parameters = [self._trace.value(self._updated_tensor(fake)).storage for fake in fakes]
        states = [storage for update in updates for storage in update.states]
        names = {self._names[update.parameter].rpartition(".")[0] for update in updates}
        read = dict.fromkeys(value.storage for value in values_in(gradients))
        resident = {storage for storage in read if self._trace.storages[storage].resident}
        return TracedCall(
            name=_UPDATE,
            target=target,
            args=gradients,
            reads=tuple(storage for storage in read if storage not in resident),
            mutates=tuple(dict.fromkeys([*parameters, *states, *resident])),
            phase=Phase.UPDATE,
            module=names.pop() if len(names) == 1 else "",
            workspace_bytes=target.workspace_bytes,
        )

    def _forget_states_never_made(self) -> None:
        """Leave out the states of parameters that get no gradient, unless the optimizer has made them before."""
        trace, optimizer = self._trace, self._step.optimizer
        made = {storage for call in trace.calls if call.name == _UPDATE for storage in call.mutates}
        for update in self._updates.values():
            assert optimizer is not None
            if made.isdisjoint(update.states) and not optimizer.state.get(update.parameter):
                for storage in update.states:
                    trace.storages[storage].resident = False
        trace.residents[:] = [r for r in trace.residents if trace.storages[r.value.storage].resident]


def _reductions(
    step: TrainingStep, trace: Trace, mode: FakeTensorMode, shards: Shards | None
) -> Reductions | ShardReductions | None:
    across = step.across if step.across is not None and step.across.reduces else None
    if isinstance(across, FullySharded):
        assert shards is not None
        return ShardReductions(trace, mode, across, shards)
    if across is None:
        return None
    assert isinstance(across, DataParallel)
    return Reductions(trace, mode, across)


def _bytes_of(fakes: Iterable[torch.Tensor]) -> int:
    return sum(fake.nbytes for fake in fakes)
