"""The two halves of a planned joint graph as graphs of nodes, which a compiler takes: one copy of a node a computation.

A node that the schedule computes twice stands in a half twice, so that tags such as "recompute this" are not needed,
which could not say it. Views have no memory, and are made anew where they are used. The forward half saves what the
backward half uses before it computes it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from memfit.capture.joint import is_tangent
from memfit.schedule import Code, Schedule
from memfit.torch_private.inductor import CHAIN, HELD
from memfit.torch_private.tensors import fake_mode_of, tensors_in


def rejoined(joint: GraphModule, halves: tuple[GraphModule, GraphModule], forward_outputs: int) -> GraphModule:
    """Return two halves of a joint graph as one graph again: what the second computes anew is there twice.

    So what a compiler computes again at no cost, in the kernel that reads it, need not be planned. Where the second is
    given what the first has not saved (states of random ops that are computed again), the joint graph is returned.

    Args:
        joint: the module that AOTAutograd made.
        halves: as a partitioner of torch's divided it.
        forward_outputs: how many of the forward half's outputs belong to the forward pass; these are the first.
    """
    forward, backward = (half.graph for half in halves)
    (first,), (second,) = (next(iter(graph.find_nodes(op="output"))).args for graph in (forward, backward))
    saved = {node.name: node for node in first[forward_outputs:] if isinstance(node, Node)}
    given = backward.find_nodes(op="placeholder")
    tangents = [node for node in given if is_tangent(node)]
    if not saved.keys() >= {node.name for node in given if not is_tangent(node)}:
        return joint
    graph, copies = Graph(), dict[Node, Node]()
    for node in [*forward.find_nodes(op="placeholder"), *tangents]:
        copies[node] = graph.node_copy(node)
    for node in forward.nodes:
        if node.op not in ("placeholder", "output"):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    for node in backward.nodes:
        if node.op == "placeholder" and not is_tangent(node):
            copies[node] = copies[saved[node.name]]
        elif node.op not in ("placeholder", "output"):
            copies[node] = graph.node_copy(node, copies.__getitem__)
            _describe_anew(copies[node])
    outputs = [*first[:forward_outputs], *second]
    graph.output([copies[output] if isinstance(output, Node) else output for output in outputs])
    graph.lint()
    return GraphModule(joint, graph)


def _describe_anew(node: Node) -> None:
    """Give a node a fake result of its own: a second computation has that of the first."""
    if node.op != "call_function" or not tensors_in(node.meta.get("val")):
        return
    args, kwargs = map_arg((node.args, node.kwargs), lambda argument: argument.meta.get("val"))
    assert callable(node.target)
    with torch.no_grad(), fake_mode_of(tensors_in(node.meta["val"])[0]):
        node.meta = {**node.meta, "val": node.target(*args, **kwargs)}


def node_halves(
    joint: GraphModule, sources: Sequence[Sequence[Node]], schedule: Schedule, forward_outputs: int
) -> tuple[GraphModule, GraphModule]:
    """Return the forward and the backward half of a schedule.

    Args:
        joint: the module that AOTAutograd made.
        sources: for each op of the schedule the nodes of the joint graph that it computes, in order.
        schedule: of one boundary; it drops and computes, and offloads nothing.
        forward_outputs: how many of the joint graph's outputs belong to the forward pass; these are the first.
    """
    forward, backward = _computed(sources, schedule)
    placeholders = joint.graph.find_nodes(op="placeholder")
    primals = [node for node in placeholders if not is_tangent(node)]
    tangents = [node for node in placeholders if is_tangent(node)]
    (outputs,) = next(iter(joint.graph.find_nodes(op="output"))).args
    computed = {node for nodes in sources for node in nodes}
    held = {node for nodes in sources for node in nodes if _leaves(node, set(nodes), computed)}
    trial = _Half(tangents, computed, held)
    trial.compute(backward)
    trial.returned(outputs[forward_outputs:])
    saved = trial.missing
    second = _Half([*saved, *tangents], computed, held)
    second.compute(backward)
    first = _Half(primals, computed, held)
    first.compute(forward)
    halves = (
        first.module(joint, [*outputs[:forward_outputs], *saved]),
        second.module(joint, outputs[forward_outputs:]),
    )
    assert not first.missing and not second.missing
    return halves


def _computed(sources: Sequence[Sequence[Node]], schedule: Schedule) -> tuple[list[Sequence[Node]], ...]:
    """Return the nodes of the ops that each half computes, in order."""
    codes, operands = schedule.codes.tolist(), schedule.operands.tolist()
    boundary = codes.index(Code.BOUNDARY)
    computed: tuple[list[Sequence[Node]], ...] = [], []
    for position, (code, operand) in enumerate(zip(codes, operands, strict=True)):
        if code == Code.COMPUTE:
            computed[position > boundary].append(sources[operand])
    return computed


def _leaves(node: Node, chain: set[Node], computed: set[Node]) -> bool:
    """Return whether anything outside of its chain uses a node that reads something, or a view of it."""
    if not any(base.op != "get_attr" for base in node.all_input_nodes):
        return False
    return any(user not in chain and (user in computed or _leaves(user, chain, computed)) for user in node.users)


class _Half:
    """A graph that is being made.

    Args:
        given: the nodes of the joint graph that are its arguments.
        computed: the nodes that take memory; all others are views.
        held: the nodes whose results the schedule counts on being in memory.

    Attributes:
        missing: the nodes that it uses and neither is given nor has computed before.
    """

    def __init__(self, given: Iterable[Node], computed: set[Node], held: set[Node]) -> None:
        self.missing: list[Node] = []
        self._graph = Graph()
        self._computed, self._held = computed, held
        self._newest: dict[Node, Node] = {}
        for node in given:
            self._add_argument(node)

    def compute(self, ops: Sequence[Sequence[Node]]) -> None:
        """Add a computation of each op, given by its nodes."""
        for number, node in [(number, node) for number, nodes in enumerate(ops) for node in nodes]:
            made = self._newest[node] = self._graph.node_copy(node, self._value)
            made.meta |= {HELD: node in self._held, CHAIN: number}
            for user in node.users:
                if user.target is operator.getitem:
                    self._newest[user] = self._graph.node_copy(user, self._value)

    def returned(self, outputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return what stands for these outputs here."""
        return tuple(self._value(output) if isinstance(output, Node) else output for output in outputs)

    def module(self, joint: GraphModule, outputs: Sequence[Any]) -> GraphModule:
        """Return the finished half.

        Args:
            joint: has the constants that it reads.
            outputs: nodes of the joint graph, or constants.
        """
        self._graph.output(self.returned(outputs))
        self._graph.eliminate_dead_code()
        self._graph.lint()
        return GraphModule(joint, self._graph)

    def _add_argument(self, node: Node) -> Node:
        argument = self._graph.placeholder(node.name)
        argument.meta = dict(node.meta)
        self._newest[node] = argument
        return argument

    def _value(self, node: Node) -> Node:
        """Return the newest copy of a node; that of a view is a view of the newest copy of its base."""
        if node.op == "call_function" and not self._takes_memory(node):
            bases = [self._value(base) for base in node.all_input_nodes]
            known = self._newest.get(node)
            if known is None or known.all_input_nodes != bases:
                known = self._newest[node] = self._graph.node_copy(node, self._value)
            return known
        if node not in self._newest and node.op == "get_attr":
            self._newest[node] = self._graph.node_copy(node)
        elif node not in self._newest:
            self.missing.append(node)
            self._add_argument(node)
        return self._newest[node]

    def _takes_memory(self, node: Node) -> bool:
        return node in self._computed or (node.target is operator.getitem and node.args[0] in self._computed)
