"""`memfit batch`, `memfit frontier` and `memfit.frontier`: the largest batch that fits a budget, and its price."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Unpack

import msgspec
import typer
from rich.console import RenderableType
from rich.text import Text

from memfit.commands import options
from memfit.commands.answer import Answer, columns_table, rows_table
from memfit.commands.batch_trial import Trial
from memfit.commands.ranks import Ranks, There, clusters_from, on_ranks
from memfit.commands.targets import require_step, resolve
from memfit.commands.work import Work, working
from memfit.cost.device_profiles import card_of_profile, load_device
from memfit.errors import InfeasibleBudgetError, InvalidBudgetError, InvalidOptionError, TimeLimitError
from memfit.options import Cluster, RanksOptions
from memfit.planning import Settings
from memfit.report.frontier_page import FrontierRow, write_frontier_page
from memfit.report.ranks import COLUMNS
from memfit.system.budget import Card, format_bytes, parse_budget
from memfit.system.files import require_writable

if TYPE_CHECKING:
    from memfit.capture.training_step import TrainingStep

_MOST_BATCH = 1 << 16

EXAMPLES_OF_BATCH = """
Examples:

memfit batch resnet50 --budget 4GiB

memfit batch gpt2 --budget 40GiB --device-profile a100-40 --report batch.html

memfit batch train.py:make_step --budget 16GB --json

memfit batch train.py:make_step --budget 72GiB --ranks 8,16,32,64 --shard --device-profile h100
"""

EXAMPLES = """
Examples:

memfit frontier gpt2 --budget 40GiB --set tokens=512,1024,2048 --device-profile h100

memfit frontier resnet50 --budget 8GiB --set size=224,288 --set depth=50,101 --report frontier.html

memfit frontier train.py:make_step --budget 16GB --set seq=512,1024 --json

memfit frontier train.py:make_step --budget 72GiB --set seq=2048,4096 --ranks 8,64 --shard --device-profile h100
"""


def frontier(
    target: str | Callable[..., TrainingStep],
    *,
    budget: str | int,
    over: Mapping[str, Sequence[Any]] | None = None,
    device_profile: str | None = None,
    planner: str = "auto",
    time_limit_seconds: float = 5.0,
    seed: int = 0,
    largest: int = 65_536,
    **ranks: Unpack[RanksOptions],
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
        ranks: `ranks`, how many there are, or several numbers, each of which is a row; and `shard`, `replicas`, `link`:
            see `memfit.options.RanksOptions`. None of them has to be there, and the batch is that of one rank.

    Raises:
        InvalidBudgetError: a budget in percent.
        InvalidTargetError, InvalidOptionError: no such target, or option of it.
        CaptureError, UnsupportedStepError: a step cannot be captured.
    """
    settings = _in_bytes(
        Settings(budget=budget, planner=planner, time_limit_seconds=time_limit_seconds, seed=seed), device_profile
    )
    clusters = clusters_from(ranks)
    asked = _Asked(target, over or {}, clusters, device_profile, settings, largest)
    with working() as work:
        return [row for row, _ in asked.rows(work)]


def batch(
    target: options.StepTarget,
    budget: options.BudgetOfAnyBatch,
    search: options.Search,
    ranks: Ranks,
    set_: options.WorkloadOptions = None,
    device_profile: options.DeviceProfile = None,
    largest: options.LargestBatch = _MOST_BATCH,
    report: options.Report = None,
) -> Answer:
    """Find the largest batch of TARGET that fits a budget, and its overhead. Several batch sizes are planned."""
    require_writable(report)
    settings, clusters = _in_bytes(search.settings(budget), device_profile), ranks.clusters()
    over = {name: [value] for name, value in options.read_settings(set_, "--set").items()}
    asked = _Asked(target, over, clusters, device_profile, settings, largest)
    if len(clusters) > 1:
        return _table(asked, report)
    with working() as work:
        ((row, trial),) = asked.rows(work)
        _write_report("memfit batch", trial.name, [(row, trial)], settings, report, work)
    if row.largest_batch == 0 and not work.interrupted:
        raise trial.refusal()
    keys: dict[str, Any] = {
        "budget_bytes": trial.budget_bytes,
        "largest_batch": row.largest_batch,
        "points": [point.keys() for point in row.planned],
        "infeasible": [size for size, error in trial.errors.items() if isinstance(error, InfeasibleBudgetError)],
        "timed_out": [size for size, error in trial.errors.items() if isinstance(error, TimeLimitError)],
    }
    head = f"{trial.name}: the largest batch within {format_bytes(trial.budget_bytes)} is {row.largest_batch}"
    columns = ("batch", "peak", "unplanned", "overhead", "samples a second (predicted)")
    table = columns_table(columns, [point.cells(trial.budget_bytes) for point in row.points])
    parts = (Text(head), table, *_rank_table([row]), *_written(report))
    return Answer(target=target, device=trial.device.name, keys=keys, parts=parts, exit_status=work.exit_status)


def command(
    target: options.StepTarget,
    budget: options.BudgetOfAnyBatch,
    search: options.Search,
    ranks: Ranks,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=V1,V2,...", help="Values of an option; every combination is a row."),
    ] = None,
    device_profile: options.DeviceProfile = None,
    largest: options.LargestBatch = _MOST_BATCH,
    report: options.Report = None,
) -> Answer:
    """Find the largest batch that fits a budget, and its price, for every combination of sizes. Nothing is trained."""
    require_writable(report)
    settings, clusters = _in_bytes(search.settings(budget), device_profile), ranks.clusters()
    over = {name: _values(name, text) for name, text in options.read_settings(set_, "--set").items()}
    return _table(_Asked(target, over, clusters, device_profile, settings, largest), report)


class _Asked(NamedTuple):
    """Which steps are planned: those of every combination of sizes, on every number of ranks."""

    target: str | Callable[..., TrainingStep]
    over: Mapping[str, Sequence[Any]]
    clusters: Sequence[Cluster]
    device_profile: str | None
    settings: Settings
    largest: int

    def rows(self, work: Work) -> Iterator[tuple[FrontierRow, Trial]]:
        """Yield the row of each combination, with the plans that it was made from; fewer rows after Ctrl-C."""
        from memfit.workloads.batch_sizes import batch_size  # imports torch

        first = 0  # a row begins with the batch that the one before ended with
        for cluster, *values in itertools.product(self.clusters or (None,), *self.over.values()):
            if work.interrupted:
                return
            chosen = dict(zip(self.over, values, strict=True))
            shown = chosen if cluster is None else {"ranks": cluster.ranks, **chosen}
            work.stage(f"building the step{''.join(f', {name} {value}' for name, value in shown.items())}")
            with on_ranks(cluster) as there:
                step = self._step(chosen, there)
                trial = Trial(str(self.target), chosen, self.device_profile, self.settings, work, step, there)
                row = trial.row(first or batch_size(trial.step), self.largest)
            first = max(1, row.largest_batch)
            yield msgspec.structs.replace(row, options=shown), trial

    def _step(self, chosen: Mapping[str, Any], there: There) -> TrainingStep:
        if not isinstance(self.target, str):
            return there.made(partial(self.target, **chosen))
        refusal = f"{self.target} is a graph of one size; a batch is sought for a workload or path/to/file.py:function"
        return require_step(resolve(self.target, chosen, there.ranks), refusal)


def _table(asked: _Asked, report: Path | None) -> Answer:
    """Answer with a row for every combination of sizes and numbers of ranks."""
    budget_bytes = int(asked.settings.budget)
    with working() as work:
        found = list(asked.rows(work))
        _write_report("memfit frontier", str(asked.target), found, asked.settings, report, work)
    rows = [row for row, _ in found]
    keys = {"budget_bytes": budget_bytes, "rows": [row.keys() for row in rows]}
    titles = ("largest batch", "peak", "unplanned", "overhead", "samples a second", "fastest batch, its samples")
    names = (*(("ranks",) if asked.clusters else ()), *asked.over)
    lines = [(*(str(row.options[name]) for name in names), *row.cells()) for row in rows]
    head = Text(f"{asked.target} within {format_bytes(budget_bytes)}{' on each rank' if asked.clusters else ''}")
    parts = (head, columns_table((*names, *titles), lines), *_rank_table(rows), *_written(report))
    device = found[-1][1].device.name
    return Answer(target=str(asked.target), device=device, keys=keys, parts=parts, exit_status=work.exit_status)


def _rank_table(rows: Sequence[FrontierRow]) -> tuple[RenderableType, ...]:
    """Return the table of what one of many ranks holds at its largest batch; nothing for steps without ranks."""
    lines: list[tuple[str, ...]] = []
    for row in rows:
        point = next((point for point in row.points if point.batch == row.largest_batch), None)
        if point is not None and point.rank is not None:
            lines.append((*point.rank.cells(), f"{point.batch:,}", f"{point.batch * point.rank.ranks:,}"))
    return (Text(), columns_table((*COLUMNS, "largest batch", "of all ranks"), lines)) if lines else ()


def _write_report(
    which: str, name: str, found: Sequence[tuple[FrontierRow, Trial]], settings: Settings, path: Path | None, work: Work
) -> None:
    if path and not work.interrupted:
        work.stage("writing the report")
        rows = [row for row, _ in found]
        write_frontier_page(which, name, int(settings.budget), found[-1][1].device, rows, path)


def _written(report: Path | None) -> tuple[RenderableType, ...]:
    return (rows_table({"report": str(report)}),) if report else ()


def _in_bytes(settings: Settings, device_profile: str | None) -> Settings:
    settings = settings.on_card(lambda: _card(device_profile))
    if not settings.is_in_bytes:
        raise InvalidBudgetError(
            f"budget {settings.budget!r} is a share of a peak that grows with the batch; give bytes, such as 6GiB"
        )
    return settings.within(parse_budget(settings.budget, 1))


def _card(device_profile: str | None) -> Card:
    if device_profile is not None:
        return card_of_profile(load_device(device_profile))
    from memfit.cost.calibration import card_of  # torch

    return card_of()


def _values(name: str, text: str) -> list[str]:
    values = [value.strip() for value in text.split(",")]
    if not all(values) or len(set(values)) < len(values):
        raise InvalidOptionError(f"--set {name}={text}: expected values with commas between them, each once")
    return values
