"""Sharded tensors (DTensor), and what `fully_shard` keeps of the modules that it was applied to.

torch 2.11 has one group of parameters a module, later versions a list of groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memfit.torch_private.tensors import contiguous_strides, storage_key

_IDLE = ("unshard", "reshard", "pre_backward", "post_backward", "finalize_backward")
_OURS = ("pre_forward", "post_forward", "wait_for_unshard")


def is_sharded(tensor: object) -> bool:
    """Return whether a tensor is a DTensor, which has a part of its elements on this rank."""
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, "_local_tensor")


def is_of_fsdp(parameter: torch.Tensor) -> bool:
    """Return whether FSDP, version 1 or 2, keeps a parameter, so that its module computes with another tensor."""
    return is_sharded(parameter) or is_of_first_fsdp(parameter)


def is_of_first_fsdp(parameter: torch.Tensor | None) -> bool:
    """Return whether FSDP's first version keeps a parameter."""
    return hasattr(parameter, "_fsdp_flattened")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor; another tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def key_of(tensor: torch.Tensor) -> int:
    """Return the key of the storage of a tensor, of this rank's part if it is sharded; 0 if it has none."""
    try:
        return storage_key(local(tensor))
    except (NotImplementedError, RuntimeError):  # sparse tensors and wrappers have no storage
        return 0


def whole_part(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a DTensor as one row, with the padding behind it."""
    part = local(tensor).detach()
    count = part.untyped_storage().nbytes() // part.element_size()
    return part.as_strided((count,), (1,), 0)


def local_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's part of a parameter's `.grad`, if there is one."""
    return None if parameter.grad is None else local(parameter.grad)


def with_local(like: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a DTensor that is sharded as `like`, with another local part; for another tensor the part itself.

    Args:
        like: gives the mesh, the placements and the global size.
        part: of the local size.
    """
    if not is_sharded(like):
        return part
    return type(like.data)(part, like._spec, requires_grad=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedFacts:
    """A parameter of a group, as `fully_shard` keeps it.

    Attributes:
        parameter: the DTensor in the module's table.
        shape: of the whole parameter.
        padded: the size of the local part that every rank has, padded where the parameter has too few rows.
        size: of the local part without padding.
        dtype: of the gathered parameter.
        refused: in which way it is not a plain tensor that is sharded by rows, in words.
        show: puts a tensor into the modules' tables in the parameter's place.
    """

    parameter: torch.Tensor
    shape: tuple[int, ...]
    padded: tuple[int, ...]
    size: tuple[int, ...]
    dtype: torch.dtype
    refused: tuple[str, ...]
    show: Callable[[Any], None]

    def gathered(self, ranks: int) -> torch.Tensor:
        """Return a tensor without content of the whole parameter, on a storage that has the padding of all ranks."""
        flat = torch.empty(ranks * math.prod(self.padded), dtype=self.dtype, device=self.parameter.device)
        whole = torch.empty(0, dtype=self.dtype, device=flat.device)
        return whole.set_(flat.untyped_storage(), 0, self.shape, contiguous_strides(self.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """The parameters that `fully_shard` gathers together, and what it was asked to do with their gradients.

    Attributes:
        own, state: the objects that torch keeps for the group, and for its module's hooks.
        name: of the module that the group was made for.
        parameters: in the order in which they are gathered.
        process_group: the ranks; None if they are a mesh of several dimensions, but for replicas of shards (HSDP).
        replicas: the ranks that have the same part of each replica (HSDP); None for one replica.
        reduce_dtype: in which gradients are reduced; None for their own.
        stays: whether the parameters stay gathered after forward.
        refused: what else it was asked for, in words.
    """

    own: Any
    state: Any
    name: str
    parameters: tuple[ShardedFacts, ...]
    process_group: Any
    replicas: Any
    reduce_dtype: torch.dtype | None
    stays: bool
    refused: tuple[str, ...]


def is_fully_sharded(model: torch.nn.Module) -> bool:
    """Return whether `fully_shard` was applied to a module of a model."""
    return any(_state(module) is not None for module in model.modules())


def modules_that_gather(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules of a model that gather parameters for their forward pass and let go of them after it.

    Args:
        model: that itself keeps its own until the end of backward, as `fully_shard` has it.
    """
    return [
        module
        for module in model.modules()
        if module is not model and any(group.post_forward_mesh_info is not None for group in _groups(_state(module)))
    ]


def parameters_that_are_gathered(model: torch.nn.Module) -> set[torch.Tensor]:
    """Return the parameters of a model that are whole in its forward pass, each a DTensor between passes."""
    groups = [group for module in model.modules() for group in _groups(_state(module))]
    return {each.sharded_param for group in groups for each in group.fsdp_params if not each.is_dtensor}


def restored_by_copies(model: torch.nn.Module) -> Callable[[torch.Tensor], bool]:
    """Return what says whether a tensor is the memory of a gathered parameter that `aten.copy_` restores.

    Where one rank has all parts of a parameter, `fully_shard` copies what it gathers by an operator of its own else.

    Args:
        model: that `fully_shard` was applied to before.
    """
    groups = [group for module in model.modules() for group in _groups(_state(module))]
    alone = [
        each for group in groups if getattr(group.mesh_info, "shard_mesh_size", 0) == 1 for each in group.fsdp_params
    ]
    return lambda tensor: any(tensor is gathered for each in alone for gathered in each.all_gather_outputs)


def gathered_before_it_reshards(model: torch.nn.Module) -> str:
    """Return the name of a module whose parameters are gathered now, and sharded after its next forward pass.

    The root keeps its own after a forward pass, so that it is none of these; empty if there are none.

    Args:
        model: between two passes.
    """
    for name, module in model.named_modules():
        for group in _groups(_state(module)):
            if group.is_unsharded and group.post_forward_mesh_info is not None:
                return name or type(module).__name__
    return ""


def sharded_groups(model: torch.nn.Module) -> list[GroupFacts]:
    """Return the groups of a model, in the order of their modules; `fully_shard` can be applied to no more modules.

    Args:
        model: itself, or modules of it, were given to `fully_shard`.
    """
    seen: dict[int, GroupFacts] = {}
    for name, module in model.named_modules():
        state = _state(module)
        if state is not None:
            state._lazy_init()  # of the outermost module first, which does so for all that it contains
        for group in _groups(state):
            if id(group) not in seen:
                seen[id(group)] = _facts(group, state, name)
    return list(seen.values())


def reshard(groups: Sequence[GroupFacts]) -> None:
    """Let go of parameters that are gathered: a forward pass without a backward one leaves those of the root so.

    Args:
        groups: of one model, of which no pass is running.
    """
    for facts in groups:
        if facts.own.is_unsharded:
            facts.own.reshard()


@contextmanager
def groups_shown(
    groups: Sequence[GroupFacts], show: Callable[[GroupFacts], None], hide: Callable[[GroupFacts], None]
) -> Iterator[None]:
    """Let the hooks of `fully_shard` call functions inside the block, in the place of collectives.

    Args:
        groups: of one model.
        show: called before a module's forward, with its group; also where it is recomputed in backward.
        hide: called after it, unless the parameters stay gathered.
    """
    with ExitStack() as stack:
        for facts in groups:
            stack.callback(_put_back, facts)
            _take_over(facts, show, hide)
        try:
            yield
        except BaseException:
            for state in {id(facts.state): facts.state for facts in groups}.values():
                _reset(state)
            raise


def divisions(group: GroupFacts, dtype: torch.dtype, device_type: str) -> tuple[float | None, float | None, str | None]:
    """Return by what a group divides gradients before it sums them and afterwards, and the name of the sum.

    Args:
        group: of a model.
        dtype: in which they are reduced.
        device_type: where.

    Returns:
        None for a division that there is none of; `sum`, `avg`, or None for a sum that no other call can make.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

    own = group.own
    before, after, operation, _ = _get_gradient_divide_factors(
        group.process_group,
        group.replicas,
        dtype,
        device_type,
        own.gradient_divide_factor,
        own.force_sum_reduction_for_comms,
    )
    reduce_op = torch.distributed.ReduceOp
    names = {reduce_op.SUM: "sum", reduce_op.AVG: "avg"}
    return before, after, next((name for each, name in names.items() if operation == each), None)


def reduces_gradients(groups: Sequence[GroupFacts]) -> bool:
    """Return whether all groups reduce their gradients now: `set_requires_gradient_sync(False)` stops that."""
    return all(group.own.reduce_grads for group in groups)


def _state(module: torch.nn.Module) -> Any:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

    return _get_module_fsdp_state(module)


def _groups(state: Any) -> list[Any]:
    if state is None:
        return []
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _facts(group: Any, state: Any, name: str) -> GroupFacts:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

    mesh_info = group.mesh_info
    has_replicas = isinstance(mesh_info, HSDPMeshInfo)
    is_plain = isinstance(mesh_info, FSDPMeshInfo) and mesh_info.mesh.ndim == 1 + has_replicas
    reduce_dtypes = {each.reduce_dtype for each in group.fsdp_params if each.sharded_param.requires_grad}
    return GroupFacts(
        own=group,
        state=state,
        name=name,
        parameters=tuple(_parameter_facts(each) for each in group.fsdp_params),
        process_group=mesh_info.shard_process_group if is_plain else None,
        replicas=mesh_info.replicate_process_group if is_plain and has_replicas else None,
        reduce_dtype=next(iter(reduce_dtypes), None),
        stays=group.post_forward_mesh_info is None,
        refused=_asked_for(group),
    )


def _parameter_facts(each: Any) -> ShardedFacts:
    found = {
        "another dimension than the first": each.fsdp_placement.dim != 0,
        "tensor parallelism": each.is_dtensor,
        "CPU offload": each.offload_to_cpu,
        "a tensor class with an extension": hasattr(each._sharded_local_tensor, "fsdp_pre_all_gather"),
    }
    return ShardedFacts(
        parameter=each.sharded_param,
        shape=tuple(each._orig_size),
        padded=tuple(each.padded_sharded_param_size),
        size=tuple(each.sharded_size),
        dtype=each.param_dtype or each.orig_dtype,
        refused=tuple(what for what, is_there in found.items() if is_there),
        show=each._setattr_on_modules,
    )


def _asked_for(group: Any) -> tuple[str, ...]:
    found = {
        "an all-reduce hook": group._all_reduce_hook is not None,
        "collectives of its own": "Default" not in type(group._all_gather_comm).__name__
        or "Default" not in type(group._reduce_scatter_comm).__name__,
        "a process group of its own for gradients": getattr(group.mesh_info, "reduce_scatter_process_group", None)
        is not None,
        "gradients of unused parameters": bool(getattr(group, "reduce_scatter_unused_params", False)),
    }
    return tuple(what for what, is_there in found.items() if is_there)


def _take_over(facts: GroupFacts, show: Callable[[GroupFacts], None], hide: Callable[[GroupFacts], None]) -> None:
    def pre_forward(_module: Any, args: Any, kwargs: Any) -> Any:
        show(facts)
        return args, kwargs

    def post_forward(_module: Any, _inputs: Any, output: Any) -> Any:
        if not facts.stays:
            hide(facts)
        return output

    own = facts.own
    own.pre_forward, own.post_forward, own.wait_for_unshard = pre_forward, post_forward, lambda: show(facts)
    for name in _IDLE:
        setattr(own, name, _do_nothing)


def _put_back(facts: GroupFacts) -> None:
    for name in (*_OURS, *_IDLE):
        vars(facts.own).pop(name, None)
    for each in facts.parameters:
        each.show(each.parameter)


def _reset(state: Any) -> None:
    """Let a module's hooks begin anew after a forward or backward pass that broke off."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    state._training_state = TrainingState.IDLE
    getattr(state, "_modules_to_run_forward", set[Any]()).clear()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def _do_nothing(*_args: Any, **_kwargs: Any) -> None:
    """Take the place of a method of a group."""
