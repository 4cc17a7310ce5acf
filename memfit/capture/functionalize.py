"""Functional forms of in-place calls: the same kernel's arithmetic, into a storage of its own.

A functional form is used only when it gives a tensor of exactly the metadata that the in-place call leaves; otherwise
the call stays a mutation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memfit.capture.torch_private import real_tensors

# In-place calls whose result does not depend on what was there before: only their first argument's metadata counts.
_OVERWRITING = frozenset(
    [
        "bernoulli_",
        "cauchy_",
        "copy_",
        "exponential_",
        "fill_",
        "geometric_",
        "log_normal_",
        "normal_",
        "random_",
        "uniform_",
        "zero_",
    ]
)

# Batch normalizations by kernel: the positions of running_mean, running_var, and of `training` (None: always training).
# native_, cudnn_ and miopen_batch_norm mutate their running statistics though their schemas do not say so.
_aten = torch.ops.aten
BATCH_NORMS: dict[Any, tuple[int, int, int | None]] = {
    _aten.native_batch_norm: (3, 4, 5),
    _aten._native_batch_norm_legit: (3, 4, 5),
    _aten.cudnn_batch_norm: (3, 4, 5),
    _aten.miopen_batch_norm: (3, 4, 5),
    _aten._batch_norm_with_update: (3, 4, None),
}

# Their functional forms, which AOTAutograd uses, and which return the statistics by themselves.
FUNCTIONAL_BATCH_NORMS: dict[Any, tuple[int, int, int | None]] = {
    _aten._native_batch_norm_legit_functional: (3, 4, 5),
    _aten._batch_norm_with_update_functional: (3, 4, None),
}

# Their gradients: the positions of running_mean, running_var and of `train` (None: always training). In training the
# statistics are not looked at; without them, no backward pass depends on buffers that a second forward pass changes.
_BATCH_NORM_GRADIENTS: dict[Any, tuple[int, int, int | None]] = {
    _aten.native_batch_norm_backward: (3, 4, 7),
    _aten.batch_norm_backward: (4, 5, 8),
    _aten.cudnn_batch_norm_backward: (3, 4, None),
    _aten.miopen_batch_norm_backward: (3, 4, None),
}


# Kernels whose third and fourth results are a seed and an offset on the host, as long as no CUDA graph is captured.
_HOST_SEEDS = (_aten._scaled_dot_product_efficient_attention.default, _aten._efficient_attention_forward.default)


def corrected(func: Any, args: tuple[Any, ...], returned: Any) -> Any:
    """Return the fake results of a call as the real kernel would give them, where torch's fake kernel is known to err.

    native_batch_norm on a CPU saves its statistics in the dtype of its weight; the fake kernel says the input's.
    mkldnn_rnn_layer has a workspace whose size only the real kernel knows; the fake kernel says none.
    Efficient attention on CUDA keeps the seed and the offset of its dropout on the host, where its gradient reads them
    through plain pointers (attention_backward.cu, Note [Seed and Offset Device]); the fake kernel says on the device.
    """
    if func in _HOST_SEEDS and args[0].device.type == "cuda":
        seeds = (torch.empty_like(tensor, device="cpu") for tensor in returned[2:4])
        return (*returned[:2], *seeds, *returned[4:])
    if func is _aten.mkldnn_rnn_layer.default:
        return (*returned[:3], returned[3].new_empty(_rnn_workspace_bytes(args)))
    if func is not _aten.native_batch_norm.default or args[1] is None or args[1].dtype == args[0].dtype:
        return returned
    if args[0].device.type != "cpu":
        return returned
    output, *statistics = returned
    return (output, *(torch.empty_like(tensor, dtype=args[1].dtype) for tensor in statistics))


def _rnn_workspace_bytes(args: tuple[Any, ...]) -> int:
    """Return the bytes of the workspace that mkldnn_rnn_layer hands to its gradient: run once, on zeros."""
    with real_tensors():
        zeros = [torch.zeros(a.shape, dtype=a.dtype) if isinstance(a, torch.Tensor) else a for a in args]
        *_, workspace = WithGradients(_aten.mkldnn_rnn_layer.default)(*zeros)
        return workspace.numel()


@dataclass(frozen=True, slots=True)
class WithGradients:
    """A call whose kernel returns what its gradient needs only where gradients are enabled, as they were in the step.

    mkldnn_rnn_layer asks; other kernels do not.
    """

    func: Any

    @property
    def __name__(self) -> str:
        return f"with_gradients.{self.func}"

    def __call__(self, *args: Any) -> tuple[torch.Tensor, ...]:
        detached = [arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args]
        with torch.enable_grad():
            return self.func(*detached)


def without_idle_statistics(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a batch normalization's gradient without the statistics that it does not look at."""
    positions = _BATCH_NORM_GRADIENTS.get(func._overloadpacket)
    if positions is None:
        return args
    mean, variance, training = positions
    if training is not None and not args[training]:
        return args
    return tuple(None if position in (mean, variance) else arg for position, arg in enumerate(args))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNorm:
    """Training batch normalization that leaves its running statistics alone and returns updated copies after the
    rest.
    """

    func: Any
    mean_position: int
    variance_position: int

    @property
    def __name__(self) -> str:
        return str(self.func)

    @staticmethod
    def of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchNorm | None:
        """Return the functional form of this call, or None when it updates no running statistics."""
        mean, variance, training = BATCH_NORMS[func._overloadpacket]
        if kwargs or len(args) <= variance or args[mean] is None or args[variance] is None:
            return None
        if training is not None and not args[training]:
            return None
        return BatchNorm(func=func, mean_position=mean, variance_position=variance)

    def __call__(self, *args: Any) -> tuple[torch.Tensor, ...]:
        own = list(args)
        own[self.mean_position] = args[self.mean_position].clone()
        own[self.variance_position] = args[self.variance_position].clone()
        return (*self.func(*own), own[self.mean_position], own[self.variance_position])


@dataclass(frozen=True, slots=True, kw_only=True)
class Overwrite:
    """An in-place call over a new tensor of the metadata that its first argument had: `Overwrite(copy_)(source)`."""

    func: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def __name__(self) -> str:
        return f"overwrite.{self.func}"

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        target = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return self.func(target, *args, **kwargs)


def overwrite_like(result: torch.Tensor, func: Any) -> Overwrite:
    """Return the call of the in-place `func` over a new tensor of `result`'s metadata."""
    return Overwrite(
        func=func,
        shape=tuple(result.shape),
        stride=tuple(result.stride()),
        dtype=result.dtype,
        device=result.device,
    )


def functional_variant(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mutated: torch.Tensor
) -> tuple[Callable[..., Any], bool] | None:
    """Return (functional form, whether it takes the mutated tensor as its first argument), or None if there is none.

    Only calls that mutate their first argument, and the whole of its storage, have one.
    """
    name = func._schema.name.split("::")[-1]
    if not name.endswith("_") or func.namespace != "aten" or not args or args[0] is not mutated:
        return None
    if not _covers_its_storage(mutated):
        return None
    if name in _OVERWRITING:
        return overwrite_like(mutated, func), False
    packet = getattr(torch.ops.aten, name[:-1], None)
    functional = getattr(packet, func._overloadname, None)
    if functional is None or len(functional._schema.arguments) != len(func._schema.arguments):
        return None
    returned = functional(*args, **kwargs)
    same = returned.shape == mutated.shape and returned.stride() == mutated.stride()
    same = same and returned.dtype == mutated.dtype and returned.untyped_storage().nbytes() == _storage_bytes(mutated)
    return (functional, True) if same else None


def _covers_its_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor is dense and is all of its storage, so that a new storage can take its place for every
    view.
    """
    if tensor.numel() * tensor.element_size() != _storage_bytes(tensor) or tensor.storage_offset() != 0:
        return False
    if tensor.is_conj() or tensor.is_neg():
        return False
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _storage_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())
