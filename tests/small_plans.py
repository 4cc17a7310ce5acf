"""Small graphs and plans made by hand, for the tests of reports."""

from __future__ import annotations

from typing import Any

import msgspec
from devices import linked

from memfit.checker import check
from memfit.device import GENERIC, Device
from memfit.graph import Graph, Op, Phase, Role, Storage
from memfit.plan import Bounds, Plan, Prediction, Problem, Status
from memfit.planners.engine.bounds.bounds import least_budget_bound
from memfit.planners.engine.results import unplanned_schedule
from memfit.schedule import Compute, Drop, Instruction, Schedule
from memfit.simulate import simulate


def small_graph(name: str = "small", seconds: float = 1.0) -> Graph:
    """Two layers, their loss, their gradients and an update; `a` is read again in backward."""
    sizes = {"w": 100, "x": 50, "a": 400, "b": 400, "loss": 8, "grad_b": 400, "grad_a": 400, "grad_w": 100}
    roles = [Role.PARAMETER, Role.INPUT, Role.ACTIVATION, Role.ACTIVATION, Role.OUTPUT, *[Role.GRADIENT] * 3]
    forward, backward = Phase.FORWARD, Phase.BACKWARD

    def op(number: int, name: str, phase: Phase, reads: tuple[int, ...], writes: tuple[int, ...], **more: Any) -> Op:
        took = seconds * more.pop("units", 1)
        return Op(id=number, name=name, phase=phase, reads=reads, writes=writes, seconds=took, **more)

    return Graph.build(
        name=name,
        storages=[
            Storage(id=number, name=storage, bytes=size, role=role)
            for number, ((storage, size), role) in enumerate(zip(sizes.items(), roles, strict=True))
        ],
        ops=[
            op(0, "fc1", forward, (0, 1), (2,), workspace_bytes=30, module="net.fc1"),
            op(1, "relu", forward, (2,), (3,), reuses=((2, 3),), module="net.act"),
            op(2, "mean", forward, (3,), (4,)),
            op(3, "mean_backward", backward, (3, 4), (5,), reuses=((3, 5),), units=2),
            op(4, "relu_backward", backward, (5, 2), (6,), units=2),
            op(5, "fc1_backward", backward, (6, 1), (7,), units=2),
            op(6, "sgd", Phase.UPDATE, (7,), (), mutates=(0,)),
        ],
    )


REMATERIALIZED = """
compute 0
compute 1
drop 2
compute 2
compute 3 in_place_of 3
compute 0
compute 4
drop 2
drop 5
compute 5
drop 6
compute 6
drop 7
"""
OFFLOADED = REMATERIALIZED.replace("drop 2\ncompute 2", "offload 2\nwait 2\ndrop 2\ncompute 2", 1).replace(
    "compute 0\ncompute 4", "prefetch 2\ncompute 4"
)
LINKED = linked(100.0, 200.0)


def plan_of(graph: Graph, text: str | Schedule, device: Device = GENERIC, **changes: Any) -> Plan:
    """Return a plan around a schedule, with the simulator's own predictions."""
    schedule = Schedule.parse(text) if isinstance(text, str) else text
    check(graph, schedule)
    planned = simulate(graph, schedule, device)
    free = Problem(graph=graph, device=device, budget_bytes=1)
    unplanned = simulate(graph, unplanned_schedule(free), device)
    least_bytes, holding_ops = least_budget_bound(free)
    plan = Plan(
        graph=graph,
        device=device,
        budget_bytes=planned.peak_bytes + 42,
        host_budget_bytes=0,
        bytes_outside=0,
        schedule=schedule,
        predicted=Prediction(
            peak_bytes=planned.peak_bytes, seconds=planned.makespan_seconds, host_peak_bytes=planned.host_peak_bytes
        ),
        unplanned=Prediction(peak_bytes=unplanned.peak_bytes, seconds=unplanned.makespan_seconds),
        bounds=Bounds(
            least_budget_found_bytes=planned.peak_bytes,
            least_budget_bound_bytes=least_bytes,
            overhead=0.01,
            holding_ops=holding_ops,
        ),
        status=Status.FEASIBLE,
        planner="by_hand",
        seed=7,
        plan_seconds=0.25,
        versions={"memfit": "0.1.0"},
    )
    return msgspec.structs.replace(plan, **changes)


def lowered(graph: Graph, dropped_early: set[int]) -> Schedule:
    """Compute in order; what is in `dropped_early` is dropped after each op, and recomputed whenever it is read."""
    last_read = {storage: op.id for op in graph.ops for storage in op.reads}
    live = {storage.id for storage in graph.storages if storage.resident}
    instructions: list[Instruction] = []

    def compute(op: Op) -> None:
        for storage in op.reads:
            if storage not in live:
                compute(graph.ops[graph.writer_of[storage]])
        instructions.append(Compute(op=op.id))
        live.update(op.writes)

    for op in graph.ops:
        compute(op)
        for storage in sorted(live):
            done = last_read.get(storage, op.id) <= op.id and storage in graph.writer_of
            early = storage in dropped_early and storage not in op.writes
            if (done and not graph.storages[storage].required_at_end) or early:
                live.discard(storage)
                instructions.append(Drop(storage=storage))
    return Schedule.of(instructions)
