"""Whether planned steps have eager's bits on a GPU, with deterministic algorithms."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from _gpu_models import make_model
from _planned import CUBLAS_WORKSPACE, WITH_ATTENTION, bits_of, eager_run

import memfit

MOST_LEFT_OUT = 0.01  # of the gradients: what eager itself does not give twice
TIME_LIMIT_SECONDS = 1.0


def measure_bits(*, model: str, options: dict[str, Any], share: str, computed: bool = True) -> Iterator[dict[str, Any]]:
    """Yield what differs between a planned and an eager step from the same state and seed.

    Args:
        model, options: see `make_model`.
        share: of the unplanned peak, in percent, as the budget.
        computed: whether kernels compute anything; a rehearsal compares whatever bytes memory holds.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = CUBLAS_WORKSPACE
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=model not in WITH_ATTENTION)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    step = make_model(model, options).step
    planned = memfit.fit(
        step.model,
        step.loss,
        step.batch,
        optimizer=step.optimizer,
        budget=share,
        time_limit_seconds=TIME_LIMIT_SECONDS,
    )
    assert isinstance(planned, memfit.PlannedStep)
    found: dict[str, Any] = {"overhead": planned.plan.overhead, "failures": []}
    yield found
    found |= bits_of(lambda: planned(step.batch), eager_run(step), step)
    left_out = [name for name in found["not_repeated"] if name.split()[0] in ("gradient", "parameter")]
    if computed and found["first_difference"] is not None:
        found["failures"].append(f"{model}: bits differ first in {found['first_difference']}")
    if computed and len(left_out) > MOST_LEFT_OUT * found["compared"]:
        found["failures"].append(f"{model}: eager does not repeat {len(left_out)} of {found['compared']} gradients")
    found["line"] = f"{found['compared']} compared, first difference {found['first_difference']}"
    yield found
