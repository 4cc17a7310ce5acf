"""A training step that a baseline runs, with the interface that measurement and verification expect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.capture.training_step import TrainingStep
from memfit.simulate.overlap import Transfers
from memfit.step.measure import measure_step
from memfit.step.measured import Measured
from memfit.step.verify import first_difference


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineStep:
    """A training step run by a baseline.

    Attributes:
        step: the step as the user wrote it.
        device: where it runs.
        run: batch -> loss; runs forward, loss, backward and, where there is an optimizer, the update.
    """

    step: TrainingStep
    device: torch.device
    run: Callable[[Any], torch.Tensor]

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """Generators handed to torch by the step's code: not known."""
        return ()

    @property
    def held_bytes(self) -> int:
        """Bytes held between calls: none."""
        return 0

    @property
    def constants(self) -> tuple[torch.Tensor, ...]:
        """Tensors that the step closes over: not known."""
        return ()

    @property
    def transfers(self) -> Transfers:
        """Copies to the host and back: not seen."""
        return Transfers()

    def __call__(self, batch: Any) -> torch.Tensor:
        return self.run(batch)

    def measure(self, repeats: int) -> Measured:
        """Measure peak bytes and seconds beside eager (medians of `repeats` steps), and compare the bits."""
        measured = measure_step(self, self.step.batch, repeats=repeats)
        return replace(measured, bitwise_equal=first_difference(self, self.step.batch) is None)
