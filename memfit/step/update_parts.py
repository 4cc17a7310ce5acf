"""Updates after clipping in parts: one op clips all gradients, and others update some parameters each.

Their gradients are freed part by part, and so may their states go to the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch

from memfit.binding import Call, Origin, Value
from memfit.capture import Captured, TrainingStep
from memfit.capture.optimizer import ParameterUpdate, WholeUpdate, in_grad, is_of_torch, overlap
from memfit.capture.training_step import with_groups
from memfit.capture.update_trial import with_measured_updates
from memfit.graph import Op, Phase
from memfit.step.divided_updates import PARTS
from memfit.torch_private.modules import optimizer_hooks

_NORMS_BYTES = 512 * 4  # of workspace for each gradient: its norm, in a block of its own, and lists of them


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ClipGradients:
    """Clips the gradients of an optimizer's parameters by their norm, as the eager loop does: `(...)(*gradients)`."""

    step: TrainingStep
    parameters: tuple[torch.nn.Parameter, ...]
    measurable = False
    __name__ = "clip_gradients"

    def __call__(self, *gradients: torch.Tensor) -> None:
        assert self.step.clip_norm is not None
        with in_grad(self.parameters, gradients):
            torch.nn.utils.clip_grad_norm_(self.step.clipped(), self.step.clip_norm)


def with_update_in_parts(step: TrainingStep, captured: Captured) -> Captured:
    """Return a captured step with its update after clipping in parts, which give the same bits; or as it is.

    Args:
        step: the step.
        captured: its capture, with the seconds of its ops.
    """
    (number,) = [call.op for call in captured.binding.calls if isinstance(call.target, WholeUpdate)] or [None]
    if number is None or not _may_be_divided(step, captured.binding.calls[number]):
        return captured
    graph, binding = captured.graph, captured.binding
    op, call = graph.ops[number], binding.calls[number]
    touched = {str(each.key): each.value.storage for each in binding.residents if each.origin is not Origin.INPUT}
    gradients = tuple(dict.fromkeys(value.storage for value in call.args))
    clip = ClipGradients(step, call.target.parameters)
    clipping = Op(
        id=0,
        name="clip_gradients",
        target=clip.__name__,
        phase=Phase.UPDATE,
        reads=(),
        writes=(),
        mutates=gradients,
        seconds=0.0,
        workspace_bytes=_NORMS_BYTES * len(call.args),
    )
    made = [(clipping, Call(op=0, target=clip, args=call.args))]
    names = {parameter: name for name, parameter in step.model.named_parameters()}
    share = op.workspace_bytes or 0
    for place, (group, places) in enumerate(_parts(step, call.target.parameters)):
        parameters = [call.target.parameters[at] for at in places]
        own = {names[parameter] for parameter in parameters}
        mutates = {s for key, s in touched.items() if key in own or key.rpartition(".")[0] in own} & set(op.mutates)
        args = tuple(call.args[at] for at in places)
        updating = msgspec.structs.replace(
            op,
            name=f"{op.name}_{place}",
            reads=tuple(dict.fromkeys(value.storage for value in args)),
            mutates=tuple(sorted(mutates)),
            seconds=0.0,
        )
        target = ParameterUpdate(call.target.optimizer, parameters, group, share)
        made.append((updating, replace(call, target=target, args=args)))
    before = list(zip(graph.ops, binding.calls, strict=True))
    parted = captured.with_ops([*before[:number], *made, *before[number + 1 :]])
    measured = with_measured_updates(parted.graph, parted.binding)
    left = op.seconds - sum(each.seconds for each in measured.ops[number + 1 : number + len(made)])
    clipped = msgspec.structs.replace(measured.ops[number], seconds=max(0.0, left))
    graph = msgspec.structs.replace(measured, ops=(*measured.ops[:number], clipped, *measured.ops[number + 1 :]))
    return replace(parted, graph=graph)


def _may_be_divided(step: TrainingStep, call: Call) -> bool:
    optimizer = step.optimizer
    assert optimizer is not None
    is_known = is_of_torch(optimizer) and not any(optimizer_hooks(optimizer))
    is_only_clipped = step.clip_norm is not None and step.scaler is None
    is_dense = all(isinstance(gradient, Value) for gradient in call.args)
    return is_known and is_only_clipped and is_dense and not overlap(call.target.parameters)  # pyright: ignore[reportFunctionMemberAccess]


def _parts(step: TrainingStep, parameters: Sequence[torch.nn.Parameter]) -> Iterator[tuple[int, list[int]]]:
    """Yield the parts of an update: the number of the optimizer's group, and places among the parameters."""
    assert step.optimizer is not None
    most_bytes = sum(parameter.nbytes for parameter in parameters) // PARTS
    group_of = {parameter: group for group, parameter in with_groups(step.optimizer)}
    part: list[int] = []
    for place, parameter in enumerate(parameters):
        part.append(place)
        following = parameters[place + 1] if place + 1 < len(parameters) else None
        is_other = following is None or group_of[following] != group_of[parameter]
        if is_other or sum(parameters[at].nbytes for at in part) >= most_bytes:
            yield group_of[parameter], part
            part = []
