"""Problem, Result and Plan: what a planner is asked, what it answers, and the file that keeps the answer."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from memfit.device import Device
from memfit.errors import InvalidDeviceError, InvalidFileError, InvalidScheduleError, PlanMismatchError
from memfit.files import decode, read_bytes, write_atomically
from memfit.graph import Bytes, Graph, GraphDocument, Seconds
from memfit.schedule import Code, Schedule

FORMAT = "memfit-plan"
VERSION = 1

INTERRUPTED = "interrupted"
"""The key of `Result.stats` that says that Ctrl-C ended the search."""


ROUNDING = 1e-12
"""Times the ops of a step: by what share of the step sums of their seconds in different orders may differ."""


PROVED_TO = 1e-7
"""Of the step: integer programs count seconds in whole units, rounded down; what is optimal is so up to this share."""


class Status(enum.StrEnum):
    """How planning ended; `remedy` says what a user can do about it."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    TIMED_OUT = "timed_out"

    @property
    def remedy(self) -> str:
        """One sentence: what to do next."""
        return {
            Status.OPTIMAL: "nothing: no plan that its bound holds for is faster",
            Status.FEASIBLE: "a longer time limit may find a faster plan",
            Status.INFEASIBLE: "raise the budget to least_budget_found_bytes, or make the batch smaller",
            Status.TIMED_OUT: "raise the time limit",
        }[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a planner reports while it works: seconds so far, best overhead so far (None before the first plan).

    `bound_overhead` is what no plan can be below, as far as the planner knows yet.
    """

    elapsed_seconds: float
    best_overhead: float | None
    best_peak_bytes: int | None
    bound_overhead: float = 0.0
    message: str = ""

    @property
    def gap(self) -> float | None:
        """How much of the unplanned seconds a better plan could save at most; None before the first plan."""
        return None if self.best_overhead is None else max(0.0, self.best_overhead - self.bound_overhead)


def _report_nothing(_: Progress) -> None:
    """Take a progress report and do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Fit `graph` on `device` into `budget_bytes`, everything resident included.

        >>> from memfit.device import GENERIC
        >>> from memfit.graph import Graph, Op, Phase, Role, Storage
        >>> from memfit.planners import make_planner
        >>> graph = Graph.build(
        ...     name="double",
        ...     storages=[
        ...         Storage(id=0, name="x", bytes=4096, role=Role.INPUT),
        ...         Storage(id=1, name="y", bytes=4096, role=Role.OUTPUT),
        ...     ],
        ...     ops=[Op(id=0, name="mul", phase=Phase.FORWARD, reads=(0,), writes=(1,), seconds=1e-6)],
        ... )
        >>> result = make_planner("none").plan(Problem(graph=graph, device=GENERIC, budget_bytes=8192))
        >>> str(result.status), result.plan.predicted.peak_bytes
        ('optimal', 8192)

    Args:
        graph: the step.
        device: gives the alignment of allocations and the link to the host.
        budget_bytes: most bytes on the device at any time.
        host_budget_bytes: most bytes of host copies at any time; 0 allows no offloading.
        bytes_outside: bytes on the device that are not the graph's: from the first boundary to the end, or from
            start to end where the graph has no boundary.
        pinned: op id -> whether its writes must be kept (True) or must be rematerialized (False): the user's mirror
            attribute.
        mirror_counts: op id -> how often its writes may be computed again (the mirror count of Chen 2016), for planners
            that work by such counts; the others see only what is `pinned`. `memfit.mirror` sets both.
        time_limit_seconds: when a planner answers with the best it has.
        seed: of all that is random; the same seed gives the same plan, unless time runs out first.
        clock: gives seconds. It and `progress`, which is called now and then, come from outside so that a planner stays
            pure. A KeyboardInterrupt inside a planner makes it answer with its best schedule so far.
    """

    graph: Graph
    device: Device
    budget_bytes: int
    host_budget_bytes: int = 0
    bytes_outside: int = 0
    pinned: Mapping[int, bool] = field(default_factory=dict[int, bool])
    mirror_counts: Mapping[int, int] = field(default_factory=dict[int, int])
    time_limit_seconds: float = 5.0
    seed: int = 0
    clock: Callable[[], float] = time.monotonic
    progress: Callable[[Progress], None] = _report_nothing


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the simulator says of a schedule."""

    peak_bytes: Bytes
    seconds: Seconds
    host_peak_bytes: Bytes = 0


class Bounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What no plan can beat, and how low a plan got.

    `least_budget_found_bytes` is the least budget this planner reached with a plan (None: it found none);
    `least_budget_bound_bytes` is proved for every legal schedule; `overhead` is a proved lower bound on the overhead at
    this budget, in any order of ops; `overhead_in_order`, where a planner proved it, is one for the schedules that
    compute ops for the first time in the order that it searched, as the family of `memfit.planners.retention_model`
    has it; `holding_ops` are the ids of the ops that make the least budget what it is: by
    their own storages, or with what has to be there beside them.
    """

    least_budget_found_bytes: Bytes | None
    least_budget_bound_bytes: Bytes
    overhead: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    overhead_in_order: Annotated[float, msgspec.Meta(ge=0)] | None = None
    holding_ops: tuple[int, ...] = ()


class Plan(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A checked schedule, its predictions, and what it was made for. Saved as JSON that carries its graph.

    `memfit.planners` make plans; `Plan.load(path)` reads one back and replays it. `predicted` and `unplanned` are what
    the simulator says of this schedule and of planner `none`'s; `versions` are of the packages that made the plan.
    """

    graph: Graph
    device: Device
    budget_bytes: int
    host_budget_bytes: int
    bytes_outside: int
    schedule: Schedule
    predicted: Prediction
    unplanned: Prediction
    bounds: Bounds
    status: Status
    planner: str
    seed: int
    plan_seconds: float
    versions: dict[str, str]

    @property
    def overhead(self) -> float:
        """Predicted planned seconds over unplanned seconds, minus one."""
        return self.predicted.seconds / self.unplanned.seconds - 1.0 if self.unplanned.seconds else 0.0

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that are copied to the host in one step."""
        offloaded: list[int] = self.schedule.operands[self.schedule.codes == Code.OFFLOAD].tolist()
        return sum(self.graph.storages[storage].bytes for storage in offloaded)

    def explain(self) -> str:
        """Return in plain words what holds the peak, each storage's fate and prices, and what more memory would buy."""
        from memfit.report import explain  # the report stands above; only who asks for words pays for it

        return explain(self)

    @property
    def is_optimal_in_every_order(self) -> bool:
        """Whether no plan at all is faster; else an optimal plan is the fastest in its order of ops."""
        return self.status is Status.OPTIMAL and self.overhead <= self.bounds.overhead + PROVED_TO

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the graph the plan is good for."""
        return self.graph.fingerprint

    def save(self, path: Path | str) -> None:
        """Write the plan to `path` atomically, as JSON with one instruction a line."""
        document = _PlanDocument(
            format=FORMAT,
            version=VERSION,
            planner=self.planner,
            status=self.status,
            seed=self.seed,
            plan_seconds=self.plan_seconds,
            budget_bytes=self.budget_bytes,
            host_budget_bytes=self.host_budget_bytes,
            bytes_outside=self.bytes_outside,
            predicted=self.predicted,
            unplanned=self.unplanned,
            bounds=self.bounds,
            versions=self.versions,
            fingerprint=self.fingerprint,
            device=self.device,
            schedule=tuple(self.schedule.lines()),
            graph=GraphDocument.of(self.graph),
        )
        write_atomically(Path(path), msgspec.json.format(msgspec.json.encode(document), indent=1))

    @staticmethod
    def load(path: Path | str, *, graph: Graph | None = None) -> Plan:
        """Read a plan, replay it with the checker, and compare its fingerprint with `graph`'s where one is given.

        Raises:
            InvalidFileError: unreadable, malformed, or the graph in it was changed by hand.
            InvalidScheduleError: the schedule is not legal on the plan's graph, or gives another prediction than the
                plan's own, or exceeds its budgets.
            InvalidDeviceError: the schedule copies, and the plan's device has no link.
            PlanMismatchError: made for another graph than `graph`.
        """
        document = decode(read_bytes(Path(path)), _PlanDocument, path)
        if document.format != FORMAT or document.version != VERSION:
            raise InvalidFileError(
                f"{path}: is {document.format!r} version {document.version}, expected {FORMAT!r} version {VERSION}"
            )
        plan = document.to_plan(str(path))
        if plan.fingerprint != document.fingerprint:
            raise InvalidFileError(
                f"{path}: its graph does not match its fingerprint; the file was changed, plan again"
            )
        if graph is not None:
            plan.require_graph(graph)
        plan._require_prediction(str(path))
        return plan

    def _require_prediction(self, where: str) -> None:
        """Raise InvalidScheduleError unless the schedule gives what the plan says of it, within the plan's budgets."""
        from memfit.simulate import simulate  # numba takes a while to import, and only loading a plan needs it

        try:
            timeline = simulate(self.graph, self.schedule, self.device)
        except (InvalidScheduleError, InvalidDeviceError) as error:
            raise type(error)(f"{where}: {error}") from error
        outside = 0 if self.graph.boundaries else self.bytes_outside  # else the boundaries of the schedule carry them
        for what, got, claimed, most in (
            ("peak_bytes", timeline.peak_bytes + outside, self.predicted.peak_bytes, self.budget_bytes),
            ("host_peak_bytes", timeline.host_peak_bytes, self.predicted.host_peak_bytes, self.host_budget_bytes),
        ):
            if got != claimed or got > most:
                raise InvalidScheduleError(
                    f"{where}: the schedule's {what} are {got}, the plan claims {claimed} within a budget of {most}; "
                    f"the file was changed, plan again"
                )
        if not math.isclose(timeline.makespan_seconds, self.predicted.seconds, rel_tol=1e-9):
            raise InvalidScheduleError(
                f"{where}: the schedule takes {timeline.makespan_seconds} seconds, the plan claims "
                f"{self.predicted.seconds}; the file was changed, plan again"
            )

    def require_graph(self, graph: Graph) -> None:
        """Raise PlanMismatchError unless the plan was made for this graph, or for it with fewer `reuses`: what kernels
        of this device were seen to write over, a plan from elsewhere does without.
        """
        if _reusing_as(self.graph, graph).fingerprint != self.fingerprint:
            raise PlanMismatchError(
                f"plan was made for graph {self.graph.name!r} ({self.fingerprint}), this one is {graph.name!r} "
                f"({graph.fingerprint}); plan again for this model, batch size and torch"
            )


def _reusing_as(planned: Graph, graph: Graph) -> Graph:
    """Return `graph` with the `reuses` of `planned` where it allows them all; else as it is."""
    pairs = [(mine.reuses, op) for mine, op in zip(planned.ops, graph.ops, strict=False)]
    if len(planned.ops) != len(graph.ops) or not all(set(reuses) <= set(op.reuses) for reuses, op in pairs):
        return graph
    return msgspec.structs.replace(graph, ops=tuple(msgspec.structs.replace(op, reuses=reuses) for reuses, op in pairs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A planner's answer. `plan` is None exactly when `status` is infeasible, or timed out with nothing found; then
    `leanest` is the plan of the least peak that was found, if any, with that peak for its budget.
    """

    status: Status
    plan: Plan | None
    bounds: Bounds
    stats: Mapping[str, float] = field(default_factory=dict[str, float])
    leanest: Plan | None = None


class _PlanDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: str
    version: int
    planner: str
    status: Status
    seed: int
    plan_seconds: Seconds
    budget_bytes: Bytes
    host_budget_bytes: Bytes
    bytes_outside: Bytes
    predicted: Prediction
    unplanned: Prediction
    bounds: Bounds
    versions: dict[str, str]
    fingerprint: str
    device: Device
    schedule: tuple[str, ...]
    graph: GraphDocument

    def to_plan(self, where: str) -> Plan:
        from memfit.checker import check

        graph = self.graph.to_graph(where)
        try:
            schedule = Schedule.parse(self.schedule)
            check(graph, schedule)
        except InvalidScheduleError as error:
            raise InvalidScheduleError(f"{where}: {error}") from error
        return Plan(
            graph=graph,
            device=self.device,
            budget_bytes=self.budget_bytes,
            host_budget_bytes=self.host_budget_bytes,
            bytes_outside=self.bytes_outside,
            schedule=schedule,
            predicted=self.predicted,
            unplanned=self.unplanned,
            bounds=self.bounds,
            status=self.status,
            planner=self.planner,
            seed=self.seed,
            plan_seconds=self.plan_seconds,
            versions=self.versions,
        )
