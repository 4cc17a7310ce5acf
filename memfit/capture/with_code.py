"""Operators that are given code (flex attention, `torch.cond`, kernels of Triton): each is one op of a graph.

Their code stands in subgraphs among their arguments, and AOTAutograd has made all that it reads arguments too. They
write to nothing and draw nothing, so that they are measured, and recomputed, as all others are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch.fx import GraphModule, Node

from memfit.capture.trace import Trace
from memfit.capture.traced import Entry, TracedCall
from memfit.errors import BY_CHECKPOINT, NotOneGraphError
from memfit.graph import Phase, Role
from memfit.torch_private.tensors import bare_overload, draws, tree_flatten, tree_unflatten

_log = logging.getLogger("memfit")
# Others may have effects, or take as long as numbers say (`while_loop`): ops are measured on noise.
_KNOWN = (
    "associative_scan",
    "auto_functionalized_v2",
    "cond",
    "flex_attention",
    "flex_attention_backward",
    "map_impl",
    "scan",
    "triton_kernel_wrapper_functional",
)
_NUMBERED = ("triton_kernel_wrapper_functional",)  # by a table of the process


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WithCode:
    """An operator that is given code, with nested arguments and results made flat.

    Attributes:
        func: the operator.
        spec: of its positional and named arguments.
        trained: positions of arguments whose gradients it computes: eager's kernels look at `requires_grad`.
    """

    func: Any
    spec: Any
    trained: frozenset[int]

    @property
    def __name__(self) -> str:
        return self.func.__name__

    def __repr__(self) -> str:
        address = f" at {id(self):#x}" if self.func.__name__ in _NUMBERED else ""
        return f"{self.func.__name__}({self.spec}, {sorted(self.trained)}{address})"

    def __call__(self, *leaves: Any) -> Any:
        given = [leaf.detach().requires_grad_() if n in self.trained else leaf for n, leaf in enumerate(leaves)]
        args, kwargs = tree_unflatten(given, self.spec)
        with torch.no_grad():
            returned = tree_flatten(self.func(*args, **kwargs))[0]
        return returned[0] if len(returned) == 1 else tuple(returned)


def enter(trace: Trace, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> Any:
    """Enter a call of an operator that is given code, and return `returned` as the real kernel returns it.

    Args:
        trace: takes the call.
        node: of the joint graph.
        args, kwargs: its arguments, with fakes, and with subgraphs as modules.
        returned: by the fake kernel.

    Raises:
        NotOneGraphError: another operator, or one whose code draws; names it, and the door for it.
    """
    leaves, spec = tree_flatten((args, kwargs))
    name, (phase, module) = str(getattr(node.target, "__name__", node.target)), trace.scope()
    why = "" if name in _KNOWN else "which PyTorch's compiler does not divide into operators"
    if any(map(_draws, leaves)):
        why = "whose code draws random numbers"
    if why:
        raise NotOneGraphError(f"{module or 'the model'} calls {name}, {why}: {BY_CHECKPOINT}")
    if name == "flex_attention":
        _tell_of_scores()
    used = {id(fake) for fake in _used(node, returned)}
    buffers = zip(args[12], returned[3], strict=True) if name == "flex_attention_backward" else ()
    trained = {id(buffer) for buffer, gradient in buffers if id(gradient) in used}
    given = tuple(trace.value(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    target = WithCode(
        func=node.target,
        spec=spec,
        trained=frozenset(place for place, leaf in enumerate(leaves) if id(leaf) in trained),
    )
    fakes, shape = tree_flatten(returned)
    entry = Entry(func=target, given=args, target=target, args=given, kwargs={}, outputs=list(fakes), mutated=[])
    trace.corrected(entry, fakes)
    role = Role.ACTIVATION if phase is Phase.FORWARD else Role.GRADIENT
    results = [
        trace.add_storage(real, name=name, role=role) if id(fake) in used and isinstance(real, torch.Tensor) else None
        for fake, real in zip(fakes, entry.outputs, strict=True)
    ]
    made = [value for value in results if value is not None]
    call = TracedCall.of(name, target, given, made=made, phase=phase, module=module)
    trace.calls.append(replace(call, results=tuple(results)))
    return tree_unflatten(entry.outputs, shape)


@cache
def _tell_of_scores() -> None:
    _log.warning(
        "memfit: flex attention runs with the kernels that eager calls, which make the whole matrix of scores; for the "
        "fused kernel train under memfit.checkpoint, and call torch.compile(flex_attention) in the model"
    )


def _draws(leaf: Any) -> bool:
    if isinstance(leaf, GraphModule):
        inside = [each for each in leaf.modules() if isinstance(each, GraphModule)]
        return any(draws(node.target, node.args, node.kwargs) for each in inside for node in each.graph.nodes)
    return bare_overload(leaf) is not None and torch.Tag.nondeterministic_seeded in leaf.tags


def _used(node: Node, returned: Any) -> Iterator[Any]:
    """Yield the results that other nodes read, of nested ones."""
    if isinstance(returned, torch.Tensor):
        yield returned
    elif returned is not None:
        for user in node.users:
            yield from _used(user, returned[user.args[1]])
