"""`memfit run`: an unchanged script, whose models train within a budget.

It is a program of its own: until the script itself imports torch, neither torch nor NumPy is there, so that what the
script sets before that (threads, devices) counts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memfit.chunked_loss import HELP
from memfit.commands.command_line import Quiet, Verbose, Verbosity, usage_message
from memfit.errors import InvalidOptionError, MemfitError
from memfit.memory.contract import read_firm
from memfit.system.budget import format_bytes, parse_host_budget, require_budget
from memfit.system.files import require_writable
from memfit.system.lines import lines_on_stderr, say
from memfit.system.script import Script, when_imported

if TYPE_CHECKING:
    from memfit.integrations.found_models import HeldReport, Running

EXAMPLES = """
Examples:

memfit run --budget 6GiB train.py -- --lr 3e-4

memfit run --budget "90% of the card" --report run.html -m package.train -- --epochs 3

torchrun --nproc-per-node 2 -m memfit run --budget 6GiB train.py

accelerate launch -m memfit run --budget 6GiB train.py
"""

PARSING = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}
"""Options behind the script are the script's own."""

_DOORS = ("auto", "checkpoint", "eager")
_BAD_INPUT = 2


def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file, or with -m the name of a module.")],
    budget: Annotated[
        str,
        typer.Option(
            "--budget",
            "-b",
            metavar="BUDGET",
            help="Of each process: 6GiB, 500MB, a whole number of bytes, '90% of the card', or 60% of the peak that is "
            "predicted for the loop as it is (not in eager mode).",
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[--] [ARGUMENTS]...", help="What the script gets.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module's name, as for `python -m`.")] = False,
    door: Annotated[
        str,
        typer.Option(
            "--door",
            metavar="auto|checkpoint|eager",
            help="What holds the models: memfit.checkpoint, memfit.eager, or auto: the first of them that can.",
        ),
    ] = "auto",
    host_budget: Annotated[
        str | None,
        typer.Option(
            "--host-budget",
            metavar="SIZE",
            help="Bytes that inputs of blocks (in eager mode: what autograd saved) may take on the host: pinned memory "
            "for a model on a GPU, a file in the system's temporary directory for one on a CPU.",
        ),
    ] = None,
    budget_is: Annotated[
        str,
        typer.Option(
            "--budget-is",
            metavar="firm|soft",
            help="soft: a step over the budget is only a warning (not in eager mode).",
        ),
    ] = "firm",
    chunk_loss: Annotated[bool, typer.Option("--chunk-loss", help=HELP)] = False,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE.html", help="Write what steps took to this file.")
    ] = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> Any:
    """Run a training script as it is, with its models held to a budget from their first step on.

    Arguments, prints, exit status and signals are the script's own.
    """
    Verbosity(verbose=verbose, quiet=quiet).choose(shows_progress=False)
    require_budget(budget)
    parse_host_budget(host_budget)
    read_firm(budget_is)
    if door not in _DOORS:
        raise InvalidOptionError(f"--door is {door!r}, expected one of {', '.join(_DOORS)}")
    require_writable(report)
    given = list(arguments or ())
    given = given[1:] if given[:1] == ["--"] else given
    made = (Script.of_module if module else Script.of_file)(script, given)
    options = {
        "budget": budget,
        "door": door,
        "host_budget": host_budget,
        "budget_is": budget_is,
        "chunk_loss": chunk_loss,
    }
    return Run(script=made, options=options, report=None if report is None else report.absolute(), is_quiet=quiet)


@dataclass(slots=True, kw_only=True)
class Run:
    """A script that is ready to run within a budget.

    Attributes:
        script: the script.
        options: of `memfit.integrations.found_models.Running`.
        report: the file of the report; None writes none.
        is_quiet: whether nothing is said of what was held.
    """

    script: Script
    options: dict[str, Any]
    report: Path | None
    is_quiet: bool
    _running: Running | None = field(default=None, init=False)

    def start(self) -> int:
        """Run the script, and return 0; what it raises is raised, SystemExit among it."""
        when_imported("torch", self._begin)
        error: BaseException | None = None
        try:
            self.script.run()
        except SystemExit as ended:
            error = ended if ended.code else None
            raise
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._end(error)
        return 0

    def _begin(self) -> None:
        from memfit.integrations.found_models import Running  # torch, which the script has imported now

        self._running = Running(**self.options)
        self._running.begin()

    def _end(self, error: BaseException | None) -> None:
        found = self._running.end(error) if self._running is not None else []
        if os.environ.get("RANK", "0") != "0":
            return
        has_left = self._running is not None and self._running.has_left
        if not (found or has_left or self.is_quiet) and error is None:
            say(
                "warning: no call of a model in training was seen in this process, and nothing was held to the budget; "
                "processes that a script starts itself are not: start them with torchrun -m memfit run"
            )
        for held in () if self.is_quiet else found:
            say(_line(held, self.options["budget"]))
        if self.report is not None:
            from memfit.report.run_page import write_run_page

            write_run_page(" ".join(self.script.arguments), [held.shown() for held in found], self.report)
            if not self.is_quiet:
                say(f"the report is in {self.report}")


def _line(held: HeldReport, budget: str) -> str:
    shown = held.shown()
    of = format_bytes(shown.budget_bytes) if shown.budget_bytes else budget
    return f"{shown.name}, {shown.by}: {shown.steps_text}; at most {format_bytes(shown.most_bytes)} of {of}"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(epilog=EXAMPLES, context_settings=PARSING)(run)


def main(words: Sequence[str]) -> int:
    """Run `memfit run` with these words, and return its exit status, unless the script exits or raises by itself.

    Args:
        words: behind `run`.
    """
    with lines_on_stderr():
        return _run(words)


def _run(words: Sequence[str]) -> int:
    try:
        made = app(list(words), prog_name="memfit run", standalone_mode=False)
        return made.start() if isinstance(made, Run) else 0
    except MemfitError as error:
        say(f"error: {error}")
        return error.exit_status
    except typer.TyperException as error:
        say(f"error: {usage_message(error, 'memfit run')}")
        return _BAD_INPUT
