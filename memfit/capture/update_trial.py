"""Workspaces of the optimizer's updates, measured by updates of copies.

Which temporary tensors an update makes depends on the optimizer's options (foreach, fused), on clipping and on the
device; on fakes, torch's optimizers choose other kernels. Only the optimizers of torch are tried, whose code touches
nothing but their groups and their state. The user's parameters, gradients, states and scaler stay as they are.
"""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import torch

from memfit.binding import Binding, Call, Value
from memfit.capture.optimizer import ParameterUpdate, WholeUpdate, has_room, is_tried, trial_of
from memfit.capture.training_step import clip_and_step
from memfit.cost.single_op import undisturbed
from memfit.graph import Graph, Op
from memfit.system.recorder import record, taken_bytes
from memfit.torch_private import tensors_in


def with_measured_updates(graph: Graph, binding: Binding) -> Graph:
    """Return `graph` with the measured workspace of each update by an optimizer of torch; others keep their guess.

    An update whose copies have no room on the device keeps its guess, too. Equal updates are measured once.

    Args:
        graph: its updates' workspaces are guesses.
        binding: the calls of its ops, with the user's optimizer and parameters.
    """
    known: dict[Any, int] = {}
    ops: list[Op] = []
    for op, call in zip(graph.ops, binding.calls, strict=True):
        target = call.target
        if isinstance(target, ParameterUpdate | WholeUpdate) and is_tried(target.optimizer) and _is_dense(call):
            key = _key(target)
            if key not in known and has_room(target.optimizer, target.parameters):
                known[key] = _measured(target, binding.device)
            op = msgspec.structs.replace(op, workspace_bytes=known.get(key, op.workspace_bytes))
        ops.append(op)
    return msgspec.structs.replace(graph, ops=tuple(ops))


def is_update(call: Call) -> bool:
    """Return whether a call is the optimizer's update of a parameter, or of all."""
    return isinstance(call.target, ParameterUpdate | WholeUpdate)


def _is_dense(call: Call) -> bool:
    """Return whether all gradients are tensors, and none the indices and values of a sparse one."""
    return all(isinstance(gradient, Value) for gradient in call.args)


def _key(target: ParameterUpdate | WholeUpdate) -> Any:
    """Return what two updates share only if they take the same workspace."""
    if isinstance(target, WholeUpdate):
        return id(target)
    parameter, state = target.parameter, target.optimizer.state.get(target.parameter, {})
    return target.group, parameter.shape, parameter.stride(), parameter.dtype, tuple(state)


def _measured(target: ParameterUpdate | WholeUpdate, device: torch.device) -> int:
    """Return the most bytes that an update of copies takes beyond the states that it creates.

    It is run twice: the first makes the states, if there are none yet.
    """
    trial = trial_of(target.optimizer, target.parameters)
    step = target.step if isinstance(target, WholeUpdate) else None
    scaler = None if step is None or step.scaler is None else copy.deepcopy(step.scaler)
    if scaler is not None:
        scaler.scale(torch.zeros((), device=device))  # a copy makes its scale at its first use
    most_bytes = 0
    with undisturbed(device):
        for _ in range(2):
            before = _state_bytes(trial)
            with record(device) as usage:
                clip_and_step(trial, None if step is None else step.clip_norm, scaler)
            most_bytes = max(most_bytes, usage.peak_bytes - (_state_bytes(trial) - before))
    return most_bytes


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = tensors_in(list(optimizer.state.values()))
    return sum(taken_bytes(tensor.untyped_storage().nbytes(), tensor.device) for tensor in tensors)
