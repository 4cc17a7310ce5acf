"""Seconds and workspace bytes of each op, measured on this device, each op by itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from memfit.binding import Binding, Call
from memfit.cost.calibration import calibrate, local_device
from memfit.cost.environment import environment
from memfit.cost.kept_costs import PRIVATE, KeptCosts, OpCost, cost_key
from memfit.cost.made_inputs import InputMaker
from memfit.cost.overwriting import try_missing, with_seen_reuses
from memfit.cost.rooflines import roofline_seconds
from memfit.cost.single_op import Clock, Measurer, undisturbed
from memfit.device import Device
from memfit.graph import Graph, Op, Storage

_log = logging.getLogger(__name__)


def measure(
    graph: Graph,
    binding: Binding,
    *,
    cache: bool = True,
    budget_bytes: int | None = None,
    progress: Callable[[float, float], None] | None = None,
    clock: Clock = time.perf_counter,
) -> Graph:
    """Return `graph` with seconds and workspace bytes of every op, measured on the binding's device, and with what
    their kernels were seen to write over.

        captured = capture(step)
        graph = measure(captured.graph, captured.binding)

    Each op is run by itself on inputs made for it, which are freed at once; equal ops are measured once, and kept on
    disk in $MEMFIT_CACHE or ~/.cache/memfit. The median of several runs counts. The first
    run's results are compared with what the capture said of them; where a kernel returns a storage of other bytes than
    its fake, the graph returned has the real ones. The random generators stay as they were.

    Where the binding has a form of an op that writes over an input, and torch's schema does not promise that it does so
    rightly, it is tried on this device, and `Op.reuses` says so where it gives the bits of the plain kernel.

    An op that cannot be run by itself gets the seconds of a roofline over this device's calibrated rates: an
    optimizer's update (which brings its own workspace), or one that refuses made-up inputs or has no room in the budget
    (these are named in a warning, and keep the workspace that the capture knew).

    Args:
        graph: a captured graph.
        binding: its calls.
        cache: whether to read and write the costs on disk.
        budget_bytes: residents and what is made for one op stay within these bytes; None sets no limit.
        progress: called with (ops measured, ops to measure) as they go.
        clock: gives seconds; CUDA devices are timed by events.

    Raises:
        CaptureError: an op's real results differ from the captured ones in shape, dtype or strides.
    """
    device: torch.device = binding.device
    kept = KeptCosts.load(environment(device), use_disk=cache)
    measurer = Measurer(graph=graph, device=device, inputs=InputMaker(device), clock=clock, budget_bytes=budget_bytes)
    keys = [cost_key(call) or f"{PRIVATE}{call.op}" for call in binding.calls]
    _measure_missing(measurer, binding, keys, kept, progress)
    try_missing(measurer, binding.calls, keys, kept)
    return _with_costs(graph, binding, [kept.costs.get(key) for key in keys])


def _measure_missing(
    measurer: Measurer,
    binding: Binding,
    keys: Sequence[str],
    kept: KeptCosts,
    progress: Callable[[float, float], None] | None,
) -> None:
    """Add to `kept` the cost of the first op of each key that it lacks."""
    ops = measurer.graph.ops
    wanted = [keys.index(key) for key in dict.fromkeys(keys) if key not in kept.costs]
    new: dict[str, OpCost] = {}
    skipped: list[tuple[str, str]] = []
    try:
        with undisturbed(measurer.device):
            for done, index in enumerate(wanted):
                if progress is not None:
                    progress(done, len(wanted))
                outcome = measurer.measure(ops[index], binding.calls[index])
                if isinstance(outcome, OpCost):
                    new[keys[index]] = outcome
                else:
                    skipped.append((ops[index].name, outcome))
    finally:
        kept.add(new)  # Ctrl-C loses no more than the op at hand
    _warn_of(skipped)


def _warn_of(skipped: Sequence[tuple[str, str]]) -> None:
    """Name the ops that were not measured though they should have been."""
    named = [(name, reason) for name, reason in skipped if reason]
    if named:
        name, reason = named[0]
        more = f", and {len(named) - 1} more" if len(named) > 1 else ""
        _log.warning("op %s%s cannot be measured, a roofline gives its seconds: %s", name, more, reason)


def _with_costs(graph: Graph, binding: Binding, costs: Sequence[OpCost | None]) -> Graph:
    profile: Device | None = None
    ops: list[Op] = []
    storages = list(graph.storages)
    for op, call, cost in zip(graph.ops, binding.calls, costs, strict=True):
        if cost is not None:
            op = with_seen_reuses(op, call, cost)
            ops.append(msgspec.structs.replace(op, seconds=cost.seconds, workspace_bytes=cost.workspace_bytes))
            _set_real_bytes(storages, op, call, cost)
            continue
        profile = profile or _calibrated(binding.device)
        seconds = roofline_seconds(call, op, graph.storages, profile)
        workspace_bytes = getattr(call.target, "workspace_bytes", op.workspace_bytes)
        ops.append(msgspec.structs.replace(op, seconds=seconds, workspace_bytes=workspace_bytes))
    if storages == list(graph.storages):
        return msgspec.structs.replace(graph, ops=tuple(ops))
    ops = [msgspec.structs.replace(op, reuses=_equal_pairs(op, storages)) for op in ops]
    return msgspec.structs.replace(graph, ops=tuple(ops), storages=tuple(storages)).verify()


def _set_real_bytes(storages: list[Storage], op: Op, call: Call, cost: OpCost) -> None:
    """Give the storages that the op writes the bytes that its kernel really takes for them."""
    for place, real_bytes in cost.storage_bytes.items():
        value = call.results[place]
        assert value is not None
        captured = storages[value.storage]
        _log.info("op %s: storage %r has %d bytes, captured %d", op.name, captured.name, real_bytes, captured.bytes)
        storages[value.storage] = msgspec.structs.replace(captured, bytes=real_bytes)


def _equal_pairs(op: Op, storages: Sequence[Storage]) -> tuple[tuple[int, int], ...]:
    return tuple(pair for pair in op.reuses if storages[pair[0]].bytes == storages[pair[1]].bytes)


def _calibrated(device: torch.device) -> Device:
    known = local_device(device)
    return known if known.memory_bytes_per_second is not None else calibrate(device)
