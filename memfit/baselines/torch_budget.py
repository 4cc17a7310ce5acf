"""The baseline `torch`: the partitioner's `activation_memory_budget`, with each of its knapsack solvers."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from memfit.baselines.baseline_step import BaselineStep
from memfit.capture.placement import step_device
from memfit.capture.training_step import TrainingStep
from memfit.torch_private.dynamo import compile_with_budget, dp_knapsack, greedy_knapsack, ilp_knapsack

TORCH = "torch"
"""The part of a baseline's name before the colon; after it stands a solver: `torch:dp`."""

SOLVERS: dict[str, Callable[..., Any]] = {"dp": dp_knapsack, "greedy": greedy_knapsack, "ilp": ilp_knapsack}
"""torch's knapsack solvers, by their name in `torch._functorch.config.activation_memory_budget_solver`."""


def torch_budget_names() -> list[str]:
    """Return the names of these baselines: one for each solver that can run here."""
    return [f"{TORCH}:{name}" for name in SOLVERS if name != "ilp" or find_spec("scipy") is not None]


def with_torch_budget(step: TrainingStep, solver: str, share: float) -> BaselineStep:
    """Return the step compiled under torch's `activation_memory_budget`, with eager's kernels.

    Args:
        step: the step to run; its model is compiled, not changed.
        solver: a key of `SOLVERS`.
        share: the budget, as torch takes it: 1.0 saves for backward all that eager saves, 0.0 as little as can be.

    Raises:
        RuntimeError: torch cannot compile the model; raised at the first run.
    """
    compiled: Any = compile_with_budget(step.model, share, solver)
    return BaselineStep(
        step=step,
        device=step_device(step.model, step.batch),
        run=lambda batch: step.run_eager(batch, model=compiled),
    )
