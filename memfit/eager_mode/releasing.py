"""Which contents eager mode frees first, and how: they are dropped and recomputed, or copied to the host and back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch

from memfit.eager_mode.kept import Kept
from memfit.eager_mode.sources import Call, Source, seconds_to_make
from memfit.errors import HostMemoryError
from memfit.memory.host.room import Host
from memfit.memory.place import bytes_of
from memfit.torch_private.autograd import no_modes
from memfit.torch_private.tensors import storage_users

LEAST_BYTES = 1 << 12  # smaller contents are never freed
NEVER_SECONDS = float("inf")

Policy = Callable[[Sequence[Kept], int, Callable[[Kept], float]], Iterable[Kept]]
"""Gives what may be freed, the best first, from that, the number of the next call, and what returns the seconds that
freeing costs; each is freed before the next one is asked for."""


def cheap_and_stale(free: Sequence[Kept], now: int, seconds_of: Callable[[Kept], float]) -> Iterable[Kept]:
    """Order by cost over bytes and the root of staleness, least first; what cannot be recomputed is left out.

    That is h of "Dynamic tensor rematerialization" (Kirisame et al. 2021), with measured costs, in which what a
    contents' call lacks itself counts too, and with less weight on staleness: backward reads everything once, so that
    age says when, and not whether.

    Args:
        free, now, seconds_of: see `Policy`.
    """
    scored: list[tuple[float, int]] = []
    for number, kept in enumerate(free):
        source = kept.source
        seconds = seconds_of(kept)
        if seconds < NEVER_SECONDS:
            scored.append((seconds / (source.bytes * math.sqrt(max(1, now - source.used_at))), number))
    scored.sort()
    return [free[number] for _, number in scored]


class Releasing:
    """What of the contents that autograd saved may be freed, in which order, and how.

    Attributes:
        host: where contents are copied to; None if that is nowhere.
        policy: what goes first.
        keeps_order: whether its order counts for some calls; else it is asked each time.
        pinned: contents that stay, since a call is given them.
        held_back: contents that are not dropped until a call has written to what they are made of.
        dropped: contents that were, by the call that made them.
        freed: how often contents were.
        to_host_bytes, to_device_bytes: copied so far.

    Args:
        host: see above.
    """

    def __init__(self, host: Host | None) -> None:
        self.host = host
        self.policy: Policy = cheap_and_stale
        self.keeps_order = True
        self._order: Iterator[Kept] = iter(())
        self._order_ends = 0
        self.pinned: set[Source] = set()
        self.held_back: frozenset[Source] = frozenset()
        self.dropped: dict[Call, list[Kept]] = {}
        self.freed = self.to_host_bytes = self.to_device_bytes = 0

    def best_first(self, contents: Callable[[], Collection[Kept]], now: int) -> Iterator[Kept]:
        """Give what may be freed, in the policy's order.

        An order counts for as many calls as it has contents, so that a call costs a few looks at contents. What is made
        meanwhile was used last, and seldom goes first.

        Args:
            contents: returns all that autograd saved.
            now: the number of the next call.
        """
        if self.keeps_order and now < self._order_ends:
            yield from self._left()
        everything = contents()
        seconds_of = self._seconds if self.host is not None else _seconds_to_make_again
        free = [kept for kept in everything if self._may_go(kept)]
        self._order, self._order_ends = iter(self.policy(free, now, seconds_of)), now + len(free)
        yield from self._left()

    def _left(self) -> Iterator[Kept]:
        """Give what is left of the order, as far as it may still be freed."""
        for kept in self._order:
            if self._may_go(kept) and kept.is_alive():
                yield kept

    def _may_go(self, kept: Kept) -> bool:
        source = kept.source
        if not kept.is_there or source.bytes < LEAST_BYTES or source in self.pinned:
            return False
        if self.host is None:
            return self._may_be_dropped(source)
        return self._may_be_dropped(source) or self._copy_seconds(kept) < NEVER_SECONDS

    def _may_be_dropped(self, source: Source) -> bool:
        return source.call is not None and source not in self.held_back and not source.is_blank

    def _drop_seconds(self, source: Source) -> float:
        return seconds_to_make(source) if self._may_be_dropped(source) else NEVER_SECONDS

    def _copy_seconds(self, kept: Kept) -> float:
        """Return the seconds of copies to the host and back; infinity without room, or if others hold the storage.

        Raises:
            HostMemoryError: a copy that has begun failed.
        """
        source, storage = kept.source, kept.source.live
        if self.host is None or storage is None or storage.device != self.host.device:
            return NEVER_SECONDS
        if source.call is None and not storage.resizable():  # memory of NumPy's, say, that others may write to
            return NEVER_SECONDS
        settle(source)  # until then the copy, too, holds the storage
        if storage_users(storage) > len(kept.alive()) + 1:  # and this function's own
            return NEVER_SECONDS
        if source.host is None:
            return self.host.seconds(source.bytes) if self.host.has_room(source.bytes) else NEVER_SECONDS
        return source.host.seconds_back

    def _seconds(self, kept: Kept) -> float:
        return min(self._drop_seconds(kept.source), self._copy_seconds(kept))

    def let_go(self, kept: Kept) -> float:
        """Drop contents, or copy them to the host, whichever takes less time with what is gone by now.

        Returns:
            the seconds of a copy.

        Raises:
            HostMemoryError: the copy failed.
        """
        seconds, is_copied = 0.0, False
        if self.host is not None:
            drop_seconds, copy_seconds = self._drop_seconds(kept.source), self._copy_seconds(kept)
            if min(drop_seconds, copy_seconds) == NEVER_SECONDS:
                return 0.0
            is_copied = copy_seconds < drop_seconds
        if is_copied:
            seconds = self._copy(kept.source)
        else:
            assert kept.source.call is not None
            self.dropped.setdefault(kept.source.call, []).append(kept)
        kept.let_go()
        self.freed += 1
        return seconds

    def _copy(self, source: Source) -> float:
        """Copy contents to the host, unless they are there; return the seconds."""
        began, storage = time.perf_counter(), source.live
        if source.host is None:
            assert self.host is not None and storage is not None
            with no_modes():
                whole = bytes_of(storage)
            source.host = self.host.copy(whole)
            self.to_host_bytes += source.bytes
            del whole  # it holds the storage, too
        settle(source)
        source.release()
        return time.perf_counter() - began

    def back(self, source: Source) -> torch.Tensor:
        """Return a tensor over a new storage with contents that are on the host.

        Raises:
            HostMemoryError: the copy failed.
        """
        assert source.host is not None
        self.to_device_bytes += source.bytes
        return source.host.back()

    def forget_dead(self) -> None:
        """Forget what was dropped and autograd no longer holds."""
        self._order = iter(())
        alive = {call: [kept for kept in group if kept.is_alive()] for call, group in self.dropped.items()}
        self.dropped = {call: group for call, group in alive.items() if group}

    def close(self) -> None:
        """Copy nothing to the host any more."""
        if self.host is not None:
            self.host.close()


def _seconds_to_make_again(kept: Kept) -> float:
    return seconds_to_make(kept.source)


def settle(source: Source) -> None:
    """Wait for a copy of contents to the host, if one has begun; one that failed is none.

    Raises:
        HostMemoryError: the copy failed.
    """
    if source.host is not None:
        try:
            source.host.wait()
        except HostMemoryError:
            source.host = None
            raise
