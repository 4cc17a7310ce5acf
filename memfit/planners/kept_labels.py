"""The labels of a shortest path with a host: which of two can do all that the other can, and which are left.

A label is done with where another of the same ops can do as much: it has all of the other's storages on the device and
on the host, under way no more and later in nothing. What it has beside can be dropped at no cost, for none of that is
under way; and its copies to the host may begin wherever the other's may.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.compiled import compiled, entry_point

CLOSED, OPEN = -1, -2  # no copy to the host may start before the next op; any may
_LIVE, _HOST, _OUT, _BACK, _MAY_COPY, _SETS = range(6)
_NOW, _OUT_FREE, _BACK_FREE, _CLOCKS = range(4)
NONE = -1
_FIRST_ROWS = 1024


class Kept(NamedTuple):
    """Labels as rows of arrays; those of the same ops and storages on the device are a chain, from
    the last one on.

    Attributes:
        sets: int64[labels, 5], storages as bits: on the device, on the host, under way there and back; which may start.
        seconds: float64[labels, 3 + 2 * storages], the three clocks, and when each copy ends: there, and back.
        before: the label before in its chain.
        is_forgotten: another can do as much.
    """

    sets: NDArray[np.int64]
    seconds: NDArray[np.float64]
    before: NDArray[np.int64]
    is_forgotten: NDArray[np.bool_]

    @classmethod
    def none_of(cls, storages: int, rows: int = _FIRST_ROWS) -> Kept:
        """Return room for the first labels of a graph with so many storages."""
        return cls(
            np.zeros((rows, _SETS), np.int64),
            np.zeros((rows, _CLOCKS + 2 * storages)),
            np.full(rows, NONE),
            np.zeros(rows, np.bool_),
        )

    def with_room_for(self, label: int) -> Kept:
        """Return the same labels with room for number `label`."""
        if label < len(self.sets):
            return self
        more = Kept.none_of((self.seconds.shape[1] - _CLOCKS) // 2, len(self.sets))
        return Kept(
            np.concatenate([self.sets, more.sets]),
            np.concatenate([self.seconds, more.seconds]),
            np.concatenate([self.before, more.before]),
            np.concatenate([self.is_forgotten, more.is_forgotten]),
        )


@entry_point
def is_dominated(kept: Any, label: int, latest: int, has_host_room: bool) -> bool:
    """Whether a label of the chain from `latest` on can do all that `label` can."""
    other = latest
    while other != NONE:
        if does_all(kept, other, label, has_host_room):
            return True
        other = kept.before[other]
    return False


@entry_point
def forget(kept: Any, label: int, latest: int, has_host_room: bool) -> int:
    """Take from the chain all that `label` can do as much as; return its latest label then."""
    after, other = NONE, latest
    while other != NONE:
        if does_all(kept, label, other, has_host_room):
            kept.is_forgotten[other] = True
            if after == NONE:
                latest = kept.before[other]
            else:
                kept.before[after] = kept.before[other]
        else:
            after = other
        other = kept.before[other]
    return latest


@compiled
def does_all(kept: Any, label: int, other: int, has_host_room: bool) -> bool:
    """Whether `label` can do all that `other` can, of the same ops."""
    mine, theirs = kept.sets[label], kept.sets[other]
    if theirs[_LIVE] & ~mine[_LIVE] or theirs[_HOST] & ~mine[_HOST]:
        return False
    if mine[_OUT] & ~theirs[_OUT] or mine[_BACK] & ~theirs[_BACK]:
        return False
    may_copy, others = mine[_MAY_COPY], theirs[_MAY_COPY]
    if may_copy != OPEN and others != CLOSED and (may_copy == CLOSED or others == OPEN or others & ~may_copy):
        return False
    if not has_host_room and mine[_HOST] & ~theirs[_HOST] & (mine[_OUT] | mine[_BACK]):
        return False
    for column in range(kept.seconds.shape[1]):  # noqa: SIM110 - compiled code has no generators
        if kept.seconds[label, column] > kept.seconds[other, column]:
            return False
    return True
