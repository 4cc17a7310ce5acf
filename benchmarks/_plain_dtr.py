"""The policy of "Dynamic tensor rematerialization" (Kirisame et al. 2021) in the runner of eager mode.

Its h_DTR: the seconds of a tensor and of its evicted neighbourhood e*, over its bytes and its staleness, here in calls.
e* are the evicted tensors that it would be made of, and those that would be made of it, each reached through evicted
ones only. The least of a random sample goes, one after the other, as in the paper's prototype: of n tensors the root of
n is looked at, and none below a hundredth of the average size. There are no calm passes.
"""

from __future__ import annotations

import math
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from memfit.eager_mode import mode
from memfit.eager_mode.kept import Kept
from memfit.eager_mode.sources import Call, Source, Sources, seconds_to_make

_LEAST_SHARE = 0.01  # of the average size
Users = weakref.WeakKeyDictionary[Source, list["weakref.ref[Source]"]]


def make_plain(contents: Any) -> None:
    """Turn eager mode into a plain DTR, for all blocks of this process.

    Args:
        contents: of the block, which was just entered.
    """
    mode._QUIET_PASSES = sys.maxsize  # pyright: ignore[reportPrivateUsage]
    users: Users = weakref.WeakKeyDictionary()
    contents.releasing.policy, contents.releasing.keeps_order = PlainDTR(users), False
    for name in ("made", "written"):
        setattr(Sources, name, _noting_users(getattr(Sources, name), users))


def _noting_users(enter: Callable[..., Source], users: Users) -> Callable[..., Source]:
    def noted(*args: Any) -> Source:
        source = enter(*args)
        for each in source.call.inputs if source.call is not None else ():
            users.setdefault(each, []).append(weakref.ref(source))
        return source

    return noted


class PlainDTR:
    """A `Policy`.

    Args:
        users: contents -> those that are made of them.
    """

    def __init__(self, users: Users) -> None:
        self._users, self._random = users, random.Random(0)

    def __call__(self, free: Sequence[Kept], now: int, _seconds_of: Any) -> Iterator[Kept]:
        """Yield the one with the least h of a sample, again and again; each is let go before the next is asked for."""
        if not free:
            return
        least_bytes = _LEAST_SHARE * sum(kept.source.bytes for kept in free) / len(free)
        left = [kept for kept in free if kept.source.bytes >= least_bytes]
        while left:
            sample = self._random.sample(range(len(left)), math.isqrt(len(left)))
            best = min(sample, key=lambda place: self._h(left[place].source, now))
            kept = left[best]
            left[best] = left[-1]
            left.pop()
            if seconds_to_make(kept.source) < float("inf"):
                yield kept

    def _h(self, source: Source, now: int) -> float:
        return self._seconds(source) / (source.bytes * (now - source.used_at))

    def _seconds(self, source: Source) -> float:
        """Return the seconds of a tensor and of its evicted neighbourhood."""
        assert source.call is not None
        calls: set[Call] = {source.call}
        waiting, seen = list(source.call.inputs), {source}
        while waiting:
            at = waiting.pop()
            if at not in seen and at.live is None and at.call is not None:
                seen.add(at)
                calls.add(at.call)
                waiting += at.call.inputs
        waiting = self._made_of(source)
        while waiting:
            at = waiting.pop()
            if at not in seen and at.live is None and at.call is not None:
                seen.add(at)
                calls.add(at.call)
                waiting += self._made_of(at)
        return sum(call.seconds for call in calls)

    def _made_of(self, source: Source) -> list[Source]:
        return [user for each in self._users.get(source, ()) if (user := each()) is not None]
