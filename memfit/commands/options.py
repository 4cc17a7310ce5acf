"""The arguments and options that commands share, and the reading of their texts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, get_type_hints

import msgspec
import typer

from memfit.errors import InvalidFileError, InvalidOptionError
from memfit.options import FitOptions, help_texts
from memfit.planners import PLANNERS, make_planner
from memfit.planning import FIRM, Settings
from memfit.system.budget import parse_budget, parse_host_budget
from memfit.system.spill_file import parse_host_dir

_ANY_PEAK_BYTES = 1 << 50  # the peak that a percentage is taken of while only its form is checked

_HELP = {name: f"{text[:1].upper()}{text[1:]}." for name, text in help_texts(FitOptions).items()}

_STEP = "A built-in workload (see `memfit workloads`), {}path/to/file.py:function that returns a memfit.TrainingStep{}."

Target = Annotated[str, typer.Argument(metavar="TARGET", help=_STEP.format("", ", or a graph file"))]
StepTarget = Annotated[str, typer.Argument(metavar="TARGET", help=_STEP.format("or ", ""))]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A file that `--save` wrote.")]
Budget = Annotated[
    str,
    typer.Option(
        "--budget",
        "-b",
        metavar="BUDGET",
        help="6GiB, 500MB, a whole number of bytes, or 60% of the unplanned peak. It covers parameters and inputs too.",
    ),
]
OptionalBudget = Annotated[
    str | None, typer.Option("--budget", "-b", metavar="BUDGET", help="As for `memfit plan`; or give --plan.")
]
HostBudget = Annotated[
    str | None,
    typer.Option(
        "--host-budget",
        metavar="SIZE",
        help="Storages may leave the device, up to this size: from a GPU to pinned memory of the host, which nothing "
        "else can use then, and from a CPU to a file on disk. None by default.",
    ),
]
HostDir = Annotated[
    Path | None,
    typer.Option(
        "--host-dir",
        metavar="DIR",
        help=_HELP["host_dir"],
    ),
]
BudgetIs = Annotated[
    str,
    typer.Option(
        "--budget-is",
        metavar="firm|soft",
        help=_HELP["budget_is"],
    ),
]
Hard = Annotated[bool, typer.Option("--hard", help=_HELP["hard"])]
CudaGraph = Annotated[bool, typer.Option("--cuda-graph", help=_HELP["cuda_graph"])]
Planner = Annotated[str, typer.Option("--planner", "-p", metavar="NAME", help="See `memfit planners`.")]
PlannerOptions = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=VALUE", help="An option of the planner; may be given several times."),
]
TimeLimit = Annotated[float, typer.Option("--time-limit", "-t", metavar="SECONDS", help=_HELP["time_limit_seconds"])]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help=_HELP["seed"])]
WorkloadOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="An option of the workload, or an argument of the function, such as batch=4; may be repeated.",
    ),
]
NoCache = Annotated[
    bool,
    typer.Option("--no-cache", help="Search a new plan even if one of the same step and settings was kept on disk."),
]
Save = Annotated[Path | None, typer.Option("--save", "-s", metavar="PLAN", help="Write the plan to this file (JSON).")]
Report = Annotated[
    Path | None, typer.Option("--report", metavar="FILE.html", help="Write an HTML report to this file.")
]
DeviceProfile = Annotated[
    str | None,
    typer.Option(
        "--device-profile",
        metavar="NAME|FILE",
        help="Plan for this device instead of the one here (see `memfit devices`); times then come from a roofline.",
    ),
]
CurvePoints = Annotated[
    int, typer.Option("--curve", metavar="N", min=0, help="Points of the report's trade-off curve; 0 leaves it out.")
]
Repeats = Annotated[int, typer.Option("--repeats", metavar="N", min=1, help="Steps to measure; medians are shown.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, on standard output.")]


def plan_settings(
    budget: str | int,
    planner: str,
    option: list[str] | None,
    time_limit: float,
    seed: int,
    *,
    host_budget: str | None = None,
    host_dir: Path | None = None,
    no_cache: bool = False,
    budget_is: str = FIRM,
    hard: bool = False,
    cuda_graph: bool = False,
) -> Settings:
    """Return the settings of a plan that the options of a command give, checked before any work is done.

    >>> plan_settings("6GiB", "search", ["iterations=100"], 5.0, 0).options
    {'iterations': 100}

    Args:
        budget: text such as `6GiB` or `60%`, or bytes.
        planner: a planner's name.
        option: `NAME=VALUE` texts of the planner's options.
        time_limit: seconds.
        seed: a whole number from 0 on.
        host_budget: text such as `64GiB`; None allows no offloading.
        host_dir: on the disk that a CPU offloads to.
        no_cache: whether kept plans are left unread.
        budget_is: `firm` or `soft`.
        hard: whether the process is capped while a step runs.
        cuda_graph: whether the step is captured and replayed.

    Raises:
        InvalidBudgetError: a budget that cannot be read.
        InvalidOptionError: no such planner, no such option, or a value that it cannot have.
    """
    parse_budget(budget, unplanned_peak_bytes=_ANY_PEAK_BYTES)
    settings = Settings(
        budget=budget,
        planner=planner,
        options=typed_options("planner", planner, PLANNERS, read_settings(option, "--option")),
        time_limit_seconds=require_time_limit(time_limit),
        seed=seed,
        host_budget_bytes=parse_host_budget(host_budget),
        host_dir=parse_host_dir(host_dir),
        reads_kept_plans=not no_cache,
        budget_is=budget_is,
        hard=hard,
        cuda_graph=cuda_graph,
    )
    make_planner(planner, **settings.options)
    return settings


def read_settings(texts: Iterable[str] | None, option: str) -> dict[str, str]:
    """Return `name=value` texts as a dictionary.

    >>> read_settings(["batch=4", "size=128"], "--set")
    {'batch': '4', 'size': '128'}

    Args:
        texts: what the user gave; None is nothing.
        option: the name of the option, for the message.

    Raises:
        InvalidOptionError: a text of another form, or a name twice.
    """
    pairs: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise InvalidOptionError(f"{option} {text!r} is not a setting: expected NAME=VALUE, such as batch=4")
        if name.strip() in pairs:
            raise InvalidOptionError(f"{option} gives {name.strip()!r} twice; give it once")
        pairs[name.strip()] = value.strip()
    return pairs


def typed_options(kind: str, name: str, classes: Mapping[str, type], texts: Mapping[str, str]) -> dict[str, object]:
    """Return the options of a planner or packer, each converted from text to the type of its field.

    A name that is not in `classes`, and an option that its class lacks, stay as they are: the registry refuses them.

    >>> from memfit.planners import PLANNERS
    >>> typed_options("planner", "search", PLANNERS, {"iterations": "100"})
    {'iterations': 100}

    Args:
        kind: `planner` or `packer`, for the message.
        name: of the planner or packer.
        classes: name -> class with the options as fields.
        texts: option -> value.

    Raises:
        InvalidOptionError: a value that the option cannot have.
    """
    hints = get_type_hints(classes[name]) if name in classes else {}
    values: dict[str, object] = {}
    for option, text in texts.items():
        try:
            values[option] = msgspec.convert(text, hints.get(option, str), strict=False)
        except msgspec.ValidationError as error:
            raise InvalidOptionError(f"{kind} {name!r}: option {option}={text!r}: {error}") from error
    return values


def require_time_limit(seconds: float) -> float:
    """Return `seconds`, or raise InvalidOptionError unless it is a finite number above 0."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidOptionError(f"--time-limit is {seconds}, expected a number of seconds above 0")
    return seconds


def require_writable(*paths: Path | None) -> None:
    """Raise InvalidFileError, before any work is done, for a file whose folder is missing, or that is a folder."""
    for path in paths:
        if path is None:
            continue
        if not path.parent.is_dir():
            raise InvalidFileError(f"{path}: cannot be written: there is no folder {path.parent}; make it first")
        if path.is_dir():
            raise InvalidFileError(f"{path}: cannot be written: it is a folder; give a file's name")
