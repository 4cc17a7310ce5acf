"""What eager mode knows of storages: how the contents of each were made, and how they are made again.

Contents are a `Source`: a storage that is written to in place has another Source from then on. Contents that a forward
pass made under the mode know the call that made them; others (parameters, batches, what backward computes) are never
made again.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from memfit.capture.functionalize import BATCH_NORMS
from memfit.capture.generators import all_states, set_state
from memfit.cost.views import lazy_view, reinterpret

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


class LostContentsError(Exception):
    """What contents are made of is gone, or gives other contents than before."""


class Call:
    """A call that made contents.

    Attributes:
        function: the operator.
        args, kwargs: its arguments, with a `View` in the place of each tensor.
        number: calls are counted.
        seconds, need_bytes: that it takes.
        generators: the states of the random generators before it, if it draws.
    """

    __slots__ = ("args", "function", "generators", "kwargs", "need_bytes", "number", "seconds")

    def __init__(self, number: int, function: Any, seconds: float, need_bytes: int, generators: Any) -> None:
        self.number, self.function, self.generators = number, function, generators
        self.seconds, self.need_bytes = seconds, need_bytes
        self.args: Any = ()
        self.kwargs: Any = {}


class Source:
    """Contents of a storage.

    Attributes:
        call: that made them; None for contents that cannot be made again.
        place: the position of the tensor among the call's results, or among its arguments if it wrote in place.
        in_place: whether the call wrote over other contents of the storage.
        storage: a weak reference to the storage that holds them; dead if it is gone, None if it was written to since.
        bytes: of the storage.
        used_at: the number of the last call that read them.
        readers: how many calls are known to read them.
    """

    __slots__ = ("__weakref__", "bytes", "call", "in_place", "place", "readers", "storage", "used_at")

    def __init__(self, storage: torch.UntypedStorage, call: Call | None, place: int, *, in_place: bool = False) -> None:
        self.storage: weakref.ref[torch.UntypedStorage] | None = weakref.ref(storage)
        self.bytes = storage.nbytes()
        self.call, self.place, self.in_place = call, place, in_place
        self.used_at = self.readers = 0

    @property
    def is_blank(self) -> bool:
        """Whether the contents are what somebody else has filled them with."""
        return self.call is not None and not self.in_place and self.call.function.overloadpacket in BLANK

    @property
    def live(self) -> torch.UntypedStorage | None:
        """The storage that holds the contents, if there is one."""
        return None if self.storage is None else self.storage()


class View:
    """A tensor over a Source. It holds the storage of contents that cannot be made again."""

    __slots__ = ("conjugated", "dtype", "held", "negated", "offset", "shape", "source", "stride")

    def __init__(self, source: Source, tensor: torch.Tensor) -> None:
        self.source = source
        self.held = source.live if source.call is None else None
        self.dtype, self.shape, self.stride = tensor.dtype, tensor.shape, tensor.stride()
        self.offset, self.conjugated, self.negated = tensor.storage_offset(), tensor.is_conj(), tensor.is_neg()

    def on(self, base: torch.Tensor) -> torch.Tensor:
        """Return the view on the storage of a tensor."""
        view = reinterpret(base, self.dtype, self.shape, self.stride, self.offset)
        return lazy_view(view, conjugated=self.conjugated, negated=self.negated)


class Sources:
    """The Sources of all storages that the mode has seen, by storage."""

    def __init__(self) -> None:
        self._of: dict[int, Source] = {}

    def find(self, storage: torch.UntypedStorage) -> Source | None:
        """Return the present contents of a storage, if they are known."""
        found = self._of.get(storage._cdata)
        return found if found is not None and found.live is storage else None

    def of(self, storage: torch.UntypedStorage) -> Source:
        """Return the present contents of a storage; unknown ones cannot be made again."""
        found = self._of.get(storage._cdata)
        if found is None or found.storage is None or found.storage() is not storage:
            found = self._of[storage._cdata] = Source(storage, None, 0)
        return found

    def enter(self, storage: torch.UntypedStorage, source: Source) -> None:
        """Note that a storage holds contents that were made again."""
        source.storage = weakref.ref(storage)
        self._of[storage._cdata] = source

    def made(self, storage: torch.UntypedStorage, call: Call | None, place: int) -> Source:
        """Enter the contents of a new storage."""
        found = self._of[storage._cdata] = Source(storage, call, place)
        return found

    def written(self, storage: torch.UntypedStorage, call: Call | None, place: int) -> Source:
        """Enter the contents of a storage after it was written to."""
        before = self._of.get(storage._cdata)
        if before is not None and before.live is storage:
            before.storage = None
        found = self._of[storage._cdata] = Source(storage, call, place, in_place=True)
        return found

    def forget(self, needed: set[Source]) -> None:
        """Drop the entries of storages that are gone, and forget how the others were made.

        Args:
            needed: contents of which it is not forgotten.
        """
        self._of = {key: source for key, source in self._of.items() if source.live is not None}
        for source in self._of.values():
            if source not in needed:
                source.call = None


def template(sources: Sources, tree: Any, now: int) -> Any:
    """Return arguments with a View in the place of each tensor, and note that call `now` reads them.

    Args:
        sources: of all storages.
        tree: an argument, or a tuple, list or dict of them.
        now: number of the call.
    """
    if type(tree) in _ATOMS:
        return tree
    if isinstance(tree, torch.Tensor):
        source = sources.of(tree.untyped_storage())
        source.used_at = now
        source.readers += 1
        return View(source, tree)
    if isinstance(tree, list | tuple):
        return [template(sources, each, now) for each in tree]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(tree, dict):
        return {key: template(sources, each, now) for key, each in tree.items()}  # pyright: ignore
    return tree


def views_in(tree: Any) -> Iterator[View]:
    """Yield the Views in arguments, in order."""
    if isinstance(tree, View):
        yield tree
    elif isinstance(tree, list | tuple):
        for each in tree:  # pyright: ignore[reportUnknownVariableType]
            yield from views_in(each)
    elif isinstance(tree, dict):
        yield from views_in(list(tree.values()))  # pyright: ignore[reportUnknownArgumentType]


def inputs_of(call: Call) -> list[Source]:
    """Return what must be there before a call can be made again, each once."""
    views = views_in((_without_statistics(call.function, call.args), call.kwargs))
    return list(dict.fromkeys(view.source for view in views))


def missing_calls(source: Source) -> list[Source] | None:
    """Return the contents to make, in the order of their first calls, so that `source` is there again at the end.

    Args:
        source: its storage is gone.

    Returns:
        None if that cannot be.
    """
    missing = {source}
    waiting = [source]
    while waiting:
        at = waiting.pop()
        if at.call is None:
            return None
        lacking = [each for each in inputs_of(at.call) if each.live is None and each not in missing]
        missing.update(lacking)
        waiting += lacking
    return sorted(missing, key=lambda each: _call(each).number)


def seconds_to_make(source: Source) -> float:
    """Return the seconds to make contents again that are there now: their call's, and those of what it lacks.

    Returns:
        infinity if they cannot be made again.
    """
    if source.call is None:
        return float("inf")
    total, seen, waiting = source.call.seconds, {source.call}, inputs_of(source.call)
    while waiting:
        at = waiting.pop()
        if at.live is not None:
            continue
        if at.call is None or len(seen) >= _LONGEST_CHAIN:
            return float("inf")
        if at.call not in seen:
            seen.add(at.call)
            total += at.call.seconds
            waiting += inputs_of(at.call)
    return total


def needed_by(sources: Iterable[Source]) -> set[Source]:
    """Return contents with all that they are made of, what is there now included."""
    seen = set(sources)
    waiting = list(seen)
    while waiting:
        at = waiting.pop()
        new = [each for each in inputs_of(at.call) if each not in seen] if at.call is not None else []
        seen.update(new)
        waiting += new
    return seen


def make_again(
    sources: Sources,
    source: Source,
    before_call: Callable[[Call], None],
    done: Callable[[Call, dict[int, torch.Tensor]], None],
) -> torch.Tensor | None:
    """Make contents again whose storage is gone, and return a tensor over them; None if that cannot be.

    What is there when a call comes may be let go before, and is then made again for it.

    Args:
        sources: of all storages.
        source: the contents.
        before_call: called before each call, whose inputs are there, to make room.
        done: called after each, with what it has made, by place.
    """
    order = missing_calls(source)
    if order is None:
        return None
    last = {each: number for number, at in enumerate(order) for each in inputs_of(_call(at))}
    held: dict[Source, torch.Tensor] = {}
    for number, at in enumerate(order):
        if at.live is None:
            call = _call(at)
            inputs = [_hold(sources, each, held, before_call, done) for each in inputs_of(call)]
            before_call(call)
            found = _run_again(call, at, last, number)
            for each in order[number:]:
                if each.call is call:
                    held[each] = _same_size(each, found[each.place])
                    sources.enter(held[each].untyped_storage(), each)
            done(call, found)
            del found, inputs
        held = {each: tensor for each, tensor in held.items() if last.get(each, -1) > number or each is source}
    return held[source] if source in held else _whole_of(source)


def _whole_of(source: Source) -> torch.Tensor:
    """Return a tensor over contents that came back while others were made again."""
    live = source.live
    if live is None:
        raise LostContentsError
    return _whole(live)


def _hold(
    sources: Sources,
    source: Source,
    held: dict[Source, torch.Tensor],
    before_call: Callable[[Call], None],
    done: Callable[[Call, dict[int, torch.Tensor]], None],
) -> torch.Tensor:
    """Return a tensor over contents, made again if they are gone."""
    live = source.live
    if live is not None:
        return _whole(live)
    made = make_again(sources, source, before_call, done)
    if made is None:
        raise LostContentsError
    held[source] = made
    return made


def _run_again(call: Call, made: Source, last: Mapping[Source, int], number: int) -> dict[int, torch.Tensor]:
    """Run a call again, and return what it makes, by place; one that writes in place writes over what nothing reads."""
    if not made.in_place:
        return dict(enumerate(_run(call, {})))
    old = next(itertools.islice(views_in((call.args, call.kwargs)), made.place, None)).source
    storage = _whole_of(old).untyped_storage()
    if last[old] > number:  # another call reads what this one writes over
        storage = _whole(storage).clone().untyped_storage()
    else:
        old.storage = None
    _run(call, {old: storage})
    return {made.place: _whole(storage)}


def _same_size(source: Source, tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor) or tensor.untyped_storage().nbytes() != source.bytes:
        raise LostContentsError
    return tensor


def _whole(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _call(source: Source) -> Call:
    assert source.call is not None
    return source.call


def _run(call: Call, instead: Mapping[Source, torch.UntypedStorage]) -> list[Any]:
    """Run a call on what is there; return its results, flattened.

    Args:
        call: whose inputs are there.
        instead: storages that take the place of those of some contents.
    """

    args = _filled(_without_statistics(call.function, call.args), instead)
    kwargs = _filled(call.kwargs, instead)
    if call.generators is None:
        return flat(call.function(*args, **kwargs))
    before = generator_states(call.generators)
    try:
        _set_generators(call.generators)
        return flat(call.function(*args, **kwargs))
    finally:
        _set_generators(before)


def _filled(tree: Any, instead: Mapping[Source, torch.UntypedStorage]) -> Any:
    """Return arguments with tensors in the places of Views. (An inner function that calls itself is a cycle, which
    would keep the storages until the next collection of garbage.)"""
    if isinstance(tree, View):
        storage = instead.get(tree.source)
        return tree.on(_whole_of(tree.source) if storage is None else _whole(storage))
    if isinstance(tree, list):
        return [_filled(each, instead) for each in tree]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(tree, dict):
        return {key: _filled(each, instead) for key, each in tree.items()}  # pyright: ignore
    return tree


def generator_states(drawing: Any) -> dict[Any, torch.Tensor]:
    """Return the states of the generators that a call draws from, by generator or device.

    Args:
        drawing: the call's arguments, or earlier such states.
    """
    given = [each for each in drawing if isinstance(each, torch.Generator)]
    return {each: each.get_state() for each in given} if given else all_states()


def _set_generators(states: Mapping[Any, torch.Tensor]) -> None:
    for generator, state in states.items():
        if isinstance(generator, torch.Generator):
            generator.set_state(state)
        else:
            set_state(generator, state)


def _without_statistics(function: Any, args: Any) -> Any:
    """Return the arguments of a batch normalization in training without the running statistics: it does not read them,
    and must not update them again."""
    found = BATCH_NORMS.get(getattr(function, "_overloadpacket", None))
    if found is None:
        return args
    mean, variance, training = found
    if training is not None and not args[training]:
        return args
    return [None if place in (mean, variance) else arg for place, arg in enumerate(args)]


def flat(returned: Any) -> list[Any]:
    """Return what a call returned as a list."""
    return list(returned) if isinstance(returned, list | tuple) else [returned]
