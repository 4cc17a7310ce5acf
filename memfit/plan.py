"""Problem, Result and Plan: the question to a planner, its answer, and the file that keeps the answer."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from memfit.checker import check
from memfit.device import Device
from memfit.errors import InvalidDeviceError, InvalidFileError, InvalidScheduleError, PlanMismatchError
from memfit.graph import Bytes, Graph, GraphDocument, Seconds
from memfit.schedule import Code, Schedule
from memfit.system.budget import format_bytes
from memfit.system.files import decode, read_bytes, write_atomically

FORMAT = "memfit-plan"
VERSION = 1

PROVED_TO = 1e-7
"""Share of the step up to which optimal plans are optimal: integer programs count seconds in units, rounded down."""


class Status(enum.StrEnum):
    """How planning ended.

    - optimal: no plan that the bounds hold for is faster.
    - feasible: a plan that fits, and no proof that it is the fastest.
    - infeasible: a bound proves that no plan fits: the budget is below `Bounds.least_budget_bound_bytes`.
    - timed_out: the planner found no plan that fits, and nothing proves that there is none. A search ran out of time;
      a planner with a fixed list of plans has tried them all (`Result.tried_all`).
    """

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    TIMED_OUT = "timed_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A planner's report while it works.

    Attributes:
        elapsed_seconds: since it began.
        best_overhead, best_peak_bytes: of the best plan so far; None before the first one.
        bound_overhead: the proved lower bound on the overhead of every plan, so far.
        message: what the planner adds.
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
        mirror_counts: op id -> how often its writes may be recomputed (the mirror count of Chen 2016), for planners
            that work by such counts; the others see only what is `pinned`. `memfit.mirror` sets both.
        gather_weight: what a repeated gather costs a search, as a share of its seconds: compute hides the rest.
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
    gather_weight: float = 0.0
    time_limit_seconds: float = 5.0
    seed: int = 0
    clock: Callable[[], float] = time.monotonic
    progress: Callable[[Progress], None] = _report_nothing

    @property
    def may_copy(self) -> bool:
        """Whether storages may go to the host and come back."""
        return self.host_budget_bytes > 0 and self.device.has_link

    @property
    def always_outside_bytes(self) -> int:
        """The bytes outside that are there from start to end; those from a boundary on are its schedule's."""
        return 0 if self.graph.boundaries else self.bytes_outside

    def fits(self, predicted: Prediction) -> bool:
        """Return whether a schedule with this prediction fits both budgets."""
        return self.fits_host(predicted) and predicted.peak_bytes <= self.budget_bytes

    def fits_host(self, predicted: Prediction) -> bool:
        """Return whether a schedule with this prediction fits the host's budget."""
        return predicted.host_peak_bytes <= self.host_budget_bytes


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The simulator's peak and seconds of a schedule."""

    peak_bytes: Bytes
    seconds: Seconds
    host_peak_bytes: Bytes = 0


class Bounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds that no plan can beat, and the least budget that a plan reached.

    Attributes:
        least_budget_found_bytes: the least budget for which this planner found a plan; None if it found none.
        least_budget_bound_bytes: no schedule fits a smaller budget.
        overhead: no schedule within this budget has a smaller overhead, in any order of ops; below zero only where the
            unplanned step waits for collectives.
        overhead_in_order: the same for schedules that compute ops for the first time in the order that was searched
            (the family of `memfit.planners.engine.cpsat.model`); None where no planner proved one.
        holding_ops: ids of the ops that determine the least budget, by themselves or with what must be there beside.
    """

    least_budget_found_bytes: Bytes | None
    least_budget_bound_bytes: Bytes
    overhead: float = 0.0
    overhead_in_order: float | None = None
    holding_ops: tuple[int, ...] = ()

    def of_any_budget(self, graph: Graph) -> Bounds:
        """Return the bounds without a proved overhead: no plan is faster than the unplanned step if nothing overlaps.

        Args:
            graph: of the plans.
        """
        return msgspec.structs.replace(self, overhead=-1.0 if graph.has_collectives else 0.0, overhead_in_order=None)


MADE = "made"  # the attribute of a plan from the cache that `age_seconds` reads: the time, in seconds of the epoch


class Plan(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A checked schedule, its predictions, and what it was made for. Saved as JSON that carries its graph.

    `memfit.planners` make plans; `Plan.load(path)` reads one back and replays it. `predicted` and `unplanned` are the
    simulator's figures of this schedule and of planner `none`'s; `versions` are of the packages that made the plan.
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
    def age_seconds(self) -> float | None:
        """How long ago a plan from the cache was made, in seconds; None of one that was made now, or read otherwise."""
        made = vars(self).get(MADE)
        return None if made is None else max(0.0, time.time() - made)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that are copied to the host in one step."""
        offloaded: list[int] = self.schedule.operands[self.schedule.codes == Code.OFFLOAD].tolist()
        return sum(self.graph.storages[storage].bytes for storage in offloaded)

    def explain(self) -> str:
        """Return as plain text what holds the peak, the fate of each storage and why, and why no plan needs less."""
        from memfit.report import explain  # the report stands above; only who asks for words pays for it

        return explain(self)

    def __repr__(self) -> str:
        sizes = f"{format_bytes(self.predicted.peak_bytes)} of {format_bytes(self.budget_bytes)}"
        return f"Plan({self.graph.name!r}, {sizes}, {self.overhead:+.1%}, {self.planner!r}, {str(self.status)!r})"

    def _repr_html_(self) -> str:
        from memfit.report.notebook import plan_html

        return plan_html(self)

    @property
    def always_outside_bytes(self) -> int:
        """The bytes outside that are there from start to end; those from a boundary on are its schedule's."""
        return 0 if self.graph.boundaries else self.bytes_outside

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
        write_atomically(Path(path), msgspec.json.format(self.encode(), indent=1))

    def encode(self) -> bytes:
        """Return the content of the plan's file, without line ends."""
        fields: dict[str, Any] = msgspec.structs.asdict(self) | {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "schedule": tuple(self.schedule.lines()),
            "graph": GraphDocument.of(self.graph),
        }
        return msgspec.json.encode(_PlanDocument(**fields))

    @staticmethod
    def load(path: Path | str, *, graph: Graph | None = None) -> Plan:
        """Read a plan, replay it with the checker, and compare its fingerprint with `graph`'s where one is given.

        Args:
            path: of a plan file; gzip is recognized.
            graph: the step that the plan is meant for, or None.

        Raises:
            InvalidFileError: unreadable, malformed, or the graph in it was changed by hand.
            InvalidScheduleError: the schedule is not legal on the plan's graph, or gives another prediction than the
                plan's own, or exceeds its budgets.
            InvalidDeviceError: the schedule copies, and the plan's device has no link.
            PlanMismatchError: made for another graph than `graph`.
        """
        return Plan.decode(read_bytes(Path(path)), path, graph=graph)

    @staticmethod
    def decode(content: bytes, path: Path | str, *, graph: Graph | None = None) -> Plan:
        """Return the plan of a file's content, as `load` does.

        Args:
            content: of the file.
            path: names it in errors.
            graph: as for `load`.

        Raises:
            MemfitError: as `load`.
        """
        document = decode(content, _PlanDocument, path)
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
        peak_bytes = timeline.peak_bytes + self.always_outside_bytes
        for what, got, claimed, most in (
            ("peak_bytes", peak_bytes, self.predicted.peak_bytes, self.budget_bytes),
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
        """Raise PlanMismatchError unless the plan was made for this graph, and reuses in place only what it allows."""
        if graph.fingerprint != self.fingerprint:
            raise PlanMismatchError(
                f"plan was made for graph {self.graph.name!r} ({self.fingerprint}), this one is {graph.name!r} "
                f"({graph.fingerprint}); plan again for this model, batch size and torch"
            )
        try:
            check(graph, self.schedule)
        except InvalidScheduleError as error:
            raise PlanMismatchError(
                f"plan was made for graph {self.graph.name!r} on a device whose kernels reuse other memory in place: "
                f"{error}; plan again on this device"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A planner's answer.

    Attributes:
        status: how planning ended.
        plan: None exactly where the status is infeasible or timed out.
        bounds: bounds that no plan can beat, and the least budget reached.
        stats: counts of the planner, by name.
        leanest: where there is no plan, the one of the least peak that was found, if any, with that peak for its
            budget.
        interrupted: whether Ctrl-C ended the planner, so that this is its best answer so far.
        tried_all: whether the planner has tried all plans that it can make; more time would change nothing.
    """

    status: Status
    plan: Plan | None
    bounds: Bounds
    stats: Mapping[str, float] = field(default_factory=dict[str, float])
    leanest: Plan | None = None
    interrupted: bool = False
    tried_all: bool = False


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
        graph = self.graph.to_graph(where)
        try:
            schedule = Schedule.parse(self.schedule)
            check(graph, schedule)
        except InvalidScheduleError as error:
            raise InvalidScheduleError(f"{where}: {error}") from error
        fields: dict[str, Any] = msgspec.structs.asdict(self) | {"graph": graph, "schedule": schedule}
        return Plan(**{name: fields[name] for name in Plan.__struct_fields__})
