"""The line of the user's code that something happened in, for errors."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch


def user_line(error: BaseException) -> str:
    """Return `file:line` of the innermost frame of an error that is neither torch's nor memfit's."""
    return _innermost(traceback.extract_tb(error.__traceback__))


def calling_line() -> str:
    """Return `file:line` of the innermost frame of the present call that is neither torch's nor memfit's."""
    return _innermost(traceback.extract_stack())


def _innermost(stack: traceback.StackSummary) -> str:
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
    frames = [f for f in stack if not f.filename.startswith((*own, "<"))]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "the training step"
