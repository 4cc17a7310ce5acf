"""Starting points of the first runs of a search, the most promising first."""

from __future__ import annotations

from memfit.planners.engine.pace import Pace
from memfit.planners.engine.parts import Parts
from memfit.planners.engine.pool import Pool
from memfit.planners.engine.retention.decisions import Retention
from memfit.planners.engine.retention.instance import Instance
from memfit.planners.engine.starts.candidates import kept_by_segments, recursive_checkpoints, structured
from memfit.planners.engine.starts.full_stages import kept_by_stages

_STAGING = 0.2  # of the time, at most, for the integer program of full stages
_STRUCTURED_BY = 0.25  # of the time, at most, until the families of retentions have been simulated
_MOST_FAMILIES = 1000  # retentions from which the block dynamic program chooses
_RECURSIVE_STORED = (1, 2, 4, 8)  # results stored on each path of recursive checkpointing
# Temperatures of a run in mean op seconds, at its first and its last move.
HOT, WIDE, MILD, NARROW = (3.0, 1e-3), (0.3, 1e-3), (0.1, 1e-3), (0.03, 1e-4)

Temperatures = tuple[float, float]
Start = tuple[Retention, Temperatures]
"""Where a run starts, and its temperatures."""


def starting_points(instance: Instance, pool: Pool, pace: Pace, parts: Parts, *, is_hopeless: bool) -> list[Start]:
    """Return the starting points of one search.

    They are the kept sets of full stages, the results of the block dynamic program, segments, and keeping everything.
    If none fits, the best of them and of recursive checkpointing is first.

    Args:
        instance: of the search.
        pool: evaluates them.
        pace: limits how long they take.
        parts: which of them there are.
        is_hopeless: whether the budget is below the proved least, so that only the least peak counts.
    """
    by_block = _joined_by_block(instance, pace, parts) if parts.block_dynamic_program and not is_hopeless else []
    until_seconds = instance.problem.clock() + pace.seconds(_STAGING)
    staged = pool.by_promise(kept_by_stages(instance, until_seconds) if parts.full_stages and not is_hopeless else [])
    by_block = pool.by_promise(by_block)
    segments = kept_by_segments(instance) if parts.segments else []
    others = pool.by_promise([*segments, pool.everything])
    starts: list[Start] = [(others[0], WIDE), (pool.everything, WIDE), (pool.everything, HOT)]
    if by_block:
        starts = [(by_block[0], NARROW), (by_block[0], MILD), *starts, (by_block[0], WIDE)]
    if staged and pool.by_promise([*staged[:1], *by_block[:1]])[0] is staged[0]:
        starts = [(staged[0], MILD), (staged[0], NARROW), *starts, (staged[0], WIDE)]
    if pool.best is None:
        for stored in _RECURSIVE_STORED if parts.recursive_checkpoints else ():
            pool.look_at(recursive_checkpoints(instance, stored))
        starts = [((pool.best or pool.least)[1], MILD), *starts]
    return starts


def _joined_by_block(instance: Instance, pace: Pace, parts: Parts) -> list[Retention]:
    clock, deadline = instance.problem.clock, pace.deadline(_STRUCTURED_BY)

    def is_enough(simulated_count: int) -> bool:
        return simulated_count >= _MOST_FAMILIES or clock() >= deadline

    return [option.retention for option in structured(instance, is_enough, parts)]
