"""Building a Graph and its Binding from a Trace: dead calls are removed, generator states added, storages numbered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.binding import Binding, Call, InPlaceForm, Value
from memfit.capture.fuse import fuse_in_place_writes
from memfit.capture.generators import STATE_BYTES, SaveGeneratorState
from memfit.capture.guards import Guards
from memfit.capture.looks import Look
from memfit.capture.renumber import Renumbering
from memfit.capture.reuse import in_place_form
from memfit.capture.stream import Stream
from memfit.capture.trace import Trace
from memfit.capture.traced import TracedCall, TracedStorage
from memfit.cost.observations import Observation
from memfit.graph import Boundary, Graph, Op, Role, Storage
from memfit.rebuild import rebuilt
from memfit.torch_private.tensors import tree_flatten


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A captured step.

    Attributes:
        graph: the graph to plan. Its seconds are 0 until `memfit.cost` measures them.
        binding: the calls that run it.
        observed: what each op was seen to do when it was run by itself, None if it was not run; empty until
            `memfit.capture.finish` has run.
        guards: hold later steps against what a whole step took from Python; None for a joint graph.
        checkpoints: how many regions of `torch.utils.checkpoint` the user's step has, which the graph has inline.
        looks: the truth values of the batch that the step has asked for; it holds only for batches that answer alike.
        stream: what the step dispatched, to be compared with eager; None for a joint graph.
        sources: for each op the nodes of the joint graph that it stands for; a whole step has none.
    """

    graph: Graph
    binding: Binding
    observed: tuple[Observation | None, ...] = ()
    guards: Guards | None = None
    checkpoints: int = 0
    looks: tuple[Look, ...] = ()
    stream: Stream | None = None
    sources: tuple[tuple[Any, ...], ...] = ()

    def __repr__(self) -> str:
        return f"Captured({self.graph!r}, {self.binding!r})"

    def answers(self, batch: Any) -> bool:
        """Return whether `batch` answers all questions that the step has asked as the captured batch did.

        The guards must have been compared before: they know which tensors have taken the places of others.
        """
        if not self.looks:
            return True
        assert self.guards is not None
        leaves = tree_flatten(batch)[0]
        return all(look.ask(leaves, self.guards.tensors.at_hand) == look.answer for look in self.looks)

    def with_ops(self, made: Iterable[tuple[Op, Call]], left: Sequence[int] | None = None) -> Captured:
        """Return the step of other ops, in this order, none of which was observed.

        Args:
            made: the ops, each with its call, with the numbers of this graph's storages.
            left: ids of the storages that are left, in their new order; None if all are.
        """
        pairs, binding = list(made), self.binding
        left = range(len(self.graph.storages)) if left is None else left
        numbers = Renumbering({old: new for new, old in enumerate(left)})
        return replace(
            self,
            graph=rebuilt(self.graph, [op for op, _ in pairs], left),
            binding=numbers.binding(binding.device, [call for _, call in pairs], binding.residents, binding.outputs),
            observed=(),
        )

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """The generators that the step hands to its ops."""
        given = (call.kwargs.get("generator") for call in self.binding.calls)
        return tuple(dict.fromkeys(generator for generator in given if isinstance(generator, torch.Generator)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedBoundary:
    """The end of the forward half: before call number `position` of the trace, `departures` are given to the user."""

    position: int
    departures: Sequence[Value]


def build(
    trace: Trace, *, name: str, outputs: Mapping[str, Value], boundary: TracedBoundary | None = None, source: str = ""
) -> Captured:
    """Return the graph and the binding of a complete trace.

    Args:
        trace: all calls of the step.
        name: of the graph.
        outputs: values required at the end, by name.
        boundary: between the halves of a joint graph; None for a whole step.
        source: says in the graph where it is from.
    """
    kept = {value.storage for value in outputs.values()}
    kept |= {storage for storage, traced in enumerate(trace.storages) if traced.resident} | set(trace.arrivals)
    fused = fuse_in_place_writes(trace.calls, kept)
    boundary_position = boundary.position if boundary else 0
    boundary_position -= sum(call is None for call in fused[:boundary_position])
    calls, position = _live_calls([call for call in fused if call is not None], kept, boundary_position)
    calls, storages, states_before = _with_generator_states(calls, list(trace.storages), position)
    renumbered = _renumbering(trace, storages, calls)
    op_names = _op_names(calls)
    fixed = {storage for storage, traced in enumerate(storages) if traced.resident} | set(trace.arrivals)
    forms = [_in_place_forms(call, storages, fixed, trace.device.type) for call in calls]
    ops = tuple(_op(index, call, op_names[index], renumbered, forms[index]) for index, call in enumerate(calls))
    boundaries: tuple[Boundary, ...] = ()
    if boundary is not None:
        departures = tuple(dict.fromkeys(renumbered[value.storage] for value in boundary.departures))
        arrivals = tuple(renumbered[storage] for storage in trace.arrivals)
        boundaries = (Boundary(position=position + states_before, arrivals=arrivals, departures=departures),)
    required = {renumbered[value.storage] for value in outputs.values()}
    graph = Graph.build(
        name=_text(name),
        storages=_storages(trace, storages, renumbered, ops, required),
        ops=ops,
        boundaries=boundaries,
        device=str(trace.device),
        source=source,
    )
    return Captured(
        graph=graph,
        binding=Renumbering(renumbered).binding(trace.device, map(_call, calls, forms), trace.residents, outputs),
        sources=tuple(call.sources for call in calls),
    )


def _live_calls(calls: Sequence[TracedCall], kept: set[int], position: int) -> tuple[list[TracedCall], int]:
    """Return the calls whose results are needed, and how many of them stand before `position`.

    Random calls stay, because the generator's stream must not change, and checks, for the errors that they raise.
    """
    needed = set(kept)
    live: list[TracedCall] = []
    live_before_position = 0
    for index in reversed(range(len(calls))):
        call = calls[index]
        mutates_needed = any(storage in needed for storage in call.mutates)
        if mutates_needed or call.random or call.is_check or any(storage in needed for storage in call.writes):
            needed.update(call.reads, call.mutates, call.writes)
            live.append(call)
            live_before_position += index < position
    live.reverse()
    return live, live_before_position


def _with_generator_states(
    calls: Sequence[TracedCall], storages: list[TracedStorage], position: int
) -> tuple[list[TracedCall], list[TracedStorage], int]:
    """Insert before each random call one that saves its generator's state, which a rematerialization replays.

    Returns:
        the calls, the storages, and how many calls were inserted before `position`.
    """
    extended: list[TracedCall] = []
    inserted_before = 0
    for index, call in enumerate(calls):
        if call.random is None or not call.recomputable:
            extended.append(call)
            continue
        storage = len(storages)
        size = STATE_BYTES[torch.device(call.random).type]
        storages.append(TracedStorage(name="generator_state", bytes=size, role=Role.ACTIVATION))
        value = Value(storage=storage, dtype=torch.uint8, shape=(size,), stride=(1,))
        extended.append(
            TracedCall.of(
                "generator_state",
                SaveGeneratorState(device=call.random),
                (),
                made=[value],
                phase=call.phase,
                module=call.module,
                random=call.random,
                recomputable=False,
            )
        )
        extended.append(replace(call, reads=(*call.reads, storage), generator_state=storage))
        inserted_before += index < position
    return extended, storages, inserted_before


def _renumbering(trace: Trace, storages: Sequence[TracedStorage], calls: Sequence[TracedCall]) -> dict[int, int]:
    """Return the new number of each storage: residents first, then arrivals, then written storages in their order."""
    order = [number for number, storage in enumerate(storages) if storage.resident]
    order += trace.arrivals
    for call in calls:
        order += call.writes
    return {old: new for new, old in enumerate(dict.fromkeys(order))}


def _op_names(calls: Sequence[TracedCall]) -> list[str]:
    """Return names such as `convolution_3`: the operator's name, and the count of earlier ops of that name."""
    seen: dict[str, int] = {}
    names: list[str] = []
    for call in calls:
        number = seen[call.name] = seen.get(call.name, -1) + 1
        names.append(f"{call.name}_{number}")
    return names


def _in_place_forms(
    call: TracedCall, storages: Sequence[TracedStorage], fixed: set[int], device_type: str
) -> dict[int, InPlaceForm]:
    """Return the forms of the call that write over a storage that it reads, by storage.

    None writes over a storage in `fixed`: a resident, or an arrival, which autograd may still hold.
    """
    if len(call.writes) != 1 or call.mutates:
        return {}
    (written,) = call.writes
    forms = {
        read: in_place_form(call.target, call.args, call.kwargs, call.results, read, device_type)
        for read in call.reads
        if read not in fixed and storages[read].bytes == storages[written].bytes > 0
    }
    return {read: form for read, form in forms.items() if form is not None}


def _op(
    index: int, call: TracedCall, name: str, renumbered: dict[int, int], in_place_forms: Mapping[int, InPlaceForm]
) -> Op:
    promised = [read for read, form in in_place_forms.items() if form.promised]
    return Op(
        id=index,
        name=name,
        target=getattr(call.target, "__name__", "") if not hasattr(call.target, "_schema") else str(call.target),
        phase=call.phase,
        module=_text(call.module),
        reads=tuple(renumbered[s] for s in call.reads),
        writes=tuple(renumbered[s] for s in call.writes),
        mutates=tuple(renumbered[s] for s in call.mutates),
        workspace_bytes=call.workspace_bytes,
        seconds=0.0,
        recomputable=call.recomputable,
        random=call.random,
        group=call.group,
        reuses=tuple((renumbered[read], renumbered[call.writes[0]]) for read in promised),
    )


def _text(name: str) -> str:
    """Return a name as UTF-8 can hold it: Python's strings may have halves of surrogate pairs."""
    return name.encode(errors="replace").decode()


def _storages(
    trace: Trace, storages: Sequence[TracedStorage], renumbered: dict[int, int], ops: Sequence[Op], required: set[int]
) -> list[Storage]:
    old_of = {new: old for old, new in renumbered.items()}
    names = {old: storage.name for old, storage in enumerate(storages) if storage.resident or old in trace.arrivals}
    for op in ops:
        for place, new in enumerate(op.writes):
            names[old_of[new]] = f"{op.name}.{place}" if len(op.writes) > 1 else op.name
    return [
        Storage(
            id=new,
            name=_text(names[old_of[new]]),
            bytes=storages[old_of[new]].bytes,
            role=storages[old_of[new]].role,
            resident=storages[old_of[new]].resident,
            required_at_end=new in required,
        )
        for new in range(len(renumbered))
    ]


def _call(call: TracedCall, in_place_forms: Mapping[int, InPlaceForm]) -> Call:
    return Call(
        op=0,
        target=call.target,
        args=call.args,
        kwargs=call.kwargs,
        results=call.results,
        generator_state=call.generator_state,
        in_place_forms=in_place_forms,
    )
