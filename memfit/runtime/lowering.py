"""Lowering: a schedule becomes the source of a Python function whose locals are the storages.

A storage is a local variable for exactly as long as the schedule says: `Compute` binds it, `Drop` deletes it, so what
the allocator holds is what the simulator counted. The source can be read (`print(step.program.source)`), and a
traceback through it shows the line of the instruction.

    s7 = convolution(s0, s3, None, [1, 1], ...)   # compute 2 convolution_1 conv1
    del s0                                        # drop 0
"""

from __future__ import annotations

import keyword
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from memfit.binding import Binding, Call, Value
from memfit.capture.generators import SaveGeneratorState, replay
from memfit.cost.views import lazy_view, reinterpret
from memfit.graph import Graph
from memfit.runtime.transfers import offload
from memfit.schedule import Boundary, Compute, Drop, DropHost, Instruction, Offload, Prefetch, Schedule, Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredHalf:
    """The lines between two boundaries: `takes` are the storages it needs from outside, `gives` those live at its end.

    `outputs` are expressions for the values that it hands to the user.
    """

    lines: tuple[str, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """Source lines of each part of a schedule, and the objects that they name."""

    halves: tuple[LoweredHalf, ...]
    namespace: dict[str, Any]


def lower(graph: Graph, binding: Binding, schedule: Schedule, outputs: Sequence[Sequence[Value]]) -> Lowered:
    """Return the code of a checked schedule: one part, or two where the graph has a boundary.

    `outputs` are, for each part, the values that it hands to the user.
    """
    return _Lowering(graph, binding, schedule, outputs).run()


class _Part(NamedTuple):
    lines: list[str]
    outputs: tuple[str, ...]
    live: set[int]


@dataclass
class _Lowering:
    graph: Graph
    binding: Binding
    schedule: Schedule
    outputs: Sequence[Sequence[Value]]
    namespace: dict[str, Any] = field(default_factory=dict[str, Any])
    bases: dict[int, Value] = field(default_factory=dict[int, Value])
    live: set[int] = field(default_factory=set[int])
    arriving: set[int] = field(default_factory=set[int])  # prefetched, not read yet
    computed: set[int] = field(default_factory=set[int])
    lines: list[str] = field(default_factory=list[str])
    _names: dict[int, str] = field(default_factory=dict[int, str])

    def run(self) -> Lowered:
        for resident in self.binding.residents:
            self.bases.setdefault(resident.value.storage, resident.value)
        for call in self.binding.calls:
            for value in call.results:
                if value is not None:
                    self.bases.setdefault(value.storage, value)
        times = Counter(i.op for i in self.schedule if isinstance(i, Compute))
        self.replayed = {self.binding.calls[op].generator_state for op, count in times.items() if count > 1}
        self.namespace |= {"reinterpret": reinterpret, "replay": replay, "offload": offload}
        parts: list[_Part] = []
        for instruction in self.schedule:
            if isinstance(instruction, Boundary):
                self._await(set(self.graph.boundaries[instruction.boundary].departures), "the user reads it")
                parts.append(self._finished_part(len(parts)))
                self.live |= set(self.graph.boundaries[instruction.boundary].arrivals)
            else:
                self._lower(instruction)
        self._await(set(self.arriving), "the step ends")
        parts.append(self._finished_part(len(parts)))
        return Lowered(halves=tuple(self._halves(parts)), namespace=self.namespace)

    def _finished_part(self, number: int) -> _Part:
        outputs = tuple(self._render(value) for value in self.outputs[number])
        part = _Part(self.lines, outputs, set(self.live))
        self.lines = []
        return part

    def _halves(self, parts: list[_Part]) -> Iterable[LoweredHalf]:
        available = {storage.id for storage in self.graph.storages if storage.resident}
        for number, part in enumerate(parts):
            takes = available & _storages_named([*part.lines, *part.outputs])
            yield LoweredHalf(
                lines=tuple(part.lines),
                takes=tuple(sorted(takes)),
                gives=tuple(sorted(part.live)),
                outputs=part.outputs,
            )
            if number < len(self.graph.boundaries):
                available |= part.live | set(self.graph.boundaries[number].arrivals)

    def _lower(self, instruction: Instruction) -> None:
        match instruction:
            case Compute():
                self._lower_compute(instruction)
            case Drop(storage=storage):
                self._emit(f"del s{storage}", f"drop {storage}")
                self.live.discard(storage)
                self.arriving.discard(storage)
            case Offload(storage=storage):
                self._emit(f"h{storage} = offload(s{storage})", f"offload {storage}")
            case Wait(storage=storage):
                self._emit(f"h{storage}.wait()", f"wait {storage}")
            case Prefetch(storage=storage):
                self._emit(f"s{storage} = h{storage}.prefetch()", f"prefetch {storage}")
                self.live.add(storage)
                self.arriving.add(storage)
            case DropHost(storage=storage):
                self._emit(f"del h{storage}", f"drop_host {storage}")
            case Boundary():
                raise AssertionError("a boundary divides the lines, it is not one of them")

    def _lower_compute(self, instruction: Compute) -> None:
        op, call = self.graph.ops[instruction.op], self.binding.calls[instruction.op]
        again = op.id in self.computed
        self.computed.add(op.id)
        self._await({*op.reads, *op.mutates}, f"op {op.id} reads it")
        comment = f"compute {op.id} {op.name} {op.module}".rstrip()
        if isinstance(call.target, SaveGeneratorState) and op.writes[0] not in self.replayed:
            self._emit(f"s{op.writes[0]} = None", f"{comment}: nothing replays it")
        else:
            target, args = self._target(instruction, call, again)
            self._emit_call(call, f"{target}({', '.join(args)})", comment)
        if instruction.in_place_of is not None:
            self._emit(f"del s{instruction.in_place_of}", "taken over")
            self.live.discard(instruction.in_place_of)
        self.live |= set(op.writes)

    def _await(self, storages: set[int], why: str) -> None:
        """Have compute wait for the copies back of these storages that are under way."""
        for storage in sorted(self.arriving & storages):
            self._emit(f"h{storage}.arrived()", why)
        self.arriving -= storages

    def _target(self, instruction: Compute, call: Call, again: bool) -> tuple[str, list[str]]:
        target: Any = call.target
        args = [self._render(arg) for arg in call.args]
        args += [f"{key}={self._render(value)}" for key, value in call.kwargs.items()]
        if instruction.in_place_of is not None:
            over = instruction.in_place_of
            assert over in call.overwrites, f"{target} has no form that writes over storage {over}"
            form = call.overwrites[over]
            target = form.target
            args += [f"{key}={self._render(value)}" for key, value in form.extra.items()]
        name = self._name(target)
        if again and call.generator_state is not None:
            device = self.graph.ops[call.op].random
            return "replay", [f"s{call.generator_state}", repr(device), name, *args]
        return name, args

    def _emit_call(self, call: Call, code: str, comment: str) -> None:
        """Bind each new storage to the first result that shows it; a second copy of a live one is let go at once."""
        names: list[str] = []
        bound: set[int] = set()
        for value in call.results:
            new = value is not None and value.storage not in self.live and value.storage not in bound
            names.append(f"s{value.storage}" if new and value is not None else "_")
            if new and value is not None:
                bound.add(value.storage)
                self.bases[value.storage] = value
        if not bound:
            self._emit(code, comment)
            return
        if _returns_one_tensor(call):
            self._emit(f"{names[0]} = {code}", comment)
        else:
            trailing = "," if len(names) == 1 else ""
            self._emit(f"{', '.join(names)}{trailing} = {code}", comment)
        if "_" in names:
            self._emit("del _", "not wanted again")

    def _emit(self, code: str, comment: str) -> None:
        self.lines.append(f"{code}  # {comment}")

    def _render(self, tree: Any) -> str:
        """Python source of an argument: views are made where they are used, constants that print are printed."""
        if isinstance(tree, Value):
            return self._render_value(tree)
        if isinstance(tree, (list, tuple)):
            inner = ", ".join(self._render(item) for item in tree)
            return f"[{inner}]" if isinstance(tree, list) else f"({inner}{',' if len(tree) == 1 else ''})"
        if tree is None or isinstance(tree, (bool, int, str)):
            return repr(tree)
        if isinstance(tree, float) and math.isfinite(tree):
            return repr(tree)
        return self._name(tree)

    def _render_value(self, value: Value) -> str:
        base, name = self.bases[value.storage], f"s{value.storage}"
        if value == base:
            return name
        shape, stride = tuple(value.shape), tuple(value.stride)
        conjugated, negated = value.conjugated, value.negated
        if value.dtype == base.dtype:
            code = f"{self._name(torch.as_strided)}({name}, {shape}, {stride}, {value.offset})"
            conjugated, negated = conjugated != base.conjugated, negated != base.negated
        else:  # looks at the storage, whatever the base makes of it
            code = f"reinterpret({name}, {self._name(value.dtype)}, {shape}, {stride}, {value.offset})"
        if conjugated or negated:
            code = f"{self._name(lazy_view)}({code}, conjugated={conjugated}, negated={negated})"
        return code

    def _name(self, thing: Any) -> str:
        """A name for an object in the function's namespace, the same one each time."""
        if id(thing) not in self._names:
            label = str(getattr(thing, "__name__", "constant")).replace(".", "_").lower()
            label = label if label.isidentifier() and not keyword.iskeyword(label) else "constant"
            name = f"{label}_{len(self._names)}"
            self._names[id(thing)] = name
            self.namespace[name] = thing
        return self._names[id(thing)]


def _returns_one_tensor(call: Call) -> bool:
    """Whether the target returns a bare tensor; otherwise it returns a sequence of len(results)."""
    schema = getattr(call.target, "_schema", None)
    if schema is None:
        return len(call.results) == 1
    return len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor"


def _storages_named(lines: Iterable[str]) -> set[int]:
    """The storages that code refers to: identifiers s<number> outside of comments."""
    found: set[int] = set()
    for line in lines:
        code = line.split("  # ", 1)[0]
        for word in "".join(c if c.isalnum() or c == "_" else " " for c in code).split():
            if word[0] == "s" and word[1:].isdigit():
                found.add(int(word[1:]))
    return found
