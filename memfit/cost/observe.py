"""Observing the ops of a graph: each is run by itself on this device, unless an equal op was observed before."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from memfit.binding import Binding
from memfit.cost.environment import environment, free_bytes
from memfit.cost.in_place_trials import RUNS, forms_to_try, gives_same_bits
from memfit.cost.observations import PRIVATE, Observation, Observations, RealResult, call_key
from memfit.cost.op_inputs import InputMaker
from memfit.cost.result_check import differs
from memfit.cost.samples import Samples, work_of
from memfit.cost.single_op import Clock, Measurer, undisturbed
from memfit.errors import WrongFakesError
from memfit.graph import Graph
from memfit.system.load import Load
from memfit.torch_private.ranks import is_of_others

_log = logging.getLogger(__name__)


def observe(
    graph: Graph,
    binding: Binding,
    *,
    progress: Callable[[float, float], None] | None = None,
    clock: Clock = time.perf_counter,
) -> tuple[Observation | None, ...]:
    """Return what each op was seen to do when it was run by itself on the binding's device; None if it cannot be run.

    Each op is run on inputs made for it, which are freed at once. Equal ops are run once, and kept on disk in
    $MEMFIT_CACHE or ~/.cache/memfit. The first run's results are compared with the captured ones. Unpromised forms that
    write over an input are tried (`memfit.cost.in_place_trials`). The random generators stay as they were.

    The memory that is free on the device is the limit, not the budget of the step: a budget that is too small is
    refused with the least one that a plan reaches, which takes the workspaces of all ops.

    An optimizer's update is not run. An op is not observed either if it refuses the inputs made for it, or if the
    device has no room for them; a warning names the first of these.

    Args:
        graph: a captured graph.
        binding: its calls.
        progress: called with (ops run, ops to run).
        clock: gives seconds; CUDA devices are timed by events.

    Raises:
        WrongFakesError: real results differ from the captured ones in dtype or strides, or are None; a capture with the
            error's corrections has the real ones.
        CaptureError: an op's real results differ from the captured ones in number, shape or offset.
    """
    device: torch.device = binding.device
    known = Observations.load(environment(device))
    measurer = Measurer(graph=graph, device=device, inputs=InputMaker(device), clock=clock)
    keys = [call_key(call) or f"{PRIVATE}{call.op}" for call in binding.calls]
    skipped = _measure_missing(measurer, binding, keys, known, progress)
    _require_real_results(graph, binding, keys, known)
    _warn_of(skipped)
    _try_missing_forms(measurer, binding, keys, known)
    return tuple(known.by_key.get(key) for key in keys)


def observe_once(
    graph: Graph, binding: Binding, samples: Samples, tried: Callable[[int], bool]
) -> tuple[Observation | None, ...]:
    """Return what each op was seen to do in one run; its seconds are those of `samples`, where these are near.

    One run gives the workspace, and shows whether the fake kernel was right about the results, as `observe` does. Its
    seconds are rough: they are kept for this process, as samples, and not on disk. Ops that the disk knows are not run.

    Args:
        graph: a captured graph.
        binding: its calls.
        samples: of graphs of the same structure; seconds of ops without a near sample are added.
        tried: of the number of an op: whether its unpromised in-place forms are worth a trial, of one run: another size
            has shown that they do not depend on the order of threads.

    Raises:
        WrongFakesError, CaptureError: as `observe`.
    """
    device: torch.device = binding.device
    known = Observations.load(environment(device), is_lasting=False)
    exact = set(known.by_key)
    free = free_bytes(device)  # asked once: to read it takes longer than most ops
    inputs = InputMaker(device)
    measurer = Measurer(
        graph=graph, device=device, inputs=inputs, clock=time.perf_counter, most_runs=1, free_bytes=free
    )
    keys = [call_key(call) or f"{PRIVATE}{call.op}" for call in binding.calls]
    skipped = _measure_missing(measurer, binding, keys, known, None)
    _require_real_results(graph, binding, keys, known)
    _warn_of(skipped)
    _try_missing_forms(measurer, binding, keys, known, tried, runs=1)
    estimated: dict[str, Observation] = {}
    for op, call, key in zip(graph.ops, binding.calls, keys, strict=True):
        seen = known.by_key.get(key)
        if seen is None or key in exact or key in estimated:
            continue
        work = work_of(call, op, graph.storages)
        seconds = samples.estimate(op.id, work)
        if seconds is None:
            samples.add(op.id, work, seen.seconds)
        estimated[key] = seen if seconds is None else msgspec.structs.replace(seen, seconds=seconds)
    return tuple(estimated.get(key, known.by_key.get(key)) for key in keys)


@contextmanager
def _adding_to(known: Observations, device: torch.device) -> Iterator[dict[str, Observation]]:
    """Collect new observations, and add them to `known` even after an error or Ctrl-C."""
    new: dict[str, Observation] = {}
    try:
        with undisturbed(device):
            yield new
    finally:
        if new:
            known.add(new)


def _measure_missing(
    measurer: Measurer,
    binding: Binding,
    keys: Sequence[str],
    known: Observations,
    progress: Callable[[float, float], None] | None,
) -> dict[str, str]:
    """Add to `known` the observation of the first op of each key that it lacks; return why ops cannot be measured."""
    ops = measurer.graph.ops
    firsts = map(keys.index, dict.fromkeys(keys))
    missing = [each for each in firsts if _is_due(keys[each], binding.calls[each].target, known)]
    skipped: dict[str, str] = {}
    with _adding_to(known, measurer.device) as new, _with_load(new, known):
        for done, index in enumerate(missing):
            if progress is not None:
                progress(done, len(missing))
            outcome = measurer.measure(ops[index], binding.calls[index])
            if isinstance(outcome, Observation):
                new[keys[index]] = outcome
            elif outcome:
                skipped[ops[index].name] = outcome
    return skipped


_measured_here: set[tuple[Path, str]] = set()  # in this process, which does not measure an op again


def _is_due(key: str, target: Any, known: Observations) -> bool:
    """Return whether an op is to be measured, again if that was in a busy moment, or if its code may have changed."""
    if key not in known.by_key:
        return True
    may_differ = known.by_key[key].load > 0 or is_of_others(target)
    return known.is_lasting and may_differ and (known.path, key) not in _measured_here


@contextmanager
def _with_load(new: dict[str, Observation], known: Observations) -> Iterator[None]:
    """Note with each new observation what others took of the processors inside the block."""
    load = Load()
    try:
        yield
    finally:
        others = load.others() if new else 0.0
        for key, seen in new.items():
            new[key] = seen.after(known.by_key.get(key), others)
            _measured_here.add((known.path, key))


def doubt(binding: Binding) -> None:
    """Let the ops of a step be measured again by the next fit: a step has shown that they take less.

    Args:
        binding: of the captured step.
    """
    known = Observations.load(environment(binding.device))
    keys = {call_key(call) for call in binding.calls} & set(known.by_key)
    _measured_here.difference_update((known.path, key) for key in keys if key)
    known.add({key: msgspec.structs.replace(known.by_key[key], load=1.0) for key in keys if key})


def _require_real_results(graph: Graph, binding: Binding, keys: Sequence[str], known: Observations) -> None:
    """Raise WrongFakesError if a captured result is another one than its kernel was seen to return."""
    wrong: dict[str, Mapping[int, RealResult | None]] = {}
    names: list[str] = []
    for op, call, key in zip(graph.ops, binding.calls, keys, strict=True):
        seen = known.by_key.get(key)
        if seen is not None and any(differs(call.results[place], real) for place, real in seen.results.items()):
            wrong[key] = seen.results
            names.append(f"{op.name!r} ({op.target})")
    if wrong:
        raise WrongFakesError(
            f"op {names[0]}{f' and {len(names) - 1} more' if names[1:] else ''} returned other dtypes or strides than "
            "its fake kernel, or None; report it to the operator's author",
            corrections=wrong,
        )


def _try_missing_forms(
    measurer: Measurer,
    binding: Binding,
    keys: Sequence[str],
    known: Observations,
    tried: Callable[[int], bool] = lambda _op: True,
    *,
    runs: int = RUNS,
) -> None:
    """Try each unpromised form that `known` lacks, of calls that were observed, have room and are worth a trial."""
    storages = measurer.graph.storages
    with _adding_to(known, measurer.device) as new:
        for op, call, key in zip(measurer.graph.ops, binding.calls, keys, strict=True):
            seen = new.get(key, known.by_key.get(key))
            if seen is None or not tried(op.id):
                continue
            missing = {read: place for read, place in forms_to_try(call).items() if place not in seen.overwrites}
            if missing and measurer.has_room(op, call):
                inputs = measurer.inputs
                bits = {p: gives_same_bits(call, read, inputs, storages, runs) for read, p in missing.items()}
                new[key] = msgspec.structs.replace(seen, overwrites={**seen.overwrites, **bits})


def _warn_of(skipped: Mapping[str, str]) -> None:
    """Name the first of the ops that were not measured, with the reason."""
    if skipped:
        name, reason = next(iter(skipped.items()))
        more = f", and {len(skipped) - 1} more" if len(skipped) > 1 else ""
        _log.warning("op %s%s cannot be measured, a roofline gives its seconds: %s", name, more, reason)
