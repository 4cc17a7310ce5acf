"""From a captured step to a program: measure its ops, plan within the budget, compile the plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from memfit.binding import Value
from memfit.budget import format_bytes, parse_budget
from memfit.capture import Captured
from memfit.cost import local_device, measure
from memfit.device import Device
from memfit.errors import InvalidOptionError, PlanMismatchError, UnsupportedStepError
from memfit.plan import INTERRUPTED, Plan, Problem, Progress, Result
from memfit.planners import make_planner
from memfit.planners.ask import require_link, require_plan, unplanned_peak_bytes
from memfit.runtime.kept_plans import keep_plan, leanest_path, plan_path, read_plan
from memfit.runtime.program import Program, make_program

DEFAULT_PLANNER = "auto"
DEFAULT_TIME_LIMIT_SECONDS = 5.0


def unheard(_said: object) -> None:
    """The default listener."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a user asks of every plan of a step.

    `budget` is text (`6GiB`, `60%`) or bytes; `device` replaces the measured profile of the step's device;
    `host_budget_bytes` is what storages may take on the host, where the step's device has a link to it.
    `arena` serves calls from laid out memory; `on_stage` hears what is being done, `progress` hears the planner.
    A planner that is interrupted answers with its best so far; `stops_on_interrupt` raises the KeyboardInterrupt again.

    Raises:
        InvalidOptionError: a time limit or a seed that is no such number.
    """

    budget: str | int
    planner: str = DEFAULT_PLANNER
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    time_limit_seconds: float = DEFAULT_TIME_LIMIT_SECONDS
    seed: int = 0
    host_budget_bytes: int = 0
    arena: bool = False
    device: Device | None = None
    on_stage: Callable[[str], None] = unheard
    progress: Callable[[Progress], None] = unheard
    stops_on_interrupt: bool = False

    def __post_init__(self) -> None:
        seconds, seed = self.time_limit_seconds, self.seed
        if not isinstance(seconds, int | float) or not seconds > 0:
            raise InvalidOptionError(f"time_limit_seconds is {seconds!r}, expected a number of seconds above 0")
        if not isinstance(seed, int) or seed < 0:
            raise InvalidOptionError(f"seed is {seed!r}, expected a whole number from 0 on")

    @property
    def is_in_bytes(self) -> bool:
        """Whether the budget can be read before the unplanned peak is known."""
        return not str(self.budget).strip().endswith("%")

    def within(self, budget_bytes: int) -> Settings:
        """Return the same settings with another budget."""
        return replace(self, budget=budget_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A step that is ready to run, and how long each part of getting there took."""

    captured: Captured
    plan: Plan
    program: Program
    seconds: Mapping[str, float]

    def with_seconds(self, **more: float) -> Prepared:
        """Return the same with the seconds of more stages."""
        return replace(self, seconds={**more, **self.seconds})


def prepare(
    captured: Captured,
    settings: Settings,
    *,
    outputs: Sequence[Sequence[Value]],
    plan: Plan | None = None,
    bytes_outside: int = 0,
) -> Prepared:
    """Return the program of a captured step within the settings' budget.

    Args:
        outputs: the values that each part of the program hands to the user.
        plan: a plan made before, used instead of asking a planner.
        bytes_outside: what user code holds between the halves, and what is on the device beside the graph's residents.

    Raises:
        InfeasibleBudgetError, TimeLimitError: there is no plan.
        InvalidBudgetError, InvalidOptionError: a setting that cannot be read.
        PlanMismatchError: `plan` is for another graph, or another torch.
    """
    started = time.perf_counter()
    settings.on_stage("measuring each op")
    captured = replace(captured, graph=measure(captured.graph, captured.binding))
    measured = time.perf_counter()
    if plan is None:
        plan = make_plan(captured, settings, bytes_outside)
    else:
        require_usable(plan, captured)
    seconds = {"measure": measured - started, "plan": time.perf_counter() - measured}
    program = make_program(captured, plan.schedule, outputs)
    return Prepared(captured=captured, plan=plan, program=program, seconds=seconds)


def make_plan(captured: Captured, settings: Settings, bytes_outside: int = 0) -> Plan:
    """Return the plan of a measured graph that was kept on disk, or ask the settings' planner for one, and keep it."""
    device = settings.device or local_device(captured.binding.device)
    graph = captured.graph
    _require_host(captured, device, settings.host_budget_bytes)
    planner = make_planner(settings.planner, **settings.options)
    budget_bytes = parse_budget(settings.budget, unplanned_peak_bytes(graph, device, bytes_outside))
    problem = Problem(
        graph=graph,
        device=device,
        budget_bytes=budget_bytes,
        host_budget_bytes=settings.host_budget_bytes,
        bytes_outside=bytes_outside,
        time_limit_seconds=settings.time_limit_seconds,
        seed=settings.seed,
        progress=settings.progress,
    )
    path = plan_path(problem, planner)
    kept = read_plan(path)
    if kept is not None:
        return kept
    settings.on_stage("searching a plan")
    result = planner.plan(problem)
    if INTERRUPTED in result.stats and settings.stops_on_interrupt:
        raise KeyboardInterrupt
    if result.plan is None:
        result = _with_leanest(result, problem, leanest_path(problem, planner))
    plan = require_plan(result, problem, settings.planner)
    if INTERRUPTED not in result.stats:
        keep_plan(plan, path)
    return plan


def _with_leanest(result: Result, problem: Problem, path: Path) -> Result:
    """Return a result without a plan with the leanest that this search or an earlier one found, where that fits, and
    with its peak for the least budget found: what one search reports, the next one meets.
    """
    kept, found = read_plan(path), result.leanest
    if found is not None and (kept is None or found.predicted.peak_bytes < kept.predicted.peak_bytes):
        keep_plan(found, path)
        kept = found
    if kept is None:
        return result
    bounds = msgspec.structs.replace(result.bounds, least_budget_found_bytes=kept.predicted.peak_bytes)
    if kept.predicted.peak_bytes > problem.budget_bytes:
        return replace(result, bounds=bounds)
    plan = msgspec.structs.replace(kept, budget_bytes=problem.budget_bytes, bounds=bounds)
    return replace(result, status=plan.status, plan=plan, bounds=bounds)


def _require_host(captured: Captured, device: Device, host_budget_bytes: int) -> None:
    if host_budget_bytes > 0 and captured.binding.device.type == "cpu":
        raise UnsupportedStepError(
            f"a host budget of {format_bytes(host_budget_bytes)} for a step on the CPU, whose memory is the host's: a "
            "copy there frees nothing; leave it out, or plan for another device with `memfit plan --device-profile`"
        )
    require_link(device, host_budget_bytes)


def require_usable(plan: Plan, captured: Captured) -> None:
    """Raise PlanMismatchError unless `plan` was made for this graph and this torch."""
    plan.require_graph(captured.graph)
    made_with = plan.versions.get("torch", "").partition("+")[0]
    here: Any = torch.__version__.partition("+")[0]
    if made_with and made_with != here:
        raise PlanMismatchError(f"plan was made with torch {made_with}, this is torch {here}; plan again")
