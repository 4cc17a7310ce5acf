"""What all command lines share: `--verbose`, `--quiet`, and what is said of wrong options.

Imports little: `memfit run` runs before its script's imports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from memfit.errors import InvalidOptionError
from memfit.system.lines import NORMAL, QUIET, VERBOSE, choose_lines

Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more on standard error: each stage and choice.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing on standard error but errors.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verbosity:
    """What a command says on standard error beside its answer."""

    verbose: Verbose = False
    quiet: Quiet = False

    def choose(self, *, shows_progress: bool) -> None:
        """Let the lines be written, until `lines_on_stderr` ends.

        Args:
            shows_progress: whether lines of progress are written, too, if nothing else was asked for.

        Raises:
            InvalidOptionError: both options are given.
        """
        if self.verbose and self.quiet:
            raise InvalidOptionError("--verbose and --quiet exclude each other; give one of them")
        choose_lines(VERBOSE if self.verbose else QUIET if self.quiet else NORMAL, shows_progress=shows_progress)


def usage_message(error: typer.TyperException, program: str = "memfit") -> str:
    """Return the message of a wrong command line: the problem, the value that was given, and the help to read.

    Args:
        error: raised by typer while it read the command line.
        program: named where typer does not say which command it read.
    """
    context, why = getattr(error, "ctx", None), getattr(error.__cause__, "errors", None)
    given = "" if why is None else f", got {why()[0]['input']!r}"  # of pydantic, by which typer reads numbers
    command = program if context is None else context.command_path
    return f"{error.format_message()}{given} (see `{command} --help`)"
