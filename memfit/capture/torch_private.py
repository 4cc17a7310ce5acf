"""Every private name of torch that memfit uses, in one place; tests/test_torch_private.py has a test for each.

memfit runs on torch 2.11 to the newest. When a release moves one of these names, this file and its test say so at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch._functorch._activation_checkpointing.knapsack import dp_knapsack as dp_knapsack
from torch._functorch._activation_checkpointing.knapsack import greedy_knapsack as greedy_knapsack
from torch._functorch._activation_checkpointing.knapsack import ilp_knapsack as ilp_knapsack
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.aot_autograd import make_boxed_func as make_boxed_func
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)


def is_fake(tensor: object) -> bool:
    """Return whether `tensor` is one of FakeTensorMode's: metadata without data."""
    return isinstance(tensor, FakeTensor)


def module_tables(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the dictionaries where a module keeps its parameters and its buffers, None for what is not there."""
    return module._parameters, module._buffers


def gradient_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], Any]]:
    """Return the hooks that `register_hook` has put on a leaf, in their order."""
    return list((tensor._backward_hooks or {}).values())


def has_accumulation_hooks(tensor: torch.Tensor) -> bool:
    """Return whether `register_post_accumulate_grad_hook` has put a hook on a parameter."""
    return bool(tensor._post_accumulate_grad_hooks)


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that two tensors share exactly when they share their storage (while both are alive)."""
    return tensor.untyped_storage()._cdata


def release_cublas_workspaces() -> None:
    """Let go of the workspaces that cuBLAS keeps for each thread and stream; its next call asks for them again."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # a build without CUDA has none
    if clear is not None:
        clear()


def next_sequence_number() -> int:
    """Return the number that autograd will give to the next node it makes on this thread."""
    return torch.autograd._get_sequence_nr()


def backward_node() -> tuple[str, int] | None:
    """Return (name, sequence number) of the autograd node that runs now, or None outside of a backward pass."""
    node = torch._C._current_autograd_node()
    return None if node is None else (node.name(), node._sequence_nr())


def backward_keeps_graph() -> bool:
    """Return whether the backward pass that runs now was asked to retain its graph."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


class _Inlined:
    """Stands in for `CheckpointFunction` while a step is captured: calls the region, checkpoints nothing."""

    @staticmethod
    def apply(function: Any, _preserve: bool, *args: Any) -> Any:
        return function(*args)


def _inlined_region(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield


@contextmanager
def checkpoints_inlined() -> Iterator[None]:
    """Run the regions of `torch.utils.checkpoint` inline: a plan decides what is rematerialized, not the region."""
    module = torch.utils.checkpoint
    kept = module._checkpoint_without_reentrant_generator, module.CheckpointFunction
    module._checkpoint_without_reentrant_generator = _inlined_region
    module.CheckpointFunction = _Inlined  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        module._checkpoint_without_reentrant_generator, module.CheckpointFunction = kept


def trace_joint(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    partition: Callable[..., Any],
    forward_compiler: Callable[..., Any],
    backward_compiler: Callable[..., Any],
    inference_compiler: Callable[..., Any],
) -> Callable[..., Any]:
    """Run AOTAutograd on a module that Dynamo captured, at the concrete sizes of `inputs`; return the compiled
    callable.

    No decompositions: the kernels are eager's. Without keep_inference_input_mutations the buffers of batch
    normalization would raise version-counter errors in backward.
    """
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


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Say that `function` takes one list and empties it: AOTAutograd then keeps no argument alive."""

    def call(arguments: list[Any]) -> Any:
        return function(arguments)

    call._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return call


def runs_under_ddp() -> bool:
    """Return whether a DistributedDataParallel module's forward is running, or being compiled."""
    if not torch.distributed.is_available():
        return False
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None


@contextmanager
def real_tensors() -> Iterator[None]:
    """Leave whatever fake or tracing modes are active: ops that are measured run for real."""
    with _disable_current_modes(), torch._C._DisableAutocast(), torch.no_grad():
        yield


def has_kernel(overload: Any, device_type: str) -> bool:
    """Return whether an operator overload has a kernel of its own for a device, and none that was generated.

    Of meta tensors, which nothing computes, it says what the CPU has.
    """
    key = torch._C._dispatch_key_for_device("cpu" if device_type == "meta" else device_type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), key)


def fake_mode_of(tensor: torch.Tensor) -> FakeTensorMode:
    """Return the mode that a fake tensor belongs to."""
    assert isinstance(tensor, FakeTensor)
    return tensor.fake_mode


def compile_with_budget(model: torch.nn.Module, share: float, solver: str) -> Callable[..., Any]:
    """Return `model` compiled under torch's own activation memory budget, with eager's kernels in place of Inductor's.

    `share` and `solver` are `activation_memory_budget` and `activation_memory_budget_solver`; they hold only while the
    model runs.
    """
    import torch._dynamo  # these take seconds to import, and only a comparison with torch needs them
    import torch._functorch.config

    torch._dynamo.reset()
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
