"""Follows a target through the package: which functions it passes on its way from the command line to a plan."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import memfit

PACKAGE = Path(memfit.__file__).parent
ORCHESTRATORS = ("commands", "planning", "plan_cache")
"""The rooms of which every function counts; in all other rooms, those that another room calls."""


def functions_of_target(target: str, run: Callable[[], object]) -> list[str]:
    """Return the functions, as `module.function` in order of their first call, that are given the target during `run`.

    The target is its text, its training step, its capture, its graph, or the problem that holds the graph. Methods of
    these objects are not counted, and neither is what a planner or the capture calls in its own room, nor the
    presentation of the finished plan.
    """
    from memfit.capture import Captured, TrainingStep
    from memfit.graph import Graph
    from memfit.plan import Problem

    kinds = (Captured, TrainingStep, Graph, Problem)
    found: dict[str, None] = {}

    def is_target(value: Any) -> bool:
        return isinstance(value, kinds) or (isinstance(value, str) and value == target)

    def on_call(frame: FrameType, event: str, _argument: object) -> None:
        module = _module_of(frame) if event == "call" else None
        if module is None or frame.f_back is None or _is_inner(frame.f_code.co_name):
            return
        caller = _module_of(frame.f_back)
        room, from_room = module.split(".")[0], caller.split(".")[0] if caller else None
        if room not in ORCHESTRATORS and from_room not in ORCHESTRATORS:
            return
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
        given = {name: frame.f_locals[name] for name in names if name in frame.f_locals}
        if isinstance(given.get("self"), kinds):
            return
        if any(is_target(value) for value in given.values()):
            found.setdefault(f"{module}.{frame.f_code.co_name}")

    sys.setprofile(on_call)
    try:
        run()
    finally:
        sys.setprofile(None)
    return list(found)


@functools.cache
def _module_at(filename: str) -> str | None:
    path = Path(filename)
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts) if path.is_relative_to(PACKAGE) else None


def _module_of(frame: FrameType) -> str | None:
    return _module_at(frame.f_code.co_filename)


def _is_inner(name: str) -> bool:
    return name.startswith("<")
