"""One run of the command line in a test, and the one JSON object that it prints."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import memfit

MOVES = ("--option", "iterations=2000")  # in place of seconds, which a busy machine fills with less

Run = Callable[..., tuple[int, str, str]]
"""Runs one command, gives exit status, standard output and standard error: the fixture `run`."""


def without_progress(err: str) -> str:
    """Return standard error without the lines that a command writes every ten seconds: a busy machine has more."""
    return re.sub(r"^memfit: [^\n]*: (\d+%, )?\d+ s\b[^\n]*\n", "", err, flags=re.MULTILINE)


def json_of(out: str) -> dict[str, Any]:
    """Return the one JSON object that must be all of standard output."""
    document = json.loads(out)
    assert isinstance(document, dict)
    assert document["memfit_version"] == memfit.__version__
    return document
