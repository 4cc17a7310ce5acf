"""Golden plans by moves: the searches give the same plans as long as their algorithm is the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from chains import network, problem
from devices import linked

from memfit.graph import Graph, Op, Phase, Role, Storage
from memfit.plan import Problem, Result
from memfit.planners import make_planner
from memfit.planners.engine.bounds.bounds import least_budget_bound
from memfit.planners.engine.results import unplanned_peak_bytes

LINKED = linked(300.0, 200.0)


class _Step:
    """Collects the storages and ops of a graph, one op after the other."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.ops: list[Op] = []

    def resident(self, name: str, role: Role, size_bytes: int) -> int:
        self.storages.append(Storage(id=len(self.storages), name=name, bytes=size_bytes, role=role))
        return len(self.storages) - 1

    def op(self, name: str, phase: Phase, reads: list[int], size_bytes: int, seconds: float, **more: object) -> int:
        role = Role.ACTIVATION if phase is Phase.FORWARD else Role.GRADIENT
        write = self.resident(name, role, size_bytes)
        reads = list(dict.fromkeys(reads))
        op = Op(id=len(self.ops), name=name, phase=phase, reads=tuple(reads), writes=(write,), seconds=seconds, **more)  # type: ignore[arg-type]
        self.ops.append(op)
        return write

    def update(self, parameter: int, gradient: int) -> None:
        number, name = len(self.ops), f"sgd{len(self.ops)}"
        touched = {"reads": (gradient,), "writes": (), "mutates": (parameter,)}
        self.ops.append(Op(id=number, name=name, phase=Phase.UPDATE, seconds=0.1, **touched))

    def graph(self, name: str) -> Graph:
        return Graph.build(name=name, storages=self.storages, ops=self.ops)


def residual(blocks: int, *, equal: bool) -> Graph:
    """Blocks of convolution, normalization, in-place relu and a sum with the block's input; then updates."""
    step = _Step()
    value = step.resident("input", Role.INPUT, 64)
    weights = [step.resident(f"w{block}", Role.PARAMETER, 40) for block in range(blocks)]
    saved: list[tuple[int, int, int, int]] = []
    for block in range(blocks):
        size = 128 if equal else 256 >> (4 * block // blocks)
        conv = step.op(f"conv{block}", Phase.FORWARD, [value, weights[block]], size, 3.0, workspace_bytes=size // 2)
        norm = step.op(f"norm{block}", Phase.FORWARD, [conv], size, 0.5 + 0.01 * (0 if equal else block))
        relu = step.op(f"relu{block}", Phase.FORWARD, [norm], size, 0.25, reuses=((norm, len(step.storages)),))
        out = step.op(f"sum{block}", Phase.FORWARD, [relu, value], size, 0.25)
        saved.append((value, conv, relu, out))
        value = out
    gradient = step.op("loss", Phase.FORWARD, [value], 8, 0.1)
    gradients: list[tuple[int, int]] = []
    for block in reversed(range(blocks)):
        value, conv, relu, out = saved[block]
        size = step.storages[value].bytes
        back = step.op(f"drelu{block}", Phase.BACKWARD, [gradient, relu], step.storages[relu].bytes, 0.25)
        back = step.op(f"dnorm{block}", Phase.BACKWARD, [back, conv], step.storages[conv].bytes, 0.75)
        gradients.append((weights[block], step.op(f"dw{block}", Phase.BACKWARD, [back, value], 40, 3.0)))
        through = step.op(f"dx{block}", Phase.BACKWARD, [back, weights[block]], size, 3.0)
        gradient = step.op(f"dsum{block}", Phase.BACKWARD, [through, gradient], size, 0.25)
    for parameter, gradient in gradients:
        step.update(parameter, gradient)
    return step.graph("equal" if equal else "residual")


def recurrent(steps: int) -> Graph:
    """A cell with one weight: gates and state of each step, and weight gradients that add up."""
    step = _Step()
    inputs = step.resident("input", Role.INPUT, 64)
    weight = step.resident("weight", Role.PARAMETER, 300)
    hidden, saved = inputs, []
    for number in range(steps):
        gates = step.op(f"gates{number}", Phase.FORWARD, [inputs, hidden, weight], 400, 2.0)
        saved.append((hidden, gates))
        hidden = step.op(f"state{number}", Phase.FORWARD, [gates], 100, 0.5)
    back, total = step.op("loss", Phase.FORWARD, [hidden], 8, 0.1), -1
    for number in reversed(range(steps)):
        hidden, gates = saved[number]
        dgates = step.op(f"dgates{number}", Phase.BACKWARD, [back, gates], 400, 1.0)
        own = step.op(f"dw{number}", Phase.BACKWARD, [dgates, hidden], 300, 2.0)
        total = own if total < 0 else step.op(f"add{number}", Phase.BACKWARD, [total, own], 300, 0.2)
        back = step.op(f"dh{number}", Phase.BACKWARD, [dgates, weight], 100, 2.0)
    step.update(weight, total)
    return step.graph("recurrent")


def ladder() -> Graph:
    """A few dozen layers of very different sizes, some of them with a skip."""
    sizes = [20 + 37 * number % 101 for number in range(18)]
    reads = [[number - 1, number - 4] if number % 5 == 4 else [number - 1] for number in range(18)]
    return network(sizes, reads, [1.0 + 53 * number % 17 for number in range(18)])


def _line(name: str, task: Problem, result: Result) -> str:
    plan = result.plan or result.leanest
    assert plan is not None
    digest = hashlib.sha256(plan.schedule.text().encode()).hexdigest()[:16]
    fits = "fits" if result.plan else "leanest"
    predicted = plan.predicted
    return f"{name} {task.budget_bytes}: {fits} {predicted.peak_bytes} bytes, {predicted.seconds!r} s, {digest}"


def _plans() -> Iterator[str]:
    graphs = [residual(6, equal=False), residual(12, equal=True), recurrent(10), ladder()]
    for graph in graphs:
        least, most = least_budget_bound(problem(graph, 1))[0], unplanned_peak_bytes(graph, problem(graph).device)
        for share, name, seed in ((0.6, "auto", 0), (0.25, "search", 0), (0.25, "search", 1)):
            task = problem(graph, int(least + share * (most - least)), seed=seed)
            result = make_planner(name, iterations=3_000).plan(task)
            yield _line(f"{graph.name} {name} seed {seed}", task, result)
        task = replace(problem(graph, int(least + 0.4 * (most - least))), device=LINKED, host_budget_bytes=most // 2)
        yield _line(f"{graph.name} offload", task, make_planner("offload", iterations=6_000).plan(task))
    task = problem(ladder(), 688)
    rounds = make_planner("search", iterations=600_000).plan(task)
    assert rounds.stats["moves"] >= 600_000, "the search ended before its last round"
    yield _line("rounds", task, rounds)
    task = problem(residual(6, equal=False), 800)
    yield _line("hopeless", task, make_planner("search", iterations=4_000).plan(task))


@pytest.mark.slow
def test_plans_by_moves_are_as_stored(golden: Callable[[str, str], None]) -> None:
    plans = list(_plans())
    assert len(plans) == 18
    golden("search_by_moves.txt", "\n".join(plans))
