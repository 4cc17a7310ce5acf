"""Retention model: what is computed and what is retained in each stage, as an integer program for CP-SAT.

The family of schedules is that of `memfit.planners.retention_stages`: the first computations stand in one order, but
may wait until they are wanted; between two of them any ops are computed again, in that order and each at most once. An
op may be computed in every stage, so that a storage may be retained over any number of intervals. It is more than
planner `search` can say with its windows in the same order of ops.

All variables are 0 or 1:

- computed[j, k]: position k is computed in stage j;
- held[j, s, v]: storage s is on the device in stage j, from its last use before position v to the computation of v,
  which reads it;
- retained[j, s]: s stays on the device after stage j.

A storage is on the device from a computation of its op to a use: nothing lies there for nothing. The bytes at every
computation fit into the budget, with one takeover (`Op.reuses`) of what the op reads for the last time. In emitted
schedules nothing lives longer than here, so that they fit as well.

Source: stages and memory are Checkmate's (Jain et al., MLSys 2020); retention intervals in CP-SAT are Moccasin's
(Bartan et al., ICML 2023). Moccasin has two integers for an interval, and a most number of intervals; here each
interval is a row of bits, one a stage, and there are as many as it takes. These are thousands for a few dozen ops, but
their linear relaxation knows of what `memfit.planners.cuts` finds at one op, at all of them: proofs rest on it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from memfit.planners.program import DROPPED, Program
from memfit.planners.retention_stages import Stages

Literal = Any  # ortools leaves its types out
Term = tuple[Literal, int]


class RetentionModel:
    """The integer program of one program: minimizes the units of time that are spent on computing again.

    Attributes:
        model: a `CpModel` of ortools.
        again_units: its objective, a linear expression: units of all computations beyond each op's first. The units of
            an op are rounded down, so that a lower bound on them is one on its seconds.
        computed, held, retained: the variables, by stage, position or storage (see the module); those that can only be
            0 are not there.
    """

    def __init__(self, program: Program, stages: Stages, units_per_second: float) -> None:
        from ortools.sat.python import cp_model  # it takes longer to import than all of memfit

        self.program, self.stages = program, stages
        self.model: Any = cp_model.CpModel()
        expression: Any = cp_model.LinearExpr
        self.weighted_sum = expression.weighted_sum
        tables = program.tables
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
        self.again_units: Any = self._sum([(on, self.units[key[1]]) for key, on in self.computed.items()]) - once_units
        self.model.minimize(self.again_units)

    def _sum(self, terms: Sequence[Term]) -> Any:
        return self.weighted_sum([literal for literal, _ in terms], [factor for _, factor in terms])

    def _compute_everything(self) -> None:
        """Every position is computed: in its own stage, or in one for which it may wait; some of them only once."""
        for position, last_first in enumerate(self.stages.last_first):
            firsts = [
                self.computed[stage, position]
                for stage in range(position, last_first + 1)
                if (stage, position) in self.computed
            ]
            if self.stages.may_again[position]:
                self.model.add_bool_or(firsts)
            else:
                self.model.add_exactly_one(firsts)

    def _waiting(self, stage: int) -> None:
        """The stage of what waits is empty, and nothing waits for a stage when all stages until then are empty.

        The first is a rule of the family. The second takes nothing away: such a schedule is also one in which the
        op does not wait.
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
        """Where `storage` is on the device in `stage`: from where it came, use by use, and behind the last one."""
        model, stages, writer = self.model, self.stages, self.writer[storage]
        if writer > stage:
            return
        before = self.retained.get((stage - 1, storage))
        came = [on for on in (before, self.computed.get((stage, writer))) if on is not None]
        uses = self._uses(stage, storage)
        if not came:
            for use in uses:
                model.add(self.computed[stage, use] == 0)
            return
        if len(came) == 2 and not stages.has_departed(storage, stage):
            model.add_at_most_one(came)  # what is computed again need not have been kept
        chain = [model.new_bool_var(f"held {stage} {storage} {use}") for use in uses]
        self.held.update({(stage, storage, use): on for use, on in zip(uses, chain, strict=True)})
        if stage < stages.last and any(reader in stages.wanted[stage + 1] for reader in stages.readers[storage]):
            stays = model.new_bool_var(f"retained {stage} {storage}")
            self.retained[stage, storage] = stays
            chain.append(stays)
            if stages.has_departed(storage, stage + 1):
                model.add(stays == 1)
        if chain:
            model.add_bool_or([~chain[0], *came])
        if before is not None:  # it was retained to be used
            model.add_bool_or([~before, *chain[:1]])
        for earlier, later in itertools.pairwise(chain):
            model.add_implication(later, earlier)
        for place, use in enumerate(uses):
            model.add_implication(self.computed[stage, use], chain[place])
            model.add_bool_or([~chain[place], self.computed[stage, use], *chain[place + 1 : place + 2]])

    def _uses(self, stage: int, storage: int) -> list[int]:
        return [reader for reader in self.stages.readers[storage] if (stage, reader) in self.computed]

    def _on_device(self, stage: int, storage: int, after: int) -> Literal | None:
        """Return whether `storage` stays on the device in `stage` behind position `after`, its writer or a later one.

        None where it does not.
        """
        use = next((use for use in self._uses(stage, storage) if use > after), None)
        return self.retained.get((stage, storage)) if use is None else self.held.get((stage, storage, use))

    def _use(self, stage: int, position: int) -> None:
        """What is computed again is used."""
        if position == stage:
            return
        stay = [self._on_device(stage, storage, position) for storage in self.stages.writes[position]]
        self.model.add_bool_or([~self.computed[stage, position], *(on for on in stay if on is not None)])

    def _memory(self, stage: int, position: int) -> None:
        """All that is on the device while `position` is computed in `stage` fits into the budget."""
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
        if sum(size_bytes for _, size_bytes in terms) > self.program.budget_bytes:
            terms.extend(self._takeovers(stage, position))
            self.model.add(self._sum(terms) <= self.program.budget_bytes)

    def _takeovers(self, stage: int, position: int) -> list[Term]:
        """One storage that `position` reads for the last time may give its memory to one that it writes."""
        taken: list[Term] = []
        for read in dict.fromkeys(read for read, _ in self.stages.takeovers[position]):
            is_new = any(
                not self.stages.has_departed(write, stage)
                for other, write in self.stages.takeovers[position]
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
        """What is pinned to be rematerialized is not retained all through its gap from forward to backward."""
        for gap in self.program.tables.gaps[self.program.tables.gaps["rule"] == DROPPED]:
            keys = [(stage, int(gap["storage"])) for stage in range(gap["start"], gap["end"])]
            if all(key in self.retained for key in keys):
                self.model.add_bool_or([~self.retained[key] for key in keys])
