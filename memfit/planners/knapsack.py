"""The knapsack of torch's activation memory budget, over a captured graph: a baseline, with the solver from outside.

torch's partitioner asks which results to save for backward so that recomputing the others takes least time, while the
saved ones take at most a share of all; memory is counted once, not as a peak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.plan import Problem, Result
from memfit.planners.answer import answer
from memfit.planners.mirrored import counts_of, evaluate_mirror
from memfit.planners.order import update_at_once_order
from memfit.planners.program import build_program

Solve = Callable[[list[float], list[float], float], tuple[float, Sequence[int], Sequence[int]]]
"""(memory, runtime, most memory) -> (runtime saved, items to save, items to recompute), as torch's solvers are."""


def plan_knapsack(problem: Problem, share: float, solve: Solve, planner: str) -> Result:
    """Return the plan that saves at most `share` of all that the forward pass saves for backward.

    As in torch's partitioner an item is an op whose results backward reads, its memory their bytes over those of all
    items, its runtime the op's seconds. What is not saved is rematerialized (mirror count 1), and so is all between.

    Source: torch/_functorch/partitioners.py, `choose_saved_values_set`.
    """
    started_seconds = problem.clock()
    program = build_program(problem, update_at_once_order(problem.graph))
    graph, device = problem.graph, problem.device
    forward = [op for op in program.op_at[: program.backward_start] if op >= 0]
    inside = set(forward)
    read_later = {storage for op in graph.ops if op.id not in inside for storage in op.reads}
    size = {s: device.aligned(graph.storages[s].bytes) for s in read_later}
    saved_bytes = {op: sum(size.get(s, 0) for s in graph.ops[op].writes) for op in forward}
    items = [op for op in forward if saved_bytes[op] > 0 and not graph.ops[op].computed_once]
    total = max(1, sum(saved_bytes[op] for op in items))
    memory = [saved_bytes[op] / total for op in items]
    _, saved, _ = solve(memory, [graph.ops[op].seconds for op in items], share)
    counts = counts_of(program, {items[index]: 0 for index in saved}, otherwise=1)
    evaluation = evaluate_mirror(program, counts)
    return answer(program, [evaluation], planner=planner, started_seconds=started_seconds)
