"""The two halves of a planned joint graph as graphs of nodes, which a compiler takes: one copy of a node a computation.

A node that the schedule computes twice stands in a half twice, so that tags such as "recompute this" are not needed,
which could not say it. Views have no memory, and are made anew where they are used. The forward half saves what the
backward half uses before it computes it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from memfit.capture import Captured
from memfit.capture.joint import arguments_of, is_tangent, outputs_of
from memfit.errors import UnsupportedStepError
from memfit.graph import Graph as PlanGraph
from memfit.kernels.host_copies import enter, operators, places_apart
from memfit.memory.host.slab import alignment_bytes
from memfit.memory.host.store import HostStore, Reserved
from memfit.schedule import Code, Schedule
from memfit.system.budget import format_bytes
from memfit.torch_private.inductor import CHAIN, HELD
from memfit.torch_private.tensors import fake_mode_of, tensors_in

_Action = tuple[int, int]
_TICKET = object()


def rejoined(joint: GraphModule, halves: tuple[GraphModule, GraphModule], forward_outputs: int) -> GraphModule:
    """Return two halves of a joint graph as one graph again: what the second computes anew is there twice.

    So what a compiler recomputes at no cost, in the kernel that reads it, need not be planned. Where the second is
    given what the first has not saved (states of random ops that are recomputed), the joint graph is returned.

    Args:
        joint: the module that AOTAutograd made.
        halves: as a partitioner of torch's divided it.
        forward_outputs: how many of the forward half's outputs belong to the forward pass; these are the first.
    """
    forward, backward = (half.graph for half in halves)
    first, second = map(outputs_of, halves)
    saved = {node.name: node for node in first[forward_outputs:] if isinstance(node, Node)}
    given, tangents = arguments_of(halves[1])
    if not saved.keys() >= {node.name for node in given}:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Copying:
    """What the copies of a schedule need.

    Attributes:
        graph: of the schedule.
        nodes: by storage that is copied the node of the joint graph whose result it is.
        places: by storage its place on the host.
        store: the number of the part of the store that has the places.
    """

    graph: PlanGraph
    nodes: Mapping[int, Node]
    places: Mapping[int, int]
    store: int


def copying_of(
    capture: Captured,
    graph: PlanGraph,
    left: Sequence[int],
    schedule: Schedule,
    store: HostStore,
) -> tuple[Reserved, Copying]:
    """Return a schedule's part of the store, with the memory for it, and what its copies need.

    Args:
        capture: of the joint graph.
        graph: that was planned, with chains as ops.
        left: the numbers of its storages in the capture.
        schedule: of the graph.
        store: of all graphs of the model.

    Raises:
        HostMemoryError: the host, or the disk, has no room.
        UnsupportedStepError: the copies do not fit the budget side by side, or a storage is the result of no node.
    """
    places, height_bytes = places_apart(graph, schedule, alignment_bytes(store.device))
    if height_bytes > store.left_bytes:
        raise UnsupportedStepError(
            f"the plan's copies take {format_bytes(height_bytes)} side by side on the host, more than the "
            f"{format_bytes(store.left_bytes)} that are left of the host budget: raise it"
        )
    reserved = store.reserve(height_bytes)
    copied: list[int] = schedule.operands[schedule.codes == Code.OFFLOAD].tolist()
    nodes = {storage: _result_node(capture, left[storage]) for storage in copied}
    return reserved, Copying(graph=graph, nodes=nodes, places=places, store=enter(reserved))


def _result_node(capture: Captured, storage: int) -> Node:
    for call, nodes in zip(capture.binding.calls, capture.sources, strict=True):
        for place, value in enumerate(call.results):
            if value is None or value.storage != storage:
                continue
            items = [user for user in nodes[-1].users if user.target is operator.getitem and user.args[1] == place]
            for node in items if len(call.results) > 1 else [nodes[-1]]:
                fake = node.meta.get("val")
                form = (tuple(fake.shape), fake.stride()) if isinstance(fake, torch.Tensor) else None
                if form == (value.shape, value.stride):
                    return node
    raise UnsupportedStepError(
        f"storage {storage} of the graph is the result of no single node, so that Inductor's code cannot copy it to "
        'the host; leave host_budget out, or take kernels="eager"'
    )


def node_halves(
    joint: GraphModule,
    sources: Sequence[Sequence[Node]],
    schedule: Schedule,
    forward_outputs: int,
    copying: Copying | None = None,
) -> tuple[GraphModule, GraphModule]:
    """Return the forward and the backward half of a schedule.

    Args:
        joint: the module that AOTAutograd made.
        sources: for each op of the schedule the nodes of the joint graph that it computes, in order.
        schedule: of one boundary.
        forward_outputs: how many of the joint graph's outputs belong to the forward pass; these are the first.
        copying: for a schedule that offloads.
    """
    forward, backward = _actions(schedule)
    (primals, tangents), outputs = arguments_of(joint), outputs_of(joint)
    computed = {node for nodes in sources for node in nodes}
    held = {node for nodes in sources for node in nodes if _leaves(node, set(nodes), computed)}
    trial = _Half(tangents, computed, held, copying)
    trial.run(backward, sources)
    trial.returned(outputs[forward_outputs:])
    saved, left = trial.missing, trial.left_before
    second = _Half(saved, computed, held, copying)
    second.take_tickets(left)
    second.take(tangents)
    second.run(backward, sources)
    first = _Half(primals, computed, held, copying)
    first.run(forward, sources)
    halves = (
        first.module(joint, [*outputs[:forward_outputs], *saved], left),
        second.module(joint, outputs[forward_outputs:]),
    )
    assert not first.missing and not second.missing
    return halves


def _actions(schedule: Schedule) -> tuple[list[_Action], ...]:
    """Return what each half computes and copies, in order: the code, and the op or the storage."""
    codes, operands = schedule.codes.tolist(), schedule.operands.tolist()
    boundary = codes.index(Code.BOUNDARY)
    actions: tuple[list[_Action], ...] = [], []
    for position, (code, operand) in enumerate(zip(codes, operands, strict=True)):
        if code in (Code.COMPUTE, Code.OFFLOAD, Code.WAIT, Code.PREFETCH):
            actions[position > boundary].append((code, operand))
    return actions


def _leaves(node: Node, chain: set[Node], computed: set[Node]) -> bool:
    """Return whether anything outside of its chain uses a node that reads something, or a view of it."""
    if not any(base.op != "get_attr" for base in node.all_input_nodes):
        return False
    return any(user not in chain and (user in computed or _leaves(user, chain, computed)) for user in node.users)


def _val(node: Node) -> Any:
    return node.meta.get("val")


class _Half:
    """A graph that is being made.

    Args:
        given: the nodes of the joint graph that are its arguments.
        computed: the nodes that take memory; all others are views.
        held: the nodes whose results the schedule counts on being in memory.

    Attributes:
        missing: the nodes that it uses and neither is given nor has computed before.
    """

    def __init__(
        self, given: Iterable[Node], computed: set[Node], held: set[Node], copying: Copying | None = None
    ) -> None:
        self.missing: list[Node] = []
        self.left_before: list[int] = []
        self._graph = Graph()
        self._computed, self._held, self._copying = computed, held, copying
        self._newest: dict[Node, Node] = {}
        self._tickets: dict[int, Node] = {}
        self._last_ticket: Node | None = None
        self._arriving: set[int] = set()
        self._number = 0
        self.take(given)

    def take(self, given: Iterable[Node]) -> None:
        """Add nodes of the joint graph as arguments."""
        for node in given:
            self._add_argument(node)

    def take_tickets(self, storages: Iterable[int]) -> None:
        """Add tickets for what is on the host as arguments."""
        for storage in storages:
            self._tickets[storage] = ticket = self._graph.placeholder(f"ticket_{storage}")
            ticket.meta = {"val": self._fake(storage, "left", lambda fake: (fake, _TICKET))}

    def run(self, actions: Sequence[_Action], sources: Sequence[Sequence[Node]]) -> None:
        """Add what is computed and copied, in order.

        Args:
            actions: of this half.
            sources: for each op its nodes.
        """
        for code, operand in actions:
            self._number += 1
            if code == Code.COMPUTE:
                self._await(operand)
                self._compute(sources[operand])
            else:
                self._copy(code, operand)
        for storage in sorted(self._arriving):  # whoever is given it reads it
            self._add_arrived(storage)

    def _compute(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            made = self._newest[node] = self._graph.node_copy(node, self._value)
            made.meta |= {HELD: node in self._held, CHAIN: self._number}
            for user in node.users:
                if user.target is operator.getitem:
                    self._newest[user] = self._graph.node_copy(user, self._value)

    def _await(self, op: int) -> None:
        """Wait for the copies back that an op reads."""
        if self._copying is not None and self._arriving:
            for storage in sorted(self._arriving.intersection(self._copying.graph.ops[op].reads)):
                self._add_arrived(storage)

    def _copy(self, code: int, storage: int) -> None:
        assert self._copying is not None
        node = self._copying.nodes[storage]
        if code == Code.OFFLOAD:
            args = (self._value(node), self._last_ticket, self._copying.store, self._copying.places[storage])
            self._tickets[storage] = self._last_ticket = self._call("leave", args, storage)
        elif code == Code.WAIT:
            args = (self._value(node), self._ticket(storage))
            self._tickets[storage] = self._call("left", args, storage)
        else:
            fake = node.meta["val"]
            place = self._copying.store, self._copying.places[storage]
            args = (self._ticket(storage), *place, list(fake.shape), list(fake.stride()), fake.dtype, fake.device)
            self._newest[node] = self._call("bring", args, storage)
            self._arriving.add(storage)

    def _add_arrived(self, storage: int) -> None:
        assert self._copying is not None
        self._call("arrived", (self._newest[self._copying.nodes[storage]], self._ticket(storage)), storage)
        self._arriving.discard(storage)

    def _ticket(self, storage: int) -> Node:
        """Return the ticket of a storage; one that the half before has got is an argument."""
        if storage not in self._tickets:
            self.left_before.append(storage)
            self.take_tickets([storage])
        return self._tickets[storage]

    def _call(self, name: str, args: tuple[Any, ...], storage: int) -> Node:
        node = self._graph.call_function(operators()[name], args)
        node.meta = {"val": self._fake(storage, name, lambda _: map_arg(args, _val)), CHAIN: self._number}
        return node

    def _fake(self, storage: int, name: str, args: Callable[[Any], tuple[Any, ...]]) -> Any:
        """Return what an operator gives, as a fake."""
        assert self._copying is not None
        fake = self._copying.nodes[storage].meta["val"]
        with torch.no_grad(), fake_mode_of(fake):
            given = tuple(torch.empty((), dtype=torch.int64) if each is _TICKET else each for each in args(fake))
            return operators()[name](*given)

    def returned(self, outputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return what stands for these outputs here."""
        return tuple(self._value(output) if isinstance(output, Node) else output for output in outputs)

    def module(self, joint: GraphModule, outputs: Sequence[Any], left: Iterable[int] = ()) -> GraphModule:
        """Return the finished half.

        Args:
            joint: has the constants that it reads.
            outputs: nodes of the joint graph, or constants.
            left: storages on the host, whose tickets are returned after these.
        """
        self._graph.output((*self.returned(outputs), *(self._tickets[storage] for storage in left)))
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
