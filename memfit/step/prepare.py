"""From a captured step to a program: the ops are measured, the step is planned, the plan is compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from memfit.binding import Value
from memfit.capture import Captured, finish
from memfit.capture.generators import states_kept
from memfit.cost.calibration import linked_device
from memfit.cost.measurement import measure
from memfit.device import Device
from memfit.errors import PlanMismatchError
from memfit.graph import Graph
from memfit.kernels.absent_gradients import Absent
from memfit.kernels.program import Program, make_program
from memfit.memory.host.layout import host_layout
from memfit.memory.host.slab import alignment_bytes
from memfit.memory.host.store import HostStore
from memfit.memory.in_arena import InArena
from memfit.memory.placed_plans import plan_as_placed, unused_bytes_on
from memfit.plan import Plan
from memfit.planning import Settings, make_plan
from memfit.system.budget import format_bytes

MOST_OPS = 150_000
"""Ops of all programs of a step that are kept: a program, its graph and its plan take about 10 KiB an op."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A step that is ready to run.

    Attributes:
        captured: the step, with its costs.
        plan: of it.
        program: that carries out the plan.
        without: returns the program for backward passes in which gradients are absent; its forward half is the same.
        seconds: that each stage of the preparation took.
    """

    captured: Captured
    plan: Plan
    program: Program
    without: Callable[[Absent], Program]
    seconds: Mapping[str, float]


class Planning:
    """Where the costs of a captured step and its plan come from: each op is measured, and a plan is searched."""

    def with_costs(self, captured: Captured, settings: Settings) -> Captured:
        """Return the step finished on its device, with the seconds and the workspace of each op.

        Args:
            captured: the step, observed on its device.
            settings: its `on_stage` is called.
        """
        return with_costs(captured, settings)

    def plan(self, captured: Captured, settings: Settings, bytes_outside: int) -> Plan:
        """Return a plan of the step with its costs that fits as its bytes are placed (see `plan_as_placed`).

        Args:
            captured: the step, with its costs.
            settings: of the plan.
            bytes_outside: bytes on the device beside the graph's, which the budget covers, too.
        """
        at = captured.binding.device
        device = settings.device or linked_device(at, settings.host_budget_bytes, settings.host_dir)
        return plan_as_placed(
            lambda settings: self.searched(captured.graph, device, settings, bytes_outside),
            settings,
            at,
            unused_bytes_on(at),
        )

    def searched(self, graph: Graph, device: Device, settings: Settings, bytes_outside: int) -> Plan:
        """Return a plan for the settings' budget, however its bytes are placed.

        Args:
            graph: with seconds and workspaces.
            device: to plan for.
            settings: budgets, planner and its options.
            bytes_outside: bytes on the device beside the graph's, which the budget covers, too.
        """
        return make_plan(graph, device, settings, bytes_outside)


class AsItIs(Planning):
    """The step has its costs already."""

    def with_costs(self, captured: Captured, settings: Settings) -> Captured:  # noqa: ARG002
        """Return the step itself."""
        return captured


ANEW, AS_IT_IS = Planning(), AsItIs()


def prepare(
    captured: Captured,
    settings: Settings,
    *,
    outputs: Sequence[Sequence[Value]],
    store: HostStore,
    plan: Plan | None = None,
    bytes_outside: int = 0,
    planning: Planning = ANEW,
    arena: InArena | None = None,
) -> Prepared:
    """Return the program of a captured step within the settings' budget.

    Args:
        captured: a whole step, or the joint graph of a compiled model.
        settings: for `make_plan`.
        outputs: for each half of the program, the values that it returns to the user.
        store: for host copies.
        plan: a plan made before, used instead of asking a planner.
        bytes_outside: bytes on the device that are not the graph's (see `Problem`).
        planning: where costs and plan come from.
        arena: that the program runs in.

    Raises:
        HostMemoryError: the host, or the disk, has no room for what the plan offloads.
        InfeasibleBudgetError, TimeLimitError: no plan was found.
        InvalidBudgetError, InvalidOptionError: a setting that cannot be read.
        PlanMismatchError: `plan` is for another graph, or another torch.
    """
    started = time.perf_counter()
    captured = replace(planning.with_costs(captured, settings), stream=None)  # compared by the caller, and large
    captured = captured if arena is None else arena.with_workspaces(captured)
    measured = time.perf_counter()
    if plan is None:
        plan = planning.plan(captured, settings, bytes_outside)
    else:
        _require_usable(plan, captured, settings.host_budget_bytes)
    seconds = {"measure": measured - started, "plan": time.perf_counter() - measured}
    host = host_layout(captured.graph, plan.schedule, alignment_bytes(captured.binding.device))
    at = None if arena is None else arena.at
    make = partial(make_program, captured, plan.schedule, outputs, host, store, at=at)
    without = lambda absent: make(absent=absent)  # noqa: E731
    return Prepared(captured=captured, plan=plan, program=make(), without=without, seconds=seconds)


def with_costs(captured: Captured, settings: Settings) -> Captured:
    """Return a captured step, finished on its device, with the seconds and the workspace of each op.

    Args:
        captured: a whole step, or the joint graph of a compiled model.
        settings: whose `on_stage` is called.

    Raises:
        WrongFakesError, CaptureError: see `memfit.capture.finish`.
    """
    settings.on_stage("measuring each op")
    with states_kept():  # a step may be planned in the middle of training
        captured = finish(captured)
        return replace(captured, graph=measure(captured.graph, captured.binding, captured.observed))


def _require_usable(plan: Plan, captured: Captured, host_budget_bytes: int) -> None:
    """Raise PlanMismatchError unless `plan` was made for this graph, this torch, and at most this host budget."""
    plan.require_graph(captured.graph)
    if 0 < host_budget_bytes < plan.predicted.host_peak_bytes:
        raise PlanMismatchError(
            f"plan offloads {format_bytes(plan.predicted.host_peak_bytes)}, more than the host budget of "
            f"{format_bytes(host_budget_bytes)}; plan again, or leave the host budget out: the plan has its own"
        )
    made_with = plan.versions.get("torch", "").partition("+")[0]
    here: Any = torch.__version__.partition("+")[0]
    if made_with and made_with != here:
        raise PlanMismatchError(f"plan was made with torch {made_with}, this is torch {here}; plan again")
