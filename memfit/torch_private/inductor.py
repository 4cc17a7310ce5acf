"""Halves of a step compiled by Inductor."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.utils.checkpoint

from memfit.torch_private.aot import boxed
from memfit.torch_private.patching import replaced
from memfit.torch_private.tensors import draws


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
LEAN = 0.999
"""Of torch's activation memory budget: it then looks only for what is fused into kernels of the backward half."""
ModulePair = tuple[torch.fx.GraphModule, torch.fx.GraphModule]
HELD, CHAIN = "memfit_held", "memfit_chain"
"""In the `meta` of a node: whether its result is kept in memory, and not computed anew in each kernel that reads it; a
number that it shares with the nodes that are to be one kernel."""


def compiled_by_inductor(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    partition: Callable[[torch.fx.GraphModule, int, Callable[[float | None], ModulePair]], ModulePair],
    around: Callable[[InductorHalf, Callable[[list[Any]], Any]], Callable[[list[Any]], Any]],
    keeps_order: Callable[[], bool],
) -> Callable[..., Any]:
    """Run AOTAutograd and Inductor on a module that Dynamo captured, and return the compiled callable.

    AOTAutograd and Inductor cache nothing of it: neither does outside of Dynamo. `module` is not changed.

    Args:
        module: captured by Dynamo.
        inputs: with concrete sizes.
        partition: divides the joint graph, given with the number of the forward pass's outputs, into its halves; it is
            also given a function that does so as Inductor would: within a share of the activations, which is torch's
            `activation_memory_budget`, or as it does by itself.
        around: returns what is called in the place of a compiled half; both take a list, and empty it.
        keeps_order: asked for each half: whether Inductor keeps the order of nodes, and the results of the nodes marked
            `HELD`.
    """
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    # A kernel that is timed in its first call takes copies of what it writes, and as much as the device's cache.
    untimed = {"triton.autotune_pointwise": False}

    def compile_half(half: torch.fx.GraphModule, arguments: Sequence[Any], **options: Any) -> Any:
        if options.get("is_inference"):
            return compile_fx_inner(half, arguments, **options)
        order = _order_kept() if keeps_order() else nullcontext()
        with order, _kernels_unbuilt(), torch._inductor.config.patch(untimed):
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
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        return compile_fx(
            torch.fx.GraphModule(module, copy.deepcopy(module.graph)),
            list(inputs),
            inner_compile=compile_half,
            config_patches={"custom_partitioner_fn": _partitioner(partition, _is_kept_anyway(module))},
        )


def _is_kept_anyway(module: torch.fx.GraphModule) -> list[bool]:
    """Return for each input of a module that Dynamo captured whether it is a parameter or a buffer."""
    inputs = module.graph.find_nodes(op="placeholder")
    return ["_dynamo_static_input_type" in node.meta.get("tensor_dict", {}) for node in inputs]


def _partitioner(partition: Callable[..., Any], is_kept_anyway: Sequence[bool]) -> Any:
    """Return a partitioner for Inductor's settings.

    To save a parameter or a buffer costs a partition no memory. AOTAutograd knows which inputs these are only while
    Dynamo captures.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partition(CustomPartitionerFn):
        def __call__(self, gm: Any, joint_inputs: Any, *, num_fwd_outputs: int, **given: Any) -> Any:
            given |= {"compiler": "inductor", "num_fwd_outputs": num_fwd_outputs}
            if len(is_kept_anyway) == len(joint_inputs[0]):  # else AOTAutograd has divided or joined some
                kept = [place for place, is_kept in enumerate(is_kept_anyway) if is_kept]
                given["static_lifetime_input_indices"] = kept

            def own(share: float | None) -> ModulePair:
                budget = torch._functorch.config.activation_memory_budget
                budget = budget if share is None else min(budget, share)
                with torch._functorch.config.patch(activation_memory_budget=budget):
                    divided = min_cut_rematerialization_partition(_drawing_once(gm), joint_inputs, **given)
                _require_drawn_once(divided)
                return divided

            return partition(gm, num_fwd_outputs, own)

        def uuid(self) -> None:
            """Name nothing, so that Inductor caches nothing: its keys leave out what a plan asks for."""

        def __reduce__(self) -> Any:  # Inductor pickles its settings
            return str, ("memfit",)

    return Partition()


def _drawing_once(joint: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return a copy of a joint graph for torch's partitioner, in which random draws are to be kept.

    The partitioner changes the graph that it is given. For an activation memory budget it also computes draws anew,
    and with them Inductor's seeds (torch 2.13): the backward half then has other dropout masks than the
    forward half. What a checkpoint of the user's draws, torch draws anew from the state that it had.
    """
    from torch._functorch.partitioners import must_recompute

    graph, copies = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
    for node in joint.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    copied = torch.fx.GraphModule(joint, graph)
    copied.meta = joint.meta
    for node in _draws(copied):
        if not must_recompute(node):
            node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
    for node in graph.find_nodes(op="placeholder"):  # a size that Dynamo does not fix is a number without a description
        node.meta.setdefault("val", ())
    return copied


def _draws(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in module.graph.nodes if draws(node.target, node.args, node.kwargs)]


def _require_drawn_once(halves: ModulePair) -> None:
    forward, backward = [{node.name for node in _draws(half)} for half in halves]
    if forward & backward:
        raise RuntimeError(
            f"torch's partitioner draws the random numbers of {min(forward & backward)} twice; set "
            "torch._functorch.config.activation_memory_budget above 0"
        )


@contextmanager
def _order_kept() -> Iterator[None]:
    """Let Inductor keep the order of nodes, and the results of nodes marked `HELD`."""
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
            if id(scheduler) not in memories:
                memories[id(scheduler)] = _Memory(scheduler)
            return memories[id(scheduler)].allows(*sorted((node1, node2), key=lambda node: node.min_order))

    lower = GraphLowering.run_node

    def run_node(lowering: Any, node: torch.fx.Node) -> Any:
        result = lower(lowering, node)
        if node.meta.get(HELD) and hasattr(result, "realize"):
            result.realize()
        return result

    def reuses(allocated: Any, freed: Any, *_: Any) -> bool:  # memory kept for later counts towards the peak
        return freed.scheduler_node_index + 1 == allocated.scheduler_node_index

    with (
        V.set_choices_handler(InOrder()),
        replaced(GraphLowering, "run_node", run_node),
        replaced(AllocateLine, "should_reuse_buffer", reuses),
    ):
        yield


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
    with replaced(AsyncCompile, "cpp_pybinding", lambda *arguments: _Unbuilt(partial(start, *arguments))):
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
