"""Tensors: which kind they are, the storage behind them, and nested values that hold them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch._dispatch.python import no_python_dispatcher
from torch._functorch.aot_autograd import make_boxed_func as make_boxed_func
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as _torch_tree_leaves
from torch.utils._pytree import tree_map as _torch_tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

from memfit.memory.place import Place
from memfit.torch_private.patching import replaced

BatchNormBase = _BatchNorm
DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)
_ATOMS = frozenset([int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format])
_NO_RECORDS = (torch.nn.Module, torch.optim.Optimizer, type, FunctionType, MethodType, ModuleType, np.ndarray)
_OBJECTS_DEEP, _MOST_OBJECTS = 4, 1000
SHORTENS = (torch.ops.aten._pack_padded_sequence,)  # leave out parts of what they are given, as values say, untagged
_VIEWS_OF_SHAPES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
WITHOUT_BASE = torch.ops.aten._unsafe_view.default  # a view that autograd takes for no view
READS_A_NUMBER = torch.ops.aten._local_scalar_dense.default  # what `item`, `bool` and `float` of a tensor call


_READS_CONTENTS = ("not supported for tensor subclasses", "FakeTensor.__format__")


def is_data_dependent(error: Exception) -> bool:
    """Return whether code that ran on fakes failed because it reads a tensor's contents.

    Args:
        error: raised by a fake kernel, by `numpy()`, or by a format such as `f"{loss:.3f}"`.
    """
    return isinstance(error, DATA_DEPENDENT_ERRORS) or any(text in str(error) for text in _READS_CONTENTS)


def is_fake(tensor: object) -> bool:
    """Return whether `tensor` is one of FakeTensorMode's: metadata without data."""
    return isinstance(tensor, FakeTensor)


def is_plain_dense(value: object) -> bool:
    """Return whether `value` is a real tensor with a storage: not fake, sparse, nested, meta or a wrapper."""
    if type(value) not in _ORDINARY and (
        not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor) or hasattr(value, "__tensor_flatten__")
    ):
        return False
    return value.layout is torch.strided and not value.is_nested and not value.is_meta  # pyright: ignore


def is_freed(tensor: torch.Tensor) -> bool:
    """Return whether the storage of a plain tensor was resized, and lacks elements of it; to read it ends the process.

    FSDP does so to parameters that are not gathered.
    """
    if not is_plain_dense(tensor):
        return False
    return Place.of(tensor).reach_bytes > tensor.untyped_storage().nbytes()


_Made = TypeVar("_Made", bound=torch.Tensor)
_ORDINARY = (torch.Tensor, torch.nn.Parameter)
PLAIN_TYPES = (*_ORDINARY, torch.nn.Buffer)
"""The classes of tensors that are torch's own, without code of their own for operators."""


def has_own_dispatch(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of a class with dispatch code of its own, such as jagged nested tensors."""
    return type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def without_torch_function() -> AbstractContextManager[Any]:
    """Return a context in which tensors of classes with functions of their own, and modes, see no function of torch."""
    return torch._C.DisableTorchFunction()


def is_of_array(tensor: torch.Tensor) -> bool:
    """Return whether a tensor that torch has just made lies on memory of an array, and not on memory of its own."""
    return not tensor.untyped_storage().resizable()


def is_zero_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one of autograd's zeros, which have no memory: of a derivative that vanishes."""
    return tensor._is_zerotensor()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]


def without_memory(kind: type[_Made], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> _Made:
    """Return a tensor of a class that has dispatch code of its own, with sizes and no memory.

    Args:
        kind: the class.
        shape, dtype, device: that it shows.
    """
    return torch.Tensor._make_wrapper_subclass(kind, tuple(shape), dtype=dtype, device=device)


INGREDIENTS: dict[type, Callable[[Any], Iterable[torch.Tensor]]] = {}
"""What returns the tensors that are there, of tensors of a class that are not."""


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists and dicts, in order; of those in INGREDIENTS what they are made of."""
    found: list[torch.Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[torch.Tensor]) -> None:
    kind = type(tree)
    if kind in _ATOMS:
        return
    if kind is tuple or kind is list:
        for branch in tree:
            _collect(branch, found)
    elif kind is dict:
        for branch in tree.values():
            _collect(branch, found)
    else:
        for leaf in (tree,) if isinstance(tree, torch.Tensor) else _torch_tree_leaves(tree):
            if type(leaf) in INGREDIENTS:
                found.extend(INGREDIENTS[type(leaf)](leaf))
            elif isinstance(leaf, torch.Tensor):
                found.append(leaf)


def tensors_reached(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in what a model is given or returns: as `tensors_in`, and those that objects in it hold.

    Such objects are graphs, records of a data class, containers of one's own and distributions; modules, functions and
    iterators are not looked into, nor anything deeper than a few objects.
    """
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    level, inside = [tree], []

    def look(leaf: Any) -> Any:
        if type(leaf) in INGREDIENTS or isinstance(leaf, torch.Tensor):
            found.extend(tensors_in(leaf))
        elif type(leaf) not in _ATOMS and not isinstance(leaf, _NO_RECORDS) and id(leaf) not in seen:
            seen.add(id(leaf))
            inside.append(leaf)
        return leaf

    for _ in range(_OBJECTS_DEEP):
        if not level:
            break
        tree_map(look, level)
        level = [contents for each in inside[:_MOST_OBJECTS] if (contents := _contents_of(each))]
        inside.clear()
    return found


def _contents_of(value: Any) -> list[Any]:
    """Return what an object holds: the entries of a container, attributes, and slots."""
    entries = list(value.values()) if isinstance(value, dict) else []
    if isinstance(value, (list, tuple, set, frozenset)):
        entries = list(value)
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*entries, *getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


def bytes_in(tree: Any) -> int:
    """Return the bytes of the elements of all tensors in what a model is given or returns."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_reached(tree))


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree with `function(leaf)` in the place of each leaf, as torch's function of this name does.

    It takes a quarter of the time for the arguments of operators: tuples, lists and dictionaries are looked at here,
    and other containers by torch.

    Args:
        function: called with each leaf, in order; None is a leaf.
        tree: of tuples, lists, dictionaries, and what else torch knows as a container.
    """
    kind = type(tree)
    if kind in _ATOMS or isinstance(tree, torch.Tensor):
        return function(tree)
    if kind is tuple:
        return tuple([tree_map(function, branch) for branch in tree])
    if kind is list:
        return [tree_map(function, branch) for branch in tree]
    if kind is dict:
        return {name: tree_map(function, branch) for name, branch in tree.items()}
    return _torch_tree_map(function, tree)


def bare_overload(target: object) -> Callable[..., Any] | None:
    """Return what an operator's overload calls, without the Python function around it; None for anything else."""
    return target._op if isinstance(target, torch._ops.OpOverload) else None


def is_view(operator: Any) -> bool:
    """Return whether an operator always returns views of its first argument; `to`, made of others, does so at times."""
    if operator is torch.ops.aten._unsafe_view.default:
        return True
    made_of_others = torch._C.DispatchKey.CompositeImplicitAutograd
    return getattr(operator, "is_view", False) and not operator.has_kernel_for_dispatch_key(made_of_others)


def draws(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call draws random numbers; attention with dropout_p = 0 does not, against its tag.

    Args:
        operator: what is called.
        args: its positional arguments.
        kwargs: its named ones.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return False
    for position, argument in enumerate(operator._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            return (args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)) != 0
    return True


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that two tensors share exactly if they share their storage, as long as both are alive."""
    return tensor.untyped_storage()._cdata


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    return torch.empty(tuple(shape), device="meta").stride()


def storage_users(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and other holders share a storage, the caller's own reference included."""
    return torch._C._storage_Use_Count(storage._cdata)


@contextmanager
def failing_fakes_unlogged() -> Iterator[None]:
    """Keep torch from logging the traceback of each fake kernel that fails: the error itself tells enough."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def strided_as_real(func: Any, args: Any, returned: Any) -> Any:
    """Return a fake view with the strides of a real one, which may be others where a dimension has the size 1.

    Kernels choose by these, too: a product of matrices has other bits then.

    Args:
        func: the overload that was called.
        args: its arguments.
        returned: the fake that it returned.
    """
    if func not in _VIEWS_OF_SHAPES or 1 not in returned.shape or not all(type(n) is int for n in returned.shape):
        return returned
    given = args[0]
    with _disable_current_modes(), no_python_dispatcher():  # which has formulas of torch's in the places of kernels
        real = func(torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta"), *args[1:])
    if real.stride() == returned.stride():
        return returned
    return torch.as_strided(given, real.shape, real.stride(), given.storage_offset())


@contextmanager
def fakes_corrected(corrected: Callable[[Any, Any, Any, Any], Any]) -> Iterator[None]:
    """Let fake kernels return `corrected(func, args, kwargs, returned)` inside the block, in all fake modes.

    Args:
        corrected: takes the overload, its arguments and what its fake kernel has returned.
    """
    original = FakeTensorMode.dispatch

    def dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = strided_as_real(func, args, original(mode, func, types, args, kwargs or {}))
        return corrected(func, args, kwargs or {}, returned)

    with replaced(FakeTensorMode, "dispatch", dispatch):
        yield


@contextmanager
def real_tensors() -> Iterator[None]:
    """Disable all fake and tracing modes inside the block: ops run on real tensors."""
    with _disable_current_modes(), torch._C._DisableAutocast(), torch.no_grad():
        yield


def as_fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """Return the fake of a real tensor, on a storage of its own, without its gradient.

    Args:
        mode: the new fake belongs to it.
        tensor: real, of any layout that fakes can have.
    """
    with _disable_current_modes():
        alone = tensor.data
        return mode.from_tensor(alone)


def known_value(fake: torch.Tensor) -> bool:
    """Return whether a fake's value does not depend on any tensor, as that of torch.tensor(2.0)."""
    return isinstance(fake, FakeTensor) and fake.constant is not None


def has_kernel(overload: Any, device_type: str) -> bool:
    """Return whether an operator overload has a kernel of its own for a device type, not a generated one.

    For meta tensors, which are never computed, the answer is that for the CPU.

    Args:
        overload: such as `torch.ops.aten.relu.default`.
        device_type: `cpu`, `cuda` or `meta`.
    """
    key = torch._C._dispatch_key_for_device("cpu" if device_type == "meta" else device_type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), key)


def fake_mode_of(tensor: torch.Tensor) -> FakeTensorMode:
    """Return the mode that a fake tensor belongs to."""
    assert isinstance(tensor, FakeTensor)
    return tensor.fake_mode
