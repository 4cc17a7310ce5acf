"""From a Trace to a Graph and its Binding: dead calls go, generator states come, everything gets its name and
number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.binding import Binding, Call, Overwrite, Resident, Value
from memfit.capture.fuse import fuse_in_place_writes
from memfit.capture.generators import STATE_BYTES, SaveGeneratorState
from memfit.capture.reuse import in_place_form
from memfit.capture.torch_private import tree_map
from memfit.capture.trace import Trace, TracedCall, TracedStorage
from memfit.errors import UnsupportedStepError
from memfit.graph import Boundary, Graph, Op, Role, Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A captured step: the graph to plan, and the binding that runs it. Seconds are 0 until `memfit.cost` fills
    them in.
    """

    graph: Graph
    binding: Binding


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedBoundary:
    """Where the forward half ends: before call number `position` of the trace; these values then go to the user."""

    position: int
    departures: Sequence[Value]


def build(
    trace: Trace, *, name: str, outputs: Mapping[str, Value], boundary: TracedBoundary | None = None, source: str = ""
) -> Captured:
    """Return the graph and the binding of a finished trace; `outputs` are required at its end.

    Raises:
        UnsupportedStepError: the step runs collective operations.
    """
    kept = {value.storage for value in outputs.values()}
    kept |= {storage for storage, traced in enumerate(trace.storages) if traced.resident} | set(trace.arrivals)
    fused = fuse_in_place_writes(trace.calls, kept)
    boundary_position = boundary.position if boundary else 0
    boundary_position -= sum(call is None for call in fused[:boundary_position])
    calls, position = _live_calls([call for call in fused if call is not None], kept, boundary_position)
    for call in calls:
        if "c10d" in getattr(call.target, "namespace", ""):
            raise UnsupportedStepError(
                f"{call.module or 'the step'} runs the collective {call.target}; memfit does not plan across ranks yet"
            )
    calls, storages, states_before = _with_generator_states(calls, list(trace.storages), position)
    renumbered = _renumbering(trace, storages, calls)
    op_names = _op_names(calls)
    fixed = {storage for storage, traced in enumerate(storages) if traced.resident} | set(trace.arrivals)
    overwrites = [_overwrites(call, storages, fixed, trace.device.type) for call in calls]
    ops = tuple(_op(index, call, op_names[index], renumbered, overwrites[index]) for index, call in enumerate(calls))
    boundaries = ()
    if boundary is not None:
        departures = dict.fromkeys(renumbered[v.storage] for v in boundary.departures)
        arrivals = tuple(renumbered[storage] for storage in trace.arrivals)
        boundaries = (
            Boundary(
                position=position + states_before,
                arrivals=arrivals,
                departures=tuple(s for s in departures),
            ),
        )
    required = {renumbered[value.storage] for value in outputs.values()}
    graph = Graph.build(
        name=name,
        storages=_storages(trace, storages, renumbered, ops, required),
        ops=ops,
        boundaries=boundaries,
        device=str(trace.device),
        source=source,
    )
    return Captured(graph=graph, binding=_binding(trace, calls, overwrites, renumbered, outputs))


def _live_calls(calls: Sequence[TracedCall], kept: set[int], position: int) -> tuple[list[TracedCall], int]:
    """Drop the calls whose results nothing needs; random calls stay, for the generator's stream must not change."""
    needed = set(kept)
    live: list[TracedCall] = []
    live_before_position = 0
    for index in reversed(range(len(calls))):
        call = calls[index]
        mutates_needed = any(storage in needed for storage in call.mutates)
        if mutates_needed or call.random or any(storage in needed for storage in call.writes):
            needed.update(call.reads, call.mutates, call.writes)
            live.append(call)
            live_before_position += index < position
    live.reverse()
    return live, live_before_position


def _with_generator_states(
    calls: Sequence[TracedCall], storages: list[TracedStorage], position: int
) -> tuple[list[TracedCall], list[TracedStorage], int]:
    """Before each random call, insert one that saves its generator's state, which a rematerialization replays."""
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
            TracedCall(
                name="generator_state",
                target=SaveGeneratorState(device=call.random),
                args=(),
                kwargs={},
                results=(value,),
                reads=(),
                writes=(storage,),
                mutates=(),
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
    """Old storage number -> new: residents first, then arrivals and written storages in the order they appear."""
    order = [number for number, storage in enumerate(storages) if storage.resident]
    order += trace.arrivals
    for call in calls:
        order += call.writes
    return {old: new for new, old in enumerate(dict.fromkeys(order))}


def _op_names(calls: Sequence[TracedCall]) -> list[str]:
    """`convolution_3`: the operator's name and how many came before it."""
    seen: dict[str, int] = {}
    names: list[str] = []
    for call in calls:
        number = seen[call.name] = seen.get(call.name, -1) + 1
        names.append(f"{call.name}_{number}")
    return names


def _overwrites(
    call: TracedCall, storages: Sequence[TracedStorage], fixed: set[int], device_type: str
) -> dict[int, Overwrite]:
    """The forms of the call that write over a storage which it reads; never over what is `fixed`: a resident, or what
    autograd hands over at a boundary and may hold on to.
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


def _op(index: int, call: TracedCall, name: str, renumbered: dict[int, int], overwrites: Mapping[int, Overwrite]) -> Op:
    promised = [read for read, form in overwrites.items() if form.promised]
    return Op(
        id=index,
        name=name,
        target=getattr(call.target, "__name__", "") if not hasattr(call.target, "_schema") else str(call.target),
        phase=call.phase,
        module=call.module,
        reads=tuple(renumbered[s] for s in call.reads),
        writes=tuple(renumbered[s] for s in call.writes),
        mutates=tuple(renumbered[s] for s in call.mutates),
        workspace_bytes=call.workspace_bytes,
        seconds=0.0,
        recomputable=call.recomputable,
        random=call.random,
        reuses=tuple((renumbered[read], renumbered[call.writes[0]]) for read in promised),
    )


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
            name=names[old_of[new]],
            bytes=storages[old_of[new]].bytes,
            role=storages[old_of[new]].role,
            resident=storages[old_of[new]].resident,
            required_at_end=new in required,
        )
        for new in range(len(renumbered))
    ]


def _binding(
    trace: Trace,
    calls: Sequence[TracedCall],
    overwrites: Sequence[Mapping[int, Overwrite]],
    renumbered: dict[int, int],
    outputs: Mapping[str, Value],
) -> Binding:
    def renumber(tree: Any) -> Any:
        return tree_map(
            lambda leaf: replace(leaf, storage=renumbered[leaf.storage]) if isinstance(leaf, Value) else leaf, tree
        )

    return Binding(
        device=trace.device,
        calls=tuple(
            Call(
                op=index,
                target=call.target,
                args=renumber(call.args),
                kwargs=renumber(call.kwargs),
                results=tuple(renumber(value) if value is not None else None for value in call.results),
                generator_state=None if call.generator_state is None else renumbered[call.generator_state],
                overwrites={
                    renumbered[read]: replace(form, extra=renumber(form.extra))
                    for read, form in overwrites[index].items()
                },
            )
            for index, call in enumerate(calls)
        ),
        residents=tuple(
            Resident(
                value=renumber(resident.value), origin=resident.origin, key=resident.key, constant=resident.constant
            )
            for resident in trace.residents
        ),
        outputs={name: renumber(value) for name, value in outputs.items()},
    )
