"""memfit makes a PyTorch training step fit a memory budget given in bytes, with the least slowdown, and proves it.

Importing memfit imports no torch; the names below are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memfit.system.version import __version__ as __version__

if TYPE_CHECKING:
    from memfit.capture.training_step import TrainingStep
    from memfit.checker import check
    from memfit.commands.frontier import frontier
    from memfit.doors.checkpoint import checkpoint
    from memfit.doors.compile import compile
    from memfit.doors.fit import fit
    from memfit.doors.function import fit_function
    from memfit.eager_mode.eager import eager
    from memfit.errors import MemfitError
    from memfit.graph import Graph
    from memfit.memory.arena.arena import arena
    from memfit.papers.planners.mirror import mirror
    from memfit.plan import Plan, Problem
    from memfit.step.distributed.across import across
    from memfit.step.planned_step import PlannedStep

__all__ = [
    "Graph",
    "MemfitError",
    "Plan",
    "PlannedStep",
    "Problem",
    "TrainingStep",
    "across",
    "arena",
    "check",
    "checkpoint",
    "compile",
    "eager",
    "fit",
    "fit_function",
    "frontier",
    "mirror",
]

_HOME = {
    "across": "memfit.step.distributed.across",
    "arena": "memfit.memory.arena.arena",
    "Graph": "memfit.graph",
    "MemfitError": "memfit.errors",
    "Plan": "memfit.plan",
    "PlannedStep": "memfit.step.planned_step",
    "Problem": "memfit.plan",
    "TrainingStep": "memfit.capture.training_step",
    "check": "memfit.checker",
    "checkpoint": "memfit.doors.checkpoint",
    "compile": "memfit.doors.compile",
    "eager": "memfit.eager_mode.eager",
    "fit": "memfit.doors.fit",
    "fit_function": "memfit.doors.function",
    "frontier": "memfit.commands.frontier",
    "mirror": "memfit.papers.planners.mirror",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'memfit' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
