"""Sums over ranks as DistributedDataParallel makes them; gathered parts and reduced ones as `fully_shard` makes them.

gloo gathers into a copy, and scatters a copy of what it has summed. Here it sends each rank's part to the others, and
sums in place: the same bits, without memory that no plan counts.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from memfit.torch_private.tensors import contiguous_strides, storage_users


def has_ranks() -> bool:
    """Return whether this process is one of several that are joined in a process group."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def inside_ddp(model: Any) -> Any:
    """Return the module inside of a DistributedDataParallel one; any other object is returned.

    One with mixed precision is returned itself: its hooks exchange the parameters of the modules inside.
    """
    is_ddp = torch.distributed.is_available() and isinstance(model, torch.nn.parallel.DistributedDataParallel)
    return model.module if is_ddp and model.mixed_precision is None else model


def is_lost(error: RuntimeError) -> bool:
    """Return whether an error of a collective says that another rank is gone, or does not answer."""
    return isinstance(error, torch.distributed.DistError) or "gloo/" in str(error)


_LET_GO_SECONDS = 20.0  # the threads of gloo need microseconds, or their turn on a processor
_MANY, _PAUSE_SECONDS = 1000, 1e-4  # looks at what gloo holds without a pause; the pause between later ones
_OF_TORCH = ("aten", "prim", "prims", "profiler", "fsdp", "c10d", "_c10d_functional", "_c10d_functional_autograd")
_OWN, _GATHERS, _OTHERS = "own", "gathers", "others"  # collectives of this thread, of `fully_shard`, of other threads
_LENT = "_memfit_lent"  # of a tensor: see `_Lent`


def is_gloo(group: Any, device: torch.device) -> bool:
    """Return whether the ranks of a process group use gloo for the tensors of a device; absent ones would on a CPU."""
    name = group._get_backend(device).name()
    return name == "gloo" or (name == "fake" and device.type == "cpu")


def start_sum(tensor: torch.Tensor, group_name: str) -> None:
    """Start a sum over the ranks of a process group, in place; `wait_for_sum` waits for it.

    Args:
        tensor: all of its storage.
        group_name: of the group.
    """
    _sum_in_place(tensor, "sum", group_name)


def wait_for_sum(tensor: torch.Tensor) -> None:
    """Wait until a sum over ranks is complete.

    Args:
        tensor: that `start_sum` was called with.
    """
    _take_back(tensor)


def start_gather(parts: Sequence[torch.Tensor], dtype: torch.dtype, group_name: str) -> torch.Tensor:
    """Start to gather the parts of all ranks, and return the tensor that they will be in, one rank after another.

    Args:
        parts: this rank's, in one dimension, as long on each rank.
        dtype: that they are gathered in.
        group_name: of the process group.
    """
    group = _group(group_name)
    size, rank, lengths = group.size(), group.rank(), [part.numel() for part in parts]
    total = sum(lengths)
    whole = torch.empty(size * total, dtype=dtype, device=parts[0].device)
    own = whole.narrow(0, rank * total, total)
    torch._foreach_copy_(list(own.split(lengths)), list(parts))
    if not is_gloo(group, whole.device):
        torch.ops._c10d_functional.all_gather_into_tensor_out(own, size, group_name, out=whole)
        return whole
    del own
    lent = _Lent(whole)
    for each in range(size):
        part = whole.narrow(0, each * total, total).data
        lent.works.append((torch.distributed.broadcast(part, group=group, group_src=each, async_op=True), part))
    setattr(whole, _LENT, lent)
    return whole


def finish_gather(whole: torch.Tensor, size: int, places: Sequence[Sequence[Any]]) -> Any:
    """Wait until the parts of all ranks are there, and return them by tensor: one tensor, or a tuple.

    Args:
        whole: from `start_gather`.
        size: how many ranks there are.
        places: for each tensor the elements of a rank's part, and its shape.
    """
    _take_back(whole)
    lengths = [length for length, _ in places]
    flat = [torch.empty(size * length, dtype=whole.dtype, device=whole.device) for length in lengths]
    torch.split_with_sizes_copy(whole.view(size, -1), lengths, dim=1, out=[each.view(size, -1) for each in flat])
    tensors = tuple(
        each.as_strided(shape, contiguous_strides(shape)) for each, (_, shape) in zip(flat, places, strict=True)
    )
    return tensors[0] if len(tensors) == 1 else tensors


def start_scatter(whole: torch.Tensor, operation: str, group_name: str) -> torch.Tensor:
    """Start to sum a tensor over ranks, and return the tensor that this rank's part of the sum will be in.

    Args:
        whole: the parts of all ranks one after another; nothing reads it until `finish_scatter`.
        operation: `sum`, or `avg`, for which gloo takes memory of its own.
        group_name: of the process group.
    """
    group = _group(group_name)
    part = torch.empty(whole.numel() // group.size(), dtype=whole.dtype, device=whole.device)
    if is_gloo(group, whole.device):
        _sum_in_place(whole, operation, group_name)
    else:
        torch.ops._c10d_functional.reduce_scatter_tensor_out(whole, operation, group.size(), group_name, out=part)
    return part


def finish_scatter(part: torch.Tensor, whole: torch.Tensor, rank: int) -> None:
    """Wait until this rank's part of a sum is there.

    Args:
        part: from `start_scatter`.
        whole: that it was called with.
        rank: of this process.
    """
    if not hasattr(whole, _LENT):
        torch.ops._c10d_functional.wait_tensor(part)
        return
    _take_back(whole)
    part.copy_(whole.narrow(0, rank * part.numel(), part.numel()))


def groups_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return the process groups of more than one rank that a call of an operator may talk to.

    Args:
        func: the overload: a collective, or any operator on DTensors.
        args, kwargs: of the call.
        tensors: in them.
    """
    found: list[Any] = []
    for mesh in {id(mesh): mesh for mesh in (getattr(tensor, "device_mesh", None) for tensor in tensors)}.values():
        found += [] if mesh is None else mesh.get_all_groups()
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        if argument.name == "group_name" and isinstance(value, str):
            found.append(_group(value))
        elif argument.name == "process_group" and value is not None:
            found.append(torch.distributed.ProcessGroup.unbox(value))
    return [group for group in found if group.size() > 1]


@contextmanager
def groups_inside(operator: Any, device: torch.device) -> Iterator[list[Any]]:
    """Note the process groups of the collectives that an operator's own code runs in the block; PyTorch's is known.

    Args:
        operator: that is called in the block; any callable.
        device: of its tensors.
    """
    with groups_talked_to(device) if is_of_others(operator) else nullcontext(list[Any]()) as groups:
        yield groups


@contextmanager
def groups_talked_to(device: torch.device, known: set[Any] | None = None) -> Iterator[list[Any]]:
    """Note the process groups of the collectives that this thread begins in the block; its end fills the list.

    Those of other threads, as of one that saves a checkpoint, and those by which `fully_shard` gathers do not count.

    Args:
        device: of their tensors.
        known: numbers of collectives that were gathers, which are not looked at again; it takes new ones.
    """
    groups, before = list[Any](), _collectives(device)
    known = set[Any]() if known is None else known
    try:
        yield groups
    finally:
        now = _collectives(device)
        begun = {group: (before.get(group, 0), count) for group, count in now.items() if count != before.get(group)}
        numbers = tuple((group.group_name, last - first) for group, (first, last) in begun.items())
        if begun and numbers not in known:
            found = {group: _kinds(group, device, *each) for group, each in begun.items()}
            groups += [group for group, kinds in found.items() if _OWN in kinds]
            if set().union(*found.values()) == {_GATHERS}:
                known.add(numbers)


def _kinds(group: Any, device: torch.device, first: int, last: int) -> set[str]:
    """Return who has begun the collectives of a group after the `first` one: this thread, `fully_shard` in it, others.

    PyTorch's flight recorder tells; what it does not hold, since it was switched off, is taken for this thread's.
    """
    name = "_dump_nccl_trace" if group._get_backend(device).name() == "nccl" else "_dump_fr_trace"
    entries = pickle.loads(getattr(torch._C._distributed_c10d, name)()).get("entries", ())
    seen = {each["collective_seq_id"]: each for each in entries if each["process_group"][0] == group.group_name}
    return {_kind(seen.get(number)) for number in range(first + 1, last + 1)}


def _kind(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return _OWN
    if int(str(entry.get("thread_id", threading.get_ident())), 0) != threading.get_ident():
        return _OTHERS
    package = str(Path(torch.distributed.__file__).parent / "fsdp")
    return _GATHERS if any(each["filename"].startswith(package) for each in entry.get("frames", ())) else _OWN


def is_of_others(operator: Any) -> bool:
    """Return whether an operator is a library's or the user's, whose code may change, and call anything."""
    return getattr(operator, "namespace", "aten") not in _OF_TORCH


def _collectives(device: torch.device) -> dict[Any, int]:
    """Return how many collectives for a device this rank has begun in each process group of more than one rank."""
    found: dict[Any, int] = {}
    for group in list(torch.distributed.distributed_c10d._world.pg_map) if has_ranks() else ():
        with suppress(RuntimeError):  # it is not for this device
            if group.size() > 1:
                backend: Any = group._get_backend(device)
                found[group] = backend._get_sequence_number_for_group()
    return found


def _group(name: str) -> Any:
    return torch._C._distributed_c10d._resolve_process_group(name)


class _Lent:
    """What gloo works on: tensors of a tensor's memory, each with its work, that nobody else holds.

    They are no views, which would hold the tensor itself.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.works: list[tuple[Any, torch.Tensor]] = []
        self.holders = storage_users(tensor.untyped_storage())


def _sum_in_place(tensor: torch.Tensor, operation: str, group_name: str) -> None:
    lent = _Lent(tensor)
    alias = tensor.data
    torch.ops._c10d_functional.all_reduce_(alias, operation, group_name)
    lent.works.append((None, alias))
    setattr(tensor, _LENT, lent)


def _take_back(tensor: torch.Tensor) -> None:
    """Wait until what was lent of a tensor is complete, and gloo's threads hold its memory no more.

    A thread drops what it holds after it has said that its work is complete, and may wait for Python's lock before:
    memory would be freed late, at any time.

    Args:
        tensor: has got no views since it was lent.
    """
    if not hasattr(tensor, _LENT):
        torch.ops._c10d_functional.wait_tensor(tensor)
        return
    lent: _Lent = getattr(tensor, _LENT)
    delattr(tensor, _LENT)
    while lent.works:
        work, each = lent.works.pop()
        torch.ops._c10d_functional.wait_tensor(each) if work is None else work.wait()
    work = each = None
    looks, until = 0, time.monotonic() + _LET_GO_SECONDS
    while tensor.device.type == "cpu" and storage_users(tensor.untyped_storage()) > lent.holders:
        if time.monotonic() >= until:
            break
        looks += 1
        time.sleep(0 if looks < _MANY else _PAUSE_SECONDS)


def gradient_buckets(parameters: Sequence[torch.Tensor], limits_bytes: Sequence[int]) -> list[list[int]]:
    """Return the positions of the parameters in each bucket that DistributedDataParallel would reduce together.

    Args:
        parameters: in the order in which their gradients are ready.
        limits_bytes: a bucket is full at its limit; the last limit holds for all later buckets.
    """
    order = list(range(len(parameters)))
    return torch.distributed._compute_bucket_assignment_by_size(list(parameters), list(limits_bytes), [], order)[0]


def first_bucket_bytes() -> int:
    """Return the size of the bucket that DistributedDataParallel reduces first, by default."""
    return torch.distributed._DEFAULT_FIRST_BUCKET_BYTES


def ddp_facts(module: torch.nn.parallel.DistributedDataParallel) -> dict[str, str]:
    """Return what DistributedDataParallel logs of itself: its communication hook and, once rebuilt, its buckets."""
    return {name: str(value) for name, value in module._get_ddp_logging_data().items()}


def first_bucket_sizes(module: torch.nn.parallel.DistributedDataParallel) -> list[int]:
    """Return the bytes of the buckets that a module was made with; none once it has made others, in its second step.

    Args:
        module: on a CPU.
    """
    is_on_cpu = next(module.parameters()).device.type == "cpu"
    return _sizes(module, "bucket_sizes") if is_on_cpu and not _sizes(module, "rebuilt_bucket_sizes") else []


def bucket_sizes(module: torch.nn.parallel.DistributedDataParallel) -> list[int]:
    """Return the bytes of the buckets that a module has now."""
    return _sizes(module, "rebuilt_bucket_sizes") or _sizes(module, "bucket_sizes")


def _sizes(module: torch.nn.parallel.DistributedDataParallel, name: str) -> list[int]:
    return [int(each) for each in ddp_facts(module).get(name, "").split(",") if each.strip()]


def ddp_sorts_buckets() -> bool:
    """Return whether a DistributedDataParallel runs its module, and makes its buckets anew after the backward pass.

    It sorts them by when gradients are ready, and tells one step later. On two ranks a sum does not depend on it, but
    what a communication hook makes of a bucket may.
    """
    if not torch.distributed.is_available():
        return False
    module = torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()
    if module is None or (module.process_group.size() <= 2 and not ddp_facts(module).get("comm_hook")):
        return False
    may_sort = module.static_graph or not module.find_unused_parameters
    return may_sort and not _sizes(module, "rebuilt_bucket_sizes")


def replicated_class() -> type:
    """Return the class of modules that `replicate` was applied to: DDP's reducer is then in their hooks."""
    from torch.distributed._composable.replicate import DDP

    return DDP


def is_joined(module: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Return whether a module was given to `torch.distributed.algorithms.Join`."""
    return module._join_config.enable


def group_timeout(group: torch.distributed.ProcessGroup) -> timedelta:
    """Return how long a rank of a process group waits for the others."""
    device = group._device_types[0]
    return group._get_backend(device).options._timeout
