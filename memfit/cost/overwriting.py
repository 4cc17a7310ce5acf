"""Whether a kernel gives the same bits when it writes its result over an input: seen on this device, not believed.

Torch's schemas promise that of pointwise operators only. Of others (`Overwrite.promised` is False: the softmax family)
the form that writes over an input is run on data of the call's own shapes, strides and dtype, and compared bit by bit
with the plain call; `Op.reuses` gets what passed. A plan for a device that is not here does without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from memfit.binding import Binding, Call
from memfit.cost.kept_costs import KeptCosts, OpCost
from memfit.cost.made_inputs import InputMaker, values_in
from memfit.cost.single_op import Measurer, undisturbed
from memfit.graph import Graph, Op, Storage

_REPEATS = 3  # what only the order of threads decides would show itself between them


def try_missing(measurer: Measurer, calls: Sequence[Call], keys: Sequence[str], kept: KeptCosts) -> None:
    """Try each form that nothing promises and `kept` does not know of, and add what was seen to the costs in `kept`.

    A call without a cost (it could not be run by itself) is not tried, and neither is one without room in the budget.
    """
    new: dict[str, OpCost] = {}
    try:
        with undisturbed(measurer.device):
            for op, call, key in zip(measurer.graph.ops, calls, keys, strict=True):
                cost = new.get(key, kept.costs.get(key))
                if cost is None:
                    continue
                missing = {read: place for read, place in unpromised(call).items() if place not in cost.overwrites}
                if not missing or not measurer.has_room(op, call):
                    continue
                seen = {
                    place: same_bits_over(call, read, measurer.inputs, measurer.graph.storages)
                    for read, place in missing.items()
                }
                new[key] = msgspec.structs.replace(cost, overwrites={**cost.overwrites, **seen})
    finally:
        if new:
            kept.add(new)


def unpromised(call: Call) -> dict[int, int]:
    """Return the storages that an unpromised form of `call` writes over, each with its place among the tensors that the
    call takes: what equal calls have in common.
    """
    places = {value.storage: place for place, value in enumerate(values_in((call.args, call.kwargs)))}
    return {read: places[read] for read, form in call.overwrites.items() if not form.promised}


def with_seen_reuses(op: Op, call: Call, cost: OpCost) -> Op:
    """Return `op` with a pair in `reuses` for each form that was seen to give the same bits."""
    seen = [read for read, place in unpromised(call).items() if cost.overwrites.get(place, False)]
    pairs = dict.fromkeys([*op.reuses, *((read, op.writes[0]) for read in seen)])
    return msgspec.structs.replace(op, reuses=tuple(pairs))


def with_every_form(graph: Graph, binding: Binding) -> Graph:
    """Return `graph` with a pair in `reuses` for every form there is, seen or not: a plan may use any of them where its
    own device was seen to.
    """
    ops = [
        msgspec.structs.replace(op, reuses=tuple((read, op.writes[0]) for read in call.overwrites))
        for op, call in zip(graph.ops, binding.calls, strict=True)
    ]
    return msgspec.structs.replace(graph, ops=tuple(ops))


def same_bits_over(call: Call, read: int, inputs: InputMaker, storages: tuple[Storage, ...]) -> bool:
    """Whether the form of `call` that writes over storage `read` gives the bits of the plain call, every time.

    It takes the memory of the call's inputs and result, as measuring it does. A kernel that refuses gives none.
    """
    form = call.overwrites[read]
    place = next(n for n, value in enumerate(values_in((call.args, call.kwargs))) if value.storage == read)
    args, kwargs = inputs.make(call, storages)
    expected = call.target(*args, **kwargs)
    del args, kwargs
    for _ in range(_REPEATS):
        args, kwargs = inputs.make(call, storages)
        over = _tensors(args, kwargs)[place]
        try:
            returned = form.target(*args, **kwargs, **dict.fromkeys(form.extra, over))
        except RuntimeError:
            return False
        if returned.untyped_storage().data_ptr() != over.untyped_storage().data_ptr():
            return False
        if not torch.equal(_bytes(returned), _bytes(expected)):
            return False
        del args, kwargs, over, returned
    return True


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors in made arguments, in the order of `values_in`."""
    found: list[torch.Tensor] = []

    def visit(tree: Any) -> None:
        if isinstance(tree, torch.Tensor):
            found.append(tree)
        elif isinstance(tree, Mapping):
            for branch in tree.values():
                visit(branch)
        elif isinstance(tree, tuple | list):
            for branch in tree:
                visit(branch)

    visit((args, kwargs))
    return found


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
