"""Workspaces and seconds of the optimizer's updates, measured by updates of copies.

Which temporary tensors an update makes depends on the optimizer's options (foreach, fused), on clipping and on the
device; on fakes, torch's optimizers choose other kernels. Only the optimizers of torch are tried, whose code touches
nothing but their groups and their state. The user's parameters, gradients, states and scaler stay as they are.
"""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import msgspec
import torch

from memfit.binding import Binding, Call, Value
from memfit.capture.optimizer import ParameterUpdate, WholeUpdate, has_room, is_tried, trial_of
from memfit.capture.training_step import clip_and_step
from memfit.cost.environment import environment
from memfit.cost.gpu_timing import synchronize
from memfit.cost.observations import Observation, Observations
from memfit.cost.single_op import undisturbed
from memfit.graph import Graph, Op
from memfit.system.recorder import record, taken_bytes
from memfit.torch_private.modules import no_hooks_on_all_optimizers
from memfit.torch_private.sharding import local
from memfit.torch_private.tensors import tensors_in

_TIMED = 5  # updates of copies


def with_measured_updates(graph: Graph, binding: Binding) -> Graph:
    """Return `graph` with what each update by an optimizer of torch was measured to take; others keep their guess.

    An update whose copies have no room on the device keeps its guess, too. Equal updates are measured once, and kept
    with the costs of other ops.

    Args:
        graph: its updates' workspaces are guesses, and their seconds are 0.
        binding: the calls of its ops, with the user's optimizer and parameters.
    """
    known = Observations.load(environment(binding.device))
    new: dict[str, Observation] = {}
    ops: list[Op] = []
    for op, call in zip(graph.ops, binding.calls, strict=True):
        target = call.target
        if isinstance(target, ParameterUpdate | WholeUpdate) and is_tried(target.optimizer) and _is_dense(call):
            key = _key(target)
            seen = new.get(key) or known.by_key.get(key)
            if seen is None and has_room(target.optimizer, target.parameters):
                seen = new[key] = _measured(target, binding.device)
            if seen is not None:
                op = msgspec.structs.replace(op, workspace_bytes=seen.workspace_bytes, seconds=seen.seconds)
        ops.append(op)
    if new:
        known.add(new)
    return msgspec.structs.replace(graph, ops=tuple(ops))


def is_update(call: Call) -> bool:
    """Return whether a call is the optimizer's update of a parameter, or of all."""
    return isinstance(call.target, ParameterUpdate | WholeUpdate)


def _is_dense(call: Call) -> bool:
    """Return whether all gradients are tensors, and none the indices and values of a sparse one."""
    return all(isinstance(gradient, Value) for gradient in call.args)


def _key(target: ParameterUpdate | WholeUpdate) -> str:
    """Return a text that two updates share only if they take the same time and workspace."""
    optimizer, whole = target.optimizer, isinstance(target, WholeUpdate)
    groups = optimizer.param_groups if whole else [optimizer.param_groups[target.group]]
    settings = [sorted((name, _kind(value)) for name, value in group.items() if name != "params") for group in groups]
    around = (target.step.clip_norm is not None, target.step.scaler is not None) if whole else ()
    parameters = [
        (str(p.dtype), tuple(local(p).shape), local(p).stride(), sorted(map(str, optimizer.state.get(p, ()))))
        for p in target.parameters
    ]
    kind = type(optimizer)
    return f"updates {kind.__module__}.{kind.__qualname__}{settings}{around}{parameters}"


def _kind(value: Any) -> Any:
    """Return what decides which kernels run: a flag itself, of a number whether it is 0."""
    if isinstance(value, bool | str | None):
        return value
    return bool(value) if isinstance(value, int | float) else type(value).__name__


def _measured(target: ParameterUpdate | WholeUpdate, device: torch.device) -> Observation:
    """Return the most bytes that an update of copies takes beyond the states that it creates, and its seconds.

    The first two make the states, if there are none yet, and load kernels; later ones are timed, from the call to the
    end of the last kernel. The last one shows what an update takes in the long run: RAdam's first five take less.
    """
    trial = trial_of(target.optimizer, target.parameters)
    step = target.step if isinstance(target, WholeUpdate) else None
    scaler = None if step is None or step.scaler is None else copy.deepcopy(step.scaler)
    if scaler is not None:
        scaler.scale(torch.zeros((), device=device))  # a copy makes its scale at its first use
    most_bytes = 0
    seconds: list[float] = []
    with undisturbed(device), no_hooks_on_all_optimizers():
        for number in range(2 + _TIMED + 1):
            before = _state_bytes(trial)
            started = time.perf_counter()
            with record(device) as usage:
                clip_and_step(trial, None if step is None else step.clip_norm, scaler)
                synchronize(device)
            if number < 2 or number == 2 + _TIMED:
                most_bytes = max(most_bytes, usage.peak_bytes - (_state_bytes(trial) - before))
            else:
                seconds.append(time.perf_counter() - started)
    return Observation(seconds=statistics.median(seconds), workspace_bytes=most_bytes)


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = tensors_in(list(optimizer.state.values()))
    return sum(taken_bytes(tensor.untyped_storage().nbytes(), tensor.device) for tensor in tensors)
