"""How eager mode makes contents again: by the calls that made them, with the same random numbers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from memfit.binding import map_values, values_in
from memfit.capture.generators import all_states, set_states
from memfit.capture.lines import calling_line
from memfit.eager_mode.kept import Kept
from memfit.eager_mode.sources import Call, Source, Sources, call_of, flat, missing_calls
from memfit.errors import UnsupportedStepError
from memfit.memory.place import Place, bytes_of
from memfit.system.recorder import taken_bytes
from memfit.torch_private.autocast import without_autocast

if TYPE_CHECKING:
    from memfit.eager_mode.contents import Contents


class Again:
    """Brings contents back that were freed: made again by their calls, or copied back from the host.

    What is there when a call comes may be freed before, and is then recomputed for it.

    Args:
        contents: of the device.
    """

    def __init__(self, contents: Contents) -> None:
        self._contents, self._sources, self._releasing = contents, contents.sources, contents.releasing

    def bring_back(self, kept: Kept) -> None:
        """Let autograd hold contents again: their storage, if somebody else still has it, or recomputed ones.

        Raises:
            UnsupportedStepError: they cannot be recomputed, or are not those that were freed.
        """
        contents, live = self._contents, kept.source.live
        if live is not None:
            give_back(self._sources, kept, live)
            return
        began = time.perf_counter()
        was_busy, contents.is_busy = contents.is_busy, True
        target, contents.target = contents.target, kept.source
        try:
            with torch.no_grad(), without_autocast():
                made = self._make(kept.source)
            if not kept.is_there:
                give_back(self._sources, kept, made.untyped_storage())
        finally:
            contents.is_busy, contents.target, contents.running = was_busy, target, None
            self._releasing.pinned.clear()
        contents.passes.again_seconds += time.perf_counter() - began

    def _make(self, source: Source) -> torch.Tensor:
        """Return a tensor over contents whose storage is gone."""
        if source.host is not None:
            fetched = self._fetch(source)
            self._sources.enter(fetched.untyped_storage(), source)
            return fetched
        order = missing_calls(source)
        if order is None:
            raise _lost()
        last = {each: number for number, at in enumerate(order) for each in call_of(at).inputs}
        held: dict[Source, torch.Tensor] = {}
        for number, at in enumerate(order):
            if at.live is None:
                call = call_of(at)
                inputs = [self._hold(each, held) for each in call.inputs]
                self._before_call(call)
                found = _run_again(call, at, last, number)
                for each in order[number:]:
                    if each.call is call:
                        held[each] = _same_size(each, found[each.place])
                        self._sources.enter(held[each].untyped_storage(), each)
                self._after_call(call, found)
                del found, inputs
            held = {each: tensor for each, tensor in held.items() if last.get(each, -1) > number or each is source}
        return held[source] if source in held else _whole_of(source)

    def _hold(self, source: Source, held: dict[Source, torch.Tensor]) -> torch.Tensor:
        """Return a tensor over contents, recomputed if they are gone."""
        live = source.live
        if live is not None:
            if live.nbytes() != source.bytes:  # a gathered parameter, whose memory is given back between its uses
                raise _lost()
            return bytes_of(live)
        held[source] = self._make(source)
        return held[source]

    def _before_call(self, call: Call) -> None:
        """Make room for a call whose inputs are there."""
        contents = self._contents
        contents.made_again += 1
        self._releasing.pinned = {*call.inputs, *([] if contents.target is None else [contents.target])}
        if contents.upper_bytes + call.need_bytes > contents.budget_bytes:
            contents.make_room(call.need_bytes, call.function)
        contents.upper_bytes += call.need_bytes
        contents.running = call.function, (), {}  # what it is given is pinned

    def _after_call(self, call: Call, found: dict[int, torch.Tensor]) -> None:
        """Let autograd have contents that were recomputed on the way, as long as there is room for them."""
        contents = self._contents
        contents.running = None
        for kept in self._releasing.dropped.pop(call, []):
            tensor = found.get(kept.source.place)
            is_its = kept.source.call is call and not kept.is_there and kept.alive()
            if is_its and isinstance(tensor, torch.Tensor):
                give_back(self._sources, kept, tensor.untyped_storage())
                contents.kept[kept.source] = kept

    def _fetch(self, source: Source) -> torch.Tensor:
        """Copy contents back from the host, and let autograd have them if it saved them."""
        contents, releasing = self._contents, self._releasing
        releasing.pinned = set() if contents.target is None else {contents.target}
        assert releasing.host is not None
        need_bytes = taken_bytes(source.bytes, releasing.host.device)
        contents.upper_bytes = contents.live_bytes()
        if contents.upper_bytes + need_bytes > contents.budget_bytes:
            contents.make_room(need_bytes, "a copy back from the host")
        contents.upper_bytes += need_bytes
        tensor = releasing.back(source)
        kept = contents.kept.get(source)
        if kept is not None and not kept.is_there:
            give_back(self._sources, kept, tensor.untyped_storage())
        return tensor


def give_back(sources: Sources, kept: Kept, storage: torch.UntypedStorage) -> None:
    """Let autograd hold contents again.

    Args:
        sources: of all storages.
        kept: the contents, as they were when they were freed.
        storage: that should hold the same.

    Raises:
        UnsupportedStepError: they are not those that were freed.
    """
    if storage.nbytes() != kept.source.bytes or not kept.is_as_before(storage):
        raise _lost()
    kept.take(storage)
    sources.enter(storage, kept.source)


def _lost() -> UnsupportedStepError:
    return UnsupportedStepError(
        f"{calling_line()}: what autograd saved cannot be recomputed with the same contents: something that it is made "
        "of was written to where torch's operators do not show it (NumPy, another thread, a kernel of another "
        "library), or its kernels do not give the same bits twice; give a budget in which it stays"
    )


def _whole_of(source: Source) -> torch.Tensor:
    """Return a tensor over contents that came back while others were recomputed."""
    live = source.live
    if live is None:
        raise _lost()
    return bytes_of(live)


def _run_again(call: Call, made: Source, last: Mapping[Source, int], number: int) -> dict[int, torch.Tensor]:
    """Run a call again; return its results by place. A call that writes in place writes over unread memory."""
    if not made.in_place:
        return dict(enumerate(_run(call, {})))
    old = next(itertools.islice(values_in((call.args, call.kwargs)), made.place, None)).storage
    storage = _whole_of(old).untyped_storage()
    if last[old] > number:  # another call reads what this one writes over
        storage = bytes_of(storage).clone().untyped_storage()
    else:
        old.storage = None
    _run(call, {old: storage})
    return {made.place: bytes_of(storage)}


def _same_size(source: Source, tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor) or tensor.untyped_storage().nbytes() != source.bytes:
        raise _lost()
    return tensor


def _run(call: Call, instead: Mapping[Source, torch.UntypedStorage]) -> list[Any]:
    """Run a call on what is there; return its results, flattened.

    Args:
        call: whose inputs are there.
        instead: storages that take the place of those of some contents.
    """

    def tensor(place: Place) -> torch.Tensor:
        storage = instead.get(place.storage)
        return place.on(_whole_of(place.storage) if storage is None else storage)

    args, kwargs = map_values(call.args, tensor), map_values(call.kwargs, tensor)
    if call.generators is None:
        return flat(call.function(*args, **kwargs))
    before = generator_states(call.generators)
    try:
        set_states(call.generators)
        return flat(call.function(*args, **kwargs))
    finally:
        set_states(before)


def generator_states(drawing: Any) -> dict[Any, torch.Tensor]:
    """Return the states of the generators that a call draws from, by generator or device.

    Args:
        drawing: the call's arguments, or earlier such states.
    """
    given = [each for each in drawing if isinstance(each, torch.Generator)]
    return {each: each.get_state() for each in given} if given else all_states()
