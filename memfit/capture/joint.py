"""Capture of the joint graph that AOTAutograd gives to a torch.compile backend: forward and backward around a boundary.

The joint graph is functional. Ops that no output of the forward pass needs belong to backward. There, only ops that
depend on a tangent keep their place; the others (statistics, views, hoisted ops) are computed as late as possible,
because their results would otherwise live through the whole step.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from memfit.binding import Origin, Value
from memfit.capture.build import Captured, TracedBoundary, build
from memfit.capture.trace import Trace
from memfit.capture.traced import TracedCall, mutated_tensors
from memfit.capture.with_code import enter as enter_with_code
from memfit.cost.observations import Corrections
from memfit.errors import UnsupportedStepError
from memfit.graph import Phase, Role
from memfit.memory.place import Place
from memfit.torch_private.tensors import (
    bare_overload,
    draws,
    fake_mode_of,
    is_fake,
    is_view,
    storage_key,
    tensors_in,
    tree_map,
)

_REPLACE = torch.ops.aten.set_.source_Tensor  # what `.data = ...` is in a joint graph


@dataclass(frozen=True, slots=True, kw_only=True)
class BetweenHalves:
    """Stands for all that runs between the halves: it does nothing, and its op has the bytes that this takes."""

    measurable = False
    workspace_bytes = 0

    @property
    def __name__(self) -> str:
        return "between_halves"

    def __call__(self, *_departing: Any) -> None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class JointCapture:
    """A captured joint graph.

    Attributes:
        captured: the graph and its binding.
        forward_outputs, backward_outputs: for each output its Value, or the constant in its place; None for an input
            without a gradient.
    """

    captured: Captured
    forward_outputs: tuple[Any, ...]
    backward_outputs: tuple[Any, ...]


def capture_joint(
    joint: GraphModule,
    *,
    forward_outputs: int,
    name: str,
    device: torch.device,
    corrections: Corrections | None = None,
    between: BetweenHalves | None = None,
    replays_draws: bool = True,
    written_by_others: Collection[int] | None = None,
) -> JointCapture:
    """Return the capture of a joint module.

    Its parameters and inputs are residents, with their position among the primals for a key. Tangents arrive at the
    boundary.

    Args:
        joint: the module that AOTAutograd made.
        forward_outputs: how many of its outputs belong to the forward pass; these are the first.
        name: of the graph.
        device: where the graph runs.
        corrections: what real kernels return in the place of their fakes' results (see `with_real_results`).
        between: the last call of the forward half, if there is to be one.
        replays_draws: whether who runs the graph can make a random call again with the same draws.
        written_by_others: the positions of the primals that user code may write to between the halves, as it may write
            to outputs; None if it writes to nothing.

    Raises:
        CaptureError: a tensor that memfit cannot plan (sparse).
        UnsupportedStepError: collective operations.
    """
    capture = _JointCapture(joint, forward_outputs, device, corrections or {}, replays_draws)
    return capture.run(name, between, written_by_others)


class _JointCapture:
    def __init__(
        self,
        joint: GraphModule,
        forward_outputs: int,
        device: torch.device,
        corrections: Corrections,
        replays_draws: bool,
    ) -> None:
        self.nodes = list(joint.graph.nodes)
        self.joint = joint
        (outputs,) = self.nodes[-1].args
        self.forward_outputs = list(outputs[:forward_outputs])
        self.backward_outputs = list(outputs[forward_outputs:])
        self.phase = Phase.FORWARD
        self.module = ""
        self.trace = Trace(
            device=device,
            scope=lambda: (self.phase, self.module),
            corrections=corrections,
            replays_draws=replays_draws,
        )
        self._replaced: set[int] = set()  # keys of storages in whose place there are others
        self._results: dict[Node, Any] = {}  # in the place of the trace's: of calls that were run again, too

    def run(self, name: str, between: BetweenHalves | None, written_by_others: Collection[int] | None) -> JointCapture:
        """Enter all calls of both halves, and return the capture.

        Args:
            name, between, written_by_others: as for `capture_joint`.
        """
        primals, tangents = arguments_of(self.joint)
        for position, node in enumerate(primals):
            self._enter(node, position)
        forward = self._forward_nodes()
        for node in self.nodes:
            if node in forward:
                self._call(node)
        departures = [self._value(node) for node in self.forward_outputs]
        if between is not None:
            self.trace.add_check("between_halves", between, [v for v in departures if isinstance(v, Value)])
        position = len(self.trace.calls)
        self._enter_backward(primals, tangents, forward)
        gradients = [self._value(node) for node in self.backward_outputs]
        if written_by_others is not None:
            inputs = [each for each in self.trace.residents if each.origin is Origin.INPUT]
            written = {each.value.storage for each in inputs if each.key in written_by_others}
            written |= {value.storage for value in departures if isinstance(value, Value)}
            self._keep_what_is_made_of(written, self.trace.calls[:position], self.trace.calls[position:])
        outputs = {f"output:{i}": v for i, v in enumerate(departures) if isinstance(v, Value)}
        outputs |= {f"gradient:{i}": v for i, v in enumerate(gradients) if isinstance(v, Value)}
        for value in outputs.values():
            if not self.trace.storages[value.storage].resident and value not in departures:
                self.trace.storages[value.storage].role = Role.GRADIENT
        leaving = [v for v in departures if isinstance(v, Value) and not self.trace.storages[v.storage].resident]
        for value in leaving:
            self.trace.storages[value.storage].role = Role.OUTPUT
        captured = build(
            self.trace,
            name=name,
            outputs=outputs,
            boundary=TracedBoundary(position=position, departures=leaving),
            source=f"joint graph of torch.compile, torch {torch.__version__}",
        )
        renumbered = captured.binding.outputs
        return JointCapture(
            captured=captured,
            forward_outputs=tuple(renumbered.get(f"output:{i}", v) for i, v in enumerate(departures)),
            backward_outputs=tuple(renumbered.get(f"gradient:{i}", v) for i, v in enumerate(gradients)),
        )

    def _enter_backward(self, primals: list[Node], tangents: list[Node], forward: set[Node]) -> None:
        self.phase = Phase.BACKWARD
        self._part_tangents(primals, tangents)
        for number, node in enumerate(tangents):
            if isinstance(node.meta.get("val"), torch.Tensor) and node.users:
                self.trace.add_arrival(self._argument(node), key=number, name=f"tangent_{number}")
        for node in self._backward_order(forward):
            self._call(node)

    def _keep_what_is_made_of(
        self, written: set[int], forward: Sequence[TracedCall], backward: Sequence[TracedCall]
    ) -> None:
        """Let nothing be recomputed from storages that may have been written to since, as a queue of keys is behind
        a graph break. To those that backward reads in eager, too, autograd lets nobody write.
        """
        written = written.difference(*(call.reads for call in backward))
        for call in forward:
            call.recomputable = call.recomputable and written.isdisjoint(call.reads)

    def _enter(self, node: Node, position: int) -> None:
        value = node.meta.get("val")  # a symbolic size of Dynamo is a plain number here
        if not isinstance(value, torch.Tensor):
            return
        is_parameter = isinstance(value, torch.nn.Parameter)
        self.trace.add_resident(
            value,
            role=Role.PARAMETER if is_parameter else Role.INPUT,
            origin=Origin.INPUT,
            key=position,
            name=node.name,
        )

    def _part_tangents(self, primals: list[Node], tangents: list[Node]) -> None:
        """Give each tangent a storage of its own, which it fills from the start.

        AOTAutograd makes those of views of one tensor as views, and those of parts at their places.
        """
        seen = {storage_key(node.meta["val"]) for node in primals if isinstance(node.meta.get("val"), torch.Tensor)}
        for node in tangents:
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor):
                continue
            if storage_key(value) in seen or value.storage_offset():
                with fake_mode_of(value):
                    self._results[node] = Place.of(value).empty(value.device)
            seen.add(storage_key(value))

    def _forward_nodes(self) -> set[Node]:
        """Return the nodes that the forward pass's outputs depend on, its updates of buffers, its draws, and its reads
        of what it updates, of which backward would find the new content.
        """
        waiting = [node for node in self.forward_outputs if isinstance(node, Node)]
        effects = [node for node in self.nodes if _has_effect(node) and _is_of_forward(node)]
        written = {storage_key(t) for node in effects for t in mutated_tensors(node.target, _fakes(node.args), {})}
        reads = (node for node in self.nodes if node.op == "call_function" and _is_of_forward(node)) if written else ()
        waiting += effects
        waiting += (node for node in reads if written & {storage_key(t) for t in tensors_in(_fakes(node.args))})
        found: set[Node] = set()
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting += node.all_input_nodes
        return found

    def _backward_order(self, forward: set[Node]) -> list[Node]:
        """Return the ops that depend on a tangent, and backward's draws and updates of buffers, in their order, each
        after the missing ops that it depends on.
        """
        depends: set[Node] = set()
        for node in self.nodes:
            if (node.op == "placeholder" and is_tangent(node)) or any(n in depends for n in node.all_input_nodes):
                depends.add(node)
        done = set(forward)
        order: list[Node] = []
        is_root = depends.union(node for node in self.nodes if _has_effect(node))
        roots = [node for node in self.nodes if node in is_root and node.op == "call_function"]
        for root in [*roots, *(node for node in self.backward_outputs if isinstance(node, Node))]:
            stack = [root]
            while stack:
                node = stack[-1]
                missing = [n for n in node.all_input_nodes if n not in done]
                if missing and node not in done:
                    stack += missing
                    continue
                stack.pop()
                if node not in done:
                    done.add(node)
                    order.append(node)
        return order

    def _call(self, node: Node) -> None:
        if node.op == "get_attr":
            return
        if node.op != "call_function" or node.target is operator.getitem:
            return
        self.module = _module_name(node)
        made = len(self.trace.calls)
        self._trace(node)
        for call in self.trace.calls[made:]:
            call.sources = (node,)

    def _trace(self, node: Node) -> None:
        args, kwargs = tree_map(self._argument, (node.args, dict(node.kwargs)))
        if node.target is _REPLACE and self.trace.storages[self.trace.value(args[1]).storage].resident:
            raise UnsupportedStepError(
                f"{_module_name(node) or 'the model'} lets a tensor have the memory of another one (`.data = ...`), "
                "which a planned step would not: copy the values (`.data.copy_(...)`), or do it between calls"
            )
        if node.target is _REPLACE:  # its memory would be that of an activation, which a plan frees, or reuses
            self._replaced.add(storage_key(args[0]))
            self.trace.add_call(torch.ops.aten.copy_.default, args, kwargs, args[0])
            return
        if self._replaced & {storage_key(each) for each in tensors_in((args, kwargs))}:
            raise UnsupportedStepError(
                f"{_module_name(node) or 'the model'} reads a tensor in backward that has other memory by then "
                "(`.data = ...` in forward, after it was used): replace it before it is used, or between calls"
            )
        if _is_stale(node, args):
            self._results[node] = self._reshaped(node.target, args, kwargs)
            return
        is_known = "val" in node.meta and not _is_within_another(node)
        is_as_traced = is_known and not self.trace.corrections and not self._results
        returned = node.meta["val"] if is_as_traced else node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        if bare_overload(node.target) is None:
            returned = enter_with_code(self.trace, node, args, kwargs, returned)
        else:
            returned = self.trace.add_call(node.target, args, kwargs, returned)
        if not is_as_traced:
            self._results[node] = returned

    def _reshaped(self, view: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a view that was traced of a tensor of other strides: of a copy where these do not let it be made.

        Eager reshapes there, which copies such a tensor.
        """
        try:
            returned = view(*args, **kwargs)
        except (RuntimeError, ValueError):
            clone, how = torch.ops.aten.clone.default, {"memory_format": torch.contiguous_format}
            args = self.trace.add_call(clone, args[:1], how, clone(args[0], **how)), *args[1:]
            returned = view(*args, **kwargs)
        return self.trace.add_call(view, args, kwargs, returned)

    def _argument(self, leaf: Any) -> Any:
        if not isinstance(leaf, Node):
            return leaf
        if leaf.op == "get_attr":
            return operator.attrgetter(str(leaf.target))(self.joint)
        if leaf.target is operator.getitem:
            source, index = leaf.args
            assert isinstance(source, Node)
            return self._argument(source)[index]
        return self._results[leaf] if leaf in self._results else leaf.meta["val"]

    def _value(self, leaf: Any) -> Any:
        """Return the Value of an output, or the constant in its place."""
        found = self._argument(leaf)
        return self.trace.value(found) if isinstance(found, torch.Tensor) else found


def _is_within_another(node: Node) -> bool:
    """Return whether a copy was described at its target's place in a larger storage; it gets a storage of its own."""
    return node.target is torch.ops.aten.copy.default and node.meta["val"].storage_offset() != 0


def _is_stale(node: Node, args: tuple[Any, ...]) -> bool:
    """Return whether a view was described when another call stood in the place of the one that it is a view of."""
    if not args or not is_fake(args[0]) or not is_view(node.target):
        return False
    return any(storage_key(each) != storage_key(args[0]) for each in tensors_in(node.meta.get("val")))


def arguments_of(module: GraphModule) -> tuple[list[Node], list[Node]]:
    """Return the placeholders of a joint graph, or of a half of one: those of forward's tensors, and the tangents."""
    given = module.graph.find_nodes(op="placeholder")
    return [node for node in given if not is_tangent(node)], [node for node in given if is_tangent(node)]


def outputs_of(module: GraphModule) -> Sequence[Any]:
    """Return what a joint graph, or a half of one, returns: nodes and constants."""
    (outputs,) = next(iter(module.graph.find_nodes(op="output"))).args
    return outputs  # pyright: ignore[reportReturnType]


def is_tangent(node: Node) -> bool:
    """Return whether a placeholder of a joint graph stands for the gradient of an output."""
    return str(node.target).startswith("tangents")


def _has_effect(node: Node) -> bool:
    """Return whether a call writes to an argument, draws random numbers, or is a check, which returns nothing."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return False
    return schema.is_mutable or not schema.returns or draws(node.target, node.args, node.kwargs)


def _fakes(arguments: tuple[Any, ...]) -> Any:
    """Return a call's arguments with fakes in the places of nodes."""
    return tree_map(lambda leaf: leaf.meta.get("val") if isinstance(leaf, Node) else leaf, arguments)


def _is_of_forward(node: Node) -> bool:
    """Return whether AOTAutograd met a call in forward; those in the user's own backward functions have no tag."""
    return node.meta.get("partitioner_tag") in ("is_forward", "must_be_in_forward")


def _module_name(node: Node) -> str:
    """`layer1.0.conv`: the innermost module of the op, or of the op whose gradient it is."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    for path, _kind in reversed(list(stack.values())):
        return _ROOT.sub("", str(path)).replace("._modules['", ".").replace("']", "").strip(".")
    return ""


# How Dynamo gets to the model: its frame's `self`, or a function around it that was entered.
_ROOT = re.compile(r"^L\['\w+'\](?:\.__closure__\[\d+\]\.cell_contents|\.__self__|\.__wrapped__)*")
