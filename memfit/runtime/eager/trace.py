"""One pass of a training loop, written down call by call: all that a Graph of it needs."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from memfit.runtime.eager.kept import Kept
from memfit.runtime.eager.needs import Need
from memfit.runtime.eager.operators import is_dense
from memfit.runtime.eager.sources import Source, Sources, tensors_given
from memfit.torch_private.tensors import storage_users, tensors_in

BEFORE = -1
"""The position of all that was there before the pass."""


class Content:
    """Contents of a storage in one pass.

    Attributes:
        bytes: of the storage.
        born: the position of the call that made them among the pass's calls, or BEFORE.
        place: the position among what that call made.
        can_be_remade: whether the call can be made again.
        is_held: whether code itself holds them when backward begins.
        written_over: the contents of the same storage whose place they took.
        reads: the positions of the calls that read them.
        dies: the number of calls after which they were gone; None if they are there at the end.
    """

    __slots__ = ("born", "bytes", "can_be_remade", "dies", "is_held", "place", "reads", "written_over")

    def __init__(
        self, size_bytes: int, born: int, place: int, *, can_be_remade: bool, written_over: Content | None = None
    ) -> None:
        self.bytes, self.born, self.place, self.can_be_remade = size_bytes, born, place, can_be_remade
        self.written_over = written_over
        self.is_held = False
        self.reads: list[int] = []
        self.dies: int | None = None


class TracedCall:
    """A call of the pass.

    Attributes:
        name: of its operator.
        need: of the call.
        seconds: it took.
        is_backward: whether autograd made it.
        reads, makes: contents.
        mutates: contents that it wrote to, and that cannot be made again; they go on as the same.
    """

    __slots__ = ("is_backward", "makes", "mutates", "name", "need", "reads", "seconds")

    def __init__(self, name: str, need: Need, seconds: float, *, is_backward: bool) -> None:
        self.name, self.need, self.seconds, self.is_backward = name, need, seconds, is_backward
        self.reads: list[Content] = []
        self.makes: list[Content] = []
        self.mutates: list[Content] = []


class Trace:
    """The calls of a pass, and the contents that they read and made.

    Attributes:
        calls: in order.
        contents: in the order of their first mention.
        live_bytes: on the device before the pass.

    Args:
        sources: of all storages.
        live_bytes: see above.
    """

    def __init__(self, sources: Sources, live_bytes: int) -> None:
        self.calls: list[TracedCall] = []
        self.contents: list[Content] = []
        self.live_bytes = live_bytes
        self._sources = sources
        self._of: weakref.WeakKeyDictionary[Source, Content] = weakref.WeakKeyDictionary()
        self._watched: list[weakref.ref[torch.UntypedStorage]] = []

    def read(self, args: Any, kwargs: Any) -> dict[int, Content]:
        """Return the contents that a call is given, by storage; it is made next."""
        found: dict[int, Content] = {}
        for tensor in tensors_given((args, kwargs)):
            if is_dense(tensor):
                storage = tensor.untyped_storage()
                source = self._sources.of(storage)
                content = self._of.get(source)
                if content is None:
                    content = Content(source.bytes, BEFORE, 0, can_be_remade=False)
                    self._enter(storage, source, content)
                found[storage._cdata] = content
        return found

    def add(self, call: TracedCall, read: Mapping[int, Content], written: list[torch.Tensor], returned: Any) -> None:
        """Add a call that was made, after the sources of its results were entered.

        Args:
            call: still without contents.
            read: what `read` returned before it.
            written: the tensors that it wrote to.
            returned: what it returned.
        """
        position = len(self.calls)
        call.reads = list(dict.fromkeys(read.values()))
        for content in call.reads:
            content.reads.append(position)
        for tensor in written:
            self._write(call, position, tensor.untyped_storage(), read)
        for tensor in tensors_in(returned):
            if is_dense(tensor):
                storage = tensor.untyped_storage()
                source = self._sources.of(storage)
                if source not in self._of:
                    content = Content(source.bytes, position, source.place, can_be_remade=source.call is not None)
                    self._enter(storage, source, content)
                    call.makes.append(content)
        self.calls.append(call)

    def begin_backward(self, aliases: Mapping[Source, int]) -> None:
        """Find out what code itself holds besides autograd, before the first node of the pass runs.

        Args:
            aliases: how many tensors autograd holds over each of the contents that it saved.
        """
        for source, count in aliases.items():
            storage, content = source.live, self._of.get(source)
            if storage is not None and content is not None:
                content.is_held = storage_users(storage) > count + 1  # and this function's own

    def end(self) -> None:
        """Complete the contents: what was let go and made again for a later call lived until that call."""
        self._watched.clear()
        for content in self.contents:
            if content.dies is not None and content.reads:
                content.dies = max(content.dies, content.reads[-1] + 1)

    def _write(
        self, call: TracedCall, position: int, storage: torch.UntypedStorage, read: Mapping[int, Content]
    ) -> None:
        before, source = read[storage._cdata], self._sources.of(storage)
        if source.call is None:
            self._of[source] = before
            if before not in call.mutates:
                call.mutates.append(before)
            return
        before.dies = position
        content = Content(source.bytes, position, source.place, can_be_remade=True, written_over=before)
        self._enter(storage, source, content)
        call.makes.append(content)

    def _enter(self, storage: torch.UntypedStorage, source: Source, content: Content) -> None:
        self._of[source] = content
        self.contents.append(content)
        self._watched.append(weakref.ref(storage, partial(self._gone, content)))

    def _gone(self, content: Content, _storage: object) -> None:
        if content.dies is None:
            content.dies = len(self.calls)


def aliases_of(kept: Mapping[Source, Kept]) -> dict[Source, int]:
    """Return how many tensors autograd holds over each of the contents that it saved and that are there."""
    return {source: len(each.alive()) for source, each in kept.items() if each.is_there}
