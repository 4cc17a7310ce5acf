"""Ledger: one budget, shared among the planned graphs of a step with graph breaks.

Only a step that has run shows what else is on the device: tensors of user code, gradients, the optimizer's update. The
first steps therefore run the leanest plans. After them, the bytes at each moment of a step are known. They are a sum of
three terms: what else is there, what the plans of the open graphs keep, and the peak of the half that runs. Each graph
is planned within the bytes that this sum leaves to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.errors import InfeasibleBudgetError, NoPlanError, TimeLimitError
from memfit.runtime.graph_part import Part, Room, Shape
from memfit.runtime.step_memory import StepMemory
from memfit.system.budget import format_bytes
from memfit.system.recorder import Usage, allocated_bytes, record


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The most bytes at one moment of a step, but for those that depend on plans.

    Attributes:
        base_bytes: on the device besides what plans keep, and besides the half that runs.
        open: the parts whose forward half has run and whose backward half has not; one may stand there twice.
        part: whose half runs, or None for user code.
        is_forward: which half.
    """

    base_bytes: int
    open: tuple[Part, ...]
    part: Part | None = None
    is_forward: bool = False

    def bytes_with(self, shapes: Mapping[Part, Shape]) -> int:
        """Return the bytes on the device at this moment if the plans have these shapes."""
        kept = self.base_bytes + sum(shapes[part].kept_bytes for part in self.open)
        if self.part is None:
            return kept
        shape = shapes[self.part]
        return kept + (shape.forward_bytes if self.is_forward else shape.backward_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Half:
    """A half that ran: bytes on the device at its start, and the most of the user code before it."""

    part: Part | None
    is_forward: bool
    start_bytes: int
    code_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """The moments of one step, and for each call of a graph the moments of its two halves."""

    moments: tuple[Moment, ...]
    calls: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeen:
    """A step that ran.

    Attributes:
        loss: what it returned.
        peak_bytes: on the device, residents and an arena included; None for a step in which a graph was compiled, which
            runs the graph's ops one by one, or an arena recorded a half.
        is_new: whether no step before took the same way through the parts. Never, if `peak_bytes` is None.
    """

    loss: torch.Tensor
    peak_bytes: int | None
    is_new: bool


class Ledger:
    """The parts of a step, and the moments of the steps that it has seen.

    Args:
        device: where the step runs.
        memory: serves the halves. With an arena, what a half alone needs lies in one block that all halves share; what
            outlives a half is ordinary memory, so that a part may be open several times at once.
        host_budget_bytes: most bytes of host copies of all parts.

    Attributes:
        compiled: how often a graph was compiled; whoever compiles one adds to it.
        is_batch_known: whether a step before the one that runs had a batch of the same shapes; who runs steps sets it.
        used: the parts, those used last at the end, each with the number of the step that used it last.
    """

    def __init__(self, device: torch.device, memory: StepMemory, host_budget_bytes: int = 0) -> None:
        self.device = device
        self.memory = memory
        self.host_budget_bytes = host_budget_bytes
        self.compiled = 0
        self.is_batch_known = False
        self.used: dict[Part, int] = {}
        self._ran = 0
        self._steps: dict[tuple[Any, ...], _Step] = {}
        self._halves: list[_Half] = []
        self._code: tuple[AbstractContextManager[Usage], Usage] | None = None
        self._offset_bytes = 0
        self._reads: list[tuple[Part, frozenset[int]]] = []

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the steps seen, in the order of their first forward halves."""
        return tuple(dict.fromkeys(moment.part for moment in self._moments() if moment.part is not None))

    def run(self, run: Callable[[], torch.Tensor], resident_bytes: int) -> StepSeen:
        """Run a step, and note its moments if no step before took the same way through the parts.

        Args:
            run: runs the step.
            resident_bytes: the bytes of parameters, buffers, batch and the optimizer's state.
        """
        self._halves, self._reads, changes = [], [], self._changes
        self._ran += 1
        held_bytes = self.memory.held_bytes
        self._offset_bytes = resident_bytes - allocated_bytes(self.device)
        try:
            with record(self.device) as usage:
                self._begin_code()
                loss = run()
                self._note(None, is_forward=False)
        finally:
            self._end_code()
        way = tuple((half.part, half.is_forward) for half in self._halves)
        is_settled = self._changes == changes
        is_new = is_settled and way not in self._steps
        if is_new:
            self._steps[way] = _moments(self._halves)
        self._halves = []
        peak_bytes = resident_bytes + held_bytes + usage.taken_bytes if is_settled else None
        return StepSeen(loss=loss, peak_bytes=peak_bytes, is_new=is_new)

    @property
    def _changes(self) -> tuple[int, int]:
        """Counts that a step which takes other memory than the next will take increases."""
        return self.compiled, self.memory.recorded

    def begin(self, part: Part, reads: frozenset[int] | None = None) -> None:
        """Note that a half of `part` begins.

        Args:
            part: whose half.
            reads: of a forward half, the data pointers of the storages that it was given; the backward half has None.
        """
        if reads is not None:
            self._reads.append((part, reads))
            self.used.pop(part, None)
            self.used[part] = self._ran
        self._note(part, is_forward=reads is not None)

    def end(self, part: Part, *, is_forward: bool) -> None:
        """Note that the half has ended."""
        if not is_forward:
            last = max((n for n, (each, _) in enumerate(self._reads) if each is part), default=None)
            if last is not None:
                del self._reads[last]
        self._begin_code()

    def drop_oldest(self, most_ops: int) -> list[Part]:
        """Forget the parts that were not used for longest until the others have few enough ops; return them.

        Those of the last step stay. A way that led through one of them is new when it is taken again.

        Args:
            most_ops: of all parts together.
        """
        ops = sum(len(part.captured.graph.ops) for part in self.used)
        dropped: list[Part] = []
        for part, step in self.used.items():
            if ops <= most_ops or step == self._ran:
                break
            dropped.append(part)
            ops -= len(part.captured.graph.ops)
        for part in dropped:
            del self.used[part]
            self._steps = {way: seen for way, seen in self._steps.items() if all(part is not each for each, _ in way)}
            for is_forward in (True, False):
                self.memory.forget((part, is_forward))
        return dropped

    def is_read(self, tensor: torch.Tensor) -> bool:
        """Return whether a graph whose backward half has yet to end was given the storage of `tensor`."""
        pointer = tensor.untyped_storage().data_ptr()
        return any(pointer in reads for _, reads in self._reads)

    def share(self, budget_bytes: int, line: str) -> None:
        """Plan each part within the bytes that the budget leaves it.

        Each is given the same share of the way from its leanest plan to the one that recomputes nothing. Then those
        that recompute the most are given what the others have left.

        Args:
            budget_bytes: of the whole step.
            line: the user's line that broke the graph, for the error.

        Raises:
            NoPlanError: even the leanest plans take more; with the least budget that they reach. They are then in use.
        """
        parts = self.parts
        self._share_host()
        if self.least_bytes > budget_bytes:
            self._make_leaner()
        if self.least_bytes > budget_bytes:
            self.use_leanest()
            raise self.no_plan(budget_bytes, line)
        lean = {part: part.lean for part in parts}
        full = {part: part.lean.towards(part.full, 1.0) for part in parts}
        share = 1.0
        for moment in self._moments():
            at_least, at_most = moment.bytes_with(lean), moment.bytes_with(full)
            if at_most > budget_bytes:
                share = min(share, (budget_bytes - at_least) / (at_most - at_least))
        self.use_leanest()
        shapes = {part: part.lean.towards(part.full, share) for part in parts}
        for part in parts:
            part.plan_within(self._room_to_keep(part, shapes, budget_bytes))
        for part in sorted(parts, key=lambda part: part.plan.overhead * part.plan.unplanned.seconds, reverse=True):
            if part.plan.overhead > 0.0:
                now = {each: each.shape for each in parts}
                more_bytes = self._spare_bytes(part, now, budget_bytes)
                kept = replace(part.shape, kept_bytes=part.shape.kept_bytes + more_bytes)
                part.improve_within(self._room_to_keep(part, {**now, part: kept}, budget_bytes))

    def use_leanest(self) -> None:
        """Use the leanest plan of each part."""
        for part in self.parts:
            part.use_leanest()

    def _share_host(self) -> None:
        """Give each part a share of the host budget: as much as it has to keep, for as often as it is open at once."""
        opened = {part: max(moment.open.count(part) for moment in self._moments()) for part in self.parts}
        whole_bytes = sum(part.full.kept_bytes * opened[part] for part in self.parts)
        for part in self.parts:
            share_bytes = self.host_budget_bytes * part.full.kept_bytes // max(1, whole_bytes)
            part.settings = replace(part.settings, host_budget_bytes=share_bytes)

    def _make_leaner(self) -> None:
        """Make leaner plans, the last graph's first: those before it have its bytes between their halves."""
        for part in reversed(self.parts):
            part.plan_leanest(self._room(part, {each: each.lean for each in self.parts}, 0))

    def _spare_bytes(self, part: Part, shapes: Mapping[Part, Shape], budget_bytes: int) -> int:
        """Return how many bytes more a part may keep each time that it is open, all shapes being as they are."""
        opened = ((moment, moment.open.count(part)) for moment in self._moments())
        spare = ((budget_bytes - moment.bytes_with(shapes)) // times for moment, times in opened if times)
        return max(0, min(spare, default=0))

    def _room_to_keep(self, part: Part, shapes: Mapping[Part, Shape], budget_bytes: int) -> Room:
        """Return what a budget leaves for a part that keeps no more than these shapes say."""
        room = self._room(part, shapes, budget_bytes)
        between_bytes = room.budget_bytes - part.resident_bytes - shapes[part].kept_bytes
        return replace(room, bytes_between=max(0, between_bytes))

    def _room(self, part: Part, shapes: Mapping[Part, Shape], budget_bytes: int) -> Room:
        """Return what a budget leaves for a part, all having these shapes."""
        mine = shapes[part]
        own = [moment for moment in self._moments() if moment.part is part]
        forward_bytes = max((m.bytes_with(shapes) - mine.forward_bytes for m in own if m.is_forward), default=0)
        backward_bytes = max((m.bytes_with(shapes) - mine.backward_bytes for m in own if not m.is_forward), default=0)
        between_bytes = max((m.bytes_with(shapes) for m in self._moments() if part in m.open), default=0)
        return Room(
            budget_bytes=budget_bytes - forward_bytes,
            bytes_between=max(0, between_bytes - mine.kept_bytes - forward_bytes - part.resident_bytes),
            bytes_outside=max(0, backward_bytes - forward_bytes),
        )

    @property
    def least_bytes(self) -> int:
        """The peak of the step if each part ran its leanest plan so far."""
        lean = {part: part.lean for part in self.parts}
        return max(moment.bytes_with(lean) for moment in self._moments())

    @property
    def bound_bytes(self) -> int:
        """The least bytes of the step, whatever the plans of its graphs: proved."""
        return max((part.bound_bytes for part in self.parts), default=0)

    def no_plan(self, budget_bytes: int, line: str, more_bytes: int = 0) -> NoPlanError:
        """Return the error of a budget that the leanest plans exceed.

        Args:
            budget_bytes: of the whole step.
            line: the user's line that broke the graph.
            more_bytes: what a step was seen to take beyond what its plans say.
        """
        least_bytes, bound_bytes = self.least_bytes + more_bytes, self.bound_bytes
        kind = InfeasibleBudgetError if budget_bytes < bound_bytes else TimeLimitError
        return kind(
            f"no plan fits {format_bytes(budget_bytes)} ({budget_bytes} bytes): the {len(self.parts)} graphs around "
            f"{line}, with what runs between them, reached {format_bytes(least_bytes)} ({least_bytes} bytes), and no "
            f"plan can go below {format_bytes(bound_bytes)} ({bound_bytes} bytes); raise the budget or make the batch "
            "smaller",
            least_budget_found_bytes=least_bytes,
            least_budget_bound_bytes=bound_bytes,
        )

    def _moments(self) -> list[Moment]:
        return [moment for step in self._steps.values() for moment in step.moments]

    def _begin_code(self) -> None:
        context = record(self.device)
        self._code = context, context.__enter__()
        self._code_start_bytes = self._offset_bytes + allocated_bytes(self.device)

    def _end_code(self) -> int:
        """End the record of user code; return the most bytes on the device in it."""
        if self._code is None:
            return 0
        context, usage = self._code
        self._code = None
        context.__exit__(None, None, None)
        return self._code_start_bytes + usage.peak_bytes

    def _note(self, part: Part | None, *, is_forward: bool) -> None:
        code_bytes = self._end_code()
        start_bytes = self._offset_bytes + allocated_bytes(self.device)
        half = _Half(part=part, is_forward=is_forward, start_bytes=start_bytes, code_bytes=code_bytes)
        self._halves.append(half)


def _moments(halves: Sequence[_Half]) -> _Step:
    """Return the moments of a step that ran: before each half the user code, then the half itself."""
    moments: list[Moment] = []
    calls: list[tuple[int, int]] = []
    open_since: list[tuple[Part, Shape, int]] = []
    for half in halves:
        kept_bytes = sum(shape.kept_bytes for _, shape, _ in open_since)
        now_open = tuple(part for part, _, _ in open_since)
        moments.append(Moment(base_bytes=half.code_bytes - kept_bytes, open=now_open))
        part = half.part
        if part is None:
            continue
        base_bytes = half.start_bytes - kept_bytes - part.resident_bytes
        if half.is_forward:
            open_since.append((part, part.shape, len(moments)))
        else:
            place = max((n for n, (each, _, _) in enumerate(open_since) if each is part), default=None)
            if place is None:  # the forward half ran before this step
                continue
            calls.append((open_since[place][2], len(moments)))
            del open_since[place]
            now_open = tuple(each for each, _, _ in open_since)
            base_bytes -= part.arriving_bytes
        moments.append(Moment(base_bytes=base_bytes, open=now_open, part=part, is_forward=half.is_forward))
    return _Step(moments=tuple(moments), calls=tuple(calls))
