"""Joint graphs of forward and backward, in the form that Inductor compiles, and the values that torch's halves keep."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence

import torch
from torch.fx import GraphModule, Node

from memfit.capture.joint import outputs_of
from memfit.capture.traced import given_to_write
from memfit.errors import BY_CHECKPOINT, NotOneGraphError, UnsupportedStepError
from memfit.torch_private.inductor import ModulePair
from memfit.torch_private.tensors import bare_overload, fake_mode_of, tensors_in, tree_flatten

_log = logging.getLogger("memfit")
_SHARES = tuple(number / 10 for number in range(9, 0, -1))  # of torch's activation memory budget


def survey(as_inductor: Callable[[float | None], ModulePair], forward_outputs: int) -> dict[float, int]:
    """Return by share of the activations what torch's halves keep between them, as far as torch can make them."""
    found: dict[float, int] = {}
    for share in _SHARES:
        try:
            forward, _ = as_inductor(share)
        except Exception as error:  # noqa: BLE001 (solvers of torch's, for what is an addition to a plan)
            _log.info("memfit: torch cannot keep %s of the activations: %s", share, error)
            continue
        found[share] = saved_bytes(forward, forward_outputs)
    return found


def saved_bytes(forward: GraphModule, forward_outputs: int) -> int:
    """Return the bytes that a forward half keeps for the backward half, beside its arguments."""
    returned = outputs_of(forward)[forward_outputs:]
    kept = (node for node in returned if isinstance(node, Node) and node.op != "placeholder")
    storages = [tensor.untyped_storage() for node in kept for tensor in tensors_in(node.meta.get("val"))]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def refuse_unplannable(joint: GraphModule) -> None:
    """Refuse calls of operators that are given code, and such as write to what the step has made."""
    for node in joint.graph.nodes:
        if node.op != "call_function" or node.target in (
            operator.getitem,
            torch.ops.higher_order.auto_functionalized_v2,
        ):
            continue
        if bare_overload(node.target) is None:
            raise NotOneGraphError(
                f'{node.target} is no operator that memfit can plan with Inductor\'s kernels; kernels="eager" plans it '
                f"with those that eager calls: {BY_CHECKPOINT}"
            )
        if any(written.op != "placeholder" for written in _written(node)):
            raise UnsupportedStepError(
                f"{node.target} writes to a tensor that the step has made, which could not be recomputed with "
                'Inductor\'s kernels; kernels="eager" can'
            )


def leave_out_overwritten(joint: GraphModule) -> None:
    """Let no copy read the tensor that it overwrites, which a schedule may have dropped."""
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.copy.default):
        source, result = node.args[1], node.meta["val"]
        with joint.graph.inserting_before(node), fake_mode_of(result):
            for target, argument in (
                (torch.ops.aten.expand.default, list(result.shape)),
                (torch.ops.prims.convert_element_type.default, result.dtype),
            ):
                value = target(source.meta["val"], argument)
                source = joint.graph.call_function(target, (source, argument))
                source.meta = {**node.meta, "val": value}
        node.replace_all_uses_with(source)
        joint.graph.erase_node(node)


def _written(node: Node) -> list[Node]:
    """Return the tensors that a call writes to."""
    given = tree_flatten(given_to_write(node.target._schema, node.args, node.kwargs))[0]
    return [each for each in given if each is not None]


def is_fusible(nodes: Sequence[Node]) -> bool:
    """Return whether Inductor makes one kernel of these nodes and of fusible neighbours."""
    return all(_TAGS.intersection(getattr(node.target, "tags", ())) or str(node.target) in _FUSIBLE for node in nodes)


_TAGS = frozenset(getattr(torch.Tag, name) for name in ("pointwise", "reduction") if hasattr(torch.Tag, name))
# Pointwise operators and reductions that have no such tag in every release.
_FUSIBLE = frozenset(
    [
        "aten.amax.default",
        "aten.clone.default",
        "aten.constant_pad_nd.default",
        "aten.expand.default",
        "aten.full.default",
        "aten.mean.dim",
        "aten.scalar_tensor.default",
        "aten.sum.default",
        "aten.sum.dim_IntList",
        "aten.var_mean.correction",
        "inductor_prims.inductor_lookup_seed.default",
        "inductor_prims.inductor_random.default",
        "prims.convert_element_type.default",
        "prims.inductor_lookup_seed.default",
        "prims.inductor_random.default",
        "prims.iota.default",
    ]
)
