"""Lines for people: printable text, on a stream of any encoding."""

from __future__ import annotations

import logging
import sys
from typing import TextIO


def printable(name: str) -> str:
    """Return a name of a graph with every character that is not printable replaced by `?`.

    Such characters could move the cursor of a terminal.

    >>> printable("relu\\x1b[2J\\n")
    'relu?[2J?'
    """
    if name.isprintable():
        return name
    return "".join(character if character.isprintable() else "?" for character in name)


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
        say(f"{record.levelname.lower()}: {record.getMessage().removeprefix('memfit: ')}")
