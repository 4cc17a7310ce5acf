"""The handle of a budgeted loop."""

from __future__ import annotations

from typing import Any

import torch

from memfit.checkpointing.explaining import Explanation, explained
from memfit.checkpointing.loop import Loop
from memfit.checkpointing.policy import to_plain
from memfit.checkpointing.reporting import Report, SizeReport
from memfit.errors import BudgetNotHeldError
from memfit.memory.contract import Contract
from memfit.step.hooks import Hook
from memfit.system.budget import format_bytes
from memfit.torch_private.autograd import has_modes
from memfit.torch_private.modules import module_hooks


class Checkpointed:
    """What `memfit.checkpoint` returns: the handle of a budgeted loop, and a `with` block that closes it."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def __enter__(self) -> Checkpointed:
        return self

    def __repr__(self) -> str:
        return f"Checkpointed({str(self.report()).partition(chr(10))[0]})"

    def __exit__(self, *raised: object) -> None:
        self._loop.close(is_judged=raised[0] is None)

    def report(self) -> Report:
        """Return the bytes that each window took, and the rules that hold for each size of batch.

        A step ends where the next one begins, so that the last one is left out; `end_step` ends it.
        """
        loop = self._loop
        contract = loop.contract
        return Report(
            budget_bytes=contract.budget_bytes if contract is not None and contract.is_resolved else None,
            blocks=loop.plans.blocks,
            windows=tuple(loop.history.latest),
            count=loop.history.count,
            lean=loop.history.lean,
            over=loop.history.over,
            most_bytes=loop.history.most_bytes,
            sizes=tuple(
                SizeReport(
                    numel=shape.numel,
                    kind=shape.kind,
                    plans=shape.standing.plans,
                    planned=shape.planned,
                    most_bytes=shape.standing.worst_bytes,
                )
                for shape in loop.plans.shapes.values()
                if shape.planned is not None
            ),
        )

    def explain(self) -> list[Explanation]:
        """Return for each size of batch the largest parts of its peak, and the price of other budgets.

        A policy that was given has no budget, and none is explained.
        """
        loop = self._loop
        contract = loop.plans.contract
        if contract is None or not contract.is_resolved:
            return []
        return [
            explained(shape.planner, shape.planned, shape.numel, contract.budget_bytes)
            for shape in loop.plans.shapes.values()
            if shape.planner is not None and shape.planned is not None
        ]

    @property
    def calls(self) -> int:
        """The calls of the model so far, compiled ones among them."""
        return self._loop.calls

    def expect_no_optimizer(self) -> None:
        """Plan from the second step on, although no optimizer will step; otherwise its state is waited for."""
        self._loop.expect_no_optimizer()

    def policy(self) -> dict[str, dict[str, Any]]:
        """Return the present policy as plain data: batch size -> block -> `none`, `full`, or the operators kept."""
        shapes = [shape for shape in self._loop.plans.shapes.values() if shape.planned is not None]
        shapes.sort(key=lambda shape: shape.lean.given_bytes if shape.lean is not None else 0)  # the largest one counts
        return to_plain({(s.numel, s.kind): s.planned.rules for s in shapes if s.planned is not None})

    def end_step(self) -> None:
        """End the present step here, and not at the next call of the model: after the last one, before a report.

        Raises:
            BudgetNotHeldError: it took too much.
        """
        self._loop.end()

    def why_leave(self) -> str:
        """Judge the step that ends where a call of the model begins; return why it was not held, empty if it was."""
        loop = self._loop
        if loop.contract is None or loop.is_between() or has_modes():
            return ""
        try:
            loop.end()
        except BudgetNotHeldError as refusal:
            return _not_held("took", loop.contract.budget_bytes + refusal.over_bytes, loop.contract)
        return ""

    def why_begin_elsewhere(self) -> str:
        """Return why no plan is predicted to hold the step that begins, where none was made; empty if one is."""
        loop = self._loop
        if loop.contract is None or not loop.contract.is_resolved or loop.is_between() or has_modes():
            return ""
        least_bytes = loop.plans.least_bytes()
        return _not_held("would take", least_bytes, loop.contract) if least_bytes > loop.contract.budget_bytes else ""

    def freeze(self) -> None:
        """Keep the policy of the largest batch from now on, and measure no more: the model can then be compiled."""
        self._loop.freeze()

    def close(self) -> None:
        """End the budget, and leave the model as it was before."""
        self._loop.close()


def _not_held(takes: str, size_bytes: int, contract: Contract) -> str:
    size, budget = format_bytes(size_bytes), format_bytes(contract.budget_bytes)
    return f"a step {takes} {size} with all checkpoints, more than the budget of {budget}"


def loops_of(model: torch.nn.Module) -> list[Loop]:
    """Return the loops whose hooks are on a model, or on the models of a ModuleList."""
    called = model if type(model) is torch.nn.ModuleList else [model]
    hooks = [hook for each in called for hook in module_hooks(each)[0].values()]
    owners = [getattr(hook.call, "__self__", None) for hook in hooks if isinstance(hook, Hook)]
    return list(dict.fromkeys(owner for owner in owners if isinstance(owner, Loop)))
