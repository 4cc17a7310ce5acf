"""What a command answers: one JSON object or a text for people, and an exit status. Only this writes to stdout."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

import memfit
from memfit.errors import InfeasibleBudgetError, MemfitError
from memfit.report.words import printable

DONE = 0
BAD_INPUT = 2
VERIFICATION_FAILED = 4
INTERRUPTED = 130

_PIPED_WIDTH = 160  # columns where nobody says how wide the terminal is: rich's 80 would break names in two


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command found.

    `keys` are the command's own JSON keys, beside those that every command has; `parts` is the same for people, from
    top to bottom.
    """

    target: str | None
    device: str | None
    keys: Mapping[str, Any]
    parts: tuple[RenderableType, ...] = ()
    exit_status: int = DONE


def deliver(answer: Answer, *, as_json: bool) -> int:
    """Write the answer to standard output and return its exit status."""
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
    """Write one JSON object to standard output; what is not a number there (nan, inf) becomes null."""
    document = {**keys, "memfit_version": memfit.__version__}
    _write(msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")


def _write(text: str) -> None:
    """Write to standard output; a reader that has seen enough and closed the pipe is no error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit


def deliver_error(error: MemfitError | str, *, as_json: bool, exit_status: int) -> int:
    """Write one line to standard error, and under --json an object with the key `error`; return the exit status."""
    message = printable(" ".join(str(error).split()))
    sys.stderr.write(f"memfit: error: {message}\n")
    if as_json:
        keys: dict[str, Any] = {"error": message, "exit_status": exit_status}
        if isinstance(error, InfeasibleBudgetError):
            keys["status"] = "infeasible"
            keys["least_budget_found_bytes"] = error.least_budget_found_bytes
            keys["least_budget_bound_bytes"] = error.least_budget_bound_bytes
        write_json(keys)
    return exit_status


class WarningLines(logging.Handler):
    """Writes what memfit logs as lines on standard error, whatever that is at the moment: progress may stand on it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        message = printable(" ".join(record.getMessage().removeprefix("memfit: ").split()))
        sys.stderr.write(f"memfit: {record.levelname.lower()}: {message}\n")


def rows_table(rows: Mapping[str, str], title: str | None = None) -> Table:
    """Return a table of two columns, what and how much, that takes names from anywhere as plain text."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, value in rows.items():
        table.add_row(Text(printable(name), style="dim"), Text(printable(value)))
    return table


def columns_table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    """Return a table with a header; the texts are taken as they are, never as markup."""
    has_header = any(columns)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_header=has_header)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table
