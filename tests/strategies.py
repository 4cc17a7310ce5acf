"""Random graphs, and random schedules for them: legal by construction, or broken by a few edits.

    >>> from hypothesis import given, strategies as st
    >>> @given(st.data())
    ... def test_something(data):
    ...     graph = data.draw(graphs())
    ...     schedule = data.draw(legal_schedules(graph))

What a legal schedule may hold is decided by `reference.Reference`, never by memfit.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import msgspec
from devices import LINKED
from hypothesis import strategies as st
from reference import IllegalError, Reference

from memfit.graph import Boundary, Graph, Op, Phase, Role, Storage
from memfit.schedule import Compute, CrossBoundary, Drop, DropHost, Instruction, Offload, Prefetch, Schedule, Wait

_SIZES = (0, 1, 64, 100, 100, 256)  # few, so that equal ones meet and in-place pairs exist
_MOVES = (Drop, Offload, Wait, Prefetch, DropHost)


# Hypothesis draws the number of steps and a seed: drawing every choice by itself leans to tiny and dull cases.
_picks = st.integers(0, (1 << 32) - 1).map(random.Random)


def _chance(pick: random.Random, probability: float) -> bool:
    return pick.random() < probability


@st.composite
def graphs(
    draw: st.DrawFn,
    *,
    most_ops: int = 8,
    boundaries: bool = True,
    mutations: bool = True,
    collectives: bool = False,
) -> Graph:
    """Draw a verified graph of 1 to `most_ops` ops, with random ops, reuses, workspace, and what is asked for."""
    op_count = draw(st.integers(1, most_ops))
    pick = draw(_picks)
    storages = [_storage(pick, i, Role.INPUT, resident=True) for i in range(pick.randint(1, 3))]
    ops: list[Op] = []
    crossings: list[Boundary] = []
    for op_id in range(op_count):
        if boundaries and _chance(pick, 0.15):
            crossings.append(_boundary(pick, op_id, storages))
        op = _op(pick, op_id, storages, mutations=mutations)
        ops.append(msgspec.structs.replace(op, group="ranks") if collectives and _chance(pick, 0.3) else op)
    if boundaries and _chance(pick, 0.15):
        crossings.append(_boundary(pick, len(ops), storages))
    return Graph.build(name="drawn", storages=storages, ops=ops, boundaries=crossings)


def _storage(pick: random.Random, number: int, role: Role, *, resident: bool = False) -> Storage:
    needed = not resident and _chance(pick, 0.2)
    return Storage(
        id=number, name=f"s{number}", bytes=pick.choice(_SIZES), role=role, resident=resident, required_at_end=needed
    )


def _boundary(pick: random.Random, position: int, storages: list[Storage]) -> Boundary:
    departures = pick.sample([s.id for s in storages], pick.randint(0, min(2, len(storages))))
    arrivals = range(len(storages), len(storages) + pick.randint(0, 2))
    storages.extend([_storage(pick, number, Role.GRADIENT) for number in arrivals])
    return Boundary(position=position, arrivals=tuple(arrivals), departures=tuple(departures))


def _op(pick: random.Random, op_id: int, storages: list[Storage], *, mutations: bool) -> Op:
    present = [s.id for s in storages]
    reads = pick.sample(present, pick.randint(0, min(3, len(present))))
    mutates = pick.sample(present, 1) if mutations and _chance(pick, 0.25) else []
    writes = [_storage(pick, len(storages) + k, Role.ACTIVATION) for k in range(pick.randint(0 if mutates else 1, 2))]
    storages.extend(writes)
    return Op(
        id=op_id,
        name=f"op{op_id}",
        phase=Phase.FORWARD,
        reads=tuple(reads),
        writes=tuple(storage.id for storage in writes),
        mutates=tuple(mutates),
        seconds=pick.choice((0.0, 0.125, 0.5)),
        workspace_bytes=pick.choice((0, 0, 30, None)),
        recomputable=_chance(pick, 0.85),
        random="cpu" if _chance(pick, 0.2) else None,
        reuses=tuple((r, w.id) for r in reads for w in writes if storages[r].bytes == w.bytes and _chance(pick, 0.7)),
    )


@st.composite
def legal_schedules(draw: st.DrawFn, graph: Graph) -> Schedule:
    """Draw a legal schedule: the ops in some legal order, with drops, copies and rematerialization in between."""
    return _Walk(graph, draw(_picks), draw(st.integers(0, 6))).schedule()


class _Walk:
    """Carries a graph out step by step; what it throws away it can bring back, or nobody needs."""

    def __init__(self, graph: Graph, pick: random.Random, most_detours: int) -> None:
        self.graph = graph
        self.pick = pick
        self.most_detours = most_detours
        self.reference = Reference(graph, LINKED)
        self.instructions: list[Instruction] = []
        self.pure = _pure_storages(graph)

    def schedule(self) -> Schedule:
        for op in self.graph.ops:
            self.cross_boundaries(op.id)
            for _ in range(self.pick.randint(0, self.most_detours)):
                self.wander()
            if op.id not in self.reference.computed:
                self.recover_all({*op.reads, *op.mutates})
                self.settle(op.mutates)
                taken = [read for read, _ in op.reuses if self.expendable(read, after=op.id)]
                if not (taken and self.attempt(Compute(op=op.id, in_place_of=self.pick.choice(taken)))):
                    self.must(Compute(op=op.id))
        self.cross_boundaries(len(self.graph.ops))
        self.recover_all({storage.id for storage in self.graph.storages if storage.required_at_end})
        self.reference.finish()
        return Schedule.of(self.instructions)

    def attempt(self, instruction: Instruction) -> bool:
        trial = copy.copy(self.reference)
        for name in ("versions", "host", "stale", "offloading", "prefetching", "users", "computed", "clocks", "rows"):
            setattr(trial, name, copy.copy(getattr(trial, name)))
        try:
            trial.run(instruction)
        except IllegalError:
            return False
        self.reference = trial
        self.instructions.append(instruction)
        return True

    def must(self, instruction: Instruction) -> None:
        assert self.attempt(instruction), f"{instruction} is illegal after {self.instructions} on {self.graph}"

    def wander(self) -> None:
        """Try one instruction that takes nothing away for good."""
        if _chance(self.pick, 0.2):
            self.attempt(Compute(op=self.pick.randrange(len(self.graph.ops))))
            return
        reference, here = self.reference, set(self.reference.versions) - _residents(self.graph)
        copied = reference.host.keys() - reference.stale
        choices = {
            Drop: [s for s in here if self.expendable(s)],
            Offload: here - copied,  # or the copy of a later version might be lost
            Wait: reference.offloading,
            Prefetch: copied - here,
            DropHost: [s for s in reference.host if self.whole(s) or s not in copied or self.expendable(s, host=False)],
        }
        kind = self.pick.choice([kind for kind in _MOVES if choices[kind]] or [Drop])
        if choices[kind]:
            self.attempt(kind(storage=self.pick.choice(sorted(choices[kind]))))

    def whole(self, s: int) -> bool:
        """Whether the device holds the version that the latest mutation left."""
        mutations = sum(s in self.graph.ops[op].mutates for op in self.reference.computed)
        return self.reference.versions.get(s) == mutations

    def expendable(self, s: int, *, host: bool = True, after: int | None = None) -> bool:
        """Whether the device's copy of `s` may go: it can be recomputed, the host has it, or nobody needs it."""
        copied = s in self.reference.host and s not in self.reference.stale and s not in self.reference.offloading
        later = [op for op in self.graph.ops if op.id not in self.reference.computed and op.id != after]
        crossings = self.graph.boundaries[self.reference.crossed :]
        needed = any(s in (*op.reads, *op.mutates) for op in later) or any(s in b.departures for b in crossings)
        dead = not needed and not self.graph.storages[s].required_at_end
        return s in self.pure or dead or (host and copied)

    def settle(self, storages: tuple[int, ...]) -> None:
        for s in storages:
            if s in self.reference.offloading:
                self.must(Wait(storage=s))

    def cross_boundaries(self, position: int) -> None:
        for number in range(self.reference.crossed, len(self.graph.boundaries)):
            boundary = self.graph.boundaries[number]
            if boundary.position == position:
                self.recover_all(set(boundary.departures))
                self.must(CrossBoundary(boundary=number, bytes_outside=self.pick.choice((0, 0, 500))))

    def recover_all(self, storages: set[int]) -> None:
        for s in sorted(storages):
            mutations = sum(s in self.graph.ops[op].mutates for op in self.reference.computed)
            self.recover(s, mutations)

    def recover(self, s: int, version: int) -> None:
        """Bring `s` to the device at `version`."""
        if self.reference.versions.get(s) == version:
            return
        if s in self.reference.versions:  # came back at version 0 when its writer was computed for another write
            self.settle((s,))
            self.must(Drop(storage=s))
        if s in self.reference.host and _chance(self.pick, 0.7) and self.attempt(Prefetch(storage=s)):
            return
        if s in self.pure:
            writer = self.graph.ops[self.graph.writer_of[s]]
            for read in writer.reads:
                self.recover(read, 0)
            self.must(Compute(op=writer.id))
        else:
            self.must(Prefetch(storage=s))


def _residents(graph: Graph) -> set[int]:
    return {storage.id for storage in graph.storages if storage.resident}


def _pure_storages(graph: Graph) -> set[int]:
    """Return the storages that can be recomputed at any time: nothing on their way is ever mutated."""
    steady = {s.id for s in graph.storages if graph.last_version[s.id] == 0}
    pure = _residents(graph) & steady
    for op in graph.ops:
        if op.recomputable and not op.mutates and set(op.reads) <= pure:
            pure |= set(op.writes) & steady
    return pure


@st.composite
def broken_schedules(draw: st.DrawFn, graph: Graph) -> Schedule:
    """Draw a legal schedule with one to three edits: most are illegal, and each rule is broken now and then."""
    instructions = list(draw(legal_schedules(graph)))
    pick = draw(_picks)
    for _ in range(pick.randint(1, 3)):
        edit: Callable[[list[Instruction], random.Random], None] = pick.choice((_remove, _repeat, _swap, _move))
        if instructions and _chance(pick, 0.6):
            edit(instructions, pick)
        else:
            instructions.insert(pick.randint(0, len(instructions)), _any_instruction(graph, pick))
    return Schedule.of(instructions)


def _remove(instructions: list[Instruction], pick: random.Random) -> None:
    del instructions[pick.randrange(len(instructions))]


def _repeat(instructions: list[Instruction], pick: random.Random) -> None:
    instructions.insert(pick.randint(0, len(instructions)), pick.choice(instructions))


def _swap(instructions: list[Instruction], pick: random.Random) -> None:
    a = pick.randrange(len(instructions))
    b = max(0, a - 1)
    instructions[a], instructions[b] = instructions[b], instructions[a]


def _move(instructions: list[Instruction], pick: random.Random) -> None:
    instructions.insert(pick.randint(0, len(instructions) - 1), instructions.pop(pick.randrange(len(instructions))))


def _any_instruction(graph: Graph, pick: random.Random) -> Instruction:
    kind = pick.choice((Compute, CrossBoundary, *_MOVES))
    if kind is Compute:
        taken = pick.choice((None, pick.randint(0, len(graph.storages))))
        return Compute(op=pick.randint(0, len(graph.ops)), in_place_of=taken)
    if kind is CrossBoundary:
        return CrossBoundary(boundary=pick.randint(0, len(graph.boundaries)))
    return kind(storage=pick.randint(0, len(graph.storages)))
