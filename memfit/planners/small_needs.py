"""What a state of a small step still needs: which storages can be of use, and what must be computed or come back."""

from __future__ import annotations

import math
from dataclasses import dataclass

from memfit.planners.shortest_path import SmallGraph, bits_of, members


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """What must happen beside the first computations that are left.

    Attributes:
        again_seconds: of the ops that must be computed again; infinite where some may not be.
        back: storages that must come back from the host, as bits.
    """

    again_seconds: float
    back: int


class Needs:
    """Answers by sets of ops and storages, each worked out once."""

    def __init__(self, small: SmallGraph) -> None:
        self.small, graph = small, small.graph
        managed = [s for s in range(len(graph.storages)) if not graph.storages[s].resident]
        self.writer = {s: graph.writer_of[s] for s in managed}
        self.seconds = [op.seconds for op in graph.ops]
        self.once = bits_of(op.id for op in graph.ops if op.computed_once)
        self._of_done: dict[int, tuple[int, int, float]] = {}
        self._missing: dict[tuple[int, int, int], Missing] = {}
        self._behind: dict[tuple[int, int], float] = {}
        self.below = [0] * len(graph.ops)  # the ops that need what an op writes, and itself
        for op in reversed(range(len(graph.ops))):
            readers = [other for other in range(op + 1, len(graph.ops)) if small.reads[other] & small.writes[op]]
            self.below[op] = 1 << op
            for reader in readers:
                self.below[op] |= self.below[reader]

    def of(self, done: int) -> tuple[int, int, float]:
        """Return what the ops that are left read, or the end requires, and has been written; what can be of use at
        all; and the seconds of the ops that are left.
        """
        if done not in self._of_done:
            left = [op for op in range(len(self.seconds)) if not done >> op & 1]
            wanted = self.small.at_end
            for op in left:
                wanted |= self.small.reads[op]
            needed = bits_of(s for s in members(wanted) if done >> self.writer[s] & 1)
            todo = needed
            while todo:
                writer = self.writer[next(members(todo))]
                todo &= todo - 1
                if self.may_again(writer, done):
                    todo |= self.small.reads[writer] & ~wanted
                    wanted |= self.small.reads[writer]
            self._of_done[done] = needed, wanted, sum(self.seconds[op] for op in left)
        return self._of_done[done]

    def may_again(self, op: int, done: int) -> bool:
        """Whether an op that has been computed may be computed once more."""
        return not self.once >> op & 1 and not self.small.until[op] & done

    def missing(self, done: int, live: int, host: int) -> Missing:
        """Return what must be computed again, or come back from the host, whatever the order."""
        needed = self.of(done)[0] & ~live
        key = (done, needed, live | host << 32)
        if key not in self._missing:
            self._missing[key] = self._missing_of(done, needed, live, host)
        return self._missing[key]

    def _missing_of(self, done: int, needed: int, live: int, host: int) -> Missing:
        again, back, seen = 0, 0, needed
        while needed:
            storage = next(members(needed))
            needed &= needed - 1
            writer = self.writer[storage]
            if host >> storage & 1:
                if not self.may_again(writer, done):
                    back |= 1 << storage
                continue
            if not self.may_again(writer, done):
                return Missing(again_seconds=math.inf, back=0)
            again |= 1 << writer
            needed |= self.small.reads[writer] & ~live & ~seen
            seen |= self.small.reads[writer]
        return Missing(again_seconds=sum(self.seconds[op] for op in members(again)), back=back)

    def behind_seconds(self, storage: int, done: int) -> float:
        """Return the seconds of the ops that are left and cannot run before `storage` has come."""
        key = storage, done
        if key not in self._behind:
            ops = 0
            for op in range(len(self.seconds)):
                if not done >> op & 1 and self.small.reads[op] >> storage & 1:
                    ops |= self.below[op]
            self._behind[key] = sum(self.seconds[op] for op in members(ops & ~done))
        return self._behind[key]
