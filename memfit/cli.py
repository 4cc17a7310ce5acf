"""The `memfit` command: puts the commands together, and turns every error into one line and an exit status.

Exit status: 0 done; 2 bad input; 3 infeasible budget; 4 verification failed; 5 time was up with no plan;
130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from memfit.commands import (
    calibrate,
    check,
    checkpoint,
    compare,
    doctor,
    estimate,
    fit,
    frontier,
    listing,
    pack,
    plan,
    report,
    run,
)
from memfit.commands.answer import BAD_INPUT, DONE, INTERRUPTED, deliver_error, only_answers_on_stdout
from memfit.commands.command_line import usage_message
from memfit.commands.options import with_each_option
from memfit.errors import MemfitError
from memfit.system.lines import lines_on_stderr
from memfit.system.version import __version__

app = typer.Typer(
    name="memfit",
    help="Make a PyTorch training step fit a memory budget given in bytes, with the least slowdown, and prove it.",
    epilog="Start with: memfit fit unet --budget 60%",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

COMMANDS = {
    "fit": (fit.fit, fit.EXAMPLES),
    "checkpoint": (checkpoint.checkpoint, checkpoint.EXAMPLES),
    "estimate": (estimate.estimate, estimate.EXAMPLES),
    "plan": (plan.plan, plan.EXAMPLES),
    "batch": (frontier.batch, frontier.EXAMPLES_OF_BATCH),
    "frontier": (frontier.command, frontier.EXAMPLES),
    "compare": (compare.compare, compare.EXAMPLES),
    "pack": (pack.pack, pack.EXAMPLES),
    "check": (check.check, check.EXAMPLES),
    "report": (report.report, report.EXAMPLES),
    "doctor": (doctor.doctor, doctor.EXAMPLES),
    "calibrate": (calibrate.calibrate, calibrate.EXAMPLES),
    "planners": (listing.planners, listing.EXAMPLES["planners"]),
    "packers": (listing.packers, listing.EXAMPLES["packers"]),
    "workloads": (listing.workloads, listing.EXAMPLES["workloads"]),
    "devices": (listing.devices, listing.EXAMPLES["devices"]),
}
for _name, (_command, _examples) in COMMANDS.items():
    app.command(_name, epilog=_examples)(with_each_option(_command))

app.command("run", epilog=run.EXAMPLES, context_settings=run.PARSING)(run.run)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"memfit {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; the console script `memfit` exits with it.

    >>> main(["planners", "--json"])  # doctest: +SKIP
    0
    """
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if words[0] == "run":  # whose script may raise what it likes
        return run.main(words[1:])
    as_json = "--json" in words
    with lines_on_stderr(), only_answers_on_stdout(as_json):
        return _answered(words, as_json=as_json)


def _answered(words: list[str], *, as_json: bool) -> int:
    try:
        status = app(words, prog_name="memfit", standalone_mode=False)
    except MemfitError as error:
        return deliver_error(error, as_json=as_json, exit_status=error.exit_status)
    except typer.TyperException as error:
        return deliver_error(usage_message(error), as_json=as_json, exit_status=BAD_INPUT)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "memfit"):
            raise
        message = f"this command needs the package {package}, which is not installed: pip install {package}"
        return deliver_error(message, as_json=as_json, exit_status=BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        return deliver_error("interrupted", as_json=as_json, exit_status=INTERRUPTED)
    return status if isinstance(status, int) else DONE
