"""A training step that a baseline runs, with the interface that measurement and verification expect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.capture.training_step import TrainingStep
from memfit.step.measure import MeasurableStep, measure_step
from memfit.step.measured import Measured
from memfit.step.verify import first_difference


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineStep(MeasurableStep):
    """A training step run by a baseline.

    Attributes:
        step: the step as the user wrote it.
        device: where it runs.
        run: batch -> loss; runs forward, loss, backward and, where there is an optimizer, the update.
    """

    step: TrainingStep
    device: torch.device
    run: Callable[[Any], torch.Tensor]

    def __call__(self, batch: Any) -> torch.Tensor:
        return self.run(batch)

    def measure(self, repeats: int) -> Measured:
        """Measure peak bytes and seconds beside eager (medians of `repeats` steps), and compare the bits."""
        measured = measure_step(self, self.step.batch, repeats=repeats)
        return replace(measured, bitwise_equal=first_difference(self, self.step.batch) is None)
