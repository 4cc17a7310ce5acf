"""All private names of torch that memfit uses; tests/test_torch_private.py has a test for each.

memfit runs on torch 2.11 to the newest. If a release moves one of these names, only this file and its test fail.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
import torch._guards
import torch._subclasses
import torch.utils.checkpoint
from torch._functorch._activation_checkpointing.knapsack import dp_knapsack as dp_knapsack
from torch._functorch._activation_checkpointing.knapsack import greedy_knapsack as greedy_knapsack
from torch._functorch._activation_checkpointing.knapsack import ilp_knapsack as ilp_knapsack
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.aot_autograd import make_boxed_func as make_boxed_func
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_map as _torch_tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

from memfit.system.addresses import returns_same

BatchNormBase = _BatchNorm
DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)
_ATOMS = frozenset([int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format])
SHORTENS = (torch.ops.aten._pack_padded_sequence,)  # leave out parts of what they are given, as values say, untagged
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
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, FakeTensor)
        and not hasattr(value, "__tensor_flatten__")
        and value.layout is torch.strided
        and not value.is_nested
        and value.device.type != "meta"
    )


def is_zero_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one of autograd's zeros, which have no memory: of a derivative that vanishes."""
    return tensor._is_zerotensor()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists and dicts, in order."""
    found: list[torch.Tensor] = []

    def look(leaf: Any) -> None:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)

    tree_map(look, tree)
    return found


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


def module_tables(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a module's dictionaries of parameters and buffers, whose values may be None."""
    return module._parameters, module._buffers


def module_hooks(module: torch.nn.Module) -> tuple[dict[Any, Any], ...]:
    """Return a module's dictionaries of hooks: before and after forward, before and after backward."""
    return module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks


def global_module_hooks() -> tuple[dict[Any, Any], ...]:
    """Return the dictionaries of hooks on all modules: before and after forward, before and after backward."""
    own = torch.nn.modules.module
    return (
        own._global_forward_pre_hooks,
        own._global_forward_hooks,
        own._global_backward_pre_hooks,
        own._global_backward_hooks,
    )


def optimizer_hooks(optimizer: torch.optim.Optimizer) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Return an optimizer's dictionaries of hooks before and after its step."""
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


dict_version: Callable[[dict[Any, Any]], int] = torch._C._dynamo.guards.dict_version
"""Returns a number that is another one after each change of a dictionary; but see ATTRIBUTES_HAVE_VERSIONS."""


def _attributes_have_versions() -> bool:
    class Holder:
        value = 0

    holder = Holder()
    holder.value = 1
    before = dict_version(holder.__dict__)
    holder.value = 2
    return dict_version(holder.__dict__) != before


ATTRIBUTES_HAVE_VERSIONS = _attributes_have_versions()
"""Whether an attribute that is set changes the version of its object's `__dict__`: no longer from Python 3.13 on."""


def in_backward() -> bool:
    """Return whether this thread is carrying out a backward pass."""
    return torch._C._current_graph_task_id() >= 0


def no_modes() -> Any:
    """Return a context in which no dispatch mode sees what is called."""
    return torch._C._DisableTorchDispatch()


def bare_overload(target: object) -> Callable[..., Any] | None:
    """Return what an operator's overload calls, without the Python function around it; None for anything else."""
    return target._op if isinstance(target, torch._ops.OpOverload) else None


def without_autocast() -> Any:
    """Return a context in which no operator is cast, whatever autocast is on."""
    return torch._C._DisableAutocast()


class UnwrappedMode(TorchDispatchMode):
    """A dispatch mode whose calls cost less: torch wraps those of others, so that Dynamo does not compile them.

    Here Dynamo is told once to skip the code of `__torch_dispatch__`, and all that it calls.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dynamo = torch._C._dynamo.eval_frame
        skip = dynamo._FrameAction.SKIP
        dynamo.set_code_exec_strategy(cls.__torch_dispatch__.__code__, dynamo._FrameExecStrategy(skip, skip))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def default_saved_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the innermost hooks of saved tensors (pack, unpack) that are on in this thread, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@contextmanager
def saved_leaves_themselves() -> Iterator[None]:
    """Let custom autograd functions get the very leaves that they saved, as they do without hooks of saved tensors.

    Inside of such hooks torch makes a new tensor of what is unpacked, without the leaf's attributes and its `.grad`.
    """
    function: Any = torch.autograd.function.BackwardCFunction
    before, original = vars(function).get("saved_tensors"), function.saved_tensors

    def saved_tensors(context: Any) -> tuple[Any, ...]:
        return tuple(map(_leaf_itself, original.__get__(context)))

    function.saved_tensors = property(saved_tensors)
    try:
        yield
    finally:
        if before is None:
            del function.saved_tensors
        else:
            function.saved_tensors = before


def _leaf_itself(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None or not tensor.requires_grad or not tensor.is_leaf:
        return tensor
    with no_modes():
        return getattr(torch.autograd.graph.get_gradient_edge(tensor).node, "variable", tensor)


def any_autocast() -> bool:
    """Return whether autocast is on for any device."""
    return torch._C._is_any_autocast_enabled()


class GlobalState:
    """torch's settings that decide which ops a step runs, as they are when this object is made.

    Gradient mode, autocast, the default dtype, deterministic algorithms, reduced precision and the number of threads,
    by Dynamo's own guard; modes and devices of `with` blocks, and the switches of attention and of mkldnn.
    """

    def __init__(self) -> None:
        self._guard = torch._C._dynamo.guards.GlobalStateGuard()
        self._switches = _switches()

    def difference(self) -> str | None:
        """Return the names of the settings that are others now, or None."""
        if not self._guard.check():
            return self._guard.reason().strip()
        now = _switches()
        if now == self._switches:
            return None
        return ", ".join(name for name, a, b in zip(_SWITCHES, now, self._switches, strict=True) if a != b)


_SWITCHES = ("torch function modes", "flash attention", "efficient attention", "math attention", "mkldnn", "cudnn")


def _switches() -> tuple[Any, ...]:
    return (
        torch._C._len_torch_function_stack(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_cudnn_enabled(),
    )


class DictVersions:
    """Holds dictionaries against their versions from before, by Dynamo's guards, which take 20 ns a dictionary."""

    def __init__(self, tables: Sequence[dict[Any, Any]]) -> None:
        from torch._dynamo.guards import GuardManagerType

        self._tables = tuple(tables)
        self._root = torch._C._dynamo.guards.RootGuardManager()
        for number, table in enumerate(self._tables):
            manager = self._root.tuple_getitem_manager(number, str(number), table, GuardManagerType.GUARD_MANAGER)
            manager.add_dict_version_guard(table, ["dict"], *_STACK)

    def match(self) -> bool:
        """Return whether no dictionary was changed."""
        return self._root.check(self._tables)


class TensorMetadata:
    """Holds tensors against their metadata from before, by Dynamo's guards, which take 0.1 us a tensor.

    Args:
        tensors: dense ones.
        watched: how many of them, from the first on, are leaves that are held against their `.grad` and hooks too.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], watched: int) -> None:
        from torch._dynamo.guards import GuardManagerType  # takes a second to import, once a process

        kind = GuardManagerType.GUARD_MANAGER
        self._root = torch._C._dynamo.guards.RootGuardManager()
        for number, tensor in enumerate(tensors):
            manager = self._root.tuple_getitem_manager(number, str(number), tensor, kind)
            _match_metadata(manager, tensor)
            if number < watched:
                gradient = manager.grad_manager(f"{number}.grad", tensor.grad, kind)
                _match(gradient, tensor.grad)
                for name, hooks in zip(_LEAF_HOOKS, leaf_hooks(tensor), strict=True):
                    held = manager.generic_getattr_manager(name, f"{number}.{name}", hooks, kind)
                    held.add_id_match_guard(id(hooks), [name], *_STACK)

    def matches(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Return whether type, sizes, strides, dtype, device and requires_grad of each tensor are as before.

        Of the leaves among them also the metadata of `.grad`, and the dictionaries of hooks.
        """
        return self._root.check(tensors)


class TensorAddresses:
    """Holds the addresses of real dense tensors' first elements against those from before."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._tensors = tensors
        self._objects = np.array(list(map(id, tensors)), dtype=np.int64)
        self._addresses = np.array(list(map(torch.Tensor.data_ptr, tensors)), dtype=np.int64)

    def match(self) -> bool:
        """Return whether all tensors are where they were."""
        # Inductor hands this function to the code that it compiles, for the same use
        function = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr
        return returns_same(function, self._objects, self._addresses)


def _match(manager: Any, tensor: torch.Tensor | None) -> None:
    if tensor is None:
        manager.add_none_match_guard(["None"], *_STACK)
    else:
        _match_metadata(manager, tensor)


def _match_metadata(manager: Any, tensor: torch.Tensor) -> None:
    sizes, strides = list(tensor.shape), list(tensor.stride())
    keys = torch._C._dispatch_keys(tensor)
    manager.add_tensor_match_guard(tensor, sizes, strides, "tensor", ["tensor"], *_STACK, type(tensor), keys)


# Dynamo's guards take the user's stack as an argument where torch is new enough.
_STACK = (None,) if "arg2" in (torch._C._dynamo.guards.GuardManager.add_dict_version_guard.__doc__ or "") else ()


def gradient_hooks(tensor: torch.Tensor) -> dict[int, Callable[[torch.Tensor], Any]]:
    """Return the dictionary of hooks that `register_hook` has added to a leaf, in order."""
    return tensor._backward_hooks or {}


_LEAF_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def leaf_hooks(tensor: torch.Tensor) -> tuple[dict[Any, Any] | None, dict[Any, Any] | None]:
    """Return a leaf's dictionaries of hooks on its gradient and on its accumulation; None before the first hook."""
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


def has_accumulation_hooks(tensor: torch.Tensor) -> bool:
    """Return whether `register_post_accumulate_grad_hook` has added a hook to a parameter."""
    return bool(tensor._post_accumulate_grad_hooks)


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that two tensors share exactly if they share their storage, as long as both are alive."""
    return tensor.untyped_storage()._cdata


def storage_users(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and other holders share a storage, the caller's own reference included."""
    return torch._C._storage_Use_Count(storage._cdata)


def release_cublas_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps for each thread and stream; its next call allocates them anew."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # a build without CUDA has none
    if clear is not None:
        clear()


def next_sequence_number() -> int:
    """Return the sequence number of the next node that autograd makes on this thread."""
    return torch.autograd._get_sequence_nr()


def backward_node() -> tuple[str, int] | None:
    """Return (name, sequence number) of the autograd node that runs now, or None outside of a backward pass."""
    node = torch._C._current_autograd_node()
    return None if node is None else (node.name(), node._sequence_nr())


def backward_keeps_graph() -> bool:
    """Return whether the backward pass that runs now was asked to retain its graph."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


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


@contextmanager
def fakes_corrected(corrected: Callable[[Any, Any, Any, Any], Any]) -> Iterator[None]:
    """Let fake kernels return `corrected(func, args, kwargs, returned)` inside the block, in all fake modes.

    Args:
        corrected: takes the overload, its arguments and what its fake kernel has returned.
    """
    original = FakeTensorMode.dispatch

    def dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = original(mode, func, types, args, kwargs or {})
        return corrected(func, args, kwargs or {}, returned)

    with _patched(FakeTensorMode, "dispatch", dispatch):
        yield


class _Inlined:
    """Replaces `CheckpointFunction` during capture: calls the region, checkpoints nothing.

    As there, the results have no gradient if none of the arguments has one, whatever parameters the region uses.
    """

    @staticmethod
    def apply(function: Any, _preserve: bool, *args: Any) -> Any:
        trained = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
        with torch.set_grad_enabled(torch.is_grad_enabled() and trained):
            return function(*args)


@contextmanager
def checkpoints_inlined() -> Iterator[Callable[[], int]]:
    """Run the regions of `torch.utils.checkpoint` inline: the plan decides what is rematerialized.

    The block is given a function that returns how many regions have run so far.
    """
    module = vars(torch.utils.checkpoint)
    name = "_checkpoint_without_reentrant_generator"
    name = f"{name}_impl" if f"{name}_impl" in module else name  # from torch 2.15 on
    kept = module[name], module["CheckpointFunction"]
    count = 0

    def region(*_args: Any, **_kwargs: Any) -> Iterator[None]:
        nonlocal count
        count += 1
        yield

    class Counted(_Inlined):
        @staticmethod
        def apply(function: Any, _preserve: bool, *args: Any) -> Any:
            nonlocal count
            count += 1
            return _Inlined.apply(function, _preserve, *args)

    module.update({name: region, "CheckpointFunction": Counted})
    try:
        yield lambda: count
    finally:
        module[name], module["CheckpointFunction"] = kept


def _asked_by_torch() -> bool:
    """Return whether the code that called the caller of this function is torch's or memfit's own."""
    room = str(sys._getframe(2).f_globals.get("__name__", "")).partition(".")[0]
    return room in ("torch", "memfit")


class _NobodysType(type):
    """Metaclass of the class that stands for FakeTensor: of its questions, only torch's own get the true answer."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return _asked_by_torch() and isinstance(instance, FakeTensor)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return _asked_by_torch() and issubclass(subclass, FakeTensor)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return FakeTensor(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        return getattr(FakeTensor, name)


_STANDS_FOR = "_memfit_stands_for"  # key of a stand-in's function


class _NobodysTensor(metaclass=_NobodysType):
    pass


def _eager_answer(function: Callable[..., Any], answer: Any) -> Callable[..., Any]:
    def ask(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if _asked_by_torch() else answer

    ask.__dict__[_STANDS_FOR] = function
    return ask


def stood_for(value: Any) -> Any:
    """Return what a stand-in of `answered_as_eager` stands for, and any other value as it is."""
    if value is _NobodysTensor:
        return FakeTensor
    if type(value) is _Facade:
        return value.__dict__["_module"]
    return value.__dict__.get(_STANDS_FOR, value) if type(value) is FunctionType else value


@contextmanager
def answered_as_eager() -> Iterator[None]:
    """Answer code outside of torch, inside the block, that no tensor is fake and that no fake mode runs.

    Libraries ask this to leave out what a tracer cannot follow; a captured step must not leave it out. Where a module
    outside of torch has FakeTensor, `is_fake`, `detect_fake_mode` or `active_fake_mode` under a global name, a stand-in
    takes its place. `torch.compiler.is_compiling` and `torch.jit.is_tracing` are False during a capture anyway.
    """
    fake_tensor, guards = torch._subclasses.fake_tensor, torch._guards
    stand_ins = {
        id(FakeTensor): _NobodysTensor,
        id(fake_tensor.is_fake): _eager_answer(fake_tensor.is_fake, False),
        id(guards.detect_fake_mode): _eager_answer(guards.detect_fake_mode, None),
        id(guards.active_fake_mode): _eager_answer(guards.active_fake_mode, None),
    }
    tables: list[dict[str, Any]] = [vars(torch._subclasses)]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("torch", "memfit") and isinstance(module, ModuleType):
            tables.append(vars(module))
    replaced = [(t, name, value) for t in tables for name, value in list(t.items()) if id(value) in stand_ins]
    replaced += [(vars(torch._subclasses), "fake_tensor", fake_tensor), (vars(torch), "_guards", guards)]
    replaced += [(sys.modules, module.__name__, module) for module in (fake_tensor, guards)]  # imports in functions
    for table, name, value in replaced:
        table[name] = stand_ins.get(id(value)) or _Facade(value, stand_ins)
    try:
        yield
    finally:
        for table, name, value in replaced:
            table[name] = value


class _Facade:
    """A module of torch's as other code sees it: some of its names are replaced, and torch's own modules keep them."""

    def __init__(self, module: Any, stand_ins: dict[int, Any]) -> None:
        self.__dict__["_module"] = module
        self.__dict__["_stand_ins"] = stand_ins

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return self._stand_ins.get(id(value), value)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


def trace_joint(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    partition: Callable[..., Any],
    forward_compiler: Callable[..., Any],
    backward_compiler: Callable[..., Any],
    inference_compiler: Callable[..., Any],
    backward_autocast: bool = False,
) -> Callable[..., Any]:
    """Run AOTAutograd on a module that Dynamo captured, and return the compiled callable.

    There are no decompositions: the kernels are eager's. Without keep_inference_input_mutations, the buffers of batch
    normalization would raise version-counter errors in backward.

    Args:
        module: captured by Dynamo.
        inputs: with concrete sizes.
        partition: divides the joint graph into its halves (AOTAutograd's partition_fn).
        forward_compiler, backward_compiler: compile the halves.
        inference_compiler: compiles a graph without a backward half.
        backward_autocast: whether backward runs inside forward's autocast; there, it casts what forward had computed
            without casts.
    """
    import torch._functorch.config

    cast = "same_as_forward" if backward_autocast else "off"
    with torch._functorch.config.patch(backward_pass_autocast=cast), _eagers_interpolation(), _checks_kept():
        return aot_module_simplified(
            module,
            inputs,
            fw_compiler=forward_compiler,
            bw_compiler=backward_compiler,
            inference_compiler=inference_compiler,
            partition_fn=partition,
            decompositions={},
            keep_inference_input_mutations=True,
        )


@contextmanager
def _checks_kept() -> Iterator[None]:
    """Let AOTAutograd keep the checks of linear algebra as calls; else torch drops them, or threads a token through."""
    check = torch.ops.aten._linalg_check_errors.default
    kept, effects = torch.fx.node._side_effectful_functions, _effects_of("aten::_linalg_check_errors")
    was_kept, effect = check in kept, getattr(effects, "effect", None)
    kept.add(check)
    if effect is not None:
        effects.register(None)
    try:
        yield
    finally:
        if not was_kept:
            kept.discard(check)
        if effect is not None:
            effects.register(effect)


def _effects_of(operator: str) -> Any:
    """Return where torch has noted the effect of an operator, or None where it notes none."""
    return getattr(torch._library.simple_registry.singleton.find(operator), "effect", None)


@contextmanager
def _eagers_interpolation() -> Iterator[None]:
    """Let interpolations be eager's kernels inside the block; torch has formulas in their places, of other bits.

    They stand before autograd, so that no setting for decompositions leaves them out.
    """
    import torch._decomp  # enters them

    aten, formulas = torch.ops.aten, (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
    packets = [getattr(aten, name) for name in dir(aten) if "upsample" in name and "backward" not in name]
    ops: list[Any] = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    removed = [(op, key, op.py_kernels.pop(key)) for op in ops for key in formulas if key in op.py_kernels]
    try:
        for op, _, _ in removed:
            op._dispatch_cache.clear()
        yield
    finally:
        for op, key, kernel in removed:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class InductorHalf:
    """A half that Inductor compiles.

    Attributes:
        module: the half's nodes.
        arguments: fakes, or numbers.
        is_backward: which half it is.
        rehearsed: the generated code with kernels that do nothing, for fakes; None where it is divided into partitions.
        build: builds its C++ kernels, which are otherwise built when they are first called.
    """

    module: torch.fx.GraphModule
    arguments: Sequence[Any]
    is_backward: bool
    rehearsed: Callable[[list[Any]], Any] | None
    build: Callable[[], None]


_MUCH_LESS = 8  # times fewer bytes than another result: what may live longer at no cost, as sums over a batch
ModulePair = tuple[torch.fx.GraphModule, torch.fx.GraphModule]
HELD, CHAIN = "memfit_held", "memfit_chain"
"""In the `meta` of a node: whether its result is kept in memory, and not computed anew in each kernel that reads it; a
number that it shares with the nodes that are to be one kernel."""


def compiled_by_inductor(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    partition: Callable[[torch.fx.GraphModule, int, Callable[[], ModulePair]], ModulePair],
    around: Callable[[InductorHalf, Callable[[list[Any]], Any]], Callable[[list[Any]], Any]],
    plan_name: Callable[[], str | None],
) -> Callable[..., Any]:
    """Run AOTAutograd and Inductor on a module that Dynamo captured, and return the compiled callable.

    AOTAutograd's cache is left out: what it keeps is found without a partition. Inductor's own cache keeps each half
    under its nodes and the name of its plan. `module` is not changed.

    Args:
        module: captured by Dynamo.
        inputs: with concrete sizes.
        partition: divides the joint graph, given with the number of the forward pass's outputs, into its halves; it is
            also given a function that does so as Inductor would.
        around: returns what is called in the place of a compiled half; both take a list, and empty it.
        plan_name: asked for each half: names the plan whose order of nodes Inductor keeps, and the results of the nodes
            marked `HELD`. None leaves both to Inductor.
    """
    import torch._functorch.config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_half(half: torch.fx.GraphModule, arguments: Sequence[Any], **options: Any) -> Any:
        if options.get("is_inference"):
            return compile_fx_inner(half, arguments, **options)
        name = plan_name()
        with nullcontext() if name is None else _order_kept(name), _kernels_unbuilt():
            compiled = compile_fx_inner(half, arguments, **options)
        described = InductorHalf(
            module=half,
            arguments=arguments,
            is_backward=bool(options.get("is_backward")),
            rehearsed=_without_kernels(compiled),
            build=partial(_build_kernels, compiled),
        )
        call = getattr(compiled, "current_callable", None)
        if call is None:  # a half without any call is not compiled
            return boxed(around(described, compiled))
        compiled.current_callable = around(described, call)
        return compiled

    # The backward half is compiled at once, and not at the first backward pass.
    settings = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}
    with torch._functorch.config.patch(settings):
        return compile_fx(
            torch.fx.GraphModule(module, copy.deepcopy(module.graph)),
            list(inputs),
            inner_compile=compile_half,
            config_patches={"custom_partitioner_fn": _partitioner(partition, "memfit")},
        )


def _partitioner(partition: Callable[..., Any], name: str) -> Any:
    """Return a partitioner for Inductor's settings; the keys of its cache have `name`."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partition(CustomPartitionerFn):
        def __call__(self, gm: Any, joint_inputs: Any, *, num_fwd_outputs: int, **given: Any) -> Any:
            given |= {"compiler": "inductor", "num_fwd_outputs": num_fwd_outputs}
            own = partial(min_cut_rematerialization_partition, gm, joint_inputs, **given)
            return partition(gm, num_fwd_outputs, own)

        def uuid(self) -> str:
            return name

        def __reduce__(self) -> Any:  # Inductor pickles its settings for the keys of its cache
            return str, (name,)

    return Partition()


@contextmanager
def _order_kept(name: str) -> Iterator[None]:
    """Let Inductor keep the order of nodes, and the results of nodes marked `HELD`.

    Args:
        name: for the keys of its cache.
    """
    import torch._inductor.config
    from torch._inductor.choices import InductorChoices
    from torch._inductor.codegen.wrapper import AllocateLine
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    memories: dict[int, _Memory] = {}

    class InOrder(InductorChoices):
        @staticmethod
        def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            if not InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score):
                return False
            memory = memories.setdefault(id(scheduler), _Memory(scheduler))
            return memory.allows(*sorted((node1, node2), key=lambda node: node.min_order))

    lower = GraphLowering.run_node

    def run_node(lowering: Any, node: torch.fx.Node) -> Any:
        if not node.meta.get(HELD):
            return lower(lowering, node)
        with torch._inductor.config.patch(realize_acc_reads_threshold=-1):  # its layout is then chosen as for any other
            result = lower(lowering, node)
        if hasattr(result, "realize"):
            result.realize()
        return result

    def reuses(allocated: Any, freed: Any, *_: Any) -> bool:  # memory kept for later counts towards the peak
        return freed.scheduler_node_index + 1 == allocated.scheduler_node_index

    with (
        V.set_choices_handler(InOrder()),
        torch._inductor.config.patch(custom_partitioner_fn=_partitioner(lambda *_: None, name)),
        _replaced(GraphLowering, "run_node", run_node),
        _replaced(AllocateLine, "should_reuse_buffer", reuses),
    ):
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace a method in the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class _Memory:
    """The results that a scheduler of Inductor's holds while its nodes run in order, before it fuses any.

    Args:
        scheduler: with its nodes in order.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._bytes: list[int] = []
        self._first: list[int] = []  # the order of the node that makes it
        self._last: list[int] = []  # of the last that reads it
        live = [0] * (len(scheduler.nodes) + 1)
        for made in scheduler.name_to_buf.values():
            if not hasattr(made.defining_op, "min_order"):  # nobody needs it
                continue
            users = [use.node for use in made.users]
            orders = [getattr(user, "max_order", len(live) - 1) for user in users]
            first, last = made.defining_op.min_order, max(orders, default=0)
            self._bytes.append(_buffer_bytes(made))
            self._first.append(first)
            self._last.append(max(first, last))
            chains = _chains_of([made.defining_op])
            if not all(chains & _chains_of([user]) for user in users):  # else it is inside of a kernel
                for order in range(first, max(first, last) + 1):
                    live[order] += self._bytes[-1]
        self._most_bytes = max(live)

    def allows(self, first: Any, second: Any) -> bool:
        """Return whether one kernel of two, in the place of the first, leaves the most bytes as they are.

        Args:
            first, second: nodes of the scheduler, each of which may be several that are fused by now. The second is
                next to the first, or uses nothing that is computed between them and makes much less than the first.
        """
        if second.min_order > first.max_order + 1:
            used = second.ancestors - second.get_operation_names()
            nodes = self._scheduler.name_to_fused_node
            is_ready = all(nodes[name].max_order <= first.max_order for name in used)
            return is_ready and _MUCH_LESS * _made_bytes(second) <= _made_bytes(first)
        if _chains_of(first.get_nodes()) & _chains_of(second.get_nodes()):
            return True
        begin, end = first.min_order, second.max_order
        held = sum(
            size
            for size, made, used in zip(self._bytes, self._first, self._last, strict=True)
            if made <= end and used >= begin and not (made >= begin and used <= end)
        )
        return held <= self._most_bytes


def _chains_of(nodes: Sequence[Any]) -> set[Any]:
    """Return the numbers of the chains that nodes of a scheduler are from."""
    origins = [origin for node in nodes if getattr(node, "node", None) is not None for origin in node.node.origins]
    return {origin.meta[CHAIN] for origin in origins if CHAIN in origin.meta}


def _made_bytes(node: Any) -> int:
    return sum(map(_buffer_bytes, node.get_outputs()))


def _buffer_bytes(made: Any) -> int:
    """Return the bytes of a buffer of Inductor's; 0 for a tuple."""
    try:
        return int(made.node.get_numel()) * made.node.get_dtype().itemsize
    except (AttributeError, NotImplementedError, TypeError):
        return 0


class _Unbuilt:
    """A C++ kernel that is built when it is first called, or before."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start
        self._kernel: Any = None

    def __call__(self, *arguments: Any) -> Any:
        return self.built()(*arguments)

    def start(self) -> None:
        if self._kernel is None:
            self._kernel = self._start()

    def built(self) -> Any:
        self.start()
        if hasattr(self._kernel, "result"):  # a future
            self._kernel = self._kernel.result()
        return self._kernel


@contextmanager
def _kernels_unbuilt() -> Iterator[None]:
    """Let Inductor generate C++ kernels without building them."""
    from torch._inductor.async_compile import AsyncCompile

    start = AsyncCompile.cpp_pybinding
    with _replaced(AsyncCompile, "cpp_pybinding", lambda *arguments: _Unbuilt(partial(start, *arguments))):
        yield


def _build_kernels(compiled: Any) -> None:
    """Build the kernels of generated code, several at once."""
    runner = getattr(compiled, "compiled_fn_runner", None)
    names = {} if runner is None else runner.call.__func__.__globals__
    unbuilt = {name: value for name, value in names.items() if isinstance(value, _Unbuilt)}
    for kernel in unbuilt.values():
        kernel.start()
    for name, kernel in unbuilt.items():
        names[name] = kernel.built()


def _without_kernels(compiled: Any) -> Callable[[list[Any]], Any] | None:
    """Return the function that Inductor generated, with its kernels replaced by functions that do nothing."""
    runner = getattr(compiled, "compiled_fn_runner", None)
    if runner is None:
        return None if hasattr(compiled, "current_callable") else compiled
    if runner.partitions:
        return None
    call = runner.call.__func__
    names = dict(call.__globals__)
    for name in list(names):
        if name.startswith("empty_strided_"):
            names[name] = partial(_empty_strided, device=name.removeprefix("empty_strided_").partition("_")[0])
        elif name.startswith(("cpp_", "triton_", "assert_")):
            names[name] = _Nothing()
    names |= {"reinterpret_tensor": _reinterpreted, "extern_kernels": _ExternKernels(names.get("extern_kernels"))}
    return FunctionType(call.__code__, names).__get__(runner)


class _Nothing:
    def __call__(self, *_: Any, **__: Any) -> None:
        return None

    run = __call__


class _ExternKernels:
    """Kernels of other libraries: those that write to a given tensor do nothing, the others run on fakes."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, out: Any = None, **kwargs: Any) -> Any:
            return getattr(self._kernels, name)(*args, **kwargs) if out is None else out

        return call


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _reinterpreted(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark `function` as boxed: it takes one list and empties it, and AOTAutograd then keeps no argument alive."""

    def call(arguments: list[Any]) -> Any:
        return function(arguments)

    call._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return call


def allocator_settings_text() -> str:
    """Return the settings of torch's caching allocator, in the form of `PYTORCH_CUDA_ALLOC_CONF`.

    torch 2.11 does not tell them: there they are those of the environment.
    """
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if read is not None:
        return read()
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF", "")


def runs_under_ddp() -> bool:
    """Return whether a DistributedDataParallel module's forward is running, or being compiled."""
    if not torch.distributed.is_available():
        return False
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None


@contextmanager
def real_tensors() -> Iterator[None]:
    """Disable all fake and tracing modes inside the block: ops run on real tensors."""
    with _disable_current_modes(), torch._C._DisableAutocast(), torch.no_grad():
        yield


@contextmanager
def only_mode(mode: TorchDispatchMode) -> Iterator[None]:
    """Disable all other modes inside the block: only `mode` sees what is called."""
    with _disable_current_modes(), mode:
        yield


def views_replayed() -> AbstractContextManager[None]:
    """Let autograd replay the views that a write in place goes through, as it does for fakes.

    Elsewhere it reads them by their strides, in backward too: other ops, which copy the same numbers.
    """
    return torch.autograd.grad_mode._force_original_view_tracking(True)


@contextmanager
def autocast_watched() -> Iterator[Callable[[str], bool]]:
    """Give the block a function that says whether the step's code has autocast on for a device type.

    A dispatch mode cannot ask torch: while it handles a call, autocast is off.
    """
    enabled: dict[str, bool] = {}
    set_enabled = torch.set_autocast_enabled

    def watched(*args: Any) -> None:
        set_enabled(*args)
        device_type, enabled[device_type] = args if len(args) > 1 else ("cuda", args[0])

    torch.set_autocast_enabled = watched
    try:
        yield lambda device_type: enabled.get(device_type, False)
    finally:
        torch.set_autocast_enabled = set_enabled


def as_fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """Return the fake of a real tensor, on a storage of its own, without its gradient.

    Args:
        mode: the new fake belongs to it.
        tensor: real, of any layout that fakes can have.
    """
    with _disable_current_modes():
        alone = tensor.data
        return mode.from_tensor(alone)


def make_size_environment() -> Any:
    """Return torch's bookkeeping of symbolic sizes: which there are, and what was asked of them."""
    import_module("torch._refs")  # which registers what kernels do with symbolic sizes
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return ShapeEnv()


def make_size_symbol(environment: Any, number: int, size: int) -> torch.SymInt:
    """Return a new symbolic size.

    Args:
        environment: it belongs to.
        number: tells it from the others.
        size: that it has at hand.
    """
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(f"size_{number}")
    symbol = environment.create_symbol(size, source, dynamic_dim=DimDynamic.DYNAMIC)
    return environment.create_symintnode(symbol, hint=size, source=source)


@contextmanager
def guesses_noted(environment: Any) -> Iterator[None]:
    """Note what C++ code would leave open in the block: whether something of symbolic sizes is known to be true.

    Where torch takes a shorter way only if it is known to be possible for all sizes (indexing with whole slices), eager
    takes it wherever it is possible. Here it is decided by the sizes at hand, and noted as a condition.

    Args:
        environment: of the sizes; others are not touched.
    """
    from torch.fx.experimental.sym_node import SymNode

    known = SymNode.statically_known_true

    def decided(self: Any, file: str, line: int) -> bool:
        return self.guard_bool(file, line) if self.shape_env is environment else known(self, file, line)

    SymNode.statically_known_true = decided
    try:
        yield
    finally:
        SymNode.statically_known_true = known


def symbolic_kernels() -> AbstractContextManager[None]:
    """Return a block in which fake kernels that are written in Python take the place of those that need numbers."""
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()


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


def compiled_around_breaks(model: torch.nn.Module, backend: Callable[..., Any]) -> Callable[..., Any]:
    """Return `model` compiled by `backend`, which is given each graph between graph breaks.

    However many models of a class are compiled, and at however many shapes, none falls back to eager silently. A break
    in a loop divides the loop, where Dynamo would leave the whole function to eager (its code stays valid, says
    `maybe_has_backedge`). NumPy's calls are breaks: Dynamo would have torch compute them, to other bits.

    Args:
        model: any module.
        backend: as torch.compile takes it.
    """
    import torch._dynamo  # takes seconds to import

    _patch_torch_for_dynamo()
    compiled, code = torch.compile(model, backend=backend), _CodeOfModules(model)
    settings = {**_SOUND, "trace_numpy": False}

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        if code.has_changed():  # another backend is not given what was compiled for the first
            compiled = torch.compile(model, backend=lambda *given: backend(*given))
        with torch._dynamo.config.patch(settings), _loops_divided:
            return compiled.forward(*args, **kwargs)  # the wrapper is a module, too, whose hooks run beside the model's

    return _CompiledModel(model, run)


class _Inside:
    """A context of any number of threads: the first to come patches, the last to go puts back.

    Args:
        patch: is given where to enter the patches.
    """

    def __init__(self, patch: Callable[[ExitStack], None]) -> None:
        self._patch = patch
        self._lock, self._patches, self._count = threading.Lock(), ExitStack(), 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._count:
                self._patch(self._patches)
            self._count += 1

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                self._patches.close()


def _divide_loops(patches: ExitStack) -> None:
    """Let Dynamo compile the graphs around a break in a loop, over modules too.

    Dynamo cannot take up an iterator of a dict or of a generator behind a break, but one of a list. (`enumerate` it
    turns into a generator itself: a list in its place made the loop's integers inputs of the graphs.) Where it has to
    leave a function to eager, it compiles the functions that are called there, but none of torch's own: so `Sequential`
    is not.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    enter = patches.enter_context
    enter(_patched(InstructionTranslatorBase, "maybe_has_backedge", lambda _self: False))
    for kind in (torch.nn.ModuleList, torch.nn.Sequential):
        enter(_patched(kind, "__iter__", _iterate_as_list))
    enter(_patched(torch.nn.Sequential, "forward", _forward_in_turn))
    enter(_patched(torch.nn.ModuleDict, "__iter__", lambda self: iter(list(self._modules))))
    enter(_patched(torch.nn.ModuleDict, "items", lambda self: list(self._modules.items())))
    enter(_patched(torch.nn.ModuleDict, "values", lambda self: list(self._modules.values())))
    enter(_patched(torch.nn.Module, "children", lambda self: iter([m for _, m in _named_children(self)])))
    enter(_patched(torch.nn.Module, "named_children", lambda self: iter(_named_children(self))))


def _note_questions(patches: ExitStack) -> None:
    """Say where the code that Dynamo captures asks whether it is being compiled, and may take another way then."""
    from torch._dynamo.variables import torch as handlers

    answers = {**handlers.tracing_state_functions(), torch.compiler.is_exporting: False}  # older torch says True
    patches.enter_context(_patched(handlers, "tracing_state_functions", lambda: _Answers(answers)))


class _Answers(dict[Any, Any]):
    """Dynamo's answers to code that asks whether it is traced; who hears that it is compiled is noted."""

    def __getitem__(self, asked: Any) -> Any:
        answer = super().__getitem__(asked)
        tracer = sys._getframe(1).f_locals.get("tx")
        if asked in (torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling, torch._utils.is_compiling):
            while tracer is not None and tracer.f_code.co_name.startswith("is_"):  # functions that only pass it on
                tracer = tracer.parent
            if tracer is not None:
                _questions.setdefault(tracer.f_code, False)
        return answer


_questions: dict[CodeType, bool] = {}  # code that asked, and whether it was named


def _name_questions() -> None:
    asked = [code for code, is_named in _questions.items() if not is_named]
    if asked:
        _questions.update(dict.fromkeys(asked, True))
        where = (f"{code.co_name} in {code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}" for code in asked)
        logging.getLogger("memfit").warning(
            "memfit: code asks whether it is being compiled (%s): where it then computes otherwise, so do planned "
            "steps; memfit.fit runs it as eager does",
            ", ".join(where),
        )


_loops_divided, _questions_noted = _Inside(_divide_loops), _Inside(_note_questions)


def _iterate_as_list(modules: Any) -> Iterator[torch.nn.Module]:
    return iter(list(modules._modules.values()))


def _named_children(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    found: list[tuple[str, torch.nn.Module]] = []
    for name, child in module._modules.items():
        if child is not None and all(child is not other for _, other in found):
            found.append((name, child))
    return found


def _forward_in_turn(self: torch.nn.Sequential, input: Any) -> Any:
    for module in self:
        input = module(input)
    return input


@contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    found = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, found)


def eager_call(model: torch.nn.Module) -> Callable[..., Any]:
    """Return what `model(...)` runs if nothing is compiled: hooks and `forward`."""
    return model._call_impl


def set_call(model: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Let `model(...)` run `call`, as `model.compile()` does, which copies and pickles leave out; None undoes that."""
    model._compiled_call_impl = call


def own_call(model: object) -> object:
    """Return what `set_call` or `model.compile()` has `model(...)` run; None if nothing."""
    return getattr(model, "_compiled_call_impl", None)


def is_compiled(model: torch.nn.Module) -> bool:
    """Return whether `torch.compile` or `model.compile()` made the calls of `model`, or `set_call`."""
    from torch._dynamo import OptimizedModule

    return isinstance(model, OptimizedModule) or model._compiled_call_impl is not None


def compiled_calls(
    model: torch.nn.Module, function: Callable[..., Any], backend: Callable[..., Any]
) -> Callable[..., Any]:
    """Return `function` compiled by `backend`, also where all of its own code is torch's, as in `nn.Sequential`.

    However many shapes there are, no call falls back to eager silently. Messages that the code logs break no graph:
    they are left out.

    Args:
        model: what the function calls.
        function: a function or a bound method.
        backend: as torch.compile takes it.
    """
    import torch._dynamo  # takes seconds to import

    def call(*args: Any, **kwargs: Any) -> Any:  # no code of torch's, so that Dynamo enters it
        return function(*args, **kwargs)

    def compile_anew() -> Callable[..., Any]:  # Dynamo keeps what it compiled by the code object
        own = FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)
        return torch.compile(own, backend=backend)

    _patch_torch_for_dynamo()
    compiled, code = compile_anew(), _CodeOfModules(model)
    logs = {call for name, call in vars(logging.Logger).items() if name.removesuffix("_once") in _LOGGING}
    settings = {**_SOUND, "ignore_logger_methods": _Functions(logs)}

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        if code.has_changed():
            compiled = compile_anew()
        try:
            with torch._dynamo.config.patch(settings), _questions_noted:
                return compiled(*args, **kwargs)
        finally:
            _name_questions()

    return run


class _Functions(set[Any]):
    """A set of functions that lists their names, in its copies too: torch 2.11 sorts them for its log."""

    def __iter__(self) -> Iterator[str]:
        return (str(getattr(each, "__name__", each)) for each in super().__iter__())


class _CodeOfModules:
    """What Dynamo reads of a model's classes, and of hooks on all modules, and does not guard: code that is replaced.

    Args:
        model: any module.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        kinds = {base for module in model.modules() for base in type(module).__mro__}
        self._tables = [kind.__dict__ for kind in kinds if issubclass(kind, torch.nn.Module)]
        self._look_again()

    def has_changed(self) -> bool:
        """Return whether something is not as it was at the last time."""
        is_as_before = list(map(len, self._tables)) == self._sizes and self._hooks == hooks_on_all_modules()
        if is_as_before and all(table.get(name) is code for table, name, code in self._code):
            return False
        self._look_again()
        return True

    def _look_again(self) -> None:
        self._hooks = hooks_on_all_modules()
        self._sizes = list(map(len, self._tables))
        self._code: list[tuple[Any, str, Any]] = []
        for table in self._tables:
            is_torchs = str(table["__module__"]).startswith("torch.")
            names = ("forward", "__call__") if is_torchs else tuple(table)
            self._code += [(table, name, table[name]) for name in names if isinstance(table.get(name), _CODE)]


def hooks_on_all_modules() -> list[Any]:
    """Return the hooks that run with every module of the process."""
    return [hook for hooks in global_module_hooks() for hook in hooks.values()]


_CODE = (FunctionType, staticmethod, classmethod, property)


def graph_breaks() -> dict[str, int]:
    """Return the reasons of all graph breaks in this process so far, a line each, with how often each occurred."""
    import torch._dynamo  # takes seconds to import

    return {str(why).partition("\n")[0]: n for why, n in torch._dynamo.utils.counters["graph_break"].items()}


def is_compilers(error: BaseException) -> bool:
    """Return whether PyTorch's compiler has raised an error, and no code that it ran."""
    from torch._dynamo.exc import TorchDynamoException  # takes seconds to import

    return isinstance(error, TorchDynamoException)


_LOGGING = {"debug", "info", "warning", "warn", "error", "exception", "critical", "log"}


# Dynamo would take a model that is compiled too often to eager, and does not look whether hooks of modules were added
# or removed, and functions given other code or defaults.
_GUARDED = {"skip_nnmodule_hook_guards": False, "assume_dunder_attributes_remain_unchanged": False}
_SOUND = {"recompile_limit": sys.maxsize, "accumulated_recompile_limit": sys.maxsize, **_GUARDED}


def compile_soundly() -> None:
    """Let Dynamo capture `module.compile()` where all code of the module is torch's, as in `nn.Sequential`, and look at
    the hooks of modules at each call."""
    import torch._dynamo  # takes seconds to import

    for name, value in {"wrap_top_frame": True, **_GUARDED}.items():
        setattr(torch._dynamo.config, name, value)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the backward pass that runs now."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class _CompiledModel:
    """What a loss function takes for the model: a call runs compiled code, all else is the model's."""

    def __init__(self, model: torch.nn.Module, run: Callable[..., Any]) -> None:
        self.__dict__.update(_model=model, _run=run)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._model[key]

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self._model)


def _patch_torch_for_dynamo() -> None:
    """Let Dynamo patch torch, as it does once in a process, but leave `torch.distributions` to check its arguments."""
    from torch._dynamo.eval_frame import TorchPatcher

    checked = torch.distributions.Distribution._validate_args
    TorchPatcher.patch()
    torch.distributions.Distribution.set_default_validate_args(checked)


def compile_with_budget(model: torch.nn.Module, share: float, solver: str) -> Callable[..., Any]:
    """Return `model` compiled under torch's own activation memory budget, with eager's kernels in place of Inductor's.

    Args:
        model: any module.
        share: torch's `activation_memory_budget`, from 0 to 1, in force only while the model runs.
        solver: torch's `activation_memory_budget_solver`.
    """
    import torch._dynamo  # takes seconds to import, and only a comparison with torch needs it
    import torch._functorch.config

    torch._dynamo.reset()
    _patch_torch_for_dynamo()
    compiled = torch.compile(model, backend=_partitioned_eager)

    def run(*args: Any, **kwargs: Any) -> Any:
        settings = {"activation_memory_budget": share, "activation_memory_budget_solver": solver}
        with torch._functorch.config.patch(settings):
            return compiled(*args, **kwargs)

    return run


def _partitioned_eager(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch.fx.graph import _BoxedCodeGen

    def compile_half(half: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        half.graph.set_codegen(_BoxedCodeGen())  # takes its arguments in a list, and empties it
        half.recompile()
        return boxed(half.forward)

    return aot_autograd(
        fw_compiler=compile_half,
        bw_compiler=compile_half,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )(module, inputs)


_LET_GO_SECONDS = 1.0  # the threads of gloo need microseconds, or their turn on a processor


def start_sum(tensor: torch.Tensor, group_name: str) -> None:
    """Start a sum over the ranks of a process group, in place; `wait_for_sum` waits for it.

    Args:
        tensor: all of its storage.
        group_name: of the group.
    """
    setattr(tensor, _HOLDERS, tensor._use_count())
    torch.ops._c10d_functional.all_reduce_(tensor, "sum", group_name)


def wait_for_sum(tensor: torch.Tensor) -> None:
    """Wait until a sum over ranks is complete, and gloo's threads hold the tensor no more: memory that they hold is
    freed late, at any time.

    Args:
        tensor: that `start_sum` was called with; it has got no views since.
    """
    torch.ops._c10d_functional.wait_tensor(tensor)
    if tensor.device.type == "cpu":
        holders, until = getattr(tensor, _HOLDERS), time.monotonic() + _LET_GO_SECONDS
        while tensor._use_count() > holders and time.monotonic() < until:
            time.sleep(0)


_HOLDERS = "_memfit_holders"


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


def group_timeout(group: torch.distributed.ProcessGroup) -> timedelta:
    """Return how long a rank of a process group waits for the others."""
    device = group._device_types[0]
    return group._get_backend(device).options._timeout
