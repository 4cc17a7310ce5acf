"""Finishing a captured graph on its device: the bytes that kernels really take, and where they may write in place.

A capture runs on fake tensors. A fake may be wrong about the bytes of a storage, and only the device at hand shows
whether a kernel gives the same bits when it writes over its input. After this step the graph's structure is final.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import msgspec

from memfit.binding import Binding, Call
from memfit.capture.build import Captured
from memfit.capture.update_trial import is_update, with_measured_updates
from memfit.cost.in_place_trials import forms_to_try
from memfit.cost.observations import Corrections, Observation
from memfit.cost.observe import observe, observe_once
from memfit.cost.samples import Samples
from memfit.errors import WrongFakesError
from memfit.graph import Graph, Op, Storage

_log = logging.getLogger(__name__)
_Made = TypeVar("_Made")


def with_real_results(make: Callable[[Corrections], _Made]) -> _Made:
    """Return `make(corrections)`, which captures a step and finishes it.

    It is called without corrections, then with more of them, until no op's real results differ from the captured ones.

    Args:
        make: raises WrongFakesError, as `finish` does.

    Raises:
        WrongFakesError: a correction has not helped.
    """
    corrections: Corrections = {}
    while True:
        try:
            return make(corrections)
        except WrongFakesError as error:
            if error.corrections.keys() <= corrections.keys():
                raise
            corrections = {**corrections, **cast("Corrections", error.corrections)}


def finish(captured: Captured, *, progress: Callable[[float, float], None] | None = None) -> Captured:
    """Return `captured` with the graph's final structure, and with what each op was observed to do on its device.

        captured = finish(capture(step))
        graph = measure(captured.graph, captured.binding, captured.observed)

    `Storage.bytes` become the real bytes where a kernel returns a storage of another size than its fake: mse_loss, for
    example, returns a number on a storage of its input's size. `Op.reuses` gets a pair for each form that writes over
    an input and was seen to give the same bits. `Op.workspace_bytes` of the optimizer's updates are measured. A graph
    for a device that is not here is not finished: it keeps the captured bytes, and the reuses that torch's schemas
    promise.

    Args:
        captured: a captured step, whose device is here.
        progress: called with (ops run, ops to run).

    Raises:
        WrongFakesError: a fake kernel is wrong about a dtype or strides, or returns a tensor in the place of None: see
            `with_real_results`.
        CaptureError: an op's real results differ from the captured ones in number, shape or offset.
    """
    observed = observe(captured.graph, captured.binding, progress=progress)
    finished = finish_as_observed(captured, observed)
    return replace(finished, graph=with_measured_updates(finished.graph, finished.binding))


def finish_near(captured: Captured, near: Captured, samples: Samples) -> Captured:
    """Return `captured` finished after one run of each op that is new, with what another size of the step has shown.

    Results, workspaces and in-place forms are observed at this size. Seconds come from `samples`. What the optimizer's
    updates take, which does not depend on the batch, is that of `near`, unless its settings are others now.

    Args:
        captured: a captured step, whose device is here.
        near: a finished capture of the same structure, on a batch of another size.
        samples: seconds of that structure.

    Raises:
        WrongFakesError, CaptureError: as `finish`.
    """

    def tried(op: int) -> bool:
        seen = near.observed[op]
        return seen is not None and any(seen.overwrites.values())

    observed = observe_once(captured.graph, captured.binding, samples, tried)
    finished = finish_as_observed(captured, observed)
    ops = (
        msgspec.structs.replace(op, workspace_bytes=known.workspace_bytes, seconds=known.seconds)
        if is_update(call)
        else op
        for op, known, call in zip(finished.graph.ops, near.graph.ops, finished.binding.calls, strict=True)
    )
    graph = msgspec.structs.replace(finished.graph, ops=tuple(ops))
    return replace(finished, graph=with_measured_updates(graph, finished.binding))


def finish_as_observed(captured: Captured, observed: Sequence[Observation | None]) -> Captured:
    """Return `captured` finished with the observation of each op; None leaves an op as it is.

    Args:
        captured: of the step, as recorded.
        observed: by op, in the order of the graph's ops.
    """
    graph, calls = captured.graph, captured.binding.calls
    storages = _with_real_bytes(graph, calls, observed)
    ops = (
        op if seen is None else _with_seen_reuses(op, call, seen)
        for op, call, seen in zip(graph.ops, calls, observed, strict=True)
    )
    finished = msgspec.structs.replace(
        graph, storages=storages, ops=tuple(_with_equal_reuses(op, storages) for op in ops)
    )
    return replace(captured, graph=finished.verify(), observed=tuple(observed))


def with_every_form(graph: Graph, binding: Binding) -> Graph:
    """Return `graph` with a pair in `reuses` for every form that writes over an input, seen to be right or not: a plan
    from another device may use any of them.

    Args:
        graph: as recorded.
        binding: its calls know their in-place forms.
    """
    ops = (_with_reuses(op, tuple(call.in_place_forms)) for op, call in zip(graph.ops, binding.calls, strict=True))
    return msgspec.structs.replace(graph, ops=tuple(_with_equal_reuses(op, graph.storages) for op in ops)).verify()


def _with_real_bytes(
    graph: Graph, calls: Sequence[Call], observed: Sequence[Observation | None]
) -> tuple[Storage, ...]:
    storages = list(graph.storages)
    for op, call, seen in zip(graph.ops, calls, observed, strict=True):
        for place, real_bytes in (seen.storage_bytes if seen is not None else {}).items():
            value = call.results[place]
            assert value is not None
            known = storages[value.storage]
            _log.info("op %s: storage %r has %d bytes, captured %d", op.name, known.name, real_bytes, known.bytes)
            storages[value.storage] = msgspec.structs.replace(known, bytes=real_bytes)
    return tuple(storages)


def _with_seen_reuses(op: Op, call: Call, seen: Observation) -> Op:
    """Return `op` with the reuses of the unpromised forms that gave the same bits."""
    return _with_reuses(op, tuple(read for read, place in forms_to_try(call).items() if seen.overwrites.get(place)))


def _with_reuses(op: Op, reads: Sequence[int]) -> Op:
    pairs = dict.fromkeys([*op.reuses, *((read, op.writes[0]) for read in reads)])
    return msgspec.structs.replace(op, reuses=tuple(pairs))


def _with_equal_reuses(op: Op, storages: Sequence[Storage]) -> Op:
    """Return `op` without the reuses whose storages turned out to have different bytes."""
    pairs = tuple(pair for pair in op.reuses if storages[pair[0]].bytes == storages[pair[1]].bytes)
    return msgspec.structs.replace(op, reuses=pairs)
