"""Plans kept on disk: the second `fit` of the same step, with the same settings, searches nothing.

A plan is found again by everything that it was made from: the graph with its seconds, the device, the budgets, the
planner with its options, time limit and seed, and memfit's version. It is replayed by the checker when it is read, as
any plan is. Where no plan fits, the leanest that was found is kept too: for the user who comes back with its bytes.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import msgspec

import memfit
from memfit.errors import MemfitError
from memfit.files import cache_folder
from memfit.plan import Plan, Problem

_MOST_PLANS = 64  # the least recently used ones go

_log = logging.getLogger(__name__)


def plan_path(problem: Problem, planner: object) -> Path:
    """Return the file that keeps the plan of `problem` by `planner`, whether or not it is there."""
    return _path(problem, planner, problem.budget_bytes, problem.time_limit_seconds, problem.seed)


def leanest_path(problem: Problem, planner: object) -> Path:
    """Return the file that keeps the plan of the least peak that `planner` has found, for any budget below that."""
    return _path(problem, planner, "leanest")


def _path(problem: Problem, planner: object, *more: object) -> Path:
    asked = (
        problem.graph,
        problem.device,
        problem.host_budget_bytes,
        problem.bytes_outside,
        sorted(problem.pinned.items()),
        sorted(problem.mirror_counts.items()),
        repr(planner),
        memfit.__version__,
        *more,
    )
    digest = hashlib.sha256(msgspec.json.encode(asked)).hexdigest()[:32]
    return cache_folder() / "plans" / f"{digest}.plan.json.gz"


def read_plan(path: Path) -> Plan | None:
    """Return the plan that is kept there, or None; a file that cannot be used is said in one warning."""
    if not path.exists():
        return None
    try:
        plan = Plan.load(path)
        path.touch()
    except (MemfitError, OSError) as error:
        _log.warning("a kept plan cannot be read and is made again: %s", error)
        return None
    return plan


def keep_plan(plan: Plan, path: Path) -> None:
    """Keep a plan; where the disk refuses, say so in one warning."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save(path)
        kept = sorted(path.parent.glob("*.plan.json.gz"), key=lambda file: file.stat().st_mtime, reverse=True)
        for old in kept[_MOST_PLANS:]:
            old.unlink(missing_ok=True)
    except (MemfitError, OSError) as error:
        _log.warning("the plan is not kept: %s; MEMFIT_CACHE names another folder", error)
