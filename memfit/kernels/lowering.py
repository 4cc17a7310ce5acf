"""Lowering: a schedule becomes the source of a Python function whose locals are the storages.

A storage is a local variable for exactly as long as it is live in the schedule: `Compute` binds it, `Drop` deletes it.
The allocator therefore holds the bytes that the simulator counted. A view is made where it is first used, and is a
variable until its storage is deleted. The source can be read (`print(step.source)`), and a traceback through it shows
the line of the instruction.

    s7 = convolution(s0, s3, None, [1, 1], ...)   # compute 2 convolution_1 conv1
    del s0                                        # drop 0
"""

from __future__ import annotations

import itertools
import keyword
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from memfit.binding import Binding, Call, Value
from memfit.capture.fuse import Fused, calls_of
from memfit.capture.generators import SaveGeneratorState, replay
from memfit.graph import Graph
from memfit.kernels.absent_gradients import Absent, copied, zeros
from memfit.kernels.direct_calls import DirectCalls
from memfit.memory.host.layout import NO_HOST_COPIES, HostLayout
from memfit.memory.place import lazy_view, reinterpret
from memfit.schedule import Code, Compute, CrossBoundary, Drop, DropHost, Instruction, Offload, Prefetch, Schedule, Wait


class Line(NamedTuple):
    """A line of a program.

    Attributes:
        code: a Python statement. All names in it are given here, none by the model.
        comment: may hold any text, such as the name of a module.
    """

    code: str
    comment: str

    def __str__(self) -> str:
        return f"{self.code}  # {ascii(self.comment)[1:-1]}"  # without line ends: a comment cannot become code


class LoweredHalf(NamedTuple):
    """The lines of one half of a schedule.

    Attributes:
        lines: Python statements with comments.
        outputs: expressions for the values that it returns to the user.
        live: the storages that are live at its end.
        takes: the storages that it needs from outside, in order.
        host_copies: the storages with a copy on the host at its end.
    """

    lines: list[Line]
    outputs: tuple[str, ...]
    live: set[int]
    takes: tuple[int, ...]
    host_copies: tuple[int, ...] = ()


def lower(
    graph: Graph,
    binding: Binding,
    schedule: Schedule,
    outputs: Sequence[Sequence[Value]],
    host: HostLayout = NO_HOST_COPIES,
    *,
    says_positions: bool = False,
    absent: Absent | None = None,
) -> tuple[list[LoweredHalf], dict[str, Any]]:
    """Return the code of a checked schedule: one half, or two if the graph has a forward/backward boundary.

    Args:
        graph: the captured step.
        binding: the calls and values of its ops.
        schedule: the instructions.
        outputs: for each half, the values that it returns to the user.
        host: the places of the host copies.
        says_positions: call `at` with each position of the schedule that allocates, before it does; and with -1 at the
            end.
        absent: the gradients that the backward half does without.

    Returns:
        the halves, and the objects that their lines name. If storages are offloaded, the first half needs a `lease`.
    """
    return _Lowering(graph, binding, schedule, outputs, host, says_positions=says_positions, absent=absent).run()


@dataclass
class _Lowering:
    graph: Graph
    binding: Binding
    schedule: Schedule
    outputs: Sequence[Sequence[Value]]
    host: HostLayout
    says_positions: bool = False
    absent: Absent | None = None
    namespace: dict[str, Any] = field(default_factory=dict[str, Any])
    bases: dict[int, Value] = field(default_factory=dict[int, Value])
    live: set[int] = field(default_factory=set[int])
    arriving: set[int] = field(default_factory=set[int])  # prefetched, not read yet
    on_host: set[int] = field(default_factory=set[int])
    computed: set[int] = field(default_factory=set[int])
    lines: list[Line] = field(default_factory=list[Line])
    views: dict[int, dict[Value, str]] = field(default_factory=dict[int, dict[Value, str]])  # of each live storage
    direct_calls: DirectCalls = field(default_factory=DirectCalls)
    _names: dict[int, str] = field(default_factory=dict[int, str])
    _views_made: int = 0

    def run(self) -> tuple[list[LoweredHalf], dict[str, Any]]:
        self.bases = self.binding.bases()
        times = Counter(i.op for i in self.schedule if isinstance(i, Compute))
        self.replayed = {self.binding.calls[op].generator_state for op, count in times.items() if count > 1}
        self.namespace |= {"reinterpret": reinterpret, "replay": replay}
        available = {storage.id for storage in self.graph.storages if storage.resident}
        halves: list[LoweredHalf] = []
        allocating = np.flatnonzero(np.isin(self.schedule.codes, (Code.COMPUTE, Code.PREFETCH))).tolist()
        self.following = dict(itertools.pairwise([-1, *allocating, -1])) if self.says_positions else {}
        self._say_next(-1)
        for position, instruction in enumerate(self.schedule):
            if isinstance(instruction, CrossBoundary):
                boundary = self.graph.boundaries[instruction.boundary]
                self._await(set(boundary.departures), "the user reads it")
                halves.append(self._finished_half(len(halves), available))
                self.live |= set(boundary.arrivals).difference(self.absent.tangents if self.absent else ())
                available |= self.live
            else:
                if self.absent is None or self._is_needed(instruction, self.absent):
                    self._lower(instruction, position)
                self._say_next(position)
        self._await(set(self.arriving), "the step ends")
        halves.append(self._finished_half(len(halves), available))
        return halves, self.namespace

    def _finished_half(self, number: int, available: set[int]) -> LoweredHalf:
        left_out = self.absent.left_out if self.absent is not None and number > 0 else ()
        outputs = tuple(
            "None" if getattr(value, "storage", None) in left_out else self._render(value)
            for value in self.outputs[number]
        )
        takes = tuple(sorted(available & _storages_named([*(line.code for line in self.lines), *outputs])))
        half = LoweredHalf(self.lines, outputs, set(self.live), takes, tuple(sorted(self.on_host)))
        self.lines = []
        self.views.clear()
        return half

    def _say_next(self, position: int) -> None:
        """Append the call that says which position allocates next, if this one does or is the start."""
        if position in self.following:
            said = f"at({self.following[position]})"
            if self.lines:
                self.lines[-1] = self.lines[-1]._replace(code=f"{self.lines[-1].code}; {said}")
            else:
                self._emit(said, "the first position that allocates")

    def _is_needed(self, instruction: Instruction, absent: Absent) -> bool:
        """Return whether an instruction has something to do without the absent gradients; make the zeros that it needs.

        A sum that passes its operand on is done here.
        """
        match instruction:
            case Compute(op=number, in_place_of=over) if number in absent.ops or number in absent.passed_on:
                operand = absent.passed_on.get(number)
                if operand is not None:
                    (result,) = self.binding.calls[number].results
                    assert result is not None
                    code = f"{self._name(copied)}({self._render(operand)}, {self._name(result)})"
                    self._emit(f"s{result.storage} = {code}", f"compute {number}: the other operand is absent")
                    self.bases[result.storage] = result
                    self.live.add(result.storage)
                if over in self.live:
                    self._delete(over, "its memory would be reused in place")
                return False
            case Compute(op=number):
                op = self.graph.ops[number]
                for storage in {*op.reads, *op.mutates} - self.live:
                    code = f"{self._name(zeros)}({self._name(self.bases[storage])}, {self._name(self.binding.device)})"
                    if not self.graph.storages[storage].resident:
                        self._emit(f"s{storage} = {code}", "an absent gradient")
                        self.live.add(storage)
                return True
            case Drop(storage=storage) | Offload(storage=storage):
                return storage in self.live
            case Wait(storage=storage) | Prefetch(storage=storage) | DropHost(storage=storage):
                return storage in self.on_host
            case CrossBoundary():
                return True

    def _lower(self, instruction: Instruction, position: int) -> None:
        match instruction:
            case Compute():
                self._lower_compute(instruction)
            case Drop(storage=storage):
                self._delete(storage, f"drop {storage}")
                self.arriving.discard(storage)
            case Offload(storage=storage):
                offset = self.host.offsets[position]
                self._emit(f"h{storage} = lease.offload(s{storage}, {offset})", f"offload {storage}")
                self.on_host.add(storage)
            case Wait(storage=storage):
                self._emit(f"h{storage}.wait()", f"wait {storage}")
            case Prefetch(storage=storage):
                self._emit(f"s{storage} = h{storage}.prefetch()", f"prefetch {storage}")
                self.live.add(storage)
                self.arriving.add(storage)
            case DropHost(storage=storage):
                self._emit(f"del h{storage}", f"drop_host {storage}")
                self.on_host.discard(storage)
            case CrossBoundary():
                raise AssertionError("boundaries are handled by `run`")

    def _lower_compute(self, instruction: Compute) -> None:
        op, call = self.graph.ops[instruction.op], self.binding.calls[instruction.op]
        recomputes = op.id in self.computed
        self.computed.add(op.id)
        self._await({*op.reads, *op.mutates}, f"op {op.id} reads it")
        comment = f"compute {op.id} {op.name} {op.module}".rstrip()
        if isinstance(call.target, SaveGeneratorState) and op.writes[0] not in self.replayed:
            self._emit(f"s{op.writes[0]} = None", f"{comment}: nothing replays it")
        elif isinstance(call.target, Fused) and self.live.isdisjoint(op.writes) and instruction.in_place_of is None:
            statements = [self._statement(part, self._call(part, self._target(part))) for part in calls_of(call)]
            self._emit("; ".join(statements), comment)
        else:
            self._emit(self._statement(call, self._computing(instruction, call, recomputes)), comment)
        if instruction.in_place_of is not None:
            self._delete(instruction.in_place_of, "its memory is reused in place")
        self.live |= set(op.writes)

    def _delete(self, storage: int, why: str) -> None:
        """Delete a storage's variable, and those of its views, which would keep its memory."""
        self._emit(f"del {', '.join([f's{storage}', *self.views.pop(storage, {}).values()])}", why)
        self.live.discard(storage)

    def _await(self, storages: set[int], why: str) -> None:
        """Emit a wait for each of these storages whose copy back is under way."""
        for storage in sorted(self.arriving & storages):
            self._emit(f"h{storage}.arrived()", why)
        self.arriving -= storages

    def _computing(self, instruction: Compute, call: Call, recomputes: bool) -> str:
        """Return the expression that computes an op: in place, or with its generator's state replayed, if need be."""
        if instruction.in_place_of is not None:
            over = instruction.in_place_of
            assert over in call.in_place_forms, f"{call.target} has no form that writes over storage {over}"
            form = call.in_place_forms[over]
            call = replace(call, target=form.target, kwargs={**call.kwargs, **form.extra})
        if recomputes and call.generator_state is not None:
            device = self.graph.ops[call.op].random
            return self._call(call, "replay", [f"s{call.generator_state}", repr(device), self._target(call)])
        return self._call(call, self._target(call))

    def _target(self, call: Call) -> str:
        label = getattr(getattr(call.target, "overloadpacket", call.target), "__name__", "call").replace(".", "_")
        return self._name(self.direct_calls.find(call.target, call.args, call.kwargs), label)

    def _call(self, call: Call, function: str, first: Sequence[str] = ()) -> str:
        args = [*first, *map(self._render, call.args), *(self._keyword(*item) for item in call.kwargs.items())]
        return f"{function}({', '.join(args)})"

    def _statement(self, call: Call, code: str) -> str:
        """Return code that binds each new storage to its first result; a second copy of a live one is dropped."""
        names: list[str] = []
        bound: set[int] = set()
        for value in call.results:
            new = value is not None and value.storage not in self.live and value.storage not in bound
            names.append(f"s{value.storage}" if new and value is not None else "_")
            if new and value is not None:
                bound.add(value.storage)
                self.bases[value.storage] = value
        if not bound:
            return code
        trailing = "" if _returns_one_tensor(call) or len(names) > 1 else ","
        return f"{', '.join(names)}{trailing} = {code}{'; del _' if '_' in names else ''}"

    def _emit(self, code: str, comment: str) -> None:
        self.lines.append(Line(code, comment))

    def _render(self, tree: Any) -> str:
        """Return Python source for an argument: a view is made where it is first used, a constant is written out."""
        if isinstance(tree, Value):
            return self._render_value(tree)
        if isinstance(tree, (list, tuple)):
            inner = ", ".join(self._render(item) for item in tree)
            return f"[{inner}]" if isinstance(tree, list) else f"({inner}{',' if len(tree) == 1 else ''})"
        if tree is None or type(tree) in (bool, int) or (type(tree) is float and math.isfinite(tree)):
            return repr(tree)
        return self._name(tree)

    def _keyword(self, key: str, tree: Any) -> str:
        """Return Python source for a keyword argument, which an operator may have called `from`, as `random_` does."""
        if _is_name(key):
            return f"{key}={self._render(tree)}"
        return f"**{{{self._name(key)}: {self._render(tree)}}}"

    def _render_value(self, value: Value) -> str:
        base, name = self.bases[value.storage], f"s{value.storage}"
        if value == base:
            return name
        views = self.views.setdefault(value.storage, {})
        if value not in views:
            self._views_made += 1
            views[value] = f"v{self._views_made}"
            return f"({views[value]} := {self._view(value, base)})"
        return views[value]

    def _view(self, value: Value, base: Value) -> str:
        name = f"s{value.storage}"
        shape, stride = tuple(value.shape), tuple(value.stride)
        conjugated, negated = value.conjugated, value.negated
        if value.dtype == base.dtype:
            code = f"{self._name(torch.as_strided)}({name}, {shape}, {stride}, {value.offset})"
            conjugated, negated = conjugated != base.conjugated, negated != base.negated
        else:  # another dtype over the same storage
            code = f"reinterpret({name}, {self._name(value.dtype)}, {shape}, {stride}, {value.offset})"
        if conjugated or negated:
            code = f"{self._name(lazy_view)}({code}, conjugated={conjugated}, negated={negated})"
        return code

    def _name(self, thing: Any, label: str = "") -> str:
        """Return the one name of an object in the function's namespace, which begins with `label`."""
        if id(thing) not in self._names:
            label = label or str(thing if isinstance(thing, _NAMED) else getattr(thing, "__name__", "constant"))
            label = label.rpartition(".")[2].lower()
            name = f"{label if _is_name(label) else 'constant'}_{len(self._names)}"
            self._names[id(thing)] = name
            self.namespace[name] = thing
        return self._names[id(thing)]


_NAMED = (torch.dtype, torch.layout, torch.memory_format, torch.device)


def _is_name(text: str) -> bool:
    """Return whether a text is a Python name, in ASCII: Python reads other letters as different ones (NFKC)."""
    return text.isascii() and text.isidentifier() and not keyword.iskeyword(text)


def _returns_one_tensor(call: Call) -> bool:
    """Return whether the target returns a bare tensor; otherwise it returns a sequence of len(results)."""
    schema = getattr(call.target, "_schema", None)
    if schema is None:
        return len(call.results) == 1
    return len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor"


def _storages_named(statements: Iterable[str]) -> set[int]:
    """Return the storages that code refers to: identifiers `s<number>`."""
    found: set[int] = set()
    for code in statements:
        for word in "".join(c if c.isalnum() or c == "_" else " " for c in code).split():
            if word[0] == "s" and word[1:].isdigit():
                found.add(int(word[1:]))
    return found
