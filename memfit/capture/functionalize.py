"""Functional forms of calls that mutate, and corrections of fake kernels that are known to be wrong.

A functional form does the arithmetic of the same kernel into a storage of its own. It is used only if its result has
exactly the metadata that the in-place call leaves; otherwise the call stays a mutation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from memfit.errors import UnsupportedStepError
from memfit.memory.place import Place, fills_memory
from memfit.torch_private.autocast import casting
from memfit.torch_private.tensors import fake_mode_of, real_tensors, tensors_in, tree_map

# In-place calls whose result does not depend on the old content: only their first argument's metadata counts.
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

_aten = torch.ops.aten

# Kernels without a cast of their own that call operators which autocast casts. Autocast stays on in them, as no other
# operator's cast came before; a recorded call runs outside of it. (Found by running all of torch's OpInfo both ways.)
CAST_INSIDE = (_aten._trilinear,)

# Kernels whose third and fourth results are a seed and an offset on the host, as long as no CUDA graph is captured.
_HOST_SEEDS = (_aten._scaled_dot_product_efficient_attention.default, _aten._efficient_attention_forward.default)


def corrected(func: Any, args: tuple[Any, ...], returned: Any) -> Any:
    """Return the fake results of a call, corrected if torch's fake kernel is known to differ from the real one.

    - native_batch_norm on a CPU saves its statistics in the dtype of its weight; the fake one in the input's.
    - mkldnn_rnn_layer returns a workspace whose size only the real kernel computes, and none without gradients; the
      fake one returns no bytes.
    - Efficient attention on CUDA keeps the seed and the offset of its dropout on the host, where its gradient reads
      them through plain pointers (attention_backward.cu, Note [Seed and Offset Device]); the fake one on the device.

    Args:
        func: the operator overload.
        args: its arguments.
        returned: what its fake kernel returned.
    """
    if func in _HOST_SEEDS and args[0].device.type == "cuda":
        seeds = (torch.empty_like(tensor, device="cpu") for tensor in returned[2:4])
        return (*returned[:2], *seeds, *returned[4:])
    if func is _aten.mkldnn_rnn_layer.default and not torch.is_grad_enabled():
        return (*returned[:3], None)
    if func is _aten.mkldnn_rnn_layer.default:
        return (*returned[:3], returned[3].new_empty(_rnn_workspace_bytes(args)))
    if func is not _aten.native_batch_norm.default or args[1] is None or args[1].dtype == args[0].dtype:
        return returned
    if args[0].device.type != "cpu":
        return returned
    output, *statistics = returned
    return (output, *(torch.empty_like(tensor, dtype=args[1].dtype) for tensor in statistics))


def as_the_real_kernel(func: Any, args: Any, kwargs: Any) -> Any:
    """Return fakes of what a real kernel returns, found by a run on zeros: for a call that its fake kernel refuses.

    Args:
        func: the operator overload; it mutates nothing and makes no view.
        args, kwargs: its arguments, with fakes.

    Raises:
        Exception: the real kernel refuses them too.
    """
    mode = fake_mode_of(tensors_in((args, kwargs))[0])

    def zeros(leaf: Any) -> Any:
        return Place.of(leaf).empty(leaf.device).zero_() if isinstance(leaf, torch.Tensor) else leaf

    with real_tensors():
        returned = func(*tree_map(zeros, args), **tree_map(zeros, kwargs))
    return tree_map(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, returned)


def is_pure(func: Any) -> bool:
    """Return whether an operator overload writes to no argument, and returns no view of one."""
    return all(argument.alias_info is None for argument in func._schema.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequireTrue:
    """Raises ValueError, as a check of arguments in torch.distributions does, unless its argument is true.

    Attributes:
        line: the user's line that makes the check.
    """

    line: str
    measurable = False
    workspace_bytes = 0

    @property
    def __name__(self) -> str:
        return "require_true"

    def __call__(self, checked: torch.Tensor) -> None:
        if not checked.item():
            raise ValueError(
                f"{self.line}: a check of the arguments of a torch.distributions object failed; an eager step names "
                "the argument"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequireClasses:
    """Raises RuntimeError, as one_hot does, unless its arguments, the ends of a range, are numbers of classes.

    Attributes:
        line: the user's line that calls one_hot.
        classes: how many there are.
    """

    line: str
    classes: int
    measurable = False
    workspace_bytes = 0

    @property
    def __name__(self) -> str:
        return f"require_classes({self.classes})"

    def __call__(self, least: torch.Tensor, largest: torch.Tensor) -> None:
        if least.item() < 0:
            raise RuntimeError(f"{self.line}: Class values must be non-negative.")
        if largest.item() >= self.classes:
            raise RuntimeError(f"{self.line}: Class values must be smaller than num_classes.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """A call of bincount whose result is as long as the call asks for; a value beyond raises UnsupportedStepError.

    Attributes:
        func: the operator overload.
        line: the user's line that calls it.
        length: of the result: `minlength`.
    """

    func: Any
    line: str
    length: int

    @property
    def __name__(self) -> str:
        return f"{self.length}_counts.{self.func}"

    def fake(self, values: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Return the fake of its result.

        Args:
            values: the numbers that are counted, as a fake.
            weights: what each of them counts, in their order; 1 each if None.
        """
        weighted = torch.float32 if weights is not None and weights.dtype == torch.float32 else torch.float64
        return values.new_empty(self.length, dtype=torch.int64 if weights is None else weighted)

    def __call__(self, *args: Any) -> torch.Tensor:
        made = self.func(*args)
        if made.numel() != self.length:
            raise UnsupportedStepError(
                f"{self.line}: bincount found the value {made.numel() - 1}, and was planned for values below its "
                f"minlength={self.length}, which decides the size of its result; give a larger minlength"
            )
        return made


def _rnn_workspace_bytes(args: tuple[Any, ...]) -> int:
    """Return the bytes of the workspace that mkldnn_rnn_layer saves for its gradient, by a run on zeros."""
    with real_tensors():
        zeros = [torch.zeros(a.shape, dtype=a.dtype) if isinstance(a, torch.Tensor) else a for a in args]
        *_, workspace = WithGradients(_aten.mkldnn_rnn_layer.default)(*zeros)
        return workspace.numel()


@dataclass(frozen=True, slots=True)
class WithGradients:
    """A call that runs with gradients enabled, as it did in the step.

    mkldnn_rnn_layer saves what its gradient needs only then; no other kernel depends on it.
    """

    func: Any

    @property
    def __name__(self) -> str:
        return f"with_gradients.{self.func}"

    def __call__(self, *args: Any) -> tuple[torch.Tensor, ...]:
        detached = [arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args]
        with torch.enable_grad():
            return self.func(*detached)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderAutocast:
    """A call that runs inside autocast, as it did in the step: its kernel calls other operators, which are cast.

    Attributes:
        func: an operator overload of `CAST_INSIDE`.
        device_type, dtype: of autocast.
    """

    func: Any
    device_type: str
    dtype: torch.dtype

    @property
    def __name__(self) -> str:
        return f"under_autocast.{self.dtype}.{self.func}"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.func, name)  # its schema, say

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with casting(self.device_type, self.dtype):
            return self.func(*args, **kwargs)


_CAST_OVERLOADS = frozenset(packet.default for packet in CAST_INSIDE)


def as_cast(func: Any, args: Sequence[Any], has_autocast: Callable[[str], bool]) -> Any:
    """Return an operator as a dispatch mode has to call it: inside autocast, if its kernel's own calls are cast there.

    Args:
        func: the overload.
        args: its arguments.
        has_autocast: says whether the call came from inside of autocast for a device type.
    """
    if func not in _CAST_OVERLOADS:
        return func
    device_type = args[0].device.type
    if not has_autocast(device_type):
        return func
    return _under_autocast(func, device_type, torch.get_autocast_dtype(device_type))


def is_cast_inside(func: Any) -> bool:
    """Return whether `as_cast` may return another operator."""
    return func in _CAST_OVERLOADS


@cache
def _under_autocast(func: Any, device_type: str, dtype: torch.dtype) -> UnderAutocast:
    """Return the one call of its kind: whoever notes operators tells them apart by `is`."""
    return UnderAutocast(func=func, device_type=device_type, dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overwrite:
    """An in-place call on a new tensor: `Overwrite(copy_)(source)` returns a copy.

    Attributes:
        func: the in-place overload, whose result does not depend on the old content.
        place, device: of the new tensor.
        length: of its storage, in elements.
    """

    func: Any
    place: Place
    length: int
    device: torch.device

    @property
    def __name__(self) -> str:
        return f"overwrite.{self.func}"

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        target = self.place.on(torch.empty(self.length, dtype=self.place.dtype, device=self.device))
        return self.func(target, *args, **kwargs)


def overwrite_like(result: torch.Tensor, func: Any) -> Overwrite:
    """Return the call of the in-place `func` on a new tensor of `result`'s metadata.

    Args:
        result: its place and device are taken, not its values.
        func: writes its result into its first argument.
    """
    length = result.untyped_storage().nbytes() // result.itemsize
    return Overwrite(func=func, place=Place.of(result), length=length, device=result.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOverwritten:
    """`slice_scatter` and its like, into a new tensor at a given place in its storage: kernels keep their argument's.

    Attributes:
        view: makes the view of the new tensor that is written to.
        shape, stride, offset: of the new tensor, in elements.
        length: of its storage, in elements.
    """

    view: Any
    place: Place
    length: int

    @property
    def __name__(self) -> str:
        return f"part_overwritten.{self.view}"

    def __call__(self, whole: torch.Tensor, part: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = self.place.on(torch.empty(self.length, dtype=whole.dtype, device=whole.device))
        self.view(made.copy_(whole), *args, **kwargs).copy_(part)
        return made


SCATTERS = {
    torch.ops.aten.slice_scatter: torch.ops.aten.slice.Tensor,
    torch.ops.aten.select_scatter: torch.ops.aten.select.int,
    torch.ops.aten.diagonal_scatter: torch.ops.aten.diagonal.default,
}


def with_arguments_of(func: Any, name: str) -> Any:
    """Return the overload of aten's operator `name` that takes what `func` takes and returns a result; else None."""
    packet = getattr(_aten, name, None)
    overloads = [] if packet is None else [getattr(packet, each) for each in packet.overloads()]
    fitting = (each for each in overloads if arguments_of(each) == arguments_of(func))
    return next((each for each in fitting if not any(argument.is_out for argument in each._schema.arguments)), None)


def arguments_of(func: Any) -> list[tuple[str, str]]:
    """Return the names and types of the arguments of an overload, but for those that it returns its results in."""
    return [(argument.name, str(argument.type)) for argument in func._schema.arguments if not argument.is_out]


def functional_variant(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mutated: torch.Tensor
) -> tuple[Callable[..., Any], bool] | None:
    """Return the functional form of an in-place call, or None if there is none.

    Only calls that mutate their first argument, and the whole of its storage, have one.

    Args:
        func: the in-place overload.
        args, kwargs: its arguments, fakes that it has mutated already.
        mutated: the only tensor that it mutates.

    Returns:
        (functional form, whether it takes the mutated tensor as its first argument)
    """
    name = func._schema.name.split("::")[-1]
    if not name.endswith("_") or func.namespace != "aten" or not args or args[0] is not mutated:
        return None
    if not _covers_its_storage(mutated):
        return None
    if name in _OVERWRITING:
        return overwrite_like(mutated, func), False
    functional = with_arguments_of(func, name[:-1])
    if functional is None:
        return None
    returned = functional(*args, **kwargs)
    same = returned.shape == mutated.shape and returned.stride() == mutated.stride()
    same = same and returned.dtype == mutated.dtype and returned.untyped_storage().nbytes() == _storage_bytes(mutated)
    return (functional, True) if same else None


def _covers_its_storage(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is dense and all of its storage, so that a new storage can replace it for each view."""
    if tensor.numel() * tensor.element_size() != _storage_bytes(tensor) or tensor.storage_offset() != 0:
        return False
    if tensor.is_conj() or tensor.is_neg():
        return False
    return fills_memory(tensor)


def _storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()
