"""A step that is not one graph: the graphs around the break are planned, the rest runs as eager would run it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from memfit.budget import format_bytes
from memfit.capture import TrainingStep
from memfit.capture.placement import step_device
from memfit.errors import GraphBreakError
from memfit.plan import Plan
from memfit.runtime.backend import PlannedGraph, memfit_backend
from memfit.runtime.planning import Settings
from memfit.runtime.state import StepState

if TYPE_CHECKING:
    from memfit.runtime.measure import Measurement

_log = logging.getLogger("memfit")


class PartlyPlannedStep:
    """A training step whose model breaks into several graphs; called like a `PlannedStep`.

    Each graph's forward and backward are planned inside what the budget leaves. The loss outside of the model and the
    optimizer's update run as eager does, so that all gradients are there at once at the end of backward.

    Attributes:
        step: the TrainingStep it carries out.
        settings: the budget, in bytes, and how plans are searched.
        line: the user's line that broke the graph.
    """

    def __init__(self, step: TrainingStep, settings: Settings, broken: GraphBreakError) -> None:
        self.step = step
        self.settings = settings
        self.line = broken.line
        self.device = step_device(step.model, step.batch)
        self._graphs: list[PlannedGraph] = []
        self._model: Any = torch.compile(step.model, backend=self._backend)
        before = StepState.take(step)
        try:
            self(step.batch)
        finally:
            before.put_back(step)
        gradients = sum(p.nbytes for p in step.model.parameters() if p.requires_grad)
        _log.warning(
            "memfit: %s; %d graphs around that line are planned, the loss and the update run unplanned, and the "
            "gradients (%s) are held together to the end of backward",
            broken,
            len(self._graphs),
            format_bytes(gradients),
        )

    @property
    def plan(self) -> Plan:
        """The plan with the highest peak among the graphs'."""
        return max(self.plans, key=lambda plan: plan.predicted.peak_bytes)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of all graphs."""
        return tuple(plan for graph in self._graphs for plan in graph.plans)

    @property
    def held_bytes(self) -> int:
        """None: there is no arena."""
        return 0

    def __call__(self, batch: Any) -> torch.Tensor:
        """Run one step on `batch`; return the loss, detached."""
        return self.step.run_eager(batch, model=self._model)

    def verify(self, batch: Any = None) -> None:
        """As `PlannedStep.verify`."""
        from memfit.runtime.verify import require_same

        require_same(self, self.step.batch if batch is None else batch)

    def measure(self, batch: Any = None, *, repeats: int = 3) -> Measurement:
        """As `PlannedStep.measure`."""
        from memfit.runtime.measure import measure_step

        return measure_step(self, self.step.batch if batch is None else batch, repeats=repeats)

    def _backend(self, module: torch.fx.GraphModule, example_inputs: Any) -> PlannedGraph:
        options: dict[str, Any] = {
            "budget": self.settings.budget,
            "planner": self.settings.planner,
            "time_limit_seconds": self.settings.time_limit_seconds,
            "seed": self.settings.seed,
        }
        if self.step.optimizer is None:
            options["reserve"] = 0
        self._graphs.append(memfit_backend(module, example_inputs, options))
        return self._graphs[-1]
