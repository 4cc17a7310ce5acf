"""The line of the user's code that something happened in, for errors."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import torch


def user_line(error: BaseException) -> str:
    """Return `file:line` of the innermost frame of an error that is neither torch's nor memfit's."""
    return _innermost(traceback.extract_tb(error.__traceback__))


def calling_line() -> str:
    """Return `file:line` of the innermost frame of the present call that is neither torch's nor memfit's."""
    return _innermost(traceback.extract_stack())


def line_of(node: torch.fx.Node) -> str:
    """Return `file:line` of the innermost frame of a call in Dynamo's graph that is neither torch's nor memfit's."""
    frames = re.findall(r'File "(.*)", line (\d+)', node.stack_trace or "")
    return _innermost(traceback.StackSummary.from_list([(file, int(line), "", "") for file, line in frames]))


def _innermost(stack: traceback.StackSummary) -> str:
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
    frames = [f for f in stack if not f.filename.startswith((*own, "<"))]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "the training step"
