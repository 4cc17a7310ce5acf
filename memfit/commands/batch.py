"""`memfit batch`: the largest batch that fits a budget, and its overhead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from memfit.commands import options
from memfit.commands.answer import Answer, columns_table, deliver, rows_table
from memfit.commands.graph_with_costs import graph_with_costs
from memfit.commands.targets import require_step, resolve
from memfit.commands.work import Work, working
from memfit.device import GENERIC, Device
from memfit.errors import InfeasibleBudgetError, InvalidBudgetError, NoPlanError, TimeLimitError
from memfit.plan import Plan
from memfit.planners.engine.bounds.bounds import least_budget_bound
from memfit.planning import DEFAULT_PLANNER, DEFAULT_TIME_LIMIT_SECONDS, Settings, make_plan, make_problem
from memfit.report.batch_page import BatchPoint, write_batch_page
from memfit.report.formatting import change_text
from memfit.system.budget import format_bytes, parse_budget

if TYPE_CHECKING:
    from memfit.capture.training_step import TrainingStep

_FINENESS = 16  # the answer is within 1/16 of the largest batch that this search can fit

EXAMPLES = """
Examples:

memfit batch resnet50 --budget 4GiB

memfit batch gpt2 --budget 40GiB --device-profile a100-40 --report batch.html

memfit batch train.py:make_step --budget 16GB --json
"""


def batch(
    target: options.StepTarget,
    budget: options.Budget,
    planner: options.Planner = DEFAULT_PLANNER,
    option: options.PlannerOptions = None,
    time_limit: options.TimeLimit = DEFAULT_TIME_LIMIT_SECONDS,
    seed: options.Seed = 0,
    set_: options.WorkloadOptions = None,
    device_profile: options.DeviceProfile = None,
    no_cache: options.NoCache = False,
    largest: Annotated[int, typer.Option("--largest", metavar="N", min=1, help="No batch above this is tried.")] = 1
    << 16,
    report: options.Report = None,
    as_json: options.Json = False,
) -> int:
    """Find the largest batch of TARGET that fits a budget, and its overhead. Several batch sizes are planned."""
    options.require_writable(report)
    asked = options.plan_settings(budget, planner, option, time_limit, seed, no_cache=no_cache)
    if not asked.is_in_bytes:
        raise InvalidBudgetError(
            f"budget {budget!r} is a share of a peak that grows with the batch; give bytes, such as 6GiB"
        )
    of_workload = options.read_settings(set_, "--set")
    with working() as work:
        from memfit.workloads.batch_sizes import batch_size  # imports torch

        refusal = f"{target} is a graph of one batch size; `memfit batch` needs a workload or path/to/file.py:function"
        step = require_step(resolve(target, of_workload), refusal)
        trial = _Trial(target, of_workload, device_profile, asked.within(parse_budget(budget, 1)), work, step)
        largest_batch = _largest(trial.fits, batch_size(step), largest, work)
        points = sorted(trial.points.values(), key=lambda point: point.batch)
        if report and not work.interrupted:
            work.stage("writing the report")
            write_batch_page(trial.name, trial.budget_bytes, trial.device, points, report)
    if largest_batch == 0 and not work.interrupted:
        raise trial.refusal()
    return deliver(_answer(target, trial, points, largest_batch, report, work.exit_status), as_json=as_json)


@dataclass
class _Trial:
    """Plans of one step at any batch size, each made once."""

    target: str
    of_workload: dict[str, str]
    device_profile: str | None
    settings: Settings
    work: Work
    step: TrainingStep
    device: Device = GENERIC  # the one that plans are made for, once a size was tried
    points: dict[int, BatchPoint] = field(default_factory=dict[int, BatchPoint])
    errors: dict[int, NoPlanError] = field(default_factory=dict[int, NoPlanError])

    @property
    def name(self) -> str:
        """The name of the step in the answer and on the page."""
        return self.step.name or self.target

    @property
    def budget_bytes(self) -> int:
        """The budget of each plan."""
        return int(self.settings.budget)

    def fits(self, size: int) -> bool:
        """Return whether a plan was found for a batch size; its figures are kept in `points`."""
        if size not in self.points:
            try:
                self.points[size] = _point(size, self._plan(size))
            except NoPlanError as error:
                self.points[size] = BatchPoint(batch=size, least_bytes=error.least_budget_bound_bytes)
                self.errors[size] = error
        return self.points[size].overhead is not None

    def _plan(self, size: int) -> Plan:
        from memfit.workloads.batch_sizes import at_batch_size

        step = at_batch_size(self.target, self.of_workload, self.step, size)
        graph, self.device, *_ = graph_with_costs(step, self.device_profile, self.work)
        self.work.stage(f"searching a plan for batch {size}", expected_seconds=self.settings.time_limit_seconds)
        bound_bytes, _ = least_budget_bound(make_problem(graph, self.device, self.settings))
        if bound_bytes > self.budget_bytes:  # a search would only add the least budget that it reaches
            raise InfeasibleBudgetError(
                f"no plan of it can go below {format_bytes(bound_bytes)} ({bound_bytes} bytes); raise the budget",
                least_budget_found_bytes=None,
                least_budget_bound_bytes=bound_bytes,
            )
        return make_plan(graph, self.device, replace(self.settings, progress=self.work.on_search))

    def refusal(self) -> NoPlanError:
        """Return the error for a budget in which no batch of 1 was planned."""
        error = self.errors[1]
        budget = f"{format_bytes(self.budget_bytes)} ({self.budget_bytes} bytes)"
        is_proved = error.least_budget_bound_bytes > self.budget_bytes
        head = (
            f"not even a batch of 1 fits {budget}"
            if is_proved
            else f"no plan was found within {budget} for a batch of 1"
        )
        return type(error)(
            f"{self.target}: {head}: {error}",
            least_budget_found_bytes=error.least_budget_found_bytes,
            least_budget_bound_bytes=error.least_budget_bound_bytes,
        )


def _point(size: int, plan: Plan) -> BatchPoint:
    return BatchPoint(
        batch=size,
        least_bytes=plan.bounds.least_budget_bound_bytes,
        unplanned_bytes=plan.unplanned.peak_bytes,
        peak_bytes=plan.predicted.peak_bytes,
        overhead=plan.overhead,
        samples_per_second=size / plan.predicted.seconds,
    )


def _largest(fits: Callable[[int], bool], first: int, largest: int, work: Work) -> int:
    """Return the largest size found that fits, 0 if none does: by doubling or halving, then by bisection.

    Args:
        fits: says whether a plan was found for a batch size.
        first: the size to begin with.
        largest: the largest size to try.
        work: says whether Ctrl-C was pressed, which ends the search.
    """
    low, high = 0, largest + 1  # low fits, high does not
    size = min(first, largest)
    while size > low and size < high and not work.interrupted:
        if fits(size):
            low, size = size, min(2 * size, largest)
        else:
            high, size = size, size // 2
            if size == 0 or low > 0:
                break
    while high - low > max(1, low // _FINENESS) and low > 0 and not work.interrupted:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _answer(
    target: str, trial: _Trial, points: list[BatchPoint], largest_batch: int, report: Path | None, exit_status: int
) -> Answer:
    keys: dict[str, Any] = {
        "budget_bytes": trial.budget_bytes,
        "largest_batch": largest_batch,
        "points": [point.keys() for point in points if point.overhead is not None],
        "infeasible": [size for size, error in trial.errors.items() if isinstance(error, InfeasibleBudgetError)],
        "timed_out": [size for size, error in trial.errors.items() if isinstance(error, TimeLimitError)],
    }
    rows = [
        (
            str(point.batch),
            point.no_plan_text(trial.budget_bytes) if point.peak_bytes is None else format_bytes(point.peak_bytes),
            "" if point.unplanned_bytes is None else format_bytes(point.unplanned_bytes),
            "" if point.overhead is None else change_text(point.overhead),
            "" if point.samples_per_second is None else f"{point.samples_per_second:,.1f}",
        )
        for point in points
    ]
    parts = [
        Text(f"{trial.name}: the largest batch within {format_bytes(trial.budget_bytes)} is {largest_batch}"),
        columns_table(("batch", "peak", "unplanned", "overhead", "samples a second (predicted)"), rows),
    ]
    if report:
        parts.append(rows_table({"report": str(report)}))
    return Answer(target=target, device=trial.device.name, keys=keys, parts=tuple(parts), exit_status=exit_status)
