"""The optimizer's updates, as ops whose targets run the optimizer's own code.

Learning rates, step counts and bias corrections change between steps. They are read where eager reads them and computed
by eager's arithmetic; the graph holds none of them. An optimizer of torch.optim treats its parameters one by one, so
each parameter is updated as soon as its gradient is complete. An update that reads several gradients (clipping by the
global norm, a GradScaler, an unknown optimizer, one with step hooks) is one op at the end.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memfit.capture.live_bytes import LiveBytes
from memfit.capture.training_step import TrainingStep
from memfit.cost.environment import free_bytes
from memfit.cost.single_op import undisturbed
from memfit.errors import UnsupportedStepError
from memfit.memory.kept_on_host import is_kept_on_host, on_device
from memfit.memory.place import Place, span_bytes
from memfit.system.alive import alive_objects
from memfit.torch_private.absent import real_form
from memfit.torch_private.compiled_regions import compiled_as_eager
from memfit.torch_private.modules import bare_step, no_hooks_on_all_optimizers, optimizer_hooks
from memfit.torch_private.sharding import is_sharded, local, with_local
from memfit.torch_private.tensors import (
    DATA_DEPENDENT_ERRORS,
    FakeTensorMode,
    is_fake,
    real_tensors,
    storage_key,
    tensors_in,
)

_GRADIENT = 1e-3  # of each element of a copy
_COPIES = 4  # of the bytes of a parameter and its state: the copy, its gradient, and the update's own tensors

Gradient = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""A gradient, or the indices and the values of a sparse one."""


def _as_tensor(gradient: Gradient, parameter: torch.Tensor) -> torch.Tensor:
    if isinstance(gradient, torch.Tensor):
        return with_local(parameter, gradient)
    return torch.sparse_coo_tensor(*gradient, parameter.shape, check_invariants=False)


@contextmanager
def in_grad(parameters: Sequence[torch.nn.Parameter], gradients: Sequence[Gradient]) -> Iterator[None]:
    """Let parameters have gradients in `.grad` in the block, and none after it."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = _as_tensor(gradient, parameter)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.grad = None


class ParameterUpdate:
    """The update of some parameters of a group: `ParameterUpdate(...)(*gradients)` runs the optimizer's `step` on them.

    An optimizer of torch gives a parameter the same bits whichever others it is updated with.
    """

    measurable = False
    __name__ = "optimizer_update"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.nn.Parameter],
        group: int,
        workspace_bytes: int,
    ) -> None:
        self.optimizer = optimizer
        self.group = group
        self.parameters = tuple(parameters)
        self.workspace_bytes = workspace_bytes
        self._alone = alone(optimizer)

    def __call__(self, *gradients: Gradient) -> None:
        # Groups and state are read at each step: a scheduler writes to them, load_state_dict replaces them.
        optimizer, mine = self.optimizer, self._alone
        mine.state = optimizer.state
        mine.param_groups = [{**optimizer.param_groups[self.group], "params": list(self.parameters)}]
        with in_grad(self.parameters, gradients):
            bare_step(mine)(mine)


class WholeUpdate:
    """The update of all parameters at once, as in the eager loop: unscale, clip, step, with gradients in `.grad`."""

    measurable = False
    __name__ = "optimizer_update"

    def __init__(self, step: TrainingStep, parameters: Sequence[torch.nn.Parameter], workspace_bytes: int) -> None:
        assert step.optimizer is not None
        self.step = step
        self.optimizer = step.optimizer
        self.parameters = tuple(parameters)
        self.workspace_bytes = workspace_bytes

    def __call__(self, *gradients: Gradient) -> None:
        with in_grad(self.parameters, gradients):
            self.step.update()


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCost:
    """Cost of a parameter's update: its state tensors by name (fakes), and the bytes that it holds while it runs."""

    state: Mapping[str, torch.Tensor]
    workspace_bytes: int


def updates_one_by_one(step: TrainingStep) -> bool:
    """Return whether each parameter may be updated as soon as its gradient is complete, with the same bits."""
    optimizer = step.optimizer
    assert optimizer is not None
    is_plain = is_of_torch(optimizer) and not any(optimizer_hooks(optimizer))
    return is_plain and step.clip_norm is None and step.scaler is None


def updates_many_at_once(group: Mapping[str, Any], device: torch.device) -> bool:
    """Return whether an optimizer of torch updates a group's parameters in few kernels, so that single calls cost more.

    Args:
        group: of the optimizer.
        device: of the parameters; on a GPU this is torch's default.
    """
    if group.get("differentiable"):
        return False
    chosen = group.get("foreach"), group.get("fused")
    return any(chosen) or ("foreach" in group and chosen == (None, None) and device.type == "cuda")


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer is one of torch.optim, whose code is known, and not a class of the user's."""
    return type(optimizer).__module__.startswith("torch.optim")


def is_tried(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an update of copies shows what updates take.

    SparseAdam's depends on the indices of gradients, and LBFGS calls the loss.
    """
    return is_of_torch(optimizer) and not isinstance(optimizer, (torch.optim.SparseAdam, torch.optim.LBFGS))


def overlap(parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether two parameters share elements in memory, so that the order of their updates changes bits."""
    ends: dict[int, int] = {}
    for tensor in sorted(parameters, key=torch.Tensor.storage_offset):
        key, (start, end) = storage_key(tensor), span_bytes(tensor)
        if start < ends.get(key, 0):
            return True
        ends[key] = end
    return False


def innermost(optimizer: object) -> object:
    """Return the optimizer that others are wrapped around, those of Accelerate and Lightning, or what is none as it is.

    Args:
        optimizer: whatever was given as one.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def alive_optimizers() -> list[torch.optim.Optimizer]:
    """Return the optimizers of the process; of one that is wrapped the innermost."""
    found = [innermost(each) for each in alive_objects() if issubclass(type(each), torch.optim.Optimizer)]
    return list({id(each): each for each in found if isinstance(each, torch.optim.Optimizer)}.values())


def changes_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an update does: not without gradients, nor at a rate of 0, by which states are made.

    Args:
        optimizer: whose step begins.
    """
    is_moving = any(group.get("lr", 1.0) != 0 for group in optimizer.param_groups)
    return is_moving and any(each.grad is not None for group in optimizer.param_groups for each in group["params"])


def _is_around_another(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has another one, whose step it calls: one of real parameters."""
    return any(isinstance(each, torch.optim.Optimizer) for each in vars(optimizer).values())


def require_supported(optimizer: torch.optim.Optimizer) -> None:
    """Raise UnsupportedStepError for an optimizer that evaluates the loss several times in a step."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedStepError(
            "LBFGS evaluates the loss several times in one step; memfit plans one evaluation: leave it out "
            "(optimizer=None) and call its step yourself, or use another one"
        )


def update_cost(
    optimizer: torch.optim.Optimizer,
    parameter: torch.nn.Parameter,
    fake_parameter: torch.Tensor,
    group: Mapping[str, Any],
    mode: FakeTensorMode,
) -> UpdateCost:
    """Return the cost of updating `parameter`, by a run of the optimizer's code on fakes, which takes no memory.

    If the code cannot run on fakes because it depends on values, an optimizer of torch updates a real copy. For another
    one, two states of the parameter's size are assumed, as Adam has, and as many bytes of workspace.

    Args:
        optimizer: the user's.
        parameter: one of its parameters.
        fake_parameter: its fake.
        group: the parameter's group in the optimizer.
        mode: the mode of the fake.
    """
    trial = without_hooks(optimizer)
    with mode:
        fake = torch.nn.Parameter(torch.empty_like(fake_parameter), requires_grad=True)
        fake.grad = torch.empty_like(fake)
        trial.state = defaultdict(dict, {fake: _fake_state(optimizer.state.get(parameter, {}), mode, fake)})
        trial.param_groups = [{**group, "params": [fake]}]
        before = {storage_key(tensor) for tensor in tensors_in(trial.state[fake])}
        needs_values = _is_around_another(optimizer) or (not is_tried(optimizer) and is_of_torch(optimizer))
        try:
            with compiled_as_eager(), no_hooks_on_all_optimizers(), LiveBytes() as live:
                if not needs_values:
                    type(optimizer).step(trial)
        except DATA_DEPENDENT_ERRORS:
            needs_values = True
        except Exception:  # of code that takes all parameters to be there
            if is_of_torch(optimizer):
                raise
            needs_values = True
        if needs_values:
            with real_tensors():
                state = _tried_state(optimizer, parameter, mode)
            state = state or {name: torch.empty_like(fake) for name in ("assumed_0", "assumed_1")}
            return UpdateCost(state=state, workspace_bytes=2 * fake.untyped_storage().nbytes())
    state = {name: t for name, t in trial.state[fake].items() if isinstance(t, torch.Tensor)}
    created = sum(t.untyped_storage().nbytes() for t in state.values() if storage_key(t) not in before)
    return UpdateCost(state=state, workspace_bytes=max(0, live.peak_bytes - created))


class UpdateCosts:
    """The costs of the updates of an optimizer's parameters, for one capture.

    Parameters of torch's optimizers that look alike, and whose states do, cost the same: one of them is tried.

    Args:
        optimizer: the user's.
        mode: of the fakes.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, mode: FakeTensorMode) -> None:
        self._optimizer = optimizer
        self._mode = mode
        self._known: dict[Any, UpdateCost] = {}

    def of(self, parameter: torch.nn.Parameter, fake_parameter: torch.Tensor, group: int) -> UpdateCost:
        """Return the cost of updating a parameter; its state's fakes are its own.

        Args:
            parameter: of the optimizer.
            fake_parameter: its fake.
            group: the number of its group.
        """
        optimizer, settings = self._optimizer, self._optimizer.param_groups[group]
        if not is_of_torch(optimizer):
            return update_cost(optimizer, parameter, fake_parameter, settings, self._mode)
        state: Mapping[str, Any] = optimizer.state.get(parameter, {})
        kind = group, _looks(fake_parameter), tuple((name, _looks(value)) for name, value in state.items())
        known = self._known.get(kind)
        if known is None or not all(map(_is_whole, known.state.values())):
            known = self._known[kind] = update_cost(optimizer, parameter, fake_parameter, settings, self._mode)
            return known
        with self._mode:
            own = {name: torch.empty_like(tensor) for name, tensor in known.state.items()}
        return UpdateCost(state=own, workspace_bytes=known.workspace_bytes)


def _looks(value: Any) -> Any:
    """Return what an update's cost depends on: of a tensor its form, and the number if it may be a step count."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    form = tuple(value.shape), value.stride(), value.dtype, value.device, value.untyped_storage().nbytes()
    return (*form, value.item()) if _is_count(value) and not is_fake(value) else form


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def _is_count(value: torch.Tensor) -> bool:
    return value.numel() == 1 and value.device.type == "cpu"  # maybe a step count, whose value the optimizer uses


def alone(optimizer: torch.optim.Optimizer) -> Any:
    """Return a second optimizer object of the same class and settings, without the instance's patched `step`."""
    second = object.__new__(type(optimizer))
    second.__dict__.update({name: value for name, value in optimizer.__dict__.items() if name != "step"})
    return second


def without_hooks(optimizer: torch.optim.Optimizer) -> Any:
    """Return a second optimizer object as `alone` does, without the user's hooks before and after its step."""
    second = alone(optimizer)
    second._optimizer_step_pre_hooks = OrderedDict()
    second._optimizer_step_post_hooks = OrderedDict()
    return second


def has_room(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Return whether the devices have room for a trial of these parameters.

    Args:
        optimizer: keeps their state.
        parameters: real, on any devices; on a device that does not tell its free bytes there is room.
    """
    held: dict[torch.device, int] = defaultdict(int)
    for tensor in tensors_in((parameters, [optimizer.state.get(parameter, {}) for parameter in parameters])):
        held[tensor.device] += local(tensor).untyped_storage().nbytes()
    free = {device: free_bytes(device) for device in held}
    return all(free[device] is None or _COPIES * size <= (free[device] or 0) for device, size in held.items())


def trial_of(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]) -> Any:
    """Return an optimizer of the same class and settings for copies of some parameters, of their states as well.

    The copies have gradients. Of sharded parameters this rank's parts are copied, so that nothing runs between ranks.

    Args:
        optimizer: one of torch's, whose code touches nothing but its groups and its state.
        parameters: of the optimizer.
    """
    trial = without_hooks(optimizer)
    trial.state = defaultdict(dict)
    copies: dict[torch.Tensor, torch.nn.Parameter] = {}
    for parameter in parameters:
        copies[parameter] = made = torch.nn.Parameter(real_form(local(parameter).detach()).clone())
        made.grad = torch.full_like(made, _GRADIENT)
        if parameter in optimizer.state:
            trial.state[made] = {name: _copied(held, made) for name, held in optimizer.state[parameter].items()}
    groups = [
        {**group, "params": [copies[p] for p in group["params"] if p in copies]} for group in optimizer.param_groups
    ]
    trial.param_groups = [group for group in groups if group["params"]]
    return trial


def _copied(held: Any, made: torch.Tensor) -> Any:
    if isinstance(held, torch.Tensor) and is_kept_on_host(held):
        return on_device(held, made.device)
    return copy.deepcopy(local(held))


def _tried_state(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, mode: FakeTensorMode
) -> dict[str, torch.Tensor] | None:
    """Return fakes of the states that a real update of a copy makes; None for code that is not torch's, or no room."""
    if not is_tried(optimizer) or not has_room(optimizer, [parameter]):
        return None
    trial = trial_of(optimizer, [parameter])
    with undisturbed(parameter.device), no_hooks_on_all_optimizers():
        type(optimizer).step(trial)
    (state,) = trial.state.values()
    return {name: mode.from_tensor(value) for name, value in state.items() if isinstance(value, torch.Tensor)}


def _fake_state(state: Mapping[str, Any], mode: FakeTensorMode, fake: torch.Tensor) -> dict[str, Any]:
    def faked(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if is_sharded(value):
            return torch.empty_like(fake, dtype=value.dtype)
        if is_kept_on_host(value):
            return Place.of(value).empty(fake.device)
        if _is_count(value):
            with real_tensors():
                number = value.tolist()
            return torch.tensor(number, dtype=value.dtype)
        return mode.from_tensor(value)

    return {name: faked(value) for name, value in state.items()}
