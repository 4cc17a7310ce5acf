"""`memfit batch`: the largest batch that fits a budget, and its overhead."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from memfit.commands import options
from memfit.commands.answer import Answer, columns_table, deliver, rows_table
from memfit.commands.batch_trial import Trial, largest_fitting
from memfit.commands.targets import require_step, resolve
from memfit.commands.work import working
from memfit.errors import InfeasibleBudgetError, InvalidBudgetError, TimeLimitError
from memfit.planning import DEFAULT_PLANNER, DEFAULT_TIME_LIMIT_SECONDS
from memfit.report.batch_page import BatchPoint, write_batch_page
from memfit.report.formatting import change_text
from memfit.system.budget import format_bytes, parse_budget

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
        trial = Trial(target, of_workload, device_profile, asked.within(parse_budget(budget, 1)), work, step)
        largest_batch = largest_fitting(trial.fits, batch_size(step), largest, work)
        points = sorted(trial.points.values(), key=lambda point: point.batch)
        if report and not work.interrupted:
            work.stage("writing the report")
            write_batch_page(trial.name, trial.budget_bytes, trial.device, points, report)
    if largest_batch == 0 and not work.interrupted:
        raise trial.refusal()
    return deliver(_answer(target, trial, points, largest_batch, report, work.exit_status), as_json=as_json)


def _answer(
    target: str, trial: Trial, points: list[BatchPoint], largest_batch: int, report: Path | None, exit_status: int
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
