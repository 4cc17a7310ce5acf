"""What a compiled graph depends on of its inputs, and what it refuses of its surroundings."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from memfit.binding import Value
from memfit.capture.functionalize import CAST_INSIDE
from memfit.errors import BY_CHECKPOINT, InvalidDeviceError, NotOneGraphError, UnsupportedStepError
from memfit.memory.place import span_bytes
from memfit.step.signature import tensor_signature
from memfit.torch_private.autocast import any_autocast
from memfit.torch_private.autograd import backward_keeps_graph, changing_hooks
from memfit.torch_private.guarding import TensorMetadata
from memfit.torch_private.modules import hooks_on_all_modules
from memfit.torch_private.tensors import PLAIN_TYPES, is_fake, is_plain_dense, tensors_in


def signatures(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return what a compiled graph depends on of its inputs: of tensors that share memory, the offsets in it too."""
    shared = overlapping(inputs)
    return tuple(
        (tensor_signature(leaf), shared.get(place)) if isinstance(leaf, torch.Tensor) else leaf
        for place, leaf in enumerate(inputs)
    )


class Signatures:
    """The signatures of a graph's inputs; where they are those of its last call, in a tenth of the time."""

    def __init__(self) -> None:
        self._latest: tuple[Any, ...] = ()
        self._seen: list[Any] = []  # the inputs then: weakly, if they are tensors
        self._metadata: TensorMetadata | None = None
        self._same: list[int] = []  # places of tensors that were the same ones in two calls
        self._others: list[int] = []  # and of all else
        self._refs: list[Any] = []
        self._addresses: list[int] = []
        self._storages: frozenset[int] = frozenset()

    def of(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return what a compiled graph depends on of its inputs."""
        if self._metadata is None or not self._are_as_before(inputs, self._metadata):
            self._note(inputs)
        return self._latest

    def _note(self, inputs: tuple[Any, ...]) -> None:
        before, key = self._seen, signatures(inputs)
        is_other, self._latest = key != self._latest, key
        is_tensor = [isinstance(leaf, torch.Tensor) for leaf in inputs]
        self._seen = [weakref.ref(leaf) if is_t else leaf for leaf, is_t in zip(inputs, is_tensor, strict=True)]
        self._metadata = None
        tensors = tuple(itertools.compress(inputs, is_tensor))
        is_shared = any(each[1] is not None for each in itertools.compress(key, is_tensor))
        if is_other or is_shared or not all(type(leaf) in PLAIN_TYPES for leaf in tensors):
            return
        pairs = enumerate(zip(inputs, before, strict=True))
        self._same = [
            n for n, (leaf, known) in pairs if is_tensor[n] and type(known) is weakref.ref and known() is leaf
        ]
        self._others = sorted(set(range(len(inputs))) - set(self._same))
        same = [inputs[n] for n in self._same]
        self._refs, self._addresses = [self._seen[n] for n in self._same], list(map(torch.Tensor.data_ptr, same))
        self._storages = frozenset(leaf.untyped_storage().data_ptr() for leaf in same)
        self._metadata = TensorMetadata(tensors, 0)

    def _are_as_before(self, inputs: tuple[Any, ...], metadata: TensorMetadata) -> bool:
        if len(inputs) != len(self._seen):
            return False
        same = [inputs[n] for n in self._same]
        if not all(map(operator.is_, same, map(operator.call, self._refs))):
            return False
        if list(map(torch.Tensor.data_ptr, same)) != self._addresses:
            return False
        storages = set(self._storages)
        for leaf, known in ((inputs[n], self._seen[n]) for n in self._others):
            if type(known) is not weakref.ref:
                if type(leaf) is not type(known) or leaf != known:
                    return False
            elif type(leaf) not in PLAIN_TYPES or leaf.untyped_storage().data_ptr() in storages:
                return False
            else:
                storages.add(leaf.untyped_storage().data_ptr())
        return metadata.matches(tuple(leaf for leaf in inputs if isinstance(leaf, torch.Tensor)))


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
    if not backward_keeps_graph():
        return
    if torch.is_grad_enabled():
        raise UnsupportedStepError(
            "a gradient with create_graph=True: the backward pass of a planned graph has no derivative; train under "
            "memfit.eager, or give memfit.fit a loss that takes the gradient inside (memfit.checkpoint takes such "
            "loops, too, but keeps what it recomputes until the outer pass ends)"
        )
    raise UnsupportedStepError(
        "backward with retain_graph=True: a planned graph frees activations as backward consumes them; call backward "
        "once, for the sum of the losses, or train this model under memfit.eager or memfit.checkpoint, which hold its "
        "budget"
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
        raise UnsupportedStepError(
            "backward outside of torch.autocast, although backward_autocast=True was given: leave that option out, or "
            "call backward inside of the block that forward runs in"
        )


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


def refuse_changing_hooks() -> None:
    """Refuse a call with gradients inside hooks of saved tensors that may change values.

    Raises:
        NotOneGraphError: such hooks are on.
    """
    hook = changing_hooks() if torch.is_grad_enabled() else ""
    if hook:
        raise NotOneGraphError(
            f"hooks of saved tensors ({hook}) are around a call, and may change what they are given: a plan keeps "
            "other tensors than eager does, so that gradients would have other bits; memfit.checkpoint has eager's"
        )


def _is_plain(kind: type) -> bool:
    """Return whether tensors of a class are torch's own, or parameters to which a class only adds attributes."""
    own = kind.__torch_function__, kind.__torch_dispatch__
    return kind in PLAIN_TYPES or own == (torch.nn.Parameter.__torch_function__, torch.Tensor.__torch_dispatch__)


def refuse_foreign(inputs: Sequence[Any], module: torch.fx.GraphModule) -> None:
    """Refuse tensors that have no memory of one known size: spread over ranks by a library, or nested.

    Args:
        inputs: of a call.
        module: captured by Dynamo, with fakes of what it computes.

    Raises:
        NotOneGraphError: the graph is given one, or makes one.
    """
    made = tensors_in([node.meta.get("example_value") for node in module.graph.nodes])
    found = [*tensors_in(inputs), *(each for each in made if not is_fake(each))]
    foreign = {type(each).__name__ for each in found if not _is_plain(type(each))}
    if foreign:
        raise NotOneGraphError(
            f"the model holds tensors of type {min(foreign)}, of which graphs are not planned: {BY_CHECKPOINT}, under "
            "any other backend of torch.compile"
        )


def differ_in_strides(gradient: torch.Tensor, assumed: Value) -> bool:
    """Return whether a gradient has the shape that was assumed, and other strides."""
    return tuple(gradient.shape) == assumed.shape and not assumed.is_strided_as(gradient.stride())


def device_of(inputs: Sequence[Any]) -> torch.device:
    """Return the device of the first tensor that is not on a CPU; if there is none, a CPU."""
    devices = (each.device for each in inputs if isinstance(each, torch.Tensor))
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def only_device_of(inputs: Sequence[Any]) -> torch.device:
    """Return the device of a graph's inputs, as `device_of` does.

    Raises:
        InvalidDeviceError: they are on several devices that are no CPU, of which the budget would be that of one.
    """
    devices = {str(each.device) for each in inputs if isinstance(each, torch.Tensor) and each.device.type != "cpu"}
    if len(devices) > 1:
        raise InvalidDeviceError(
            f"a compiled graph has tensors on {' and '.join(sorted(devices))}, and memfit plans for one device: move "
            "the model to one, or give each rank a device and the model to fully_shard"
        )
    return device_of(inputs)
