"""Stages of an instance, and the positions that may usefully be computed in each: the input of the retention model.

Stage j of an instance (see `memfit.planners.engine.retention.instance`) is the part of a schedule that ends with
position j: some of the positions before it, in order and each at most once, and then j itself. A first computation
with `may_wait` may be in a later stage.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.planners.engine.retention.instance import NOT_AN_OP, Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The computations that each stage may contain. Positions and managed storages are the instance's.

    Attributes:
        reads, writes: position -> managed storages.
        in_place: position -> pairs (read, written) of storages, for in-place reuse.
        readers: storage -> positions that read it, in order.
        last_first: position -> the last stage in which it may be computed for the first time; its own, mostly.
        may_recompute: position -> whether it may be computed more than once.
        departed_at: storage -> the position of the boundary at which it departs to the user.
        useful: stage -> positions, in order, that may usefully be computed in it.
        useful_from: stage -> positions that may usefully be computed in it or later.
    """

    reads: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    in_place: tuple[tuple[tuple[int, int], ...], ...]
    readers: tuple[tuple[int, ...], ...]
    last_first: tuple[int, ...]
    may_recompute: tuple[bool, ...]
    departed_at: dict[int, int]
    useful: tuple[tuple[int, ...], ...]
    useful_from: tuple[frozenset[int], ...]

    @property
    def last(self) -> int:
        """The last stage: the end of the step."""
        return len(self.reads) - 1

    def has_departed(self, storage: int, stage: int) -> bool:
        """Return whether `storage` has departed to the user before `stage` begins.

        Args:
            storage: the managed storage.
            stage: the stage.
        """
        return self.departed_at.get(storage, self.last) < stage


def build_stages(instance: Instance) -> Stages:
    """Return the stages of `instance`. An op with a pin of True is computed once."""
    tables = instance.tables
    rows = tables.positions
    reads = tuple(tuple(instance.reads(position)) for position in range(len(rows)))
    writes = tuple(tuple(instance.writes(position)) for position in range(len(rows)))
    in_place = tuple(
        tuple(zip(pairs["read"].tolist(), pairs["write"].tolist(), strict=True))
        for pairs in (tables.reuses[row["reuse_start"] : row["reuse_end"]] for row in rows)
    )
    readers: list[list[int]] = [[] for _ in instance.storage_of]
    for position, storages in enumerate(reads):
        for storage in storages:
            readers[storage].append(position)
    last_first, last_recomputed = _last_stages(instance)
    latest = [max(first, last) for first, last in zip(last_first, last_recomputed, strict=True)]
    useful, useful_from = _useful(latest, writes, readers)
    return Stages(
        reads=reads,
        writes=writes,
        in_place=in_place,
        readers=tuple(tuple(positions) for positions in readers),
        last_first=tuple(last_first),
        may_recompute=tuple(last > position for position, last in enumerate(last_recomputed)),
        departed_at=instance.departed_at,
        useful=useful,
        useful_from=useful_from,
    )


def _last_stages(instance: Instance) -> tuple[list[int], list[int]]:
    """Return for each position the last stage of its first computation, and the last stage of any computation."""
    rows, pinned = instance.tables.positions, instance.problem.pinned
    fences = [*sorted(instance.boundary_at), len(rows) - 1]
    firsts: list[int] = []
    lasts: list[int] = []
    for position, op in enumerate(instance.op_at):
        waits = bool(rows[position]["may_wait"])
        firsts.append(next(fence for fence in fences if fence > position) if waits else position)
        once = op == NOT_AN_OP or pinned.get(op) is True
        lasts.append(position if once else int(rows[position]["last_rematerialization"]))
    return firsts, lasts


def _useful(
    latest: list[int], writes: tuple[tuple[int, ...], ...], readers: list[list[int]]
) -> tuple[tuple[tuple[int, ...], ...], tuple[frozenset[int], ...]]:
    """Return for each stage the positions that may usefully be computed in it, and in it or later.

    Stages are visited from the last to the first. Position j is computed in stage j, or later if it waits. Any other
    computation is useful only if a later one reads its result.
    """
    last = len(writes) - 1
    useful_from: set[int] = set()
    all_useful: list[tuple[int, ...]] = []
    all_useful_from: list[frozenset[int]] = []
    for stage in range(last, -1, -1):
        useful_from.add(stage)
        useful = [stage]
        for position in range(stage - 1, -1, -1):
            if latest[position] < stage:
                continue
            if any(reader in useful_from for storage in writes[position] for reader in readers[storage]):
                useful_from.add(position)
                useful.append(position)
        all_useful.append(tuple(reversed(useful)))
        all_useful_from.append(frozenset(useful_from))
    return tuple(reversed(all_useful)), tuple(reversed(all_useful_from))
