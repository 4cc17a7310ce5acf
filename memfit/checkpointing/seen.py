"""What a lean pass shows of the calls of blocks: operators, the storages they make, what autograd saves. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

NEVER = 1 << 60


@dataclass(slots=True, kw_only=True)
class OpSeen:
    """One operator.

    Attributes:
        name: of the overload, such as `aten.addmm.default`.
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
        saves: moments at which autograd saved it.
        is_output: whether the call returns it.
    """

    size_bytes: int
    last_write: int
    first_read: int = NEVER
    saves: list[int] = field(default_factory=list[int])
    is_output: bool = False


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
        ops: in order; storages by index; spans by the order of their ends.
        saves: moments at which autograd saved anything, the block's own or not.
        input_bytes: of the tensors that were given to it, that the call before it returned.
        follows: whether all of its tensors that need a gradient came from the call before it.
        has_collectives: whether operators of it may talk to other ranks.
        is_kept: whether it was no checkpoint in the lean pass.
        must_stay: why it cannot be computed again; empty if it can.
    """

    block: str
    ops: list[OpSeen] = field(default_factory=list[OpSeen])
    storages: list[StorageSeen] = field(default_factory=list[StorageSeen])
    spans: list[SpanSeen] = field(default_factory=list[SpanSeen])
    saves: list[int] = field(default_factory=list[int])
    input_bytes: int = 0
    follows: bool = False
    has_collectives: bool = False
    is_kept: bool = False
    must_stay: str = ""

    @property
    def form(self) -> tuple[object, ...]:
        """What is equal for calls that may be treated alike."""
        return (
            tuple((op.name, op.storage) for op in self.ops),
            tuple((s.size_bytes, tuple(s.saves), s.is_output) for s in self.storages),
            tuple((span.name.removeprefix(self.block), span.first, span.last) for span in self.spans),
        )

    def recomputed(self, first: int, last: int) -> Iterator[OpSeen]:
        """Yield the operators that a checkpoint around these moments computes again: those before its last save."""
        stop = max((moment for moment in self.saves if first <= moment < last), default=-1)
        return (op for op in self.ops if first <= op.moment < stop)


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
