"""Seconds and workspace bytes of each op, from what this device was observed to take for it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from memfit.binding import Binding, Call
from memfit.cost.calibration import rates_for_rooflines
from memfit.cost.collectives import copies_results, is_collective
from memfit.cost.gpu_timing import on_two_timelines
from memfit.cost.observations import Observation
from memfit.cost.rooflines import roofline_seconds
from memfit.graph import Graph, Op


def measure(graph: Graph, binding: Binding, observed: Sequence[Observation | None]) -> Graph:
    """Return `graph` with the measured seconds and workspace bytes of every op. Nothing else of it changes.

        captured = finish(capture(step))
        graph = measure(captured.graph, captured.binding, captured.observed)

    An update keeps what it was measured to take. Another op without an observation gets the seconds of a roofline over
    this device's rates (see `rates_for_rooflines`). Its workspace stays the captured one, which may be unknown. On a
    GPU an op has the time by which it delays the step in the original order: that of its kernels, or of its launch
    where the device waits for the host. A collective gets no seconds: see `memfit.cost.collectives`. What waits for one
    and copies its results has a roofline.

    Args:
        graph: a captured graph that is finished.
        binding: its calls.
        observed: for each op what `memfit.cost.observe.observe` returned.

    Raises:
        ValueError: `observed` has another length: the capture is not finished.
    """
    ops: list[Op] = []
    dispatches = [0.0 if seen is None else seen.dispatch_seconds for seen in observed]
    for op, call, seen in zip(graph.ops, binding.calls, observed, strict=True):
        if seen is not None:
            seconds = seen.seconds
            workspace_bytes = max(seen.workspace_bytes, _replay_bytes(graph, op, call, binding.device))
        elif op.seconds > 0 and not getattr(call.target, "measurable", True):
            seconds, workspace_bytes = op.seconds, op.workspace_bytes  # an update, measured on copies
        elif is_collective(call.target) and not copies_results(call.target):
            seconds, workspace_bytes = 0.0, 0
        else:
            seconds = roofline_seconds(call, op, graph.storages, rates_for_rooflines(binding.device))
            workspace_bytes = 0 if is_collective(call.target) else op.workspace_bytes
        ops.append(msgspec.structs.replace(op, seconds=seconds, workspace_bytes=workspace_bytes))
    if any(dispatches):
        each = on_two_timelines([op.seconds for op in ops], dispatches)
        ops = [msgspec.structs.replace(op, seconds=seconds) for op, seconds in zip(ops, each, strict=True)]
    return msgspec.structs.replace(graph, ops=tuple(ops))


def _replay_bytes(graph: Graph, op: Op, call: Call, device: torch.device) -> int:
    """Return the workspace that a replay of a random op needs at least: it reads the generator's own state before.

    The state is freed before the op allocates its results. On CUDA it is in the host's memory.
    """
    if call.generator_state is None or device.type != "cpu":
        return 0
    state_bytes = graph.storages[call.generator_state].bytes
    return state_bytes if op.reuses else state_bytes - sum(graph.storages[storage].bytes for storage in op.writes)
