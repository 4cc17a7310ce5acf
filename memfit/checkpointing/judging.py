"""What becomes of a window that has ended: its verdict by the budget, with other ranks where they share a policy."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from memfit.checkpointing.blocks import NO_BLOCKS
from memfit.checkpointing.compiled_calls import CompiledCalls
from memfit.checkpointing.passes import Pass
from memfit.checkpointing.plans import Plans
from memfit.checkpointing.shapes import Shape
from memfit.checkpointing.shared_policy import Agreed, FirstTalks, Judged, SharedPolicy
from memfit.checkpointing.windows import Meter
from memfit.errors import EAGER_MODE
from memfit.memory.contract import Aim, Contract, Held, Refused, Unused, Usage, Warnings, WindowKind
from memfit.system.budget import format_bytes
from memfit.system.recorder import allocated_bytes, empty_cache, held_bytes
from memfit.torch_private.autograd import INSTEAD_OF_TRANSFORMS

_MOST_LEAN_PASSES = 64  # without an optimizer's step, before a plan is made all the same
_MOST_OVER_LEAN = 2  # of them over the budget, which a plan may keep, or is refused
_MOST_IN_A_ROW = 4  # lean ones over the budget, of sizes that are new each time, before they are refused
TRY_EAGER_MODE = f"try {EAGER_MODE}, which frees single tensors"
_IN_ONE_CALL = (
    "hold all models of this loop by one call, memfit.checkpoint([first, second], budget), which plans them together"
)
_LEAST = "keeps as little as can be"
_TWICE = (
    "recomputes blocks twice and holds both, since several backward passes run through them (a pipeline's schedule "
    "that splits backward, as zero-bubble ones do, or retain_graph=True)"
)
_LEAK = (
    "the one before, since the loop keeps tensors of each (a list of losses keeps what they were computed from: append "
    "loss.item()), so that no budget holds for long"
)
_UNCOMPILED = "leave the model uncompiled and "  # whose compiled call frees nothing in eager mode


class Judge:
    """Judges the windows of a loop, and lets plans follow.

    Args:
        contract: the budget of this rank; None with a given policy.
        plans: of the loop.
        compiled: the model's compiled calls.
        meter: of the windows.

    Attributes:
        warnings: of the loop.
        talks: the first collectives of blocks.
    """

    def __init__(self, contract: Contract | None, plans: Plans, compiled: CompiledCalls, meter: Meter) -> None:
        self.contract, self._plans, self._compiled, self._meter = contract, plans, compiled, meter
        self.warnings = Warnings()
        self._lean = self._over_lean = self._in_a_row = 0
        self._holding_bytes = 0  # a budget that has room for all windows like those that were seen without a plan
        self._created_bytes = self._fuller_bytes = 0  # of optimizers' state; by which others of its shape began fuller
        self._unused = Unused()
        self._shared: SharedPolicy | None = None
        self._may_share, self.talks = True, FirstTalks(plans)
        _open.add(self)

    def close(self) -> None:
        """Judge no more."""
        _open.discard(self)

    def is_beside(self, device: torch.device) -> bool:
        """Return whether a budget of this device is judged here."""
        return self.contract is not None and self._plans.device == device

    def is_over(self, size_bytes: int) -> bool:
        """Return whether so many bytes are more than the budget, as far as that is known."""
        return self.contract is not None and self.contract.is_resolved and size_bytes > self.contract.budget_bytes

    def return_unused(self, present: Pass | None, numel: int, predicted_bytes: int | None, other_bytes: int) -> None:
        """Return what CUDA's allocator holds unused to the device if the window that begins may be over by it.

        Args:
            present: the window's pass; None of an evaluation.
            numel: elements of its batch.
            predicted_bytes: that it takes, as far as that is known.
            other_bytes: that are live, and do not count against the budget.
        """
        device = self._plans.device
        if device.type != "cuda" or self.contract is None or not self.contract.is_resolved:
            return
        budget_bytes = self.contract.budget_bytes
        held, live = held_bytes(device) - other_bytes, allocated_bytes(device) - other_bytes
        if present is None:
            is_returned = self._unused.evaluation_begins(held, live, budget_bytes, numel)
        else:
            more_bytes = max(0, (predicted_bytes or 0) - live)
            is_returned = self._unused.step_begins(held, more_bytes, budget_bytes, numel)
            is_returned |= present.recorder is not None  # of a new size, which blocks of other sizes may not serve
        if is_returned or held > budget_bytes:
            empty_cache(device)

    # -- ranks

    @property
    def is_shared(self) -> bool:
        """Whether other ranks follow the same policy."""
        return self._shared is not None

    @property
    def shift_bytes(self) -> int:
        """Added to levels of bytes for what other ranks' budgets have more."""
        return 0 if self._shared is None else self._shared.shift_bytes

    def begins_to_share(self, groups: Sequence[Any]) -> bool:
        """Share a policy from now on with the ranks of collectives in blocks; return whether that is new.

        Args:
            groups: process groups that a lean pass has seen.
        """
        groups = groups or self.talks.groups
        self.talks.end_of_window()
        self._plans.has_collectives |= bool(groups)
        if not groups or not self._may_share or self._shared is not None:
            return False
        if self.talks.are_alike is False:
            self._stop_sharing()
            return True
        self._shared = SharedPolicy(groups, self._plans, self.contract)
        self._plans.shapes.clear()  # their sizes are not agreed
        return True

    def _stop_sharing(self) -> None:
        self._shared, self._may_share = None, False
        self.talks.are_alike = False
        self._plans.stop_sharing(self.contract)

    def agree(self, numel: int, kind: WindowKind, form: int, now_bytes: int) -> Agreed:
        """Return what all ranks take a window for that begins; they agree on all else that decides about plans.

        Args:
            numel: elements of this rank's batch.
            kind: of this rank's window.
            form: what needs a gradient in it.
            now_bytes: that are live on this rank.

        Raises:
            BudgetNotHeldError: as `judge`, on all ranks at once.
        """
        may_wait = self._lean < _MOST_LEAN_PASSES and self._over_lean < _MOST_OVER_LEAN
        own = Agreed(numel=numel, kind=kind, form=form, now_bytes=now_bytes, may_wait=may_wait)
        if self._shared is None:
            return own
        agreed = self._shared.agree(own)
        if agreed is None:
            self._stop_sharing()
            return own
        if agreed.judged is not None:
            self._judge(agreed.judged)
        return agreed

    # -- verdicts

    def judge(self, shape: Shape | None, usage: Usage, predicted_bytes: int | None) -> None:
        """Judge a window; where ranks share a policy, when the next one begins.

        Args:
            shape: of its pass; None of an evaluation.
            usage: of it.
            predicted_bytes: what its plan was predicted to take; None of a lean pass.

        Raises:
            BudgetNotHeldError: the budget is firm, and the plan that takes the least took more.
        """
        if self.contract is None:
            return
        if shape is not None:
            began_bytes = usage.start_bytes - self._created_bytes
            shape.most_start_bytes = max(shape.most_start_bytes, began_bytes)
            shape.growth.note(began_bytes)
            self._fuller_bytes = shape.most_start_bytes - began_bytes
            self._created_bytes += self._meter.created_bytes
        if self._compiled.is_new and shape is not None:  # the compiler itself takes memory, and compiles once
            self._compiled.is_new = False
        elif shape is None or predicted_bytes is None:
            is_over, is_lean = self.is_over(usage.taken_bytes), usage.kind is not WindowKind.EVALUATION
            if not is_lean:
                self._unused.evaluations_end(usage.live_bytes)
            self._lean, self._over_lean = self._lean + is_lean, self._over_lean + (is_lean and is_over)
            self._in_a_row = (self._in_a_row + 1) * is_over if is_lean else self._in_a_row
            again_bytes = usage.taken_bytes + (self._meter.created_bytes if self._meter.is_before_update else 0)
            self._holding_bytes = max(self._holding_bytes + self._meter.created_bytes, again_bytes)
            if is_over and not self._refuses_new_sizes(shape, usage):
                kind = "lean" if is_lean else "evaluation"
                self.warnings.warn(self.contract.over_text(usage), kind)
        else:
            self._in_a_row = 0
            judged = Judged(shape=shape, usage=usage, predicted_bytes=predicted_bytes)
            if self._shared is not None:
                self._shared.judged = judged
            else:
                self._judge(judged)

    def _refuses_new_sizes(self, shape: Shape | None, usage: Usage) -> bool:
        """Refuse the size of a lean pass if no plan of it is predicted to hold, nor were those before it planned."""
        if self._in_a_row < _MOST_IN_A_ROW or shape is None or shape.planner is None or self._shared is not None:
            return False
        assert self.contract is not None
        least, budget_bytes = shape.planner.plan(0, 0), self.contract.budget_bytes
        if least.predicted_bytes <= budget_bytes:
            return False
        self._refuse(shape, Refused(usage.taken_bytes, usage.taken_bytes - budget_bytes), least.peak_is_in)
        return True

    def _judge(self, judged: Judged) -> None:
        shape, usage = judged.shape, judged.usage
        own, contract = self.contract, self._plans.contract
        assert own is not None
        assert contract is not None
        verdict = contract.judge(shape.standing, usage, judged.predicted_bytes)
        if isinstance(verdict, Aim) and self._compiled.compilations and not self._compiled.may_compile:
            over_bytes = usage.taken_bytes - contract.budget_bytes
            verdict = Held(0) if verdict.is_larger else Refused(usage.taken_bytes, over_bytes)
        if isinstance(verdict, Held):
            seconds = self._meter.seconds() if self._plans.wants_race(shape) else None
            if seconds is not None:
                self._plans.race(shape, seconds)
        elif isinstance(verdict, Refused):
            refused = Refused(own.budget_bytes + verdict.over_bytes, verdict.over_bytes)
            self._refuse(shape, refused, "" if shape.planned is None else shape.planned.peak_is_in)
        else:
            shape.wants_plan, shape.aim_bytes = True, verdict.aim_bytes
            if not verdict.is_larger:
                taken_bytes = usage.taken_bytes - self.shift_bytes
                self.warnings.warn(own.over_text(Usage(taken_bytes=taken_bytes, live_bytes=taken_bytes)), "over")

    def _refuse(self, shape: Shape, refused: Refused, peak_is_in: str) -> None:
        own = self.contract
        assert own is not None
        uncompiled = _UNCOMPILED if self._compiled else ""
        ways = [_IN_ONE_CALL] if any(each is not self and each.is_beside(self._plans.device) for each in _open) else []
        by_transforms = self._plans.has_transforms  # which call the model several times before they go backward
        if by_transforms:
            ways.append(f"use {INSTEAD_OF_TRANSFORMS}")
        elif self._plans.blocks:  # otherwise `NO_BLOCKS` names it
            ways.append(f"{uncompiled}{TRY_EAGER_MODE}")
        why = self._why_refused(shape, peak_is_in)
        fuller_bytes = refused.needed_bytes + self._fuller_bytes
        is_unknown = by_transforms or _is_twice(shape) or shape.growth.is_leak
        holding_bytes = None if is_unknown else max(self._holding_bytes, fuller_bytes)
        error = own.refusal(refused, why, ", ".join(ways), holding_bytes=holding_bytes)
        if own.is_firm and not shape.is_refused:
            shape.is_refused = True
            raise error
        self.warnings.warn(str(error), "refused")

    def _why_refused(self, shape: Shape, peak_is_in: str) -> str:
        if not self._plans.blocks:
            return NO_BLOCKS
        if shape.planned is not None and not shape.standing.is_least:
            return f"the model was compiled {self._compiled.compilations} times, each for less"
        leak = ""
        if shape.growth.is_leak:
            bytes_a_step = shape.growth.grown_bytes // shape.growth.windows
            leak = (
                f"; each of the last {shape.growth.windows} began with {format_bytes(bytes_a_step)} more than {_LEAK}"
            )
        return f"it {_TWICE if _is_twice(shape) else _LEAST}; the most is taken in {peak_is_in}{leak}"


def _is_twice(shape: Shape) -> bool:
    return shape.lean is not None and shape.lean.is_twice


_open: weakref.WeakSet[Judge] = weakref.WeakSet()  # of the loops that are not closed
