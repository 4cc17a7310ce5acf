"""Reductions of sharded models: each group's gradients are summed over ranks, and each rank keeps its part.

Gradients are copied into one storage as soon as they are complete, in the layout of `fully_shard`: the rows of each
rank one after another, padded as its parts are. A sum is waited for at once; a plan defers that as its budget allows
(`memfit.planners.engine.overlapping`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from memfit.binding import Value
from memfit.capture.fully_sharded import FullySharded, ShardedGroup
from memfit.capture.reductions import Ready, Reductions, UpdateCall, backward_call
from memfit.capture.shards import COLLECTIVES, Shards
from memfit.capture.trace import Trace
from memfit.capture.traced import TracedCall
from memfit.torch_private.ranks import finish_scatter, start_scatter, start_sum, wait_for_sum
from memfit.torch_private.sharding import ShardedFacts
from memfit.torch_private.tensors import FakeTensorMode, contiguous_strides

_aten = torch.ops.aten


@dataclass(slots=True, kw_only=True)
class _Open:
    """A group of this step: its parameters with a gradient, each with its first element in a rank's part.

    `whole` holds the parts of all ranks, `part` this rank's part of the sum.
    """

    group: ShardedGroup
    places: dict[str, tuple[ShardedFacts, int]]
    dtype: torch.dtype
    length: int
    whole: Value | None = None
    part: Value | None = None
    filled: list[Ready] = field(default_factory=list[Ready])

    @property
    def is_full(self) -> bool:
        return len(self.filled) == len(self.places)


class ShardReductions(Reductions):
    """Collects the gradients of one capture of a sharded model, and enters the calls that reduce them.

    Args:
        trace: of the step.
        mode: of its fakes.
        sharded: the groups of the model.
        shards: of the capture.
    """

    def __init__(self, trace: Trace, mode: FakeTensorMode, sharded: FullySharded, shards: Shards) -> None:
        super().__init__(trace, mode, sharded)
        self._sharded, self._shards = sharded, shards

    def takes(self, fake: torch.Tensor) -> bool:
        """Return whether the gradient of a parameter's fake is reduced: that of a sharded one."""
        return fake in self._shards.parts

    def enter(self, update: UpdateCall, *, is_at_once: bool) -> dict[torch.Tensor, Value]:  # noqa: ARG002
        """Enter the calls, and return what `Reductions.enter` does.

        Args:
            update: makes the updates of parameters.
            is_at_once: changes nothing here: each part is waited for at once.
        """
        ready = {each.name: each for each in self._ready}
        opened = [
            self._opened(group, ready) for group in self._sharded.groups if not ready.keys().isdisjoint(group.names)
        ]
        group_of = {name: each for each in opened for name in each.places}
        calls: list[tuple[int, TracedCall]] = []
        reduced: dict[torch.Tensor, Value] = {}
        for each in self._ready:
            group = group_of[each.name]
            calls.extend((each.position, call) for call in self._fill(group, each))
            if group.is_full:
                calls.extend((each.position, call) for call in self._start(group))
                calls.extend((each.position, call) for call in self._finish(group, update, reduced))
        self._trace.insert(calls)
        return reduced

    def _opened(self, group: ShardedGroup, ready: dict[str, Ready]) -> _Open:
        places: dict[str, tuple[ShardedFacts, int]] = {}
        length = 0
        for name, each in zip(group.names, group.parameters, strict=True):
            if name in ready:
                places[name] = each, length
                length += math.prod(each.padded)
        dtype = group.facts.reduce_dtype or ready[next(iter(places))].gradient.dtype
        return _Open(group=group, places=places, dtype=dtype, length=length)

    def _fill(self, opened: _Open, ready: Ready) -> Iterator[TracedCall]:
        """Yield the calls that copy a gradient's rows; the group's first one makes the storage before."""
        each, start = opened.places[ready.name]
        module = ready.module
        if opened.whole is None:
            yield self._make(opened, module)
        assert opened.whole is not None
        for mine, theirs in _rows(opened.whole, opened.length, start, each, ready.gradient):
            yield backward_call("into_shards", _aten.copy_.default, (mine, theirs), module, mutated=mine)
        opened.filled.append(ready)

    def _make(self, opened: _Open, module: str) -> TracedCall:
        is_padded = any(each.padded[0] * self._sharded.size != each.shape[0] for each, _ in opened.places.values())
        size = self._sharded.size * opened.length
        options = {"dtype": opened.dtype, "device": self._trace.device}
        opened.whole = self._storage("shards", size, opened.dtype)
        make = _aten.zeros.default if is_padded else _aten.empty.memory_format
        return backward_call("shards", make, ([size],), module, kwargs=options, made=[opened.whole])

    def _start(self, opened: _Open) -> Iterator[TracedCall]:
        whole, module = opened.whole, opened.group.facts.name
        assert whole is not None
        before, _, operation = self._sharded.divisions(opened.group, opened.dtype)
        if before not in (None, 1):
            yield backward_call("div_", _aten.div_.Scalar, (whole, before), module, mutated=whole)
        opened.part = self._storage("part", opened.length, opened.dtype)
        args, facts = (whole, operation, self._sharded.group.group_name), {"group": COLLECTIVES, "recomputable": False}
        yield backward_call("scatter", start_scatter, args, module, mutated=whole, made=[opened.part], **facts)

    def _finish(self, opened: _Open, update: UpdateCall, reduced: dict[torch.Tensor, Value]) -> Iterator[TracedCall]:
        """Yield the call that waits for a group, and those that use its gradients, or put these into `reduced`."""
        whole, part, module = opened.whole, opened.part, opened.group.facts.name
        assert whole is not None and part is not None
        args = (part, whole, self._sharded.rank)
        yield backward_call("scattered", finish_scatter, args, module, mutated=part, recomputable=False)
        yield from self._sum_of_replicas(part, module)
        _, after, _ = self._sharded.divisions(opened.group, opened.dtype)
        if after not in (None, 1):
            yield backward_call("div_", _aten.div_.Scalar, (part, after), module, mutated=part)
        own_dtype = next(each.parameter.dtype for each, _ in opened.places.values())
        if own_dtype != opened.dtype:
            cast = self._storage("part", opened.length, own_dtype)
            options = {"dtype": own_dtype}
            yield backward_call("to_copy", _aten._to_copy.default, (part,), module, kwargs=options, made=[cast])
            part = cast
        for ready in opened.filled:
            each, start = opened.places[ready.name]
            view = _view(part, each.size, contiguous_strides(each.size), start)
            gradient = view
            if ready.fake in self._shards.gradients:
                gradient = self._trace.value(self._shards.gradients[ready.fake])
                yield backward_call("add_", _aten.add_.Tensor, (gradient, view), ready.module, mutated=gradient)
            yield from self._use(ready, gradient, update, reduced)

    def _sum_of_replicas(self, part: Value, module: str) -> Iterator[TracedCall]:
        """Yield the calls that sum a part over the replicas of the model, if there are several."""
        replicas = self._sharded.replicas
        if replicas is not None:
            args, facts = (part, replicas.group_name), {"mutated": part, "recomputable": False}
            yield backward_call("start_sum", start_sum, args, module, group=COLLECTIVES, **facts)
            yield backward_call("wait_for_sum", wait_for_sum, (part,), module, **facts)


def _rows(whole: Value, length: int, start: int, each: ShardedFacts, gradient: Value) -> Iterator[tuple[Value, Value]]:
    """Yield pairs of a place in the parts of all ranks and of the rows of a gradient that belong there.

    Args:
        whole: the parts, each of `length` elements.
        length: see above.
        start: of the parameter in a part.
        each: the parameter.
        gradient: of the whole parameter, with any strides.
    """
    rows, rest = each.padded[0], each.padded[1:]
    inner, row = (math.prod(rest), *contiguous_strides(rest)), gradient.stride[0]
    full, left = divmod(each.shape[0], rows)
    if full:
        yield (
            _view(whole, (full, rows, *rest), (length, *inner), start),
            _view(gradient, (full, rows, *rest), (rows * row, *gradient.stride), gradient.offset),
        )
    if left:
        yield (
            _view(whole, (left, *rest), inner, full * length + start),
            _view(gradient, (left, *rest), gradient.stride, gradient.offset + full * rows * row),
        )


def _view(value: Value, shape: Sequence[int], stride: Sequence[int], offset: int) -> Value:
    return replace(value, shape=tuple(shape), stride=tuple(stride), offset=offset)
