"""Data parallel training: each rank computes the gradients of its own batch, and all ranks train with their average.

Gradients are reduced in the buckets of DistributedDataParallel: of its sizes, in its order, divided before the sum as
it divides them. The bits are therefore DDP's, also where the order of a sum depends on its place in a bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from memfit.capture.across import Across, refuse_asked
from memfit.errors import BY_CHECKPOINT, InvalidOptionError, UnsupportedStepError
from memfit.memory.place import fills_memory
from memfit.system.recorder import taken_bytes
from memfit.torch_private.ranks import (
    bucket_sizes,
    ddp_facts,
    first_bucket_bytes,
    gradient_buckets,
    is_joined,
    start_sum,
    wait_for_sum,
)
from memfit.torch_private.tensors import contiguous_strides

BUCKET_BYTES = 25 << 20  # DistributedDataParallel's bucket_cap_mb


class Slice(NamedTuple):
    """The part of a bucket that is a gradient's, in elements."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients that are reduced together, in one storage.

    Attributes:
        dtype, device: of the parameters, and so of the storage.
        size: elements of the storage.
        slices: of the gradients, in the order in which they are ready.
    """

    dtype: torch.dtype
    device: torch.device
    size: int
    slices: tuple[Slice, ...]


class DataParallel(Across):
    """How a step averages its gradients over the ranks of a process group.

    Args:
        group: of the ranks.
        limits_bytes: of the first bucket, and of all others.
        broadcasts_buffers: whether rank 0's buffers are everybody's before each step.
        ddp: the DistributedDataParallel that was taken apart; inside its `no_sync` nothing is reduced.

    Attributes:
        broadcasts_buffers: see above.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        limits_bytes: tuple[int, int] | None = None,
        broadcasts_buffers: bool = True,
        ddp: torch.nn.parallel.DistributedDataParallel | None = None,
    ) -> None:
        super().__init__(group)
        if self.rank < 0:
            raise InvalidOptionError(
                f"process_group does not have this process (rank {dist.get_rank()}): call memfit.fit on its ranks alone"
            )
        self.broadcasts_buffers = broadcasts_buffers
        self._limits_bytes = limits_bytes or (first_bucket_bytes(), BUCKET_BYTES)
        self._ddp = ddp
        self._is_local = False
        self._shares_next = True
        self._buckets: dict[frozenset[str], tuple[Bucket, ...]] = {}

    @property
    def reduces(self) -> bool:
        """Whether steps reduce their gradients now; inside `no_sync` they do not.

        Raises:
            UnsupportedStepError: the DDP module was given to torch's Join.
        """
        if self._ddp is not None:
            _require_not_joined(self._ddp)
        return not self._is_local and (self._ddp is None or self._ddp.require_backward_grad_sync)

    @property
    def kept_bytes(self) -> int:
        """The buckets of the DDP module that was taken apart, which it keeps."""
        device = next(self._ddp.parameters()).device if self._ddp is not None else None
        sizes = bucket_sizes(self._ddp) if self._ddp is not None else []
        return sum(taken_bytes(each, device) for each in sizes if device is not None)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let the steps inside the block add to their own gradients only, as DistributedDataParallel.no_sync does."""
        before, self._is_local = self._is_local, True
        try:
            yield
        finally:
            self._is_local = before

    def buckets(self, ready: Mapping[str, torch.Tensor]) -> tuple[Bucket, ...]:
        """Return the buckets of these parameters: those of the first call that had the same ones.

        Args:
            ready: parameters by name, in the order in which their gradients are ready.

        Raises:
            UnsupportedStepError: a complex parameter.
        """
        key = frozenset(ready)
        if key not in self._buckets:
            named, given = list(ready.items()), self._given_buckets(list(ready))
            assigned = given or gradient_buckets([tensor for _, tensor in named], self._limits_bytes)
            self._buckets[key] = tuple(_bucket([named[number] for number in numbers]) for numbers in assigned)
        return self._buckets[key]

    def _given_buckets(self, names: list[str]) -> list[list[int]]:
        """Return the buckets that the DDP module has rebuilt, as positions in `names`; none if it has not."""
        if self._ddp is None:
            return []
        numbers = ddp_facts(self._ddp).get("rebuilt_per_bucket_param_indices", "")
        own = [name for name, parameter in self._ddp.module.named_parameters() if parameter.requires_grad]
        buckets = [[own[int(number)] for number in bucket.split()] for bucket in numbers.split(",")]
        if sorted(name for bucket in buckets for name in bucket) != sorted(names):
            return []
        position = {name: number for number, name in enumerate(names)}
        return [[position[name] for name in bucket] for bucket in buckets]

    def begin(self, model: torch.nn.Module) -> None:
        """Give all ranks rank 0's parameters and buffers."""
        self._share([*model.parameters(), *model.buffers()])

    def share_buffers(self, model: torch.nn.Module) -> None:
        """Give all ranks rank 0's buffers before a forward pass, as DistributedDataParallel does.

        Args:
            model: the bare model. Its buffers are left alone after a step inside `no_sync`.
        """
        if self.broadcasts_buffers and self._shares_next:
            self._share(model.buffers())
        self._shares_next = self.reduces

    def _share(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give all ranks the content of rank 0's tensors."""
        with torch.no_grad():
            for tensor in tensors:
                dense = tensor.detach().contiguous()
                sent = dense.view(torch.uint8) if dense.dtype == torch.bool else dense
                dist.broadcast(sent, group=self.group, group_src=0)
                if dense.data_ptr() != tensor.data_ptr():
                    tensor.copy_(dense)

    def average(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Average the gradients in `.grad` over all ranks, as an eager step does after backward.

        Args:
            parameters: the model's, by name.
        """
        if not self.reduces:
            return
        with torch.no_grad():
            for bucket in self.buckets({name: p for name, p in parameters.items() if p.grad is not None}):
                flat = torch.empty(bucket.size, dtype=bucket.dtype, device=bucket.device)
                views = [flat.as_strided(one.shape, one.stride, one.offset) for one in bucket.slices]
                gradients = [parameters[one.name].grad for one in bucket.slices]
                for view, gradient in zip(views, gradients, strict=True):
                    assert gradient is not None
                    torch.mul(gradient, 1.0 / self.size, out=view)
                start_sum(flat, self.group.group_name)
                wait_for_sum(flat)
                for view, gradient in zip(views, gradients, strict=True):
                    assert gradient is not None
                    gradient.copy_(view)


def data_parallel(
    model: torch.nn.Module, group: dist.ProcessGroup | None
) -> tuple[torch.nn.Module, DataParallel | None]:
    """Return the bare model, and how its gradients are averaged; None for training on this rank alone.

    Args:
        model: bare, or wrapped in DistributedDataParallel, whose group and bucket sizes are then taken.
        group: the ranks that train together; None leaves it to the model.

    Raises:
        InvalidOptionError: not a process group, or another one than the wrapped model's.
        UnsupportedStepError: a DistributedDataParallel that does more than average; names what.
    """
    if not dist.is_available():
        if group is not None:
            raise InvalidOptionError("process_group is given, but this torch has no torch.distributed")
        return model, None
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise InvalidOptionError(
            f"process_group is a {type(group).__name__}, expected a torch.distributed.ProcessGroup, such as "
            "torch.distributed.group.WORLD after init_process_group"
        )
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return model, None if group is None else DataParallel(group)
    own: Any = model.process_group
    if group is not None and group is not own:
        raise InvalidOptionError(
            "process_group differs from that of the DistributedDataParallel model: leave it out, the model has its own"
        )
    _require_plain(model)
    cap_bytes = model.bucket_bytes_cap
    first_bytes = first_bucket_bytes() if model.bucket_bytes_cap_default else cap_bytes
    return model.module, DataParallel(
        own, limits_bytes=(first_bytes, cap_bytes), broadcasts_buffers=model.broadcast_buffers, ddp=model
    )


def _require_plain(model: torch.nn.parallel.DistributedDataParallel) -> None:
    """Refuse a DistributedDataParallel that does more than average gradients in buckets and broadcast buffers."""
    found = {
        "find_unused_parameters=True": model.find_unused_parameters,
        "static_graph=True": model.static_graph,
        "mixed_precision": model.mixed_precision is not None,
        "bucket_cap_mb_list": bool(getattr(model, "bucket_bytes_cap_list", None)),
        "parameters that it ignores or reduces later": bool(model.parameters_to_ignore),
        "a communication hook": bool(ddp_facts(model).get("comm_hook")),
    }
    refuse_asked("the model is wrapped in DDP with", found, ", or give the bare model and process_group")
    _require_not_joined(model)


def _require_not_joined(model: torch.nn.parallel.DistributedDataParallel) -> None:
    if is_joined(model):
        raise UnsupportedStepError(
            "the DDP model was given to torch's Join, in which ranks end at different steps; planned steps need all "
            f"ranks in each: {BY_CHECKPOINT}; or give the bare model and process_group, and as many batches to each "
            "rank"
        )


def _bucket(parameters: Sequence[tuple[str, torch.Tensor]]) -> Bucket:
    slices: list[Slice] = []
    offset = 0
    for name, parameter in parameters:
        if parameter.is_complex():
            raise UnsupportedStepError(
                f"memfit.fit: parameter {name!r} is complex, and a planned step reduces gradients of real numbers "
                f"only: {BY_CHECKPOINT}"
            )
        shape = tuple(parameter.shape)
        stride = parameter.stride() if fills_memory(parameter) else contiguous_strides(shape)
        slices.append(Slice(name, shape, tuple(stride), offset))
        offset += parameter.numel()
    first = parameters[0][1]
    return Bucket(dtype=first.dtype, device=first.device, size=offset, slices=tuple(slices))
