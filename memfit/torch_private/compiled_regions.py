"""Calls of code that `torch.compile` has compiled, where memfit watches what is called.

PyTorch compiles nothing, and runs nothing that is compiled, while a dispatch mode is on: it would run such code in
eager, with other last bits, mark it so for later calls too, and end with an error under `fullgraph=True`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from memfit.torch_private.patching import Inside, replaced

_EVAL_FRAME = "torch._dynamo.eval_frame"


class _Thread(threading.local):
    """Where a thread is.

    Attributes:
        begins: whether the present region is about to begin.
        depth: of regions, one inside of the other.
        watchers: functions called when an outermost region begins; each returns a function to call at its end.
    """

    def __init__(self) -> None:
        self.begins, self.depth = False, 0
        self.watchers: list[Callable[[], Callable[[], None]]] = []
        self.ends: list[Callable[[], None]] = []


_thread = _Thread()


def _patch(patches: ExitStack) -> None:
    module: Any = sys.modules.get(_EVAL_FRAME)
    if module is None or not hasattr(module, "set_skip_guard_eval_unsafe"):  # nothing is compiled
        return
    asks, sets = module._is_skip_guard_eval_unsafe_stance, module.set_skip_guard_eval_unsafe
    resumes = module._maybe_set_eval_frame

    def asked() -> bool:  # which a region asks where it begins, and nowhere else
        _thread.begins = True
        return asks()

    def set_here(value: bool) -> bool:  # where it begins, and where it ends
        begins, _thread.begins = _thread.begins, False
        if begins:
            _thread.depth += 1
            if _thread.depth == 1 and _thread.watchers:
                _thread.ends.append(_thread.watchers[-1]())
        elif _thread.depth:
            _thread.depth -= 1
        return sets(value)

    def resumed(callback: Any) -> None:  # the last that a region does, when it has put back what it changed
        resumes(callback)
        if not _thread.depth and _thread.ends:
            _thread.ends.pop()()

    patches.enter_context(replaced(module, "_is_skip_guard_eval_unsafe_stance", asked))
    patches.enter_context(replaced(module, "set_skip_guard_eval_unsafe", set_here))
    patches.enter_context(replaced(module, "_maybe_set_eval_frame", resumed))


_inside = Inside(_patch)


class CompiledRegions:
    """A context in which calls of compiled code are reported.

    Args:
        begin: called when compiled code is entered from code that is not; returns what to call at its end. An error
            of it is raised in the place of the call.
    """

    def __init__(self, begin: Callable[[], Callable[[], None]]) -> None:
        self._begin = begin

    def __enter__(self) -> None:
        _inside.__enter__()
        self._outer = _thread.depth, _thread.ends
        _thread.depth, _thread.ends = 0, []
        _thread.watchers.append(self._begin)

    def __exit__(self, *_error: object) -> None:
        _thread.watchers.pop()
        for end in _thread.ends:  # of a region that ended in an error of torch's own
            end()
        _thread.depth, _thread.ends = self._outer
        _inside.__exit__()


def compiled_as_eager() -> AbstractContextManager[Any]:
    """Return a context in which compiled code runs as it was written, also on fakes."""
    return torch.compiler.set_stance("force_eager") if _EVAL_FRAME in sys.modules else nullcontext()
