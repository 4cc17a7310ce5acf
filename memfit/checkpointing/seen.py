"""What a lean pass shows of the calls of blocks: operators, the storages they make, what autograd saves. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

NEVER = 1 << 60
CACHED_CAST = "cast by autocast"
"""The name of operators that one forward pass calls and another does not: they are never kept, nor numbered."""


@dataclass(slots=True, kw_only=True)
class OpSeen:
    """One operator.

    Attributes:
        name: of the overload, such as `aten.addmm.default`, or `CACHED_CAST`.
        nth: of this name in the call.
        storage: the index of the storage that it makes, views, or writes to; None if that is not the block's.
        seconds: that it took.
        draws: whether it draws random numbers.
        moment: in the order of all that was seen in the call.
    """

    name: str
    nth: int
    storage: int | None
    seconds: float
    draws: bool
    moment: int


@dataclass(slots=True, kw_only=True)
class StorageSeen:
    """A storage that the call makes; all that one operator makes is one.

    Attributes:
        size_bytes: that it takes of the device.
        last_write, first_read: numbers of operators.
        made: the number of the operator that makes it.
        dropped: the number of the first operator after which it was gone, as nothing was kept.
        saves: moments at which autograd saved it.
        is_output: whether the call returns it, and it is held outside until the backward pass.
        unsaved_bytes: of it that autograd does not save: of batch normalization it may save the statistics alone.
    """

    size_bytes: int
    last_write: int
    first_read: int = NEVER
    made: int = 0
    dropped: int = NEVER
    saves: list[int] = field(default_factory=list[int])
    is_output: bool = False
    unsaved_bytes: int = 0

    @property
    def saved_bytes(self) -> int:
        """Bytes of it that autograd holds."""
        return self.size_bytes - self.unsaved_bytes if self.saves else 0


@dataclass(slots=True, kw_only=True)
class SpanSeen:
    """A call of a module inside the block's call.

    Attributes:
        name: of the module, in the model.
        first, last: moments; the span is what lies between.
        given: the block's storages among its arguments.
    """

    name: str
    first: int
    last: int
    given: frozenset[int]


@dataclass(slots=True, kw_only=True)
class CallSeen:
    """One call of a block in a pass.

    Attributes:
        block: the name of its module.
        given_bytes: of all tensors that were given to it.
        ops: in order; storages by index; spans by the order of their ends.
        saves: moments at which autograd saved anything, the block's own or not.
        input_bytes: of the tensors that were given to it, that the call before it returned.
        follows: whether all of its tensors that need a gradient came from the call before it.
        has_collectives: whether operators of it may talk to other ranks.
        differentiates: whether its forward pass runs a backward pass, for which it needs what it saves.
        is_kept: whether it was no checkpoint in the lean pass.
        must_stay: why it cannot be recomputed; empty if it can.
    """

    block: str
    given_bytes: int = 0
    ops: list[OpSeen] = field(default_factory=list[OpSeen])
    storages: list[StorageSeen] = field(default_factory=list[StorageSeen])
    spans: list[SpanSeen] = field(default_factory=list[SpanSeen])
    saves: list[int] = field(default_factory=list[int])
    input_bytes: int = 0
    follows: bool = False
    has_collectives: bool = False
    differentiates: bool = False
    is_kept: bool = False
    must_stay: str = ""

    @property
    def form(self) -> tuple[object, ...]:
        """What is equal for calls that may be treated alike."""
        return (
            (self.differentiates, *((op.name, op.storage) for op in self.ops)),
            tuple((s.size_bytes, s.unsaved_bytes, tuple(s.saves), s.is_output) for s in self.storages),
            tuple((span.name.removeprefix(self.block), span.first, span.last) for span in self.spans),
        )

    @property
    def pattern(self) -> tuple[object, ...]:
        """What is equal on ranks that may share a plan: all but bytes and seconds."""
        return (
            tuple((op.name, op.storage, op.draws, op.moment) for op in self.ops),
            tuple((s.last_write, s.first_read, tuple(s.saves), s.is_output) for s in self.storages),
            tuple((span.name, span.first, span.last, sorted(span.given)) for span in self.spans),
            (self.block, tuple(self.saves), self.follows, self.is_kept, bool(self.must_stay), self.differentiates),
        )

    @property
    def runs_without_saving(self) -> bool:
        """Whether its output alone may be recomputed."""
        return not (self.must_stay or self.differentiates)

    def recomputed(self, first: int, last: int) -> Iterator[OpSeen]:
        """Yield the operators that a checkpoint around these moments recomputes: those before its last save.

        Args:
            first: the first moment inside of the checkpoint.
            last: the first moment after it.
        """
        stop = max((moment for moment in self.saves if first <= moment < last), default=-1)
        return (op for op in self.ops if first <= op.moment < stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentSeen:
    """A part of a lean pass.

    Attributes:
        last: the last call that is live: whose forward pass has begun, and whose backward pass has not; -1 if none is.
        own: the call whose backward pass it is; None outside of backward passes of calls.
        peak_bytes: the most that was live in it.
        forward: the call whose forward pass it is; None outside of forward passes of calls.
    """

    last: int
    own: int | None
    peak_bytes: int
    forward: int | None = None


@dataclass(slots=True, kw_only=True)
class LeanPass:
    """A pass in which all blocks were recomputed.

    Attributes:
        calls: of blocks, in the order of the forward pass.
        moments: of the pass, in order.
        start_bytes: that were live when it began.
        at_once: name of a block -> the most calls of it that were live at once.
        created_bytes: of the optimizer's state, which its update after the pass has made.
        undivided_bytes: that its updates would have taken in one call each.
        is_twice: whether a call was recomputed twice, so that both were held, as where backward passes are split.
    """

    calls: list[CallSeen] = field(default_factory=list[CallSeen])
    moments: list[MomentSeen] = field(default_factory=list[MomentSeen])
    start_bytes: int = 0
    at_once: Counter[str] = field(default_factory=Counter[str])
    created_bytes: int = 0
    undivided_bytes: int = 0
    is_twice: bool = False

    @property
    def given_bytes(self) -> int:
        """Bytes of all tensors that were given to all calls: a measure of the pass."""
        return sum(call.given_bytes for call in self.calls)

    def given_by_block(self) -> dict[str, list[int]]:
        """Return the bytes that were given to each call of a block, by its name."""
        found: dict[str, list[int]] = {}
        for call in self.calls:
            found.setdefault(call.block, []).append(call.given_bytes)
        return found

    @property
    def form(self) -> tuple[object, ...]:
        """What is equal on ranks that may share a plan: all but bytes and seconds."""
        moments = tuple((moment.last, moment.own, moment.forward) for moment in self.moments)
        return moments, tuple(call.pattern for call in self.calls)

    def values(self, shift_bytes: int) -> list[int]:
        """Return the bytes, and the seconds in nanoseconds, in a fixed order.

        Args:
            shift_bytes: that are added to levels of bytes.
        """
        levels = [level + shift_bytes for level in (self.start_bytes, *(each.peak_bytes for each in self.moments))]
        sizes = [
            size
            for call in self.calls
            for size in (call.input_bytes, *(n for s in call.storages for n in (s.size_bytes, s.unsaved_bytes)))
        ]
        dropped = [storage.dropped for call in self.calls for storage in call.storages]
        return [*levels, *sizes, *dropped, *(int(op.seconds * 1e9) for call in self.calls for op in call.ops)]

    def put(self, values: Sequence[int]) -> None:
        """Take values over that are in the order of `values`."""
        rest = iter(values)
        self.start_bytes = next(rest)
        self.moments = [replace(moment, peak_bytes=next(rest)) for moment in self.moments]
        for call in self.calls:
            call.input_bytes = next(rest)
            for storage in call.storages:
                storage.size_bytes, storage.unsaved_bytes = next(rest), next(rest)
        for storage in (storage for call in self.calls for storage in call.storages):
            storage.dropped = next(rest)
        for op in (op for call in self.calls for op in call.ops):
            op.seconds = next(rest) * 1e-9


def equalize_seconds(calls: list[CallSeen]) -> None:
    """Give operators of calls of the same form the median of their seconds: the first one warms caches up."""
    groups: dict[object, list[CallSeen]] = {}
    for call in calls:
        groups.setdefault(tuple(op.name for op in call.ops), []).append(call)
    for alike in groups.values():
        for ops in zip(*(call.ops for call in alike), strict=True):
            middle = sorted(op.seconds for op in ops)[(len(ops) - 1) // 2]
            for op in ops:
                op.seconds = middle
