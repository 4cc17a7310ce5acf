"""The joint graph of forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_module_simplified
from torch._subclasses.functional_tensor import FunctionalTensorMode

from memfit.errors import BY_CHECKPOINT, NotOneGraphError
from memfit.memory.place import Place
from memfit.torch_private.patching import replaced


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
    settings = torch._functorch.config.patch(backward_pass_autocast=cast)
    with settings, _eagers_kernels(), _checks_kept(), _functionalized_as_eager(), _in_one_line():
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
def _in_one_line() -> Iterator[None]:
    """Take away what torch adds to a refusal: the node at which it was."""
    try:
        yield
    except NotOneGraphError as error:
        error.args = (str(error).partition("\n\nWhile executing ")[0],)
        raise


def as_aot_takes_it(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Let a graph compute under `no_grad` what it would under `inference_mode`, and `.data = ...` be in it; return it.

    AOTAutograd cannot trace a graph under `inference_mode`, and after the error the mode is left when Python frees it,
    at some other time, and puts back what was on in the thread in the midst of the trace. What `.data = ...` is in
    torch 2.15 it leaves to the end of a call, outside of the graph; `set_`, as in torch 2.13, stays in the graph.

    Args:
        module: captured by Dynamo; changed in place.
    """
    for node in module.graph.nodes:
        node.target = _INSTEAD.get(node.target, node.target) if node.op == "call_function" else node.target
    module.recompile()
    return module


def _enter_no_grad(is_inference: bool) -> Any:
    return torch.set_grad_enabled(not is_inference)


def _leave_no_grad(entered: Any) -> None:
    entered.__exit__(None, None, None)


def _set_data(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    version = tensor._version
    tensor.set_(source)  # pyright: ignore[reportArgumentType, reportCallIssue]
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
    return tensor


def _run_inline(subgraph: Callable[..., Any], _name: str, *given: Any) -> Any:
    """Run a region of `nested_compile_region` call by call: each is planned by itself, and may draw."""
    return subgraph(*given)


def _refuse_loop(*_: Any) -> Any:
    raise NotOneGraphError(
        f"the model calls torch.while_loop, of which numbers decide how long it runs: {BY_CHECKPOINT}"
    )


_INSTEAD: dict[Any, Any] = {
    torch.ops.higher_order.invoke_subgraph: _run_inline,
    torch.ops.higher_order.while_loop: _refuse_loop,
    torch.autograd.grad_mode._enter_inference_mode: _enter_no_grad,
    torch.autograd.grad_mode._exit_inference_mode: _leave_no_grad,
    getattr(torch.ops.aten, "shallow_copy_data_", None): _set_data,  # `.data = ...` in torch 2.15, `set_` in 2.13
}


def hand_over_absent(node: Any) -> None:
    """Let the backward half of a compiled graph get None, and not zeros, for a gradient that is absent.

    Args:
        node: of autograd, of an output of a graph that `trace_joint` made, or of a view of one.
    """
    while node is not None and not hasattr(node, "set_materialize_grads"):
        node = next((each for each, _ in node.next_functions), None)
    if node is not None:
        node.set_materialize_grads(False)


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
def _functionalized_as_eager() -> Iterator[None]:
    """Let functionalization keep what it would lose of two kinds of calls.

    Their schemas say that the results of `unsafe_chunk` and its like are on memory of their own, so that a write to one
    of them would leave the others as they were. They are views for eager's kernels, and here. Autograd, which stands
    before, records the calls as eager does. And `bernoulli_` becomes the call that `torch.bernoulli` makes: its result
    is contiguous, and it draws in another order than `bernoulli_` into other strides. Here it is called with a tensor
    of the strides that are drawn into, which `memfit.capture.eager_draws` keeps to.
    """
    aten, dispatch = torch.ops.aten, FunctionalTensorMode.__torch_dispatch__
    views = {
        aten.unsafe_split.Tensor: aten.split.Tensor,
        aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
    }

    def as_eager(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            _refuse_overlapping(func, [each for each in args if isinstance(each, torch.Tensor)])
        if func is aten.bernoulli.p:
            with mode:
                args = (aten.empty_like.default(args[0], memory_format=torch.contiguous_format), *args[1:])
        elif func is aten.bernoulli_.float and not args[0].is_contiguous():
            given = args if len(args) > 1 else (args[0], 0.5)  # the default, which calls leave out
            drawn = dispatch(mode, aten.bernoulli.p, types, given, kwargs)
            with mode:
                return aten.copy_.default(args[0], drawn)
        return dispatch(mode, views.get(func, func), types, args, kwargs)

    with replaced(FunctionalTensorMode, "__torch_dispatch__", as_eager):
        yield


def _refuse_overlapping(func: Any, given: Sequence[torch.Tensor]) -> None:
    """Refuse a call that writes to a view of memory, and reads another view that overlaps it: `x[:, 1:] = x[:, :-1]`.

    Raises:
        NotOneGraphError: eager's result depends on the order of its kernel's loops, and no graph has it.
    """
    written = [tensor for tensor, argument in zip(given, func._schema.arguments, strict=False) if argument.is_write]
    for tensor in written[:1]:
        place = Place.of(tensor, tensor.untyped_storage()._cdata)
        for other in given:
            read = Place.of(other, other.untyped_storage()._cdata)
            if read.storage == place.storage and read != place and place.meets(read):
                raise NotOneGraphError(
                    f"{func} writes over what it reads, in overlapping views of one tensor, so that eager's result "
                    "depends on the order of its loops, which a compiled graph does not have: clone what is read (as "
                    "in x[:, 1:] = x[:, :-1].clone()), or use memfit.fit or memfit.checkpoint, which run eager's kernel"
                )


@contextmanager
def _eagers_kernels() -> Iterator[None]:
    """Let interpolations, dropout, batch normalization on CUDA and some losses be eager's kernels inside the block.

    torch has formulas in their places, of other bits. They stand before autograd, so that no setting for decompositions
    leaves them out.
    """
    import torch._decomp  # enters them

    aten, formulas = torch.ops.aten, (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
    names = [name for name in dir(aten) if "upsample" in name and "backward" not in name]
    packets = [getattr(aten, name) for name in (*names, *_WITH_FORMULAS)]
    own = [(aten.dropout.default, key, _dropout) for key in formulas]
    own.append((aten.cudnn_batch_norm.default, torch._C.DispatchKey.Autograd, _batch_norm_by_cudnn))
    ops: list[Any] = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    removed = [(op, key, op.py_kernels.pop(key)) for op in ops for key in formulas if key in op.py_kernels]
    try:
        for op, _, _ in removed:
            op._dispatch_cache.clear()
        for op, key, kernel in own:
            op.py_impl(key)(kernel)
        yield
    finally:
        for op, key, _ in own:
            op.py_kernels.pop(key, None)
            op._dispatch_cache.clear()
        for op, key, kernel in removed:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


_WITH_FORMULAS = (
    "cudnn_batch_norm",
    "dropout",
    "hardshrink",
    "multi_margin_loss",
    "multilabel_margin_loss_forward",
    "softshrink",
)


def _dropout(inputs: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Return what eager does: the input itself where all of it is kept; without a draw where nothing is."""
    if not train or p == 0 or not inputs.numel():
        return inputs
    if p == 1:
        return inputs.mul(torch.zeros((), dtype=inputs.dtype, device=inputs.device))
    return torch.ops.aten.native_dropout(inputs, p, train)[0]


def _batch_norm_by_cudnn(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    epsilon: float,
) -> tuple[torch.Tensor, ...]:
    """Compute what `cudnn_batch_norm` does, by an operator that chooses cuDNN by the same rule.

    Unlike that of `cudnn_batch_norm`, its schema says that running statistics are written, and it has a functional
    form. In evaluation mode torch's formula stands.
    """
    if not training:  # `_batch_norm_no_update` calls the CPU's kernel on CUDA (torch 2.11)
        return torch._decomp.decompositions.cudnn_batch_norm(
            inputs, weight, bias, running_mean, running_var, training, momentum, epsilon
        )
    if running_mean is None or running_var is None:  # which the result does not depend on
        running_mean, running_var = torch.zeros_like(weight), torch.ones_like(weight)
    return torch.ops.aten._batch_norm_with_update(inputs, weight, bias, running_mean, running_var, momentum, epsilon)


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark `function` as boxed: it takes one list and empties it, and AOTAutograd then keeps no argument alive."""

    def call(arguments: list[Any]) -> Any:
        return function(arguments)

    call._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return call
