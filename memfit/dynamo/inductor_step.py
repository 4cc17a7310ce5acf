"""A training step whose forward and backward run on Inductor's kernels: what `fit(kernels="inductor")` returns."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NoReturn

import torch

from memfit.capture import TrainingStep
from memfit.capture.placement import step_device
from memfit.capture.step_check import require_training_context
from memfit.dynamo.model import PlannedCalls
from memfit.dynamo.settings import INDUCTOR, GraphSettings
from memfit.errors import InvalidOptionError
from memfit.plan import Plan
from memfit.planning import Settings
from memfit.step.measure import in_bytes
from memfit.step.step import Step
from memfit.step.turns import Turn


class InductorStep(Step):
    """A training step on Inductor's kernels, inside its budget: call it with a batch, get the loss.

    The model and the loss are compiled, and planned, at the first call with a batch of some sizes, before anything of
    that call runs. Clipping, scaling and the update run as eager does; they are measured, and held to the budget.

    Args:
        step: the training step.
        settings: a budget, of which a percentage is a share of the measured peak of an eager step, and how plans are
            searched.
    """

    def __init__(self, step: TrainingStep, settings: Settings) -> None:
        self.step = step
        self.device = step_device(step.model, step.batch)
        self.settings = in_bytes(settings, step, self.device)
        options = GraphSettings(settings=self.settings, reserve_bytes=0, kernels=INDUCTOR)

        def loss(batch: Any) -> torch.Tensor:
            return step.compute_loss(step.model, batch)

        self._own_turn = Turn()
        self._calls = calls = PlannedCalls(loss, step.model, options, "memfit.fit")
        self._compiled = replace(step, loss=lambda _model, batch: calls(batch))
        if step.optimizer is not None:
            calls.account.optimizers.follow(step.optimizer)

    @property
    def plan(self) -> Plan:
        """The plan with the highest peak, after the first call."""
        return max(self.plans, key=lambda plan: plan.predicted.peak_bytes)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of all graphs and sizes so far."""
        return tuple(self._calls.plans)

    @property
    def most_bytes(self) -> int:
        """The most bytes on the device in any step that was measured, and while graphs were compiled."""
        return self._calls.account.most_bytes

    def _run(self, batch: Any) -> torch.Tensor:
        require_training_context("the step was called", self.step)
        return self._compiled.run_eager(batch)

    def verify(self, batch: Any = None) -> NoReturn:
        """Refuse: Inductor's kernels round differently from eager's.

        Raises:
            InvalidOptionError: always.
        """
        del batch
        raise InvalidOptionError(
            'verify does not go with kernels="inductor": its kernels round differently from eager\'s, so that last '
            'bits differ; compare losses within a tolerance, or plan with kernels="eager"'
        )

    def _unjudged(self) -> AbstractContextManager[None]:
        return self._calls.account.unjudged()

    def _turn(self, what: str, planned: object | None = None) -> AbstractContextManager[None]:
        """Of the step alone: each graph takes the device's turn, and autograd runs its backward half in a thread."""
        return self._own_turn.of(planned or self.step, f"{what} of {self.step.name or type(self.step.model).__name__}")


def refuse_with_inductor(settings: Settings, **others: object) -> None:
    """Refuse what a step on Inductor's kernels cannot do.

    Args:
        settings: of the step.
        others: further arguments of `fit`, by name.

    Raises:
        InvalidOptionError: names what was asked for.
    """
    asked = {
        "arena": settings.arena,
        "hard": settings.hard,
        "cuda_graph": settings.cuda_graph,
        **others,
    }
    for name, value in asked.items():
        if value:
            raise InvalidOptionError(f'memfit.fit: {name} does not go with kernels="inductor": leave one of them out')
