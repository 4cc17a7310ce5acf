"""`memfit batch`: the largest batch that fits a budget, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from memfit.budget import format_bytes, parse_budget
from memfit.commands import options
from memfit.commands.answer import DONE, INTERRUPTED, Answer, columns_table, deliver, rows_table
from memfit.commands.planning import Search, graph_with_costs, load_target, make_search, problem_of
from memfit.commands.work import Work, working
from memfit.device import GENERIC, Device
from memfit.errors import InfeasibleBudgetError, InvalidBudgetError, InvalidTargetError
from memfit.graph import Graph
from memfit.planners import make_planner
from memfit.planners.bounds import least_budget_bound
from memfit.report.batch_page import BatchPoint, write_batch_page
from memfit.report.words import change_text

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
    planner: options.Planner = "auto",
    option: options.PlannerOptions = None,
    time_limit: options.TimeLimit = 5.0,
    seed: options.Seed = 0,
    set_: options.Settings = None,
    device_profile: options.DeviceProfile = None,
    largest: Annotated[int, typer.Option("--largest", metavar="N", help="No batch above this is tried.")] = 1 << 16,
    report: options.Report = None,
    as_json: options.Json = False,
) -> int:
    """Find the largest batch of TARGET that fits a budget, and what it costs: by plans at several sizes."""
    options.require_writable(report)
    options.require_count(largest, "--largest", least=1)
    options.require_budget(budget)
    if budget.strip().endswith("%"):
        raise InvalidBudgetError(
            f"budget {budget!r} is a share of a peak that grows with the batch; give bytes, such as 6GiB"
        )
    settings = options.read_settings(set_, "--set")
    search = make_search(planner, option, time_limit, seed)
    with working() as work:
        from memfit.workloads.batch_size import batch_size  # torch's room

        step = _load_step(target, settings)
        trial = _Trial(target, settings, device_profile, parse_budget(budget, 1), search, work, step)
        largest_batch = _largest(trial.fits, batch_size(step), largest, work)
        points = sorted(trial.points.values(), key=lambda point: point.batch)
        if report and not work.interrupted:
            work.stage("writing the report")
            write_batch_page(trial.name, trial.budget_bytes, trial.device, points, report)
    if largest_batch == 0 and not work.interrupted:
        raise trial.refusal()
    status = INTERRUPTED if work.interrupted else DONE
    return deliver(_answer(target, trial, points, largest_batch, report, status), as_json=as_json)


def _load_step(target: str, settings: dict[str, str]) -> TrainingStep:
    """Return the step that TARGET names.

    Raises:
        InvalidTargetError: it is a graph file.
    """
    resolved = load_target(target, settings)
    if isinstance(resolved, Graph):
        raise InvalidTargetError(
            f"{target} is a graph of one batch size; `memfit batch` needs a workload or path/to/file.py:function"
        )
    return resolved


@dataclass
class _Trial:
    """Plans of one step at any batch size, each made once."""

    target: str
    settings: dict[str, str]
    device_profile: str | None
    budget_bytes: int
    search: Search
    work: Work
    step: TrainingStep
    device: Device = GENERIC  # once a size was tried, the one that plans are for
    points: dict[int, BatchPoint] = field(default_factory=dict[int, BatchPoint])

    @property
    def name(self) -> str:
        """What the answer and the page call the step."""
        return self.step.name or self.target

    def fits(self, size: int) -> bool:
        """Whether a plan fits at a batch size; what it costs is remembered."""
        from memfit.workloads.batch_size import at_batch_size

        if size in self.points:
            return self.points[size].overhead is not None
        step = at_batch_size(self.target, self.settings, self.step, size)
        graph, self.device = graph_with_costs(step, self.device_profile, self.work)
        self.work.stage(f"searching a plan for batch {size}", expected_seconds=self.search.time_limit_seconds)
        problem = problem_of(graph, self.device, self.budget_bytes, self.search, self.work)
        bound_bytes, _ = least_budget_bound(problem)
        if bound_bytes > self.budget_bytes:
            self.points[size] = BatchPoint(batch=size, least_bytes=bound_bytes)
            return False
        result = make_planner(self.search.planner, **self.search.options).plan(problem)
        plan = result.plan
        self.points[size] = BatchPoint(
            batch=size,
            least_bytes=bound_bytes,
            unplanned_bytes=None if plan is None else plan.unplanned.peak_bytes,
            peak_bytes=None if plan is None else plan.predicted.peak_bytes,
            overhead=None if plan is None else plan.overhead,
            samples_per_second=None if plan is None else size / plan.predicted.seconds,
        )
        return plan is not None

    def refusal(self) -> InfeasibleBudgetError:
        """What is said where not even a batch of one fits."""
        least_bytes = self.points[1].least_bytes
        return InfeasibleBudgetError(
            f"{self.target}: not even a batch of 1 fits {format_bytes(self.budget_bytes)} ({self.budget_bytes} bytes); "
            f"no plan of it can go below {format_bytes(least_bytes)} ({least_bytes} bytes); raise the budget",
            least_budget_found_bytes=None,
            least_budget_bound_bytes=least_bytes,
        )


def _largest(fits: Callable[[int], bool], first: int, largest: int, work: Work) -> int:
    """Return the largest size found that fits, 0 where none does: doubling and halving, then bisection."""
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
        "infeasible": [point.batch for point in points if point.overhead is None],
    }
    rows = [
        (
            str(point.batch),
            "no plan fits" if point.peak_bytes is None else format_bytes(point.peak_bytes),
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
