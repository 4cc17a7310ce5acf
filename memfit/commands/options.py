"""The arguments and options that commands share, and how their texts become values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, get_type_hints

import msgspec
import typer

from memfit.budget import parse_budget
from memfit.errors import InvalidFileError, InvalidOptionError

_ANY_PEAK_BYTES = 1 << 50  # what a percentage is taken of while only its form is looked at

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        show_default=False,
        help="A built-in workload (see `memfit workloads`), path/to/file.py:function that returns a "
        "memfit.TrainingStep, or a graph file.",
    ),
]
StepTarget = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        show_default=False,
        help="A built-in workload (see `memfit workloads`), or path/to/file.py:function that returns a "
        "memfit.TrainingStep.",
    ),
]
Budget = Annotated[
    str,
    typer.Option(
        "--budget",
        "-b",
        metavar="BUDGET",
        show_default=False,
        help="6GiB, 500MB, a whole number of bytes, or 60% of the unplanned peak. It covers parameters and inputs too.",
    ),
]
OptionalBudget = Annotated[
    str | None,
    typer.Option("--budget", "-b", metavar="BUDGET", show_default=False, help="As for `memfit plan`; or give --plan."),
]
HostBudget = Annotated[
    str | None,
    typer.Option(
        "--host-budget",
        metavar="SIZE",
        show_default=False,
        help="Storages may go to the host's memory, up to this size, where the device has a link to it: 64GiB. "
        "None by default: what is copied there is pinned, and taken from all that runs on the host.",
    ),
]
Planner = Annotated[str, typer.Option("--planner", "-p", metavar="NAME", help="See `memfit planners`.")]
PlannerOptions = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=VALUE", help="An option of the planner; may be given several times."),
]
TimeLimit = Annotated[float, typer.Option("--time-limit", "-t", metavar="SECONDS", help="For the search of a plan.")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Of the search: the same seed gives the same plan.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="An option of the workload, such as batch=4; may be repeated."),
]
Save = Annotated[
    Path | None,
    typer.Option("--save", "-s", metavar="PLAN", show_default=False, help="Write the plan to this file (JSON)."),
]
Report = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE.html", show_default=False, help="Write an HTML report to this file."),
]
DeviceProfile = Annotated[
    str | None,
    typer.Option(
        "--device-profile",
        metavar="NAME|FILE",
        show_default=False,
        help="Plan for this device instead of the one here (see `memfit devices`); times then come from a roofline.",
    ),
]
EstimatedDevice = Annotated[
    str | None,
    typer.Option(
        "--device-profile",
        metavar="NAME|FILE",
        show_default=False,
        help="Round sizes up as this device does (see `memfit devices`) instead of the one here.",
    ),
]
CurvePoints = Annotated[
    int, typer.Option("--curve", metavar="N", help="Points of the report's trade-off curve; 0 leaves it out.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, on standard output.")]


def read_settings(texts: Iterable[str] | None, option: str) -> dict[str, str]:
    """Return `name=value` texts as a dictionary.

    >>> read_settings(["batch=4", "size=128"], "--set")
    {'batch': '4', 'size': '128'}
    """
    settings: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise InvalidOptionError(f"{option} {text!r} is not a setting: expected NAME=VALUE, such as batch=4")
        if name.strip() in settings:
            raise InvalidOptionError(f"{option} gives {name.strip()!r} twice; give it once")
        settings[name.strip()] = value.strip()
    return settings


def typed_options(kind: str, name: str, classes: Mapping[str, type], texts: Mapping[str, str]) -> dict[str, object]:
    """Return the options of a planner or packer read from text, each as the type of its own field.

    What is not in `classes`, and options that its class does not have, are left for the registry to refuse.

    >>> from memfit.planners import PLANNERS
    >>> typed_options("planner", "search", PLANNERS, {"iterations": "100"})
    {'iterations': 100}

    Raises:
        InvalidOptionError: a value that the option cannot take.
    """
    hints = get_type_hints(classes[name]) if name in classes else {}
    values: dict[str, object] = {}
    for option, text in texts.items():
        try:
            values[option] = msgspec.convert(text, hints.get(option, str), strict=False)
        except msgspec.ValidationError as error:
            raise InvalidOptionError(f"{kind} {name!r}: option {option}={text!r}: {error}") from error
    return values


def require_budget(text: str) -> None:
    """Refuse, before any work is done, a budget that could not be read later."""
    parse_budget(text, unplanned_peak_bytes=_ANY_PEAK_BYTES)


def read_host_budget(text: str | None) -> int:
    """Return the bytes of `--host-budget`; none is 0, which allows no offloading.

    >>> read_host_budget("2GiB"), read_host_budget(None)
    (2147483648, 0)
    """
    if text is not None and text.strip().endswith("%"):
        raise InvalidOptionError(f"--host-budget is {text!r}, expected a size such as 64GiB")
    return 0 if text is None else parse_budget(text, unplanned_peak_bytes=0)


def require_time_limit(seconds: float) -> float:
    """Return `seconds` where it is a time limit that can be kept."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidOptionError(f"--time-limit is {seconds}, expected a number of seconds above 0")
    return seconds


def require_count(count: int, option: str, least: int = 0) -> int:
    """Return `count` where it is at least `least`."""
    if count < least:
        raise InvalidOptionError(f"{option} is {count}, expected {least} or more")
    return count


def require_writable(*paths: Path | None) -> None:
    """Refuse, before any work is done, a file to be written whose folder is not there or that is a folder itself."""
    for path in paths:
        if path is None:
            continue
        if not path.parent.is_dir():
            raise InvalidFileError(f"{path}: cannot be written: there is no folder {path.parent}; make it first")
        if path.is_dir():
            raise InvalidFileError(f"{path}: cannot be written: it is a folder; give a file's name")
