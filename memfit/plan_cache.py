"""Plans kept on disk: the second time that the same step is planned with the same settings, nothing is searched.

The key of a plan is all that it was made from: the graph with its seconds, the device, the budgets, the planner with
its options, the time limit, the seed, and memfit's version. When a kept plan is read, its own key and its graph must be
those of the problem, and the checker replays it, as it does any plan. Where no plan fits, the leanest plan that was
found is kept, for a later call with as many bytes as it needs; its bytes do not depend on seconds, so that they are no
part of its key. They depend on the workspaces of ops, as an update's with another `weight_decay`, which are.

Of several plans with one key the fastest is kept. A search by time while other processes took of the processors is made
once more when its plan is asked for again.

The name of a plan's file begins with the structure of its graph and its bytes, so that `kept_near` finds plans of the
same step on batches of other sizes. All plans together take a bounded number of bytes on the disk.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from memfit.errors import MemfitError, PlanMismatchError
from memfit.plan import MADE, Plan, Problem, Result, Status
from memfit.planners import uses_files
from memfit.planners.engine.results import Ending, make_result
from memfit.planners.protocols import Planner
from memfit.system.cache import is_kept
from memfit.system.files import cache_folder
from memfit.system.load import BUSY, Load
from memfit.system.version import __version__

MOST_BYTES = 256 << 20  # of all plans, compressed; the least recently used ones are deleted
_SUFFIX = ".plan.json.gz"
_KEY = "kept as"  # among the versions of a kept plan: the name of its file, which holds the key
_BESIDE = "searched beside others"  # there, too: that a search by time had less of the processors than it could have

_log = logging.getLogger(__name__)


def plan_or_kept(
    problem: Problem, planner: Planner, *, reads: bool = True, on_search: Callable[[], None] = lambda: None
) -> Result:
    """Return the kept plan of `problem` as a result, or ask the planner, and keep its plan.

    A plan of an interrupted search is returned and not kept.

    Args:
        problem: what the planner is given.
        planner: with its options, which its `repr` shows.
        reads: whether a kept plan may be used; False searches again, and keeps the faster one.
        on_search: called before the planner is.
    """
    shared = (
        problem.graph.fingerprint,
        problem.device,
        problem.host_budget_bytes,
        problem.bytes_outside,
        sorted(problem.pinned.items()),
        sorted(problem.mirror_counts.items()),
        repr(planner),
        __version__,
    )
    own_files = uses_files(planner)  # which a kept plan would neither read nor write
    key = shared, problem.graph, problem.budget_bytes, problem.time_limit_seconds, problem.seed
    path = _path(*key, prefix=f"{_near_key(problem, planner)}-{problem.graph.all_bytes}-")
    kept = None if own_files else _read(path, partial(Plan.load, graph=problem.graph))
    was_disturbed = kept is not None and _BESIDE in kept.versions
    if kept is not None:
        kept = _without(kept, _BESIDE)
        if reads and not was_disturbed:
            return Result(status=kept.status, plan=kept, bounds=kept.bounds)
    on_search()
    load = Load()
    result = planner.plan(problem)
    if result.interrupted:
        return result  # at once: keeping a plan of a long step takes a second
    if result.plan is None:
        taken = [(op.workspace_bytes, op.reuses) for op in problem.graph.ops]
        result = _with_leanest(result, problem, _path(shared, taken, "leanest"))
    is_disturbed = load.others() > BUSY and getattr(planner, "iterations", None) is None and not was_disturbed
    if kept is not None and (result.plan is None or kept.predicted.seconds <= result.plan.predicted.seconds):
        if was_disturbed:
            _keep(kept, path)
        return replace(result, status=kept.status, plan=kept) if reads else result
    if result.plan is not None and not own_files:
        marks = {_BESIDE: "yes"} if is_disturbed and result.status is not Status.OPTIMAL else {}
        _keep(msgspec.structs.replace(result.plan, versions={**result.plan.versions, **marks}), path)
    return result


def kept_near(problem: Problem, planner: Planner) -> dict[int, Path]:
    """Return the bytes of graphs of the problem's structure that were planned for its budget -> file of such a plan.

    Args:
        problem: its graph, device and budgets count.
        planner: with its options.
    """
    near: dict[int, Path] = {}
    for path in sorted((cache_folder() / "plans").glob(f"{_near_key(problem, planner)}-*-*{_SUFFIX}")):
        middle = path.name.split("-")[1]
        if middle.isdecimal():
            near[int(middle)] = path
    return near


def read_near(path: Path) -> Plan | None:
    """Return the plan of a file that `kept_near` has named, or None if it cannot be read, with a warning.

    Args:
        path: of the file.
    """
    return _read(path, Plan.load)


def _near_key(problem: Problem, planner: Planner) -> str:
    """Return what the names of all plans begin with that differ in sizes only."""
    budgets = problem.budget_bytes, problem.host_budget_bytes, problem.bytes_outside
    parts = problem.graph.structure, problem.device, budgets, repr(planner), __version__
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]


def _with_leanest(result: Result, problem: Problem, path: Path) -> Result:
    """Return a result without a plan with the leanest plan that this search or an earlier one found, where it fits.

    Its peak becomes the least budget found: a later call with that budget gets this plan.
    """
    kept, found = _read(path, partial(Plan.load, graph=problem.graph)), result.leanest
    if found is not None and (kept is None or found.predicted.peak_bytes < kept.predicted.peak_bytes):
        _keep(found, path)
        kept = found
    if kept is None:
        return result
    bounds = msgspec.structs.replace(result.bounds, least_budget_found_bytes=kept.predicted.peak_bytes)
    ending = Ending(planner=kept.planner, started_seconds=problem.clock(), schedule=kept.schedule)
    planned = make_result(problem, ending)  # with the seconds of this problem's ops
    plan = planned.plan or planned.leanest
    plan = None if plan is None else msgspec.structs.replace(plan, bounds=bounds)
    if planned.plan is None or plan is None:
        return replace(result, bounds=bounds, leanest=plan)
    return replace(result, status=plan.status, plan=plan, bounds=bounds)


def _path(*key_parts: object, prefix: str = "") -> Path:
    """Return the file of a plan, whether or not it exists.

    Args:
        key_parts: all that the plan was made from.
        prefix: begins the name.
    """
    key = hashlib.sha256(msgspec.json.encode(key_parts)).hexdigest()[:32]
    return cache_folder() / "plans" / f"{prefix}{key}{_SUFFIX}"


def _read(path: Path, load: Callable[[Path], Plan]) -> Plan | None:
    """Return the plan of a file, or None; a file that cannot be read, or is of another problem, gives one warning."""
    if not is_kept(path):
        return None
    try:
        plan = load(path)
        versions = dict(plan.versions)
        if versions.pop(_KEY, None) != path.name:
            raise PlanMismatchError(f"{path}: holds the plan of another problem")
    except (MemfitError, OSError) as error:
        _log.warning("a kept plan cannot be read and is made again: %s", error)
        return None
    made = path.stat().st_mtime
    with suppress(OSError):  # a cache that can only be read
        os.utime(path, (time.time(), made))  # used now, and as old as it is
    plan = msgspec.structs.replace(plan, versions=versions)
    vars(plan)[MADE] = made
    return plan


def _without(plan: Plan, mark: str) -> Plan:
    if mark not in plan.versions:
        return plan
    made, versions = vars(plan)[MADE], {name: value for name, value in plan.versions.items() if name != mark}
    plan = msgspec.structs.replace(plan, versions=versions)
    vars(plan)[MADE] = made
    return plan


def _keep(plan: Plan, path: Path) -> None:
    """Write a plan; if that fails, give one warning."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        msgspec.structs.replace(plan, versions={**plan.versions, _KEY: path.name}).save(path)
        _drop_oldest(path.parent)
    except (MemfitError, OSError) as error:
        _log.warning("the plan is not kept: %s; MEMFIT_CACHE names another folder", error)


def _drop_oldest(folder: Path) -> None:
    """Delete the least recently used plans beyond the bytes that all may take; the last one stays in any case."""
    states: list[tuple[float, int, Path]] = []
    for file in folder.glob(f"*{_SUFFIX}"):
        with suppress(FileNotFoundError):  # another process has deleted it
            state = file.stat()
            states.append((max(state.st_atime, state.st_mtime), state.st_size, file))
    taken_bytes = 0
    for place, (_, file_bytes, file) in enumerate(sorted(states, reverse=True)):
        taken_bytes += file_bytes
        if place > 0 and taken_bytes > MOST_BYTES:
            file.unlink(missing_ok=True)
