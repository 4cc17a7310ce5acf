"""The knapsack behind torch's activation memory budget, as a prediction over a captured graph that nothing compiles.

torch's partitioner chooses the results to save for backward: recomputing the others takes the least time, and the saved
ones take at most a share of the bytes of all. It counts bytes once, not as a peak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.papers.planners.recompute_counts import Counts, counts_of, plan_by_counts
from memfit.plan import Problem, Result
from memfit.planners.engine.retention.instance import Instance

Solve = Callable[[list[float], list[float], float], tuple[float, Sequence[int], Sequence[int]]]
"""(memory, runtime, most memory) -> (runtime saved, items to save, items to recompute), as torch's solvers are."""


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
