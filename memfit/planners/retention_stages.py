"""Stages of a program: which positions may be computed in which, to some use. What the retention model is built from.

Stage j of a program (see `memfit.planners.program`) is the part of a schedule that ends with position j: some of the
positions before it, in order and each at most once, and then j itself. A first computation may wait for a later stage
where `may_wait` says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.planners.program import NOT_AN_OP, Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """What may happen in each stage. Positions and managed storages are the program's.

    Attributes:
        reads, writes: position -> managed storages.
        takeovers: position -> pairs (read, written) of storages, of which one may take over the other's memory.
        readers: storage -> positions that read it, in order.
        last_first: position -> the last stage in which it may be computed for the first time; its own, mostly.
        may_again: position -> whether it may be computed more than once.
        departed_at: storage -> the position of the boundary from which on it is the user's, and stays.
        useful: stage -> positions, in order, that may be computed in it to some use.
        wanted: stage -> positions that may be computed in it or later to some use.
    """

    reads: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    takeovers: tuple[tuple[tuple[int, int], ...], ...]
    readers: tuple[tuple[int, ...], ...]
    last_first: tuple[int, ...]
    may_again: tuple[bool, ...]
    departed_at: dict[int, int]
    useful: tuple[tuple[int, ...], ...]
    wanted: tuple[frozenset[int], ...]

    @property
    def last(self) -> int:
        """The last stage: the end of the step."""
        return len(self.reads) - 1

    def has_departed(self, storage: int, stage: int) -> bool:
        """Whether the user has `storage` before `stage` begins."""
        return self.departed_at.get(storage, self.last) < stage


def build_stages(program: Program) -> Stages:
    """Return the stages of `program`; pins of True are honoured here (the op is computed once)."""
    tables = program.tables
    rows = tables.positions
    reads: tuple[tuple[int, ...], ...] = tuple(
        tuple(tables.reads["storage"][row["read_start"] : row["read_end"]].tolist()) for row in rows
    )
    writes = tuple(tuple(tables.writes["storage"][row["write_start"] : row["write_end"]].tolist()) for row in rows)
    takeovers = tuple(
        tuple(zip(pairs["read"].tolist(), pairs["write"].tolist(), strict=True))
        for pairs in (tables.reuses[row["reuse_start"] : row["reuse_end"]] for row in rows)
    )
    readers: list[list[int]] = [[] for _ in program.storage_of]
    for position, storages in enumerate(reads):
        for storage in storages:
            readers[storage].append(position)
    last_first, last_again = _last_stages(program)
    departed_at: dict[int, int] = {}
    for boundary in sorted(program.boundary_at):
        for storage in reads[boundary]:
            departed_at.setdefault(storage, boundary)
    latest = [max(first, again) for first, again in zip(last_first, last_again, strict=True)]
    useful, wanted = _useful(latest, writes, readers)
    return Stages(
        reads=reads,
        writes=writes,
        takeovers=takeovers,
        readers=tuple(tuple(positions) for positions in readers),
        last_first=tuple(last_first),
        may_again=tuple(again > position for position, again in enumerate(last_again)),
        departed_at=departed_at,
        useful=useful,
        wanted=wanted,
    )


def _last_stages(program: Program) -> tuple[list[int], list[int]]:
    """For each position, the last stage in which it may be computed for the first time, and at all."""
    rows, pinned = program.tables.positions, program.problem.pinned
    fences = [*sorted(program.boundary_at), len(rows) - 1]
    firsts: list[int] = []
    agains: list[int] = []
    for position, op in enumerate(program.op_at):
        waits = bool(rows[position]["may_wait"])
        firsts.append(next(fence for fence in fences if fence > position) if waits else position)
        once = op == NOT_AN_OP or pinned.get(op) is True
        agains.append(position if once else int(rows[position]["last_rematerialization"]))
    return firsts, agains


def _useful(
    latest: list[int], writes: tuple[tuple[int, ...], ...], readers: list[list[int]]
) -> tuple[tuple[tuple[int, ...], ...], tuple[frozenset[int], ...]]:
    """Return for each stage what may be computed in it, and in it or later, so that something later reads it.

    From the last stage back: position j is computed in stage j, or later if it waits; any other only for the sake of
    what is computed behind it.
    """
    last = len(writes) - 1
    wanted: set[int] = set()
    all_useful: list[tuple[int, ...]] = []
    all_wanted: list[frozenset[int]] = []
    for stage in range(last, -1, -1):
        wanted.add(stage)
        useful = [stage]
        for position in range(stage - 1, -1, -1):
            if latest[position] < stage:
                continue
            if any(reader in wanted for storage in writes[position] for reader in readers[storage]):
                wanted.add(position)
                useful.append(position)
        all_useful.append(tuple(reversed(useful)))
        all_wanted.append(frozenset(wanted))
    return tuple(reversed(all_useful)), tuple(reversed(all_wanted))
