"""Retention model: an integer program for CP-SAT, with the computations and retained storages of each stage.

The family of schedules is that of `memfit.planners.engine.cpsat.stages`: the first computations stand in one order, but
may wait until they are needed; between two of them any ops are recomputed, in that order and each at most once. An op
may be computed in every stage, so that a storage may be retained over any number of intervals. The family contains all
schedules of planner `search` in the same order of ops.

All variables are 0 or 1:

- computed[j, k]: position k is computed in stage j;
- held[j, s, v]: storage s is on the device in stage j, from its last use before position v to the computation of v,
  which reads it;
- retained[j, s]: s stays on the device after stage j.

A storage is on the device from a computation of its op to a use, and not without a use. The bytes at every computation
fit into the budget, with one in-place reuse (`Op.reuses`) of a storage that the op reads for the last time. In emitted
schedules no storage is live for longer than here, so that they fit as well.

Source: stages and memory are Checkmate's (Jain et al., MLSys 2020); retention intervals in CP-SAT are Moccasin's
(Bartan et al., ICML 2023). Moccasin has two integers for each interval, and a maximum number of intervals. Here each
interval is a row of bits, one for each stage, and their number is not limited. There are thousands of bits for a few
dozen ops, but their linear relaxation contains the minimum cuts of `memfit.planners.engine.bounds.minimum_cuts` at all
ops at once, and the proofs need it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from memfit.planners.engine.cpsat.stages import Stages
from memfit.planners.engine.retention.instance import DROPPED, Instance
from memfit.planners.engine.solver import make_model

Literal = Any  # ortools leaves its types out
Term = tuple[Literal, int]


class RetentionModel:
    """The integer program of one instance: minimizes the units of time spent on recomputation.

    Attributes:
        model: a `CpModel` of ortools.
        recompute_units: its objective, a linear expression: units of all computations except each op's first. The units
            of an op are rounded down, so that a lower bound on them is a lower bound on its seconds.
        computed, held, retained: the variables, by stage, position and storage (see the module); variables that can
            only be 0 are left out.
    """

    def __init__(self, instance: Instance, stages: Stages, units_per_second: float) -> None:
        self.instance, self.stages = instance, stages
        self.model, self.weighted_sum = make_model()
        tables = instance.tables
        self.sizes: list[int] = tables.storages["size_bytes"].tolist()
        self.writer: list[int] = tables.storages["writer"].tolist()
        self.workspace: list[int] = tables.positions["workspace_bytes"].tolist()
        self.units = [int(seconds * units_per_second) for seconds in tables.positions["seconds"].tolist()]
        self.computed: dict[tuple[int, int], Literal] = {
            (stage, position): self.model.new_bool_var(f"computed {stage} {position}")
            for stage, positions in enumerate(stages.useful)
            for position in positions
        }
        self.held: dict[tuple[int, int, int], Literal] = {}
        self.retained: dict[tuple[int, int], Literal] = {}
        self._compute_everything()
        for stage in range(stages.last + 1):
            self._waiting(stage)
            for storage in range(len(self.sizes)):
                self._retention(stage, storage)
            for position in stages.useful[stage]:
                self._use(stage, position)
                self._memory(stage, position)
        self._rematerialize_pinned()
        once_units = sum(self.units)
        self.recompute_units: Any = (
            self._sum([(on, self.units[key[1]]) for key, on in self.computed.items()]) - once_units
        )
        self.model.minimize(self.recompute_units)

    def _sum(self, terms: Sequence[Term]) -> Any:
        return self.weighted_sum([literal for literal, _ in terms], [factor for _, factor in terms])

    def _compute_everything(self) -> None:
        """Require that every position is computed in its own stage or in one for which it may wait; some only once."""
        for position, last_first in enumerate(self.stages.last_first):
            firsts = [
                self.computed[stage, position]
                for stage in range(position, last_first + 1)
                if (stage, position) in self.computed
            ]
            if self.stages.may_recompute[position]:
                self.model.add_bool_or(firsts)
            else:
                self.model.add_exactly_one(firsts)

    def _waiting(self, stage: int) -> None:
        """Require that the stage of an op that waits is empty, and that the op waits behind a stage that is not.

        The first is a rule of the family. The second excludes no schedule: if all stages between are empty, the same
        schedule is one in which the op does not wait.
        """
        if self.stages.last_first[stage] == stage:
            return
        own = self.computed[stage, stage]
        for position in self.stages.useful[stage][:-1]:
            self.model.add_implication(self.computed[stage, position], own)
        between: list[Literal] = []
        for later in range(stage + 1, self.stages.last_first[stage] + 1):
            if (later, stage) in self.computed:
                self.model.add_bool_or([~self.computed[later, stage], own, *between])
            between.append(self.computed[later, later])

    def _retention(self, stage: int, storage: int) -> None:
        """Relate the variables of `storage` in `stage`: retained or computed, held to each use, retained after it."""
        model, stages, writer = self.model, self.stages, self.writer[storage]
        if writer > stage:
            return
        before = self.retained.get((stage - 1, storage))
        sources = [on for on in (before, self.computed.get((stage, writer))) if on is not None]
        uses = self._uses(stage, storage)
        if not sources:
            for use in uses:
                model.add(self.computed[stage, use] == 0)
            return
        if len(sources) == 2 and not stages.has_departed(storage, stage):
            model.add_at_most_one(sources)  # a recomputed storage need not have been retained
        chain = [model.new_bool_var(f"held {stage} {storage} {use}") for use in uses]
        self.held.update({(stage, storage, use): on for use, on in zip(uses, chain, strict=True)})
        if stage < stages.last and any(reader in stages.useful_from[stage + 1] for reader in stages.readers[storage]):
            stays = model.new_bool_var(f"retained {stage} {storage}")
            self.retained[stage, storage] = stays
            chain.append(stays)
            if stages.has_departed(storage, stage + 1):
                model.add(stays == 1)
        if chain:
            model.add_bool_or([~chain[0], *sources])
        if before is not None:  # a storage is retained only for a use
            model.add_bool_or([~before, *chain[:1]])
        for earlier, later in itertools.pairwise(chain):
            model.add_implication(later, earlier)
        for place, use in enumerate(uses):
            model.add_implication(self.computed[stage, use], chain[place])
            model.add_bool_or([~chain[place], self.computed[stage, use], *chain[place + 1 : place + 2]])

    def _uses(self, stage: int, storage: int) -> list[int]:
        return [reader for reader in self.stages.readers[storage] if (stage, reader) in self.computed]

    def _on_device(self, stage: int, storage: int, after: int) -> Literal | None:
        """Return the literal for `storage` on the device in `stage` behind position `after`, its writer or a later one.

        None if it cannot be.
        """
        use = next((use for use in self._uses(stage, storage) if use > after), None)
        return self.retained.get((stage, storage)) if use is None else self.held.get((stage, storage, use))

    def _use(self, stage: int, position: int) -> None:
        """Require that the results of a recomputation are used."""
        if position == stage:
            return
        stay = [self._on_device(stage, storage, position) for storage in self.stages.writes[position]]
        self.model.add_bool_or([~self.computed[stage, position], *(on for on in stay if on is not None)])

    def _memory(self, stage: int, position: int) -> None:
        """Require that the bytes on the device while `position` is computed in `stage` fit into the budget."""
        terms: list[Term] = []
        for storage, size_bytes in enumerate(self.sizes):
            writer = self.writer[storage]
            if writer >= position:
                there = [self.retained.get((stage - 1, storage))]
                if writer == position:
                    there.append(self.computed[stage, position])
            else:
                there = [self._on_device(stage, storage, position - 1)]
            terms.extend((on, size_bytes) for on in there if on is not None and size_bytes > 0)
        terms.append((self.computed[stage, position], self.workspace[position]))
        if sum(size_bytes for _, size_bytes in terms) > self.instance.budget_bytes:
            terms.extend(self._in_place(stage, position))
            self.model.add(self._sum(terms) <= self.instance.budget_bytes)

    def _in_place(self, stage: int, position: int) -> list[Term]:
        """Return the terms of in-place reuse: a write may use the memory of a storage read for the last time."""
        taken: list[Term] = []
        for read in dict.fromkeys(read for read, _ in self.stages.in_place[position]):
            is_new = any(
                not self.stages.has_departed(write, stage)
                for other, write in self.stages.in_place[position]
                if other == read
            )
            if is_new and self.sizes[read] > 0:
                takes = self.model.new_bool_var(f"takes {stage} {position} {read}")
                self.model.add_implication(takes, self.computed[stage, position])
                stays = self._on_device(stage, read, position)
                if stays is not None:
                    self.model.add_implication(takes, ~stays)
                taken.append((takes, -self.sizes[read]))
        self.model.add_at_most_one([takes for takes, _ in taken])
        return taken

    def _rematerialize_pinned(self) -> None:
        """Require that a storage pinned to be rematerialized is not retained from forward to backward."""
        for interval in self.instance.tables.intervals[self.instance.tables.intervals["rule"] == DROPPED]:
            keys = [(stage, int(interval["storage"])) for stage in range(interval["start"], interval["end"])]
            if all(key in self.retained for key in keys):
                self.model.add_bool_or([~self.retained[key] for key in keys])
