"""The baseline `checkpoint`: `torch.utils.checkpoint` around the modules that a person would choose."""

from __future__ import annotations

from typing import Any

import torch

from memfit.baselines.baseline_step import BaselineStep
from memfit.capture.placement import step_device
from memfit.capture.training_step import TrainingStep
from memfit.workloads import WORKLOADS
from memfit.workloads.building import GRANULARITIES, checkpoints_placed

CHECKPOINT = "checkpoint"
"""The part of a baseline's name before the colon; after it stands a granularity: `checkpoint:block`."""


def checkpoint_names(step: TrainingStep) -> list[str]:
    """Return the names of these baselines; only a built-in workload says where its checkpoints belong."""
    return [f"{CHECKPOINT}:{name}" for name in GRANULARITIES] if step.name in WORKLOADS else []


def with_checkpoints_placed(step: TrainingStep, granularity: str) -> BaselineStep:
    """Return a built-in step that checkpoints the modules of a granularity. The model is changed only while it runs.

    Args:
        step: a built-in step.
        granularity: as in `checkpoints_placed`.
    """

    def run(batch: Any) -> torch.Tensor:
        with checkpoints_placed(step, granularity):
            return step.run_eager(batch)

    return BaselineStep(step=step, device=step_device(step.model, step.batch), run=run)
