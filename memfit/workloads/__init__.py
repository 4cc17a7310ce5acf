"""Built-in training steps: models of the papers, for benchmarks, demos and tests.

Importing this package imports no torch. Building a workload imports torch and the package of its model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.workloads.registry import WORKLOADS, Option, OptionValue, Workload

if TYPE_CHECKING:
    from memfit.capture.training_step import TrainingStep

__all__ = ["WORKLOADS", "Option", "OptionValue", "Workload", "build"]


def build(name: str, **options: OptionValue) -> TrainingStep:
    """Return a built-in workload as a training step, with parameters and batch made from the seed.

        >>> from memfit.workloads import build
        >>> step = build("lstm", batch=2, steps=3, width=8, optimizer="sgd")
        >>> step.name, round(step.compute_loss(step.model, step.batch).item(), 1)
        ('lstm', 2.3)

    The same name, options and seed give the same bits. The caller's random generators do not change.

    Args:
        name: one of `WORKLOADS`.
        options: those of `WORKLOADS[name].options`, as values or as text.

    Raises:
        InvalidTargetError: no workload has that name, or the package of its model is not installed.
        InvalidOptionError: an option that does not exist, or a value that it cannot take.
        InvalidDeviceError: there is no such device.
    """
    from memfit.workloads.building import build_workload

    return build_workload(name, options)
