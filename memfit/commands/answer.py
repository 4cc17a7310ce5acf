"""The answer of a command: one JSON object or text, and an exit status. Nothing else writes to standard output."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

import msgspec
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from memfit.errors import MemfitError, NoPlanError, TimeLimitError
from memfit.plan import Status
from memfit.system.lines import printable, say, write
from memfit.system.version import __version__

DONE = 0
BAD_INPUT = 2
VERIFICATION_FAILED = 4
INTERRUPTED = 130

_STDOUT, _STDERR = 1, 2  # file descriptors
_PIPED_WIDTH = 160  # columns of output that is no terminal: at rich's default of 80, names would be broken in two


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of a command.

    Attributes:
        keys: the command's own JSON keys, beside those of every command.
        target: as the user wrote it; None if there is none.
        device: the name of the device, likewise.
        parts: the same as text and tables, from top to bottom; made only if they are shown.
        exit_status: of the process.
    """

    keys: Mapping[str, Any]
    target: str | None = None
    device: str | None = None
    parts: Iterable[RenderableType] = ()
    exit_status: int = DONE


_for_answers: TextIO | None = None


@contextmanager
def only_answers_on_stdout(wanted: bool) -> Generator[None]:
    """Send to standard error whatever is written to standard output inside, by Python, C or a child, but for answers.

    Args:
        wanted: nothing is changed without.
    """
    global _for_answers
    if not wanted:
        yield
        return
    kept, sys.stdout = sys.stdout, sys.stderr
    with ExitStack() as restored:
        restored.callback(setattr, sys, "stdout", kept)
        _for_answers = _apart(kept, restored)
        try:
            yield
        finally:
            _for_answers.flush()
            _for_answers = None


def _apart(stream: TextIO, restored: ExitStack) -> TextIO:
    """Return a stream for answers alone: another descriptor of the process's standard output, which is then stderr's.

    A stream that is not the process's own (of a test, of a notebook) is returned as it is: no C code writes there.
    """
    try:
        is_own = stream is sys.__stdout__ and stream.fileno() == _STDOUT
    except (OSError, ValueError):
        is_own = False
    if not is_own:
        return stream
    stream.flush()
    apart = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)
    restored.callback(os.close, apart)
    restored.callback(os.dup2, apart, _STDOUT)
    return open(apart, "w", encoding=stream.encoding, errors=stream.errors, closefd=False)


def deliver(answer: Answer, *, as_json: bool) -> int:
    """Write the answer to standard output and return its exit status.

    Args:
        answer: what is written.
        as_json: whether it is written as one JSON object, and not as text.
    """
    if as_json:
        write_json({"target": answer.target, "device": answer.device} | dict(answer.keys))
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = _PIPED_WIDTH
        with console.capture() as shown:
            for part in answer.parts:
                console.print(part, markup=False, soft_wrap=isinstance(part, str))
        _write(shown.get())
    return answer.exit_status


def write_json(keys: Mapping[str, Any]) -> None:
    """Write one JSON object to standard output; nan and inf become null."""
    document = {**keys, "memfit_version": __version__}
    _write(msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")


def _write(text: str) -> None:
    """Write to standard output; a pipe that its reader has closed is no error."""
    try:
        write(text, _for_answers or sys.stdout)
    except BrokenPipeError:
        stream = _for_answers or sys.stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # for the flush at exit


def deliver_error(error: MemfitError | str, *, as_json: bool, exit_status: int) -> int:
    """Write one line to standard error, and under --json an object with the key `error`; return the exit status.

    An error about a budget adds `status` and both least budgets.

    Args:
        error: the error, or its message.
        as_json: whether the object is written.
        exit_status: of the process.
    """
    message = printable(" ".join(str(error).split()))
    say(f"error: {message}")
    if as_json:
        keys: dict[str, Any] = {"error": message, "exit_status": exit_status}
        if isinstance(error, NoPlanError):
            keys["status"] = Status.TIMED_OUT if isinstance(error, TimeLimitError) else Status.INFEASIBLE
            keys["least_budget_found_bytes"] = error.least_budget_found_bytes
            keys["least_budget_bound_bytes"] = error.least_budget_bound_bytes
        write_json(keys)
    return exit_status


def rows_table(rows: Mapping[str, str]) -> Table:
    """Return a table of names and values; both are shown as plain text, never as markup.

    Args:
        rows: name -> value.
    """
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, value in rows.items():
        table.add_row(Text(printable(name), style="dim"), Text(printable(value)))
    return table


def columns_table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    """Return a table with a header; all texts are shown as plain text, never as markup.

    Args:
        columns: the header; it is left out if all are empty.
        rows: a text for each column.
    """
    has_header = any(columns)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_header=has_header)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table
