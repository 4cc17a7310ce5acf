"""The line of the user's code that something happened in, for errors."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch

OWN = str(Path(__file__).parent.parent)
_NO_USERS = (str(Path(torch.__file__).parent), OWN, "<")


@cache
def is_users_file(filename: str) -> bool:
    """Return whether a file is neither torch's nor memfit's, and is one at all."""
    return not filename.startswith(_NO_USERS)


def user_line(error: BaseException) -> str:
    """Return `file:line` of the innermost frame of an error that is neither torch's nor memfit's."""
    return _innermost((frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__))


def calling_line() -> str:
    """Return `file:line` of the innermost frame of the present call that is neither torch's nor memfit's."""
    return _innermost((frame.filename, frame.lineno) for frame in traceback.extract_stack())


def line_of(node: torch.fx.Node) -> str:
    """Return `file:line` of the innermost frame of a call in Dynamo's graph that is neither torch's nor memfit's."""
    return _innermost(re.findall(r'File "(.*)", line (\d+)', node.stack_trace or ""))


def _innermost(frames: Iterable[tuple[str, int | str | None]]) -> str:
    lines = [f"{filename}:{line}" for filename, line in frames if is_users_file(filename)]
    return lines[-1] if lines else "the training step"
