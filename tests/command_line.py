"""One run of the command line in a test, and the one JSON object that it prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import memfit

MOVES = ("--option", "iterations=2000")  # in place of seconds, which a busy machine fills with less

Run = Callable[..., tuple[int, str, str]]
"""Runs one command, gives exit status, standard output and standard error: the fixture `run`."""


def json_of(out: str) -> dict[str, Any]:
    """Return the one JSON object that must be all of standard output."""
    document = json.loads(out)
    assert isinstance(document, dict)
    assert document["memfit_version"] == memfit.__version__
    return document
