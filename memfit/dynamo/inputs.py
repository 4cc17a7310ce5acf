"""What a compiled graph depends on of its inputs, and what it refuses of its surroundings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from memfit.binding import Value
from memfit.capture.across import BY_CHECKPOINT
from memfit.capture.functionalize import CAST_INSIDE
from memfit.errors import NotOneGraphError, UnsupportedStepError
from memfit.memory.place import span_bytes
from memfit.step.signature import tensor_signature
from memfit.torch_private.autograd import any_autocast, backward_keeps_graph
from memfit.torch_private.modules import hooks_on_all_modules
from memfit.torch_private.ranks import runs_under_ddp
from memfit.torch_private.tensors import is_plain_dense, tensors_in

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def signatures(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return what a compiled graph depends on of its inputs: of tensors that share memory, the offsets in it too."""
    shared = overlapping(inputs)
    return tuple(
        (tensor_signature(leaf), shared.get(place)) if isinstance(leaf, torch.Tensor) else leaf
        for place, leaf in enumerate(inputs)
    )


def overlapping(inputs: Sequence[Any]) -> dict[int, tuple[int, int]]:
    """Return the places of tensors that share memory: place -> (the first place on their storage, offset in it)."""
    on_storage: dict[int, list[int]] = {}
    for place, leaf in enumerate(inputs):
        if is_plain_dense(leaf) and leaf.numel():
            on_storage.setdefault(leaf.untyped_storage().data_ptr(), []).append(place)
    found: dict[int, tuple[int, int]] = {}
    for places in on_storage.values():
        if len(places) == 1:
            continue
        spans = sorted((span_bytes(inputs[place]), place) for place in places)
        if any(left[1] > right[0] for (left, _), (right, _) in itertools.pairwise(spans)):
            found |= {place: (places[0], int(inputs[place].storage_offset())) for place in places}
    return found


def refuse_retained_graph() -> None:
    """Refuse a backward that keeps its graph; it runs before the backward, when nothing has been released."""
    if backward_keeps_graph():
        raise UnsupportedStepError(
            "backward with retain_graph=True, or a gradient with create_graph=True: a planned step frees activations "
            "as backward consumes them; call backward once, or train this model under memfit.eager or "
            "memfit.checkpoint"
        )


def refuse_other_autocast(is_expected: bool) -> None:
    """Refuse a backward that is inside autocast, or outside, where its half was captured otherwise.

    Args:
        is_expected: whether the half was captured inside autocast.

    Raises:
        UnsupportedStepError: it was, and autocast is off now, or the other way round.
    """
    if any_autocast() and not is_expected:
        raise UnsupportedStepError(
            "backward inside torch.autocast, which casts what forward computed without casts: call backward after that "
            "block, as torch advises, or give backward_autocast=True"
        )
    if is_expected and not any_autocast():
        raise UnsupportedStepError("backward outside of torch.autocast, although backward_autocast=True was given")


def refuse_casts_inside(joint: torch.fx.GraphModule, module: torch.fx.GraphModule, is_in_autocast: bool) -> None:
    """Refuse a kernel that autocast would cast inside: a compiled graph runs it outside of autocast.

    Args:
        joint: the calls that the halves make.
        module: the graph that they are from, which enters autocast where the user's code does.
        is_in_autocast: whether the whole graph runs inside autocast.
    """
    packets = {getattr(node.target, "overloadpacket", None): node.target for node in joint.graph.nodes}
    cast = next((packets[packet] for packet in CAST_INSIDE if packet in packets), None)
    enters = any("enter_autocast" in getattr(node.target, "__name__", "") for node in module.graph.nodes)
    if cast is not None and (enters or is_in_autocast):
        raise UnsupportedStepError(
            f"{cast} computes with other operators, which eager casts under torch.autocast and a compiled graph does "
            "not: call it inside torch.autocast(..., enabled=False)"
        )


def refuse_other_hooks(hooks: list[Any]) -> None:
    """Refuse a call after hooks on all modules have come or gone: a compiled graph has those of its capture.

    Args:
        hooks: what `hooks_on_all_modules` returned at the capture.

    Raises:
        UnsupportedStepError: there are others now.
    """
    if hooks_on_all_modules() != hooks:
        raise UnsupportedStepError(
            "hooks on all modules (torch.nn.modules.module.register_module_...) were added or removed since the model "
            "was captured, which PyTorch's compiler does not look at: call torch.compiler.reset(), or use "
            "memfit.compile(model, budget=...), which captures the model again"
        )


def _is_plain(kind: type) -> bool:
    """Return whether tensors of a class are torch's own, or parameters to which a class only adds attributes."""
    own = kind.__torch_function__, kind.__torch_dispatch__
    return kind in _PLAIN or own == (torch.nn.Parameter.__torch_function__, torch.Tensor.__torch_dispatch__)


def refuse_ranks(inputs: Sequence[Any]) -> None:
    """Refuse parameters that another library has spread over ranks.

    Raises:
        NotOneGraphError: the model is under DDP or FSDP.
    """
    foreign = {type(each).__name__ for each in tensors_in(inputs) if not _is_plain(type(each))}
    if runs_under_ddp() or foreign:
        what = f"holds tensors of type {min(foreign)}, as under FSDP" if foreign else "is under DDP"
        raise NotOneGraphError(
            f"the model {what}, where graphs are not planned: {BY_CHECKPOINT}, under any other backend of torch.compile"
        )


def differ_in_strides(gradient: torch.Tensor, assumed: Value) -> bool:
    """Return whether a gradient has the shape that was assumed, and other strides."""
    strides = zip(gradient.shape, gradient.stride(), assumed.stride, strict=False)
    return tuple(gradient.shape) == assumed.shape and any(size > 1 and mine != other for size, mine, other in strides)


def device_of(inputs: Sequence[Any]) -> torch.device:
    """Return the device of the first tensor that is not on a CPU; if there is none, a CPU."""
    accelerated = [each.device for each in inputs if isinstance(each, torch.Tensor) and each.device.type != "cpu"]
    return accelerated[0] if accelerated else torch.device("cpu")
