"""`memfit frontier`, and `memfit.frontier`: the largest batch of each combination of sizes, and its price."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from memfit.commands import options
from memfit.commands.answer import Answer, columns_table, deliver, rows_table
from memfit.commands.batch_trial import Trial, largest_fitting
from memfit.commands.targets import require_step, resolve
from memfit.commands.work import Work, working
from memfit.device import GENERIC, Device
from memfit.errors import InvalidBudgetError, InvalidOptionError
from memfit.planning import DEFAULT_PLANNER, DEFAULT_TIME_LIMIT_SECONDS, Settings
from memfit.report.frontier_page import FrontierRow, write_frontier_page
from memfit.system.budget import format_bytes, parse_budget

if TYPE_CHECKING:
    from memfit.capture.training_step import TrainingStep

_MOST_BATCH = 1 << 16

EXAMPLES = """
Examples:

memfit frontier gpt2 --budget 40GiB --set tokens=512,1024,2048 --device-profile h100

memfit frontier resnet50 --budget 8GiB --set size=224,288 --set depth=50,101 --report frontier.html

memfit frontier train.py:make_step --budget 16GB --set seq=512,1024 --json
"""


def frontier(
    target: str | Callable[..., TrainingStep],
    *,
    budget: str | int,
    over: Mapping[str, Sequence[Any]] | None = None,
    device_profile: str | None = None,
    planner: str = DEFAULT_PLANNER,
    time_limit_seconds: float = DEFAULT_TIME_LIMIT_SECONDS,
    seed: int = 0,
    largest: int = _MOST_BATCH,
) -> list[FrontierRow]:
    """Return the largest batch that fits a budget, and its price, for each combination of sizes.

        rows = memfit.frontier("gpt2", budget="40GiB", over={"tokens": [512, 1024]}, device_profile="h100")
        rows = memfit.frontier(lambda seq: make_step(seq), budget="8GiB", over={"seq": [128, 256]})

    Nothing is trained. With a device profile that device need not be there.

    Args:
        target: a built-in workload, `path/to/file.py:function`, or a function that returns a TrainingStep.
        budget: bytes for all that is on the device, as text or as a number.
        over: options of the workload, or arguments of the function -> their values.
        device_profile: a name of `memfit devices`, or a file; by default the device that the step is on.
        planner: see `memfit planners`.
        time_limit_seconds: for the search of each plan; several batches are planned in each row.
        seed: of the searches.
        largest: no batch above this is tried.

    Raises:
        InvalidBudgetError: a budget in percent.
        InvalidTargetError, InvalidOptionError: no such target, or option of it.
        CaptureError, UnsupportedStepError: a step cannot be captured.
    """
    settings = _in_bytes(Settings(budget=budget, planner=planner, time_limit_seconds=time_limit_seconds, seed=seed))
    with working() as work:
        return [row for row, _ in _rows(target, over or {}, device_profile, settings, largest, work)]


def command(
    target: options.StepTarget,
    budget: options.Budget,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=V1,V2,...", help="Values of an option; every combination is a row."),
    ] = None,
    planner: options.Planner = DEFAULT_PLANNER,
    option: options.PlannerOptions = None,
    time_limit: options.TimeLimit = DEFAULT_TIME_LIMIT_SECONDS,
    seed: options.Seed = 0,
    device_profile: options.DeviceProfile = None,
    no_cache: options.NoCache = False,
    largest: Annotated[
        int, typer.Option("--largest", metavar="N", min=1, help="No batch above this is tried.")
    ] = _MOST_BATCH,
    report: options.Report = None,
    as_json: options.Json = False,
) -> int:
    """Find the largest batch that fits a budget, and its price, for every combination of sizes. Nothing is trained."""
    options.require_writable(report)
    settings = _in_bytes(options.plan_settings(budget, planner, option, time_limit, seed, no_cache=no_cache))
    over = {name: _values(name, text) for name, text in options.read_settings(set_, "--set").items()}
    with working() as work:
        found = list(_rows(target, over, device_profile, settings, largest, work))
        rows, device = [row for row, _ in found], found[-1][1] if found else GENERIC
        if report and not work.interrupted:
            work.stage("writing the report")
            write_frontier_page(target, int(settings.budget), device, rows, report)
    keys = {"budget_bytes": int(settings.budget), "rows": [row.keys() for row in rows]}
    parts = [Text(f"{target} within {format_bytes(int(settings.budget))}"), _table(rows, list(over))]
    if report:
        parts.append(rows_table({"report": str(report)}))
    answer = Answer(target=target, device=device.name, keys=keys, parts=tuple(parts), exit_status=work.exit_status)
    return deliver(answer, as_json=as_json)


def _in_bytes(settings: Settings) -> Settings:
    if not settings.is_in_bytes:
        raise InvalidBudgetError(
            f"budget {settings.budget!r} is a share of a peak that grows with the sizes; give bytes, such as 6GiB"
        )
    return settings.within(parse_budget(settings.budget, 1))


def _values(name: str, text: str) -> list[str]:
    values = [value.strip() for value in text.split(",")]
    if not all(values) or len(set(values)) < len(values):
        raise InvalidOptionError(f"--set {name}={text}: expected values with commas between them, each once")
    return values


def _rows(
    target: str | Callable[..., TrainingStep],
    over: Mapping[str, Sequence[Any]],
    device_profile: str | None,
    settings: Settings,
    largest: int,
    work: Work,
) -> Iterator[tuple[FrontierRow, Device]]:
    """Yield the row of each combination, and the device that it was planned for; fewer after Ctrl-C."""
    from memfit.workloads.batch_sizes import batch_size  # imports torch

    first = 0  # a row begins with the batch that the one before ended with
    for values in itertools.product(*over.values()):
        if work.interrupted:
            return
        chosen = dict(zip(over, values, strict=True))
        work.stage(f"building the step{''.join(f', {name} {value}' for name, value in chosen.items())}")
        trial = Trial(str(target), chosen, device_profile, settings, work, _step_of(target, chosen))
        found = largest_fitting(trial.fits, min(first or batch_size(trial.step), largest), largest, work)
        first = max(1, found)
        points = sorted(trial.points.values(), key=lambda point: point.batch)
        yield FrontierRow(options=chosen, largest_batch=found, points=points), trial.device


def _step_of(target: str | Callable[..., TrainingStep], chosen: Mapping[str, Any]) -> TrainingStep:
    if not isinstance(target, str):
        return target(**chosen)
    refusal = f"{target} is a graph of one size; `memfit frontier` needs a workload or path/to/file.py:function"
    return require_step(resolve(target, chosen), refusal)


def _table(rows: Sequence[FrontierRow], names: Sequence[str]) -> Any:
    titles = ("largest batch", "peak", "unplanned", "overhead", "samples a second", "fastest batch, its samples")
    lines = [(*(str(row.options[name]) for name in names), *row.cells()) for row in rows]
    width = len(names) + len(titles)
    return columns_table((*names, *titles), [(*line, *[""] * (width - len(line))) for line in lines])
