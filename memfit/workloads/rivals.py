"""What a step can do without memfit, as rows of a comparison: torch's activation memory budget, checkpoints by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from memfit.capture.placement import step_device
from memfit.capture.torch_private import compile_with_budget, dp_knapsack, greedy_knapsack, ilp_knapsack
from memfit.capture.training_step import TrainingStep
from memfit.runtime.measure import Measurement, measure_step
from memfit.runtime.verify import first_difference
from memfit.workloads import registry
from memfit.workloads.building import GRANULARITIES

TORCH, CHECKPOINT = "torch", "checkpoint"
SOLVERS: dict[str, Callable[..., Any]] = {"dp": dp_knapsack, "greedy": greedy_knapsack, "ilp": ilp_knapsack}
"""torch's knapsack solvers by the name that `activation_memory_budget_solver` has for them."""


def rivals_of(step: TrainingStep) -> list[str]:
    """Return the rivals that this step has: `torch:dp`, ..., and for a built-in workload `checkpoint:block`, ..."""
    solvers = [f"{TORCH}:{name}" for name in SOLVERS if name != "ilp" or find_spec("scipy") is not None]
    placed = [f"{CHECKPOINT}:{name}" for name in GRANULARITIES] if step.name in registry.WORKLOADS else []
    return solvers + placed


@dataclass(frozen=True, slots=True, kw_only=True)
class RivalStep:
    """Another way to run a step, measured as a planned one is."""

    step: TrainingStep
    device: torch.device
    run: Callable[[Any], torch.Tensor]

    @property
    def held_bytes(self) -> int:
        """Nothing: it has no memory of its own between calls."""
        return 0

    def __call__(self, batch: Any) -> torch.Tensor:
        return self.run(batch)

    def measure(self, repeats: int) -> Measurement:
        """Measure peak bytes and seconds beside eager."""
        return measure_step(self, self.step.batch, repeats=repeats)

    def gives_the_same_bits(self) -> bool:
        """Whether loss, gradients, buffers and generators are eager's."""
        return first_difference(self, self.step.batch) is None


def with_torch_budget(step: TrainingStep, solver: str, share: float) -> RivalStep:
    """Return the step compiled under torch's `activation_memory_budget`, with eager's kernels."""
    compiled: Any = compile_with_budget(step.model, share, solver)
    return RivalStep(
        step=step,
        device=step_device(step.model, step.batch),
        run=lambda batch: step.run_eager(batch, model=compiled),
    )


def with_checkpoints_placed(step: TrainingStep, granularity: str) -> RivalStep:
    """Return a built-in step with `torch.utils.checkpoint` where a person would place it, only while it runs."""
    modules = import_module(f"memfit.workloads.{registry.WORKLOADS[step.name].module}")
    places: list[torch.nn.Module] = modules.places(step.model, granularity)

    def run(batch: Any) -> torch.Tensor:
        with _checkpointed(places):
            return step.run_eager(batch)

    return RivalStep(step=step, device=step_device(step.model, step.batch), run=run)


@contextmanager
def _checkpointed(modules: list[torch.nn.Module]) -> Iterator[None]:
    for module in modules:
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    try:
        yield
    finally:
        for module in modules:
            del module.forward  # the class's own is there again
