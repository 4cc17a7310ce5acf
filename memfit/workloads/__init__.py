"""The training steps that memfit brings along: the models of the papers, for benchmarks, demos and tests.

Importing this package imports no torch; building a workload does, and the package that its model comes from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.workloads.registry import WORKLOADS, Option, OptionValue, Workload

if TYPE_CHECKING:
    from memfit.capture.training_step import TrainingStep

__all__ = ["WORKLOADS", "Option", "OptionValue", "Workload", "build", "checkpointed"]


def build(name: str, **options: OptionValue) -> TrainingStep:
    """Return the built-in workload `name` as a training step, its parameters and batch made from the seed.

        >>> from memfit.workloads import build
        >>> step = build("lstm", batch=2, steps=3, width=8, optimizer="sgd")
        >>> step.name, round(step.compute_loss(step.model, step.batch).item(), 1)
        ('lstm', 2.3)

    The same name, options and seed give the same bits; the random generators of the caller stay as they were.

    Args:
        name: one of `WORKLOADS`.
        options: those of `WORKLOADS[name].options`, as values or as text.

    Raises:
        InvalidTargetError: no workload of that name, or the package its model comes from is not installed.
        InvalidOptionError: an option that does not exist, or a value that it cannot take.
        InvalidDeviceError: the device is not here.
    """
    from memfit.workloads.building import build_workload

    return build_workload(name, options)


def checkpointed(step: TrainingStep, granularity: str = "block") -> TrainingStep:
    """Return a copy of a built-in step with `torch.utils.checkpoint` where a person would place it.

        >>> from memfit.workloads import build, checkpointed
        >>> step = checkpointed(build("lstm", batch=2, steps=3, width=8), granularity="stage")
        >>> step.name
        'lstm, checkpoint every stage'

    Args:
        step: what `build` returned.
        granularity: "block": every residual block, unit, layer or time step; "stage": every group of them.

    Raises:
        InvalidOptionError: another granularity.
        InvalidTargetError: not a built-in step.
    """
    from memfit.workloads.building import with_checkpoints

    return with_checkpoints(step, granularity)
