"""The arguments and options that commands share, and the reading of their texts."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

import msgspec
import typer

from memfit.chunked_loss import HELP as CHUNK_LOSS_HELP
from memfit.commands.answer import Answer, deliver
from memfit.commands.command_line import Verbosity
from memfit.errors import InvalidOptionError
from memfit.options import FitOptions, RanksOptions, help_texts, settings_from
from memfit.planners import PLANNERS, make_planner
from memfit.planning import DEFAULT_PLANNER, DEFAULT_TIME_LIMIT_SECONDS, Settings
from memfit.system.budget import require_budget

_TEXTS = help_texts(FitOptions) | help_texts(RanksOptions)
_HELP = {name: f"{text[:1].upper()}{text[1:]}." for name, text in _TEXTS.items()}


def _of_record(name: str, *names: str, metavar: str | None = None) -> Any:
    """Return an option of the command line with the help text that the option `name` has in Python."""
    return typer.Option(*(names or (f"--{name.replace('_', '-')}",)), metavar=metavar, help=_HELP[name])


_STEP = "A built-in workload (see `memfit workloads`), {}path/to/file.py:function that returns a memfit.TrainingStep{}."

Target = Annotated[str, typer.Argument(metavar="TARGET", help=_STEP.format("", ", or a graph file"))]
StepTarget = Annotated[str, typer.Argument(metavar="TARGET", help=_STEP.format("or ", ""))]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A file that `--save` wrote.")]
_BYTES, _COVERS = "6GiB, 500MB, a whole number of bytes, ", "It covers parameters and inputs too."
_SHARES = f"{_BYTES}60% of the peak of the step as it was written, or '90% of the card'. {_COVERS}"


def _budget(help_text: str) -> Any:
    return typer.Option("--budget", "-b", metavar="BUDGET", help=help_text)


Budget = Annotated[str, _budget(_SHARES)]
BudgetOfAnyBatch = Annotated[str, _budget(f"{_BYTES}or '90% of the card', whatever the batch. {_COVERS}")]
OptionalBudget = Annotated[str | None, _budget(f"{_SHARES} Or give --plan.")]
HostBudget = Annotated[str | None, _of_record("host_budget", metavar="SIZE")]
HostDir = Annotated[Path | None, _of_record("host_dir", metavar="DIR")]
BudgetIs = Annotated[str, _of_record("budget_is", metavar="firm|soft")]
Hard = Annotated[bool, _of_record("hard")]
CudaGraph = Annotated[bool, _of_record("cuda_graph")]
ChunkLoss = Annotated[bool, typer.Option("--chunk-loss", help=CHUNK_LOSS_HELP)]
Planner = Annotated[str, _of_record("planner", "--planner", "-p", metavar="NAME")]
PlannerOptions = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=VALUE", help="An option of the planner; may be given several times."),
]
TimeLimit = Annotated[float, _of_record("time_limit_seconds", "--time-limit", "-t", metavar="SECONDS")]
Seed = Annotated[int, _of_record("seed", metavar="N")]
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
LargestBatch = Annotated[int, typer.Option("--largest", metavar="N", min=1, help="No batch above this is tried.")]
CurvePoints = Annotated[
    int, typer.Option("--curve", metavar="N", min=0, help="Points of the report's trade-off curve; 0 leaves it out.")
]
Repeats = Annotated[
    int | None,
    typer.Option(
        "--repeats",
        metavar="N",
        min=1,
        help="Turns of eager and planned steps to measure; by default until the overhead is known to 2 points.",
    ),
]
RanksText = Annotated[str | None, _of_record("ranks", metavar="N|N,N,...")]
Shard = Annotated[bool, _of_record("shard", "--shard")]
Replicas = Annotated[int, _of_record("replicas", metavar="N")]
LinkText = Annotated[str | None, _of_record("link", metavar="nvlink|ib|RATE")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, on standard output.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The options of a command that say how plans are searched, and what they may use.

    >>> Search(planner="search", option=["iterations=100"]).settings("6GiB").options
    {'iterations': 100}
    """

    host_budget: HostBudget = None
    host_dir: HostDir = None
    planner: Planner = DEFAULT_PLANNER
    option: PlannerOptions = None
    time_limit: TimeLimit = DEFAULT_TIME_LIMIT_SECONDS
    seed: Seed = 0
    no_cache: NoCache = False

    def settings(self, budget: str | int, **of_run: Any) -> Settings:
        """Return the settings of a plan, checked before any work is done.

        Args:
            budget: text such as `6GiB` or `60%`, or bytes.
            of_run: more options of `memfit.fit`.

        Raises:
            InvalidBudgetError: a budget that cannot be read.
            InvalidOptionError: no such planner, no such option, or a value that it cannot have.
        """
        require_budget(budget)
        of_plan = {
            "planner": self.planner,
            "options": typed_options("planner", self.planner, PLANNERS, read_settings(self.option, "--option")),
            "time_limit_seconds": require_time_limit(self.time_limit),
            "seed": self.seed,
            "host_budget": self.host_budget,
            "host_dir": self.host_dir,
        }
        settings = settings_from(budget, {**of_plan, **of_run})
        make_planner(settings.planner, **settings.options)
        return replace(settings, reads_kept_plans=not self.no_cache, stops_on_interrupt=False)


def with_each_option(command: Callable[..., Answer]) -> Callable[..., int]:
    """Return a command as typer takes it: with each option of a group, such as `Search`, in the place of the group.

    Each command also has `--json` and the options of `Verbosity`. Its answer is written, and its exit status returned.
    """
    taken: dict[str, inspect.Parameter] = {}
    groups: dict[str, tuple[Any, list[str]]] = {}
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        group: Any = parameter.annotation
        if is_dataclass(group):
            own = inspect.signature(cast("type", group), eval_str=True).parameters
            groups[name] = group, list(own)
            taken |= own
        else:
            taken[name] = parameter
    keyword = inspect.Parameter.KEYWORD_ONLY
    of_all = inspect.signature(Verbosity, eval_str=True).parameters
    taken |= {"as_json": inspect.Parameter("as_json", keyword, default=False, annotation=Json), **of_all}
    signature = inspect.Signature([parameter.replace(kind=keyword) for parameter in taken.values()])

    @wraps(command)
    def run(**given: Any) -> int:
        as_json: bool = given.pop("as_json")
        Verbosity(**{name: given.pop(name) for name in of_all}).choose(shows_progress=not sys.stderr.isatty())
        chosen = {group: kind(**{name: given.pop(name) for name in own}) for group, (kind, own) in groups.items()}
        return deliver(command(**given, **chosen), as_json=as_json)

    vars(run).update(__signature__=signature)
    run.__annotations__ = {name: parameter.annotation for name, parameter in taken.items()}
    return run


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
