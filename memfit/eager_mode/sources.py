"""What eager mode knows of storages: how the contents of each were made, and how they are recomputed.

Contents are a `Source`: a storage that is written to in place has another Source from then on. Contents that a forward
pass made under the mode know the call that made them; others (parameters, batches, what backward computes) are never
recomputed.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable
from typing import Any

import torch

from memfit.memory.host.room import OnHost
from memfit.memory.place import Place

_ATOMS = {int, float, bool, type(None), str, torch.dtype, torch.device}
_LONGEST_CHAIN = 256  # calls that are counted for the cost of making contents again


BLANK = (
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.empty_permuted,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
)
"""Operators whose results have no contents yet: what fills them may do so where the mode does not look."""


class Call:
    """A call that made contents.

    Attributes:
        function: the operator.
        args, kwargs: its arguments, with a `Place` in a Source in the place of each tensor.
        inputs: what must be there before it can be recomputed, each once.
        held: the storages of those that cannot be recomputed.
        number: calls are counted.
        seconds, need_bytes: that it takes.
        generators: the states of the random generators before it, if it draws.
    """

    __slots__ = ("args", "function", "generators", "held", "inputs", "kwargs", "need_bytes", "number", "seconds")

    def __init__(self, number: int, function: Any, seconds: float, need_bytes: int, generators: Any) -> None:
        self.number, self.function, self.generators = number, function, generators
        self.seconds, self.need_bytes = seconds, need_bytes
        self.args: Any = ()
        self.kwargs: Any = {}
        self.inputs: list[Source] = []
        self.held: list[Held] = []

    def read(self, sources: Sources, args: Any, kwargs: Any) -> None:
        """Remember what the call is made with, and that it reads it.

        Args:
            sources: of all storages that are known.
            args, kwargs: that the call is made with.

        Raises:
            NotImplementedError, RuntimeError: a tensor without a storage, or without a shape, of its own.
        """
        read: dict[Source, None] = {}
        number = self.number
        self.args = [arg if type(arg) in _ATOMS else template(sources, arg, number, read) for arg in args]
        if kwargs:
            self.kwargs = template(sources, kwargs, number, read)
        self.inputs = list(read)
        self.held = [source.hold() for source in self.inputs if source.call is None]


class Held:
    """A storage that is held for the calls that read it; None once its contents are on the host."""

    __slots__ = ("__weakref__", "storage")

    def __init__(self, storage: torch.UntypedStorage | None) -> None:
        self.storage = storage


class Source:
    """Contents of a storage.

    Attributes:
        call: that made them; None for contents that cannot be recomputed.
        place: the position of the tensor among the call's results, or among its arguments if it wrote in place.
        in_place: whether the call wrote over other contents of the storage.
        storage: a weak reference to the storage that holds them; dead if it is gone, None if it was written to since.
        bytes: of the storage.
        used_at: the number of the last call that read them.
        readers: how many calls are known to read them.
        host: their copy on the host, if there is one.
    """

    __slots__ = (
        "__weakref__",
        "_held",
        "bytes",
        "call",
        "host",
        "in_place",
        "place",
        "readers",
        "storage",
        "used_at",
    )

    def __init__(self, storage: torch.UntypedStorage, call: Call | None, place: int, *, in_place: bool = False) -> None:
        self.storage: weakref.ref[torch.UntypedStorage] | None = weakref.ref(storage)
        self.bytes = storage.nbytes()
        self.call, self.place, self.in_place = call, place, in_place
        self.used_at = self.readers = 0
        self.host: OnHost | None = None
        self._held: weakref.ref[Held] | None = None

    @property
    def is_blank(self) -> bool:
        """Whether the contents are what somebody else has filled them with."""
        return self.call is not None and not self.in_place and self.call.function.overloadpacket in BLANK

    @property
    def live(self) -> torch.UntypedStorage | None:
        """The storage that holds the contents, if there is one."""
        return None if self.storage is None else self.storage()

    def hold(self) -> Held:
        """Hold the storage for a call that reads it, until `release`."""
        held = None if self._held is None else self._held()
        if held is None:
            held = Held(self.live if self.host is None else None)
            self._held = weakref.ref(held)
        return held

    def release(self) -> None:
        """Hold the storage no longer for the calls that read it: the host has the contents."""
        held = None if self._held is None else self._held()
        if held is not None:
            held.storage = None


class Sources:
    """The Sources of all storages that the mode has seen, by storage."""

    def __init__(self) -> None:
        self._of: dict[int, Source] = {}

    def find(self, storage: torch.UntypedStorage) -> Source | None:
        """Return the present contents of a storage, if they are known."""
        found = self._of.get(storage._cdata)
        return found if found is not None and found.live is storage else None

    def of(self, storage: torch.UntypedStorage) -> Source:
        """Return the present contents of a storage; unknown ones cannot be recomputed."""
        return self.find(storage) or self.made(storage, None, 0)

    def enter(self, storage: torch.UntypedStorage, source: Source) -> None:
        """Note that a storage holds contents again: recomputed, or copied back from the host.

        Args:
            storage: that holds them; it is not kept alive.
            source: of the contents; it refers to this storage from now on.
        """
        source.storage = weakref.ref(storage)
        self._of[storage._cdata] = source

    def made(self, storage: torch.UntypedStorage, call: Call | None, place: int) -> Source:
        """Enter the contents of a new storage.

        Args:
            storage: of a result.
            call: that made it; None if it cannot be made again.
            place: of the result among those of the call.
        """
        found = self._of[storage._cdata] = Source(storage, call, place)
        return found

    def written(self, storage: torch.UntypedStorage, call: Call | None, place: int) -> Source:
        """Enter the contents of a storage after it was written to.

        Args:
            storage: that was written to.
            call: that wrote; None if it cannot be made again.
            place: of the argument or result on that storage.
        """
        before = self.find(storage)
        if before is not None:
            before.storage = None
        found = self._of[storage._cdata] = Source(storage, call, place, in_place=True)
        return found

    def hold_without(self, lost: set[Source]) -> None:
        """Mark contents on the device that are made of lost ones as not recomputable.

        The calls that read them hold them.

        Args:
            lost: contents that are about to be written over.
        """
        there = {source for source in self._of.values() if source.live is not None and source.call is not None}
        remade = [source for source in needed_by(there) if source.call is not None and source.host is None]
        gone, held = set(lost), set[Source]()
        for source in sorted(remade, key=lambda each: call_of(each).number):
            if not gone.isdisjoint(call_of(source).inputs):
                (gone if source.live is None else held).add(source)
        for source in remade:
            call_of(source).held += [each.hold() for each in call_of(source).inputs if each in held]
        for source in held - lost:
            source.call = None

    def forget(self, needed: set[Source], since: float) -> None:
        """Drop the entries of storages that are gone, and forget how most of the others were made.

        Args:
            needed: contents of which it is not forgotten.
            since: the number of a call: of what it and later ones made it is not forgotten either. What reads that next
                would hold it otherwise, as what cannot be recomputed.
        """
        self._of = {key: source for key, source in self._of.items() if source.live is not None}
        for source in self._of.values():
            if source.call is not None and source.call.number >= since:
                made_of = needed_by([source], needed)
                if len(made_of) <= _LONGEST_CHAIN:  # or a loop that saves nothing would be remembered from its start
                    needed |= made_of
        for source in self._of.values():
            if source not in needed:
                source.call = None


def template(sources: Sources, tree: Any, now: int, read: dict[Source, None]) -> Any:
    """Return arguments with a Place in a Source in the place of each tensor, and note that call `now` reads them.

    Args:
        sources: of all storages.
        tree: an argument, or a tuple, list or dict of them.
        now: number of the call.
        read: is given the Sources, in order.
    """
    if type(tree) in _ATOMS:
        return tree
    if isinstance(tree, torch.Tensor):
        source = sources.of(tree.untyped_storage())
        source.used_at = now
        source.readers += 1
        read[source] = None
        return Place.of(tree, source)
    if isinstance(tree, list | tuple):
        return [template(sources, each, now, read) for each in tree]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(tree, dict):
        return {key: template(sources, each, now, read) for key, each in tree.items()}  # pyright: ignore
    return tree


def missing_calls(source: Source) -> list[Source] | None:
    """Return the contents to make, in the order of their first calls, so that `source` is there again at the end.

    Args:
        source: its storage is gone, and it is not on the host.

    Returns:
        None if that cannot be; what is on the host is not among them.
    """
    missing = {source}
    waiting = [source]
    while waiting:
        at = waiting.pop()
        if at.call is None:
            return None
        gone = [each for each in at.call.inputs if each.live is None and each.host is None]
        lacking = [each for each in gone if each not in missing]
        missing.update(lacking)
        waiting += lacking
    return sorted(missing, key=lambda each: call_of(each).number)


def seconds_to_make(source: Source) -> float:
    """Return the seconds to make contents again that are there now: their call's, and those of what it lacks.

    Returns:
        infinity if they cannot be recomputed.
    """
    call = source.call
    if call is None:
        return float("inf")
    waiting = [each for each in call.inputs if each.storage is None or each.storage() is None]
    total, seen = call.seconds, {call}
    while waiting:
        at = waiting.pop()
        if at.live is not None:
            continue
        if at.host is not None:
            total += at.host.seconds_back
            continue
        if at.call is None or len(seen) >= _LONGEST_CHAIN:
            return float("inf")
        if at.call not in seen:
            seen.add(at.call)
            total += at.call.seconds
            waiting += at.call.inputs
    return total


def needed_by(sources: Iterable[Source], there: Container[Source] = ()) -> set[Source]:
    """Return contents with all that they are made of, those on the device included; copies on the host need no sources.

    Args:
        sources: the contents.
        there: contents that stay where they are, so that what they are made of is not needed.
    """
    seen = set(sources)
    waiting = list(seen)
    while waiting:
        at = waiting.pop()
        inputs = at.call.inputs if at.call is not None and at.host is None and at not in there else []
        new = [each for each in inputs if each not in seen]
        seen.update(new)
        waiting += new
    return seen


def call_of(source: Source) -> Call:
    """Return the call that made contents, of those that have one."""
    assert source.call is not None
    return source.call


def flat(returned: Any) -> list[Any]:
    """Return what a call returned as a list."""
    return list(returned) if isinstance(returned, list | tuple) else [returned]


def tensors_given(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in the arguments of an operator, in order.

    Args:
        tree: tuples, lists and dicts of no other kinds, in which tensors stand.
    """
    found: list[torch.Tensor] = []
    for each in tree.values() if isinstance(tree, dict) else tree:  # pyright: ignore[reportUnknownVariableType]
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, tuple | list | dict):
            found += tensors_given(each)
    return found
