"""A graph of a step with graph breaks: its plans, and the bytes that they take beside those of the other graphs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from memfit.capture import Captured
from memfit.capture.joint import BetweenHalves
from memfit.cost.calibration import linked_device
from memfit.device import Device
from memfit.errors import NoPlanError
from memfit.graph import Graph
from memfit.plan import Plan, Problem
from memfit.planners.engine.bounds.bounds import least_budget_bound
from memfit.planners.engine.results import unplanned_schedule
from memfit.planning import Settings, make_leanest_plan, make_plan
from memfit.runtime.host.store import alignment_bytes
from memfit.runtime.placed_plans import plan_as_placed, plan_within_host
from memfit.schedule import Code, Schedule
from memfit.simulate import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The bytes of a plan that others have to share with, its graph's residents included in the peaks.

    Attributes:
        kept_bytes: live between the halves, residents not included.
        forward_bytes, backward_bytes: peaks of the halves.
    """

    kept_bytes: int
    forward_bytes: int
    backward_bytes: int

    def towards(self, other: Shape, share: float) -> Shape:
        """Return the shape at `share` (from 0 to 1) of the way to `other`, in none of its bytes less than this one."""

        def between(mine: int, theirs: int) -> int:
            return mine + math.floor(max(0, theirs - mine) * share)

        return Shape(
            kept_bytes=between(self.kept_bytes, other.kept_bytes),
            forward_bytes=between(self.forward_bytes, other.forward_bytes),
            backward_bytes=between(self.backward_bytes, other.backward_bytes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The bytes that a graph is planned within.

    Attributes:
        budget_bytes: for the graph, with its residents.
        bytes_between: taken between its halves, beside what it keeps: by the graphs and the code that run there.
        bytes_outside: taken from the end of its forward half on: gradients of other graphs, say.
    """

    budget_bytes: int
    bytes_between: int
    bytes_outside: int


@dataclass(eq=False, kw_only=True)
class Part:
    """A graph of the step at concrete sizes.

    Attributes:
        captured: with the costs of its ops.
        settings: for its plans, but for the budget; with the part's share of the host budget.
        beside_bytes: the step's residents that are not the graph's.
        plan, shape: the plan in use, and its shape.
        leanest, lean: the leanest plan so far, and its shape.
        full: the shape of the plan that recomputes nothing.
    """

    captured: Captured
    settings: Settings
    beside_bytes: int
    device: Device = field(init=False)
    plan: Plan = field(init=False)
    shape: Shape = field(init=False)
    leanest: Plan = field(init=False)
    lean: Shape = field(init=False)
    full: Shape = field(init=False)

    def __post_init__(self) -> None:
        graph = self.captured.graph
        at, host_bytes = self.captured.binding.device, self.settings.host_budget_bytes
        self.device = self.settings.device or linked_device(at, host_bytes, self.settings.host_dir)
        self.settings = replace(self.settings, host_budget_bytes=0)  # until it is known who shares it
        unplanned = unplanned_schedule(Problem(graph=graph, device=self.device, budget_bytes=0))
        self.full = self._shape(unplanned)
        most_bytes = max(self.full.forward_bytes, self.full.backward_bytes)
        self.plan_leanest(Room(budget_bytes=0, bytes_between=most_bytes, bytes_outside=0))
        self.use_leanest()

    @property
    def resident_bytes(self) -> int:
        """The bytes of the graph's residents: parameters and inputs."""
        return self.captured.graph.resident_bytes

    @property
    def arriving_bytes(self) -> int:
        """The bytes of the gradients that the backward half is given."""
        graph = self.captured.graph
        return sum(graph.storages[storage].bytes for b in graph.boundaries for storage in b.arrivals)

    @property
    def bound_bytes(self) -> int:
        """The least bytes of a step with this graph, whatever the plans: proved."""
        graph = _with_bytes_between(self.captured, 0)
        return self.beside_bytes + least_budget_bound(Problem(graph=graph, device=self.device, budget_bytes=1))[0]

    def plan_leanest(self, room: Room) -> None:
        """Make the plan that takes the fewest bytes, with the bytes between and outside of a room; not yet used."""
        graph = self._graph_in(room)
        self.leanest = plan_within_host(
            lambda settings: make_leanest_plan(graph, self.device, settings, room.bytes_outside),
            self.settings,
            alignment_bytes(self.captured.binding.device),
        )
        self.lean = self._shape(self.leanest.schedule)

    def plan_within(self, room: Room) -> None:
        """Use the planner's plan for a room, if there is one."""
        plan = self._plan_in(room)
        if plan is not None:
            self._use(plan)

    def improve_within(self, room: Room) -> None:
        """Use the planner's plan for a room, if there is one that is faster than the plan in use."""
        plan = self._plan_in(room)
        if plan is not None and plan.predicted.seconds < self.plan.predicted.seconds:
            self._use(plan)

    def _plan_in(self, room: Room) -> Plan | None:
        try:
            return plan_as_placed(
                lambda settings: make_plan(self._graph_in(room), self.device, settings, room.bytes_outside),
                self.settings.within(max(1, room.budget_bytes)),
                self.captured.binding.device,
                is_part=True,
            )
        except NoPlanError:
            return None

    def use_leanest(self) -> None:
        """Use the leanest plan."""
        self._use(self.leanest)

    def _use(self, plan: Plan) -> None:
        self.plan, self.shape = plan, self._shape(plan.schedule)

    def _graph_in(self, room: Room) -> Graph:
        return _with_bytes_between(self.captured, room.bytes_between)

    def _shape(self, schedule: Schedule) -> Shape:
        graph = _with_bytes_between(self.captured, 0)
        timeline = simulate(graph, schedule, self.device)
        (boundary,) = np.flatnonzero(schedule.codes == Code.BOUNDARY)
        before, after = timeline.device_bytes[:boundary], timeline.device_bytes[boundary:]
        outside = int(schedule.extras[boundary])
        return Shape(
            kept_bytes=int(after[0]) - outside - self.arriving_bytes - graph.resident_bytes,
            forward_bytes=int(before.max(initial=graph.resident_bytes)),
            backward_bytes=int(after.max()) - outside,
        )


def _with_bytes_between(captured: Captured, bytes_between: int) -> Graph:
    """Return the graph of a capture whose call between the halves takes that many bytes."""
    ops = list(captured.graph.ops)
    for call in captured.binding.calls:
        if isinstance(call.target, BetweenHalves):
            ops[call.op] = msgspec.structs.replace(ops[call.op], workspace_bytes=bytes_between)
    return msgspec.structs.replace(captured.graph, ops=tuple(ops))
