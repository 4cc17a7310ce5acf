"""How eager mode makes contents again: by the calls that made them, with the same random numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from memfit.binding import map_values, values_in
from memfit.capture.generators import all_states, set_states
from memfit.eager_mode.sources import Call, Source, Sources, call_of, flat, missing_calls
from memfit.memory.place import Place, bytes_of


class LostContentsError(Exception):
    """What contents are made of is gone, or gives other contents than before."""


class Again:
    """Makes contents again whose storages are gone, or copies them back from the host.

    What is there when a call comes may be freed before, and is then recomputed for it.

    Args:
        sources: of all storages.
        before_call: called before each call, whose inputs are there, to make room.
        done: called after each, with what it has made, by place.
        fetch: returns a tensor over contents that come back from the host.
    """

    def __init__(
        self,
        sources: Sources,
        before_call: Callable[[Call], None],
        done: Callable[[Call, dict[int, torch.Tensor]], None],
        fetch: Callable[[Source], torch.Tensor],
    ) -> None:
        self._sources, self._before_call, self._done, self._fetch = sources, before_call, done, fetch

    def make(self, source: Source) -> torch.Tensor:
        """Return a tensor over contents whose storage is gone.

        Raises:
            LostContentsError: they cannot be recomputed.
        """
        if source.host is not None:
            fetched = self._fetch(source)
            self._sources.enter(fetched.untyped_storage(), source)
            return fetched
        order = missing_calls(source)
        if order is None:
            raise LostContentsError
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
                self._done(call, found)
                del found, inputs
            held = {each: tensor for each, tensor in held.items() if last.get(each, -1) > number or each is source}
        return held[source] if source in held else _whole_of(source)

    def _hold(self, source: Source, held: dict[Source, torch.Tensor]) -> torch.Tensor:
        """Return a tensor over contents, recomputed if they are gone."""
        live = source.live
        if live is not None:
            if live.nbytes() != source.bytes:  # a gathered parameter, whose memory is given back between its uses
                raise LostContentsError
            return bytes_of(live)
        held[source] = self.make(source)
        return held[source]


def _whole_of(source: Source) -> torch.Tensor:
    """Return a tensor over contents that came back while others were recomputed."""
    live = source.live
    if live is None:
        raise LostContentsError
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
        raise LostContentsError
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
