"""Offloading on a GPU: the seconds that copies took, and those that the plan was made with; and workspaces of ops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from _gpu_measure import Way, alone, let_go, timed
from _gpu_models import make_model
from _measure import MIB
from _planned import eager_run
from torch.profiler import ProfilerActivity, profile

import memfit
from memfit.simulate.simulator import simulate

TIME_LIMIT_SECONDS = 2.0
SHOWN = 8  # ops with the largest workspaces
_DIRECTIONS = {"to_host": "DtoH", "to_device": "HtoD"}


def measure_copies(
    *, model: str, options: dict[str, Any], share: float, host_bytes: int, planner: str = "offload", steps: int = 5
) -> Iterator[dict[str, Any]]:
    """Yield the seconds of a step that offloads, predicted and measured, whole and of its copies.

    Args:
        model, options: see `make_model`.
        share: of the bytes that eager reserves, as the budget.
        host_bytes: that may be offloaded to.
        planner: of the step.
        steps: timed.
    """
    step = make_model(model, options).step
    eager = Way(name="eager", run=eager_run(step))
    eager.found |= alone(eager)
    eager_seconds = min(timed(eager.run)[0] for _ in range(steps))
    step.model.zero_grad(set_to_none=True)
    let_go()
    planned: Any = memfit.fit(
        step.model,
        step.loss,
        step.batch,
        optimizer=step.optimizer,
        budget=int(share * eager.found["reserved_bytes"]),
        planner=planner,
        host_budget=host_bytes,
        time_limit_seconds=TIME_LIMIT_SECONDS,
    )
    way = Way(name="offloading", run=lambda: planned(step.batch))
    plan = planned.plan
    timeline = simulate(plan.graph, plan.schedule, plan.device)
    found: dict[str, Any] = {
        "eager_reserved_bytes": eager.found["reserved_bytes"],
        "budget_bytes": int(planned.settings.budget),
        "offloaded_bytes": plan.offloaded_bytes,
        "predicted_seconds": plan.predicted.seconds,
        "predicted_overhead": plan.overhead,
        "predicted_busy_seconds": timeline.busy_seconds,
        "predicted_stall_seconds": timeline.stall_seconds,
        "eager_seconds": eager_seconds,
        "failures": [] if plan.offloaded_bytes else ["offloading: the plan offloads nothing"],
    }
    yield found
    found |= alone(way)
    found["seconds"] = min(timed(way.run)[0] for _ in range(steps))
    found["time_ratio"] = found["seconds"] / eager_seconds
    yield found
    found["copies"] = copies_of(way)
    busy = timeline.busy_seconds
    copies = [f"{name} {1e3 * got['seconds']:.0f} ms ({1e3 * busy[name]:.0f})" for name, got in found["copies"].items()]
    found["line"] = (
        f"{plan.offloaded_bytes / MIB:,.0f} MiB, x{found['time_ratio']:.3f} (predicted x{1 + plan.overhead:.3f}), "
        + ", ".join(copies)
    )
    yield found


def copies_of(way: Way) -> dict[str, dict[str, float]]:
    """Return the seconds and the number of copies in each direction of one step, as the profiler saw them."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        way.run()
        torch.cuda.synchronize()
    found: dict[str, dict[str, float]] = {}
    for name, direction in _DIRECTIONS.items():
        events = [event for event in seen.events() or [] if f"Memcpy {direction}" in event.name]
        found[name] = {"count": len(events), "seconds": sum(each.device_time_total for each in events) / 1e6}
    return found


def measure_workspaces(
    *, model: str, options: dict[str, Any], optimizer: dict[str, Any] | None = None, share: str = "60%"
) -> Iterator[dict[str, Any]]:
    """Yield predicted and measured live bytes of a plan without an arena, and the ops of the largest workspaces.

    Args:
        model, options, optimizer: see `make_model`.
        share: of the unplanned peak, in percent, as the budget.
    """
    step = make_model(model, options, optimizer=optimizer).step
    eager = alone(Way(name="eager", run=eager_run(step)))
    step.model.zero_grad(set_to_none=True)
    let_go()
    planned: Any = memfit.fit(
        step.model,
        step.loss,
        step.batch,
        optimizer=step.optimizer,
        budget=share,
        arena=False,
        time_limit_seconds=TIME_LIMIT_SECONDS,
    )
    ops = sorted(planned.captured.graph.ops, key=lambda op: -(op.workspace_bytes or 0))
    found: dict[str, Any] = {
        "budget_bytes": int(planned.settings.budget),
        "unplanned_bytes": planned.plan.unplanned.peak_bytes,
        "eager_live_bytes": eager["live_bytes"],
        "workspaces": [{"op": op.name, "target": op.target, "bytes": op.workspace_bytes} for op in ops[:SHOWN]],
        "failures": [],
    }
    yield found
    found |= alone(Way(name="planned", run=lambda: planned(step.batch)))
    found["predicted_bytes"] = planned.plan.predicted.peak_bytes
    found["corrections"] = [str(each) for each in planned.corrections]
    live, predicted = found["live_bytes"], found["predicted_bytes"]
    largest = found["workspaces"][0]
    found["line"] = (
        f"live {live / MIB:,.0f} of {predicted / MIB:,.0f} MiB predicted, unplanned "
        f"{found['unplanned_bytes'] / MIB:,.0f} beside eager's {eager['live_bytes'] / MIB:,.0f}; "
        f"largest workspace {(largest['bytes'] or 0) / MIB:,.0f} ({largest['target']})"
    )
    yield found
