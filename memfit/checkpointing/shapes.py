"""What is known of passes of one size and kind: the lean pass, the present plan, and how it fares."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from memfit.checkpointing.groups import INPUT_RULES
from memfit.checkpointing.passes import Ruling
from memfit.checkpointing.planning import LeanPass, Planned, Planner
from memfit.memory.contract import Standing, WindowKind

_BUCKET = math.log(1.15)  # sizes that differ by less share a plan
_RUNS = 3  # windows of each plan of a race
_GROWN_IN_A_ROW = 4  # windows that began fuller than the one before, after which the loop keeps tensors of each


@dataclass(slots=True, eq=False)
class Race:
    """Two plans that are measured against each other: with dispatch modes, and without.

    Attributes:
        plans: both, the present one first.
        seconds: the fewest that a pass of each took.
        runs: of the one that runs now.
        is_over: whether both were measured.
    """

    plans: tuple[Planned, Planned]
    seconds: list[float] = field(default_factory=lambda: [math.inf, math.inf])
    running: int = 0
    runs: int = 0
    is_over: bool = False

    def note(self, seconds: float) -> Planned | None:
        """Count a pass, and return the plan that takes the present one's place, if another does."""
        self.seconds[self.running] = min(self.seconds[self.running], seconds)
        self.runs += 1
        if self.is_over or self.runs < _RUNS:
            return None
        self.runs = 0
        if self.running == 0:
            self.running = 1
            return self.plans[1]
        self.is_over = True
        return self.plans[0] if self.seconds[0] <= self.seconds[1] else None


@dataclass(slots=True, eq=False)
class Growth:
    """Of what is live when windows of one size and kind begin.

    Attributes:
        windows: in a row that began with more than the one before.
        grown_bytes: in these.
    """

    windows: int = 0
    grown_bytes: int = 0
    _start_bytes: int | None = None

    def note(self, start_bytes: int) -> None:
        """Count a window that began with so many bytes live."""
        grown_bytes = 0 if self._start_bytes is None else start_bytes - self._start_bytes
        self.windows = self.windows + 1 if grown_bytes > 0 else 0
        self.grown_bytes = self.grown_bytes + grown_bytes if grown_bytes > 0 else 0
        self._start_bytes = start_bytes

    @property
    def is_leak(self) -> bool:
        """Whether the loop keeps something of each step, so that no budget holds for long."""
        return self.windows >= _GROWN_IN_A_ROW


@dataclass(slots=True, eq=False)
class Shape:
    """What is known of passes of one size and kind.

    Attributes:
        numel: elements of the largest batch.
        kind: of its windows.
        form: what needs a gradient in them: see `Updates.form`.
        lean_passes: of it, all told.
        wants_lean: whether the next pass is lean, too: the last one had more than the one that plans are made from.
        planner: of its lean pass; None before.
        lean: that pass.
        overloads: name -> operator, of that pass.
        planned: the present plan; None before.
        rulings: the same in the form in which it is carried out.
        start_bytes: that the present plan is made for, live when a pass begins.
        most_start_bytes: that were live when one of its windows began, without the state of optimizers made since.
        growth: of these bytes.
        standing: what its windows have shown.
        wants_plan: whether the next pass is planned anew.
        aim_bytes: that its plan may be predicted to take, if the last window said so.
        next_plan: that it follows.
        unused_share: of the bytes that the allocator had taken in the lean pass, which were not live.
        race: of the two best plans.
        is_shared: whether its lean pass holds the most that any rank saw.
        is_refused: whether it was said that no plan keeps the budget.
    """

    numel: int
    kind: WindowKind
    form: int = 0
    lean_passes: int = 0
    wants_lean: bool = False
    planner: Planner | None = None
    lean: LeanPass | None = None
    overloads: dict[str, Any] = field(default_factory=dict[str, Any])
    planned: Planned | None = None
    rulings: dict[str, Ruling] = field(default_factory=dict[str, Ruling])
    start_bytes: int = 0
    most_start_bytes: int = 0
    growth: Growth = field(default_factory=Growth)
    standing: Standing = field(default_factory=Standing)
    wants_plan: bool = True
    aim_bytes: int | None = None
    next_plan: Planned | None = None
    unused_share: float = 0.0
    race: Race | None = None
    is_shared: bool = False
    is_refused: bool = False

    @property
    def planned_has_mode(self) -> bool:
        """Whether a dispatch mode is on in a block."""
        return self.planned is not None and self.planned.has_mode

    @property
    def has_chains(self) -> bool:
        """Whether inputs of blocks are recomputed, or come from the host."""
        return any(isinstance(ruling, str) and ruling in INPUT_RULES for ruling in self.rulings.values())


def bucket_of(numel: int) -> int:
    """Return the number of the sizes that share a plan."""
    return math.ceil(math.log(max(numel, 2)) / _BUCKET)
