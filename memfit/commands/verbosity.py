"""`--verbose` and `--quiet`, which every command has. Imports little: `memfit run` runs before its script's imports."""

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
