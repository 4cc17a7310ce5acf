"""The report of a budgeted loop: the bytes of its windows, and the rules for its blocks. Torch-free."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from memfit.checkpointing.choices import FULL, NONE
from memfit.checkpointing.groups import CHAINS, HOSTED
from memfit.checkpointing.planning import Planned
from memfit.memory.contract import WindowKind
from memfit.system.budget import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSeen:
    """One window.

    Attributes:
        numel: elements of the batch.
        kind: of the window.
        plan: the number of the plan of this size; 0 if all blocks were recomputed, or in an evaluation.
        taken_bytes: most bytes that were taken.
        predicted_bytes: that were predicted; None of a lean pass and of an evaluation.
    """

    numel: int
    kind: WindowKind
    plan: int
    taken_bytes: int
    predicted_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeReport:
    """What is done with batches of one size.

    Attributes:
        numel: elements of the batch.
        kind: of its windows.
        plans: that were made.
        planned: the present one.
        most_bytes: that its windows took since then.
    """

    numel: int
    kind: WindowKind
    plans: int
    planned: Planned
    most_bytes: int

    def kinds_text(self) -> str:
        """Return how many modules are kept, partly kept, and recomputed."""
        kept = Counter(_kind_of(rule) for rule in self.planned.rules.values())
        return ", ".join(f"{count} {kind}" for kind, count in sorted(kept.items())) or "no blocks"

    def __str__(self) -> str:
        later = ", later micro-batches" if self.kind is WindowKind.LATER else ""
        bound = f", at least {self.planned.bound_seconds * 1e3:.1f} ms" if self.planned.bound_seconds else ""
        return (
            f"{self.numel:,} elements{later}: {self.kinds_text()}; took {format_bytes(self.most_bytes)}, "
            f"{format_bytes(self.planned.predicted_bytes)} predicted; {self.planned.seconds * 1e3:.1f} ms "
            f"recomputed{bound}; most in {self.planned.peak_is_in}; plan {self.plans}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a budgeted loop did so far.

    Attributes:
        budget_bytes: None if the policy was given, or a percentage is not resolved yet.
        blocks: names.
        windows: the latest thousand, in order.
        count, lean, over: of all windows, of those that were lean, and of those that took more than the budget.
        most_bytes: that a window took.
        sizes: with a plan.
    """

    budget_bytes: int | None
    blocks: tuple[str, ...]
    windows: tuple[WindowSeen, ...]
    count: int
    lean: int
    over: int
    most_bytes: int
    sizes: tuple[SizeReport, ...]

    def __str__(self) -> str:
        budget = "no budget" if self.budget_bytes is None else f"a budget of {format_bytes(self.budget_bytes)}"
        first = (
            f"{len(self.blocks)} blocks, {budget}; {self.count} windows, {self.lean} of them lean, {self.over} over "
            f"budget; most {format_bytes(self.most_bytes)}"
        )
        return "\n".join([first, *map(str, self.sizes)])


def _kind_of(rule: object) -> str:
    if rule == NONE:
        return "kept"
    if rule == FULL:
        return "recomputed"
    if rule == HOSTED:
        return "recomputed from the host"
    return "recomputed with their inputs" if rule in CHAINS else "partly kept"
