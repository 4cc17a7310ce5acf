"""Fusing in-place writes into the call that made the storage they write to.

`sigmoid_` on a quarter of an LSTM's gates, or `shifted[:, 1:] = values` over new zeros, writes to a part of a storage.
As a mutation, it could be computed only once. If no other call reads the storage before, the call that made it and the
writes are fused to one call with one result, which can be rematerialized.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.binding import Call, Value, map_values
from memfit.capture.traced import TracedCall


@dataclass(frozen=True, slots=True)
class Fused:
    """A call, and the in-place calls on its results: `Fused(parts)(*tensors)` returns what the first part returns.

    Attributes:
        parts: the calls. A Value on storage -1 - n stands for argument n, one on storage n for a view of result n.
    """

    parts: tuple[Call, ...]

    @property
    def __name__(self) -> str:
        names = "+".join(str(getattr(part.target, "__name__", part.target)) for part in self.parts)
        digest = hashlib.sha256(repr(self.parts).encode()).hexdigest()[:8]  # of the scalars and views, too
        return f"{names}#{digest}"

    def __call__(self, *tensors: torch.Tensor) -> Any:
        results: list[torch.Tensor] = []

        def tensor(value: Value) -> torch.Tensor:
            return tensors[-1 - value.storage] if value.storage < 0 else value.on(results[value.storage])

        for part in self.parts:
            returned = part.target(*map_values(part.args, tensor), **map_values(part.kwargs, tensor))
            results = results or ([returned] if isinstance(returned, torch.Tensor) else list(returned))
        return results[0] if len(results) == 1 else tuple(results)


def calls_of(call: Call) -> list[Call]:
    """Return the calls that the call of a `Fused` stands for: the first makes the results, the others write to them.

    Args:
        call: its target is a `Fused`.
    """

    def original(value: Value) -> Value:
        if value.storage < 0:
            return call.args[-1 - value.storage]
        result = call.results[value.storage]
        assert result is not None
        return replace(value, storage=result.storage)

    parts = [
        replace(call, target=p.target, args=map_values(p.args, original), kwargs=map_values(p.kwargs, original))
        for p in call.target.parts
    ]
    return [parts[0], *(replace(part, results=()) for part in parts[1:])]


def fuse_in_place_writes(calls: Sequence[TracedCall], residents: set[int]) -> list[TracedCall | None]:
    """Return the calls with each fusable write merged into the call that made its storage.

    Args:
        calls: in execution order.
        residents: storages that exist before the step, or arrive at its boundary.

    Returns:
        as many entries as `calls`; None in the place of a merged write.
    """
    fused: list[TracedCall | None] = list(calls)
    parts: dict[int, list[TracedCall]] = {}
    made_at: dict[int, int] = {}
    mutated_at: dict[int, int] = {}
    seen: set[int] = set()  # storages that were read, other than by writes merged into the calls that made them
    for position, call in enumerate(calls):
        maker = _maker(call, made_at, mutated_at, seen, calls, residents)
        if maker is not None:
            parts[maker].append(call)
            fused[position] = None
            seen.update(set(call.reads).difference(calls[maker].writes))
        else:
            seen.update(call.reads, call.mutates)
            mutated_at.update(dict.fromkeys(call.mutates, position))
        for storage in call.writes:
            made_at[storage] = position
            parts.setdefault(position, [call])
    for position, together in parts.items():
        if len(together) > 1:
            fused[position] = _fuse(together)
    return fused


def _maker(
    call: TracedCall,
    made_at: dict[int, int],
    mutated_at: dict[int, int],
    seen: set[int],
    calls: Sequence[TracedCall],
    residents: set[int],
) -> int | None:
    """Return the position of the call that `call` can be merged into, or None."""
    if len(call.mutates) != 1 or call.writes or call.random or not call.recomputable:
        return None
    (storage,) = call.mutates
    maker = made_at.get(storage)
    if maker is None or storage in seen or calls[maker].random or not _is_simple(calls[maker]):
        return None
    own = set(calls[maker].writes)
    for read in call.reads:
        # The storages that it reads must have existed, in the same version, when the storage was made.
        was_there = read in residents or made_at.get(read, maker) < maker
        if read not in own and (not was_there or mutated_at.get(read, -1) >= maker):
            return None
    return maker


def _is_simple(call: TracedCall) -> bool:
    """Return whether every result is a tensor in a storage of its own, of which `Fused` can make views."""
    storages = [value.storage for value in call.results if value is not None]
    return len(storages) == len(call.results) == len(set(storages)) and not call.mutates


def _fuse(together: Sequence[TracedCall]) -> TracedCall:
    first = together[0]
    results = {value.storage: number for number, value in enumerate(first.results) if value is not None}
    given: dict[Value, int] = {}

    def local(value: Value) -> Value:
        if value.storage in results:
            return replace(value, storage=results[value.storage])
        return replace(value, storage=-1 - given.setdefault(value, len(given)))

    parts = tuple(
        Call(op=0, target=c.target, args=map_values(c.args, local), kwargs=map_values(c.kwargs, local))
        for c in together
    )
    reads = [storage for call in together for storage in call.reads if storage not in results]
    sources = tuple(source for call in together for source in call.sources)
    return replace(
        first, target=Fused(parts), args=tuple(given), kwargs={}, reads=tuple(dict.fromkeys(reads)), sources=sources
    )
