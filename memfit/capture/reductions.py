"""Reductions: the calls that average gradients over ranks, entered into the trace of a step's backward pass.

Each gradient is scaled into its bucket as soon as it is complete. A full bucket is reduced while backward goes on, and
is waited for once the next one is under way, so that one reduction and the ops of backward always overlap. Its
parameters are updated then, if each may be updated by itself, and the bucket is free. Gradients become views of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from memfit.binding import Value
from memfit.capture.data_parallel import Bucket, Slice
from memfit.capture.trace import Trace
from memfit.capture.traced import TracedCall
from memfit.errors import UnsupportedStepError
from memfit.graph import Phase, Role
from memfit.torch_private.ranks import start_sum, wait_for_sum
from memfit.torch_private.tensors import FakeTensorMode

_GROUP = "data parallel"

UpdateCall = Callable[[torch.Tensor, Value], TracedCall | None]
"""Given a parameter's fake and its gradient, returns the call that updates it; None if that is done in another way."""


class Ready(NamedTuple):
    """A gradient that is complete before the call at `position`."""

    position: int
    name: str
    fake: torch.Tensor
    gradient: Value

    @property
    def module(self) -> str:
        """The module of the parameter."""
        return self.name.rpartition(".")[0]


@dataclass(slots=True, kw_only=True)
class _Open:
    """A bucket of this step: its storage once it has one, and the gradients that it has."""

    bucket: Bucket
    flat: Value | None = None
    filled: list[tuple[Ready, Value]] = field(default_factory=list[tuple[Ready, Value]])


class Reductions:
    """Collects the gradients of one capture, and enters the calls that average them.

    Args:
        trace: of the step.
        mode: of its fakes.
        across: the ranks, and their buckets.
    """

    def __init__(self, trace: Trace, mode: FakeTensorMode, across: Any) -> None:
        self._trace, self._mode, self._across = trace, mode, across
        self._ready: list[Ready] = []

    def takes(self, _fake: torch.Tensor) -> bool:
        """Return whether the gradient of a parameter's fake is reduced: each is."""
        return True

    def add(self, name: str, fake: torch.Tensor) -> None:
        """Note that the gradient of a parameter is complete.

        Args:
            name: of the parameter.
            fake: the parameter's, with its gradient in `.grad`.

        Raises:
            UnsupportedStepError: a sparse gradient.
        """
        assert fake.grad is not None
        gradient = self._trace.gradient(fake.grad)
        if not isinstance(gradient, Value):
            raise UnsupportedStepError(
                f"the gradient of {name!r} is sparse; memfit reduces dense gradients only: make it with sparse=False"
            )
        self._ready.append(Ready(len(self._trace.calls), name, fake, gradient))

    def enter(self, update: UpdateCall, *, is_at_once: bool) -> dict[torch.Tensor, Value]:
        """Enter the calls; return the averaged gradient of each parameter's fake that `update` has not used.

        Args:
            update: makes the updates of parameters.
            is_at_once: whether a bucket's gradients are of use before backward ends; if not, all are waited for there.

        Raises:
            UnsupportedStepError: a complex parameter.
        """
        buckets = self._across.buckets({ready.name: ready.fake for ready in self._ready})
        opened = [_Open(bucket=bucket) for bucket in buckets]
        place_of = {one.name: (each, one) for each in opened for one in each.bucket.slices}
        calls: list[tuple[int, TracedCall]] = []
        averaged: dict[torch.Tensor, Value] = {}
        started = finished = 0

        def finish_until(count: int, position: int) -> None:
            nonlocal finished
            for each in opened[finished:count]:
                calls.extend((position, call) for call in self._finish(each, update, averaged))
            finished = max(finished, count)

        for ready in self._ready:
            calls.extend((ready.position, call) for call in self._fill(*place_of[ready.name], ready))
            while started < len(opened) and len(opened[started].filled) == len(opened[started].bucket.slices):
                calls.append((ready.position, self._start(opened[started])))
                started += 1
                if is_at_once:
                    finish_until(started - 1, ready.position)
        finish_until(len(opened), len(self._trace.calls))
        self._trace.insert(calls)
        return averaged

    def _storage(self, name: str, size: int, dtype: torch.dtype) -> Value:
        """Enter a storage of `size` elements on the step's device."""
        with self._mode:
            made = torch.empty(size, dtype=dtype, device=self._trace.device)
        return self._trace.add_storage(made, name=name, role=Role.GRADIENT)

    def _fill(self, opened: _Open, one: Slice, ready: Ready) -> Iterator[TracedCall]:
        """Yield the call that scales a gradient into its bucket; the bucket's first one makes it before."""
        module = ready.module
        if opened.flat is None:
            size, options = opened.bucket.size, {"dtype": opened.bucket.dtype, "device": opened.bucket.device}
            opened.flat = self._storage("bucket", size, opened.bucket.dtype)
            make = torch.ops.aten.empty.memory_format
            yield backward_call("bucket", make, ([size],), module, kwargs=options, made=[opened.flat])
        view = replace(opened.flat, shape=one.shape, stride=one.stride, offset=one.offset)
        opened.filled.append((ready, view))
        scaled, kwargs = (ready.gradient, 1.0 / self._across.size), {"out": view}
        yield backward_call("into_bucket", torch.ops.aten.mul.out, scaled, module, kwargs=kwargs, mutated=view)

    def _start(self, opened: _Open) -> TracedCall:
        assert opened.flat is not None
        args = (opened.flat, self._across.group.group_name)
        return backward_call("start_sum", start_sum, args, "", mutated=opened.flat, group=_GROUP, recomputable=False)

    def _finish(self, opened: _Open, update: UpdateCall, averaged: dict[torch.Tensor, Value]) -> Iterator[TracedCall]:
        """Yield the call that waits for a bucket, and those that use its gradients, or put these into `averaged`.

        A gradient that was there before the step is written to in place.
        """
        assert opened.flat is not None
        yield backward_call("wait_for_sum", wait_for_sum, (opened.flat,), "", mutated=opened.flat, recomputable=False)
        for ready, view in opened.filled:
            gradient = view
            if self._trace.storages[ready.gradient.storage].resident:
                gradient, copy = ready.gradient, torch.ops.aten.copy_.default
                yield backward_call("copy_", copy, (gradient, view), ready.module, mutated=gradient)
            yield from self._use(ready, gradient, update, averaged)

    def _use(
        self, ready: Ready, gradient: Value, update: UpdateCall, averaged: dict[torch.Tensor, Value]
    ) -> Iterator[TracedCall]:
        """Yield the update of a parameter, or put its gradient into `averaged` where another call uses it."""
        call = update(ready.fake, gradient)
        if call is None:
            averaged[ready.fake] = gradient
        else:
            yield call
            ready.fake.grad = None


def backward_call(name: str, target: Any, args: tuple[Any, ...], module: str, **others: Any) -> TracedCall:
    """Return a call of the backward pass.

    Args:
        name: of the op.
        target: a function or an operator.
        args: its arguments.
        module: that it works for.
        others: as for `TracedCall.of`.
    """
    return TracedCall.of(name, target, args, phase=Phase.BACKWARD, module=module, **others)
