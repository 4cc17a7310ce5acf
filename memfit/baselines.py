"""Baselines: the ways to save memory that PyTorch offers without memfit, as rows of `memfit compare`.

`checkpoint` is `torch.utils.checkpoint` around the modules that a person would choose. `torch` is the partitioner's
`activation_memory_budget`, with each of its knapsack solvers: run, or predicted over a captured graph that nothing
compiles. The partitioner chooses the results to save for backward: recomputing the others takes the least time, and the
saved ones take at most a share of the bytes of all. It counts bytes once, not as a peak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch

from memfit.capture.placement import step_device
from memfit.capture.training_step import TrainingStep
from memfit.papers.planners.recompute_counts import Counts, counts_of, plan_by_counts
from memfit.plan import Problem, Result
from memfit.planners.engine.retention.instance import Instance
from memfit.step.measure import MeasurableStep, measure_step
from memfit.step.measured import Measured
from memfit.step.verify import first_difference
from memfit.torch_private.dynamo import compile_with_budget, dp_knapsack, greedy_knapsack, ilp_knapsack
from memfit.workloads import WORKLOADS
from memfit.workloads.building import GRANULARITIES, checkpoints_placed

CHECKPOINT, TORCH = "checkpoint", "torch"
"""The parts of baselines' names before the colon; after it stands a granularity or a solver: `checkpoint:block`."""

Solve = Callable[[list[float], list[float], float], tuple[float, Sequence[int], Sequence[int]]]
"""(memory, runtime, most memory) -> (runtime saved, items to save, items to recompute), as torch's solvers are."""

SOLVERS: dict[str, Solve] = {"dp": dp_knapsack, "greedy": greedy_knapsack, "ilp": ilp_knapsack}
"""torch's knapsack solvers, by their name in `torch._functorch.config.activation_memory_budget_solver`."""


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


def baseline_names(step: TrainingStep) -> list[str]:
    """Return the names of the baselines of a step: one for each solver that can run here, and for each granularity.

    Only a built-in workload says where its checkpoints belong.
    """
    solvers = [f"{TORCH}:{name}" for name in SOLVERS if name != "ilp" or find_spec("scipy") is not None]
    return solvers + [f"{CHECKPOINT}:{name}" for name in GRANULARITIES if step.name in WORKLOADS]


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


def plan_knapsack(problem: Problem, share: float, solve: Solve, planner: str) -> Result:
    """Return the plan that saves at most `share` of all that the forward pass saves for backward.

    An item is an op whose results backward reads, as in torch's partitioner. Its memory is the bytes of these results
    over those of all items, its runtime the seconds of the op. Results that are not saved are recomputed once, and so
    are those between them.

    Args:
        problem: the graph, and the budget that decides the status of the result.
        share: 0 to 1, the most bytes to save, over the bytes that eager saves.
        solve: the knapsack solver, with the signature of torch's.
        planner: the name that the plan gets, such as `torch:dp`.

    Raises:
        InvalidOptionError: a pin cannot be honoured.

    Source: torch/_functorch/partitioners.py, `choose_saved_values_set`.
    """
    return plan_by_counts(problem, planner, lambda instance: [_counts(instance, share, solve)])


def _counts(instance: Instance, share: float, solve: Solve) -> Counts:
    graph, device = instance.graph, instance.problem.device
    forward = [op for op in instance.op_at[: instance.backward_start] if op >= 0]
    inside = set(forward)
    read_later = {storage for op in graph.ops if op.id not in inside for storage in op.reads}
    size = {s: device.aligned(graph.storages[s].bytes) for s in read_later}
    saved_bytes = {op: sum(size.get(s, 0) for s in graph.ops[op].writes) for op in forward}
    items = [op for op in forward if saved_bytes[op] > 0 and not graph.ops[op].computed_once]
    total = max(1, sum(saved_bytes[op] for op in items))
    memory = [saved_bytes[op] / total for op in items]
    _, saved, _ = solve(memory, [graph.ops[op].seconds for op in items], share)
    return counts_of(instance, {items[index]: 0 for index in saved}, otherwise=1)
