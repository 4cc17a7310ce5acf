"""Lines for people: printable text, on a stream of any encoding."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TextIO

QUIET, NORMAL, VERBOSE = logging.ERROR, logging.WARNING, logging.DEBUG
"""Levels of the lines that a command writes."""


def printable(name: str) -> str:
    """Return a name of a graph with every character that is not printable replaced by `?`.

    Such characters could move the cursor of a terminal.

    >>> printable("relu\\x1b[2J\\n")
    'relu?[2J?'
    """
    if name.isprintable():
        return name
    return "".join(character if character.isprintable() else "?" for character in name)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint at the known name that is closest to an unknown one; empty if none is close.

    >>> did_you_mean("bach", ["batch", "size"])
    "; did you mean 'batch'?"

    Args:
        name: as given.
        known: the names that exist.
    """
    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def write(text: str, stream: TextIO) -> None:
    """Write text to a stream, and flush it; what its encoding does not have is replaced by `?`.

    Args:
        text: to be written.
        stream: such as `sys.stdout`.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding, "replace"))
    stream.flush()


def say(text: str) -> None:
    """Write one line of memfit's to standard error, whatever whitespace and characters are in the text."""
    write(f"memfit: {printable(' '.join(text.split()))}\n", sys.stderr)


class WarningLines(logging.Handler):
    """Writes memfit's log records as lines on standard error: on the `sys.stderr` of that time, which tests replace."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        say(f"{level}{record.getMessage().removeprefix('memfit: ')}")


@contextmanager
def lines_on_stderr() -> Generator[None]:
    """Write memfit's log records of the chosen level on standard error, inside the block."""
    loggers = [logging.getLogger(name) for name in ("memfit", "memfit.progress")]
    levels, handler = [logger.level for logger in loggers], WarningLines()
    loggers[0].addHandler(handler)
    try:
        yield
    finally:
        loggers[0].removeHandler(handler)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def choose_lines(level: int, *, shows_progress: bool = False) -> None:
    """Choose which records `lines_on_stderr` writes, until its block ends.

    Args:
        level: QUIET, NORMAL or VERBOSE.
        shows_progress: whether lines of progress are written at the normal level.
    """
    logging.getLogger("memfit").setLevel(level)
    is_told = shows_progress and level == NORMAL
    logging.getLogger("memfit.progress").setLevel(logging.INFO if is_told else level)
