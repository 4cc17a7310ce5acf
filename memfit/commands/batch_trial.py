"""Plans of one step at any batch size, and the search for the largest one that fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from memfit.commands.graph_with_costs import graph_with_costs
from memfit.commands.ranks import There
from memfit.commands.work import Work
from memfit.device import GENERIC, Device
from memfit.errors import InfeasibleBudgetError, NoPlanError
from memfit.plan import Plan
from memfit.planners.engine.bounds.bounds import least_budget_bound
from memfit.planning import Settings, make_problem
from memfit.report.frontier_page import BatchPoint, FrontierRow
from memfit.report.live import play
from memfit.system.budget import format_bytes

if TYPE_CHECKING:
    from memfit.capture.training_step import TrainingStep

_FINENESS = 16  # the answer is within 1/16 of the largest batch that this search can fit


@dataclass
class Trial:
    """Plans of one step at any batch size, each made once."""

    target: str
    of_workload: Mapping[str, Any]
    device_profile: str | None
    settings: Settings
    work: Work
    step: TrainingStep
    there: There = field(default_factory=There)
    device: Device = GENERIC  # the one that plans are made for, once a size was tried
    points: dict[int, BatchPoint] = field(default_factory=dict[int, BatchPoint])
    errors: dict[int, NoPlanError] = field(default_factory=dict[int, NoPlanError])

    @property
    def name(self) -> str:
        """The name of the step in the answer and on the page."""
        return self.step.name or self.target

    @property
    def budget_bytes(self) -> int:
        """The budget of each plan."""
        return int(self.settings.budget)

    def row(self, first: int, largest: int) -> FrontierRow:
        """Return the largest batch found that fits, with the batches that were tried.

        Args:
            first: the size to begin with.
            largest: the largest size to try.
        """
        found = largest_fitting(self.fits, min(first, largest), largest, self.work)
        points = sorted(self.points.values(), key=lambda point: point.batch)
        return FrontierRow(options=self.of_workload, largest_batch=found, points=points)

    def fits(self, size: int) -> bool:
        """Return whether a plan was found for a batch size; its figures are kept in `points`."""
        if size not in self.points:
            try:
                self.points[size] = self._point(size, self._plan(size))
            except NoPlanError as error:
                self.points[size] = BatchPoint(batch=size, least_bytes=error.least_budget_bound_bytes)
                self.errors[size] = error
        return self.points[size].overhead is not None

    def _plan(self, size: int) -> Plan:
        from memfit.workloads.batch_sizes import at_batch_size

        step = at_batch_size(self.target, self.of_workload, self.step, size, self.there.ranks)
        costed = graph_with_costs(step, self.device_profile, self.work, settings=self.settings)
        self.device = costed.device
        self.work.stage(f"searching a plan for batch {size}", expected_seconds=self.settings.time_limit_seconds)
        bound_bytes, _ = least_budget_bound(make_problem(costed.graph, self.device, self.settings))
        # a search would only add the least budget that it reaches
        if bound_bytes > self.budget_bytes and costed.forms is None:
            raise InfeasibleBudgetError(
                f"no plan of it can go below {format_bytes(bound_bytes)} ({bound_bytes} bytes); raise the budget",
                least_budget_found_bytes=None,
                least_budget_bound_bytes=bound_bytes,
            )
        return costed.plan(replace(self.settings, progress=self.work.on_search))

    def _point(self, size: int, plan: Plan) -> BatchPoint:
        cluster = self.there.cluster
        run = None if cluster is None else play(plan.graph, plan.schedule, plan.device)
        return BatchPoint(
            batch=size,
            least_bytes=plan.bounds.least_budget_bound_bytes,
            unplanned_bytes=plan.unplanned.peak_bytes,
            peak_bytes=plan.predicted.peak_bytes,
            overhead=plan.overhead,
            samples_per_second=size * (1 if cluster is None else cluster.ranks) / plan.predicted.seconds,
            rank=None if run is None else self.there.figures_of(run, self.step),
        )

    def refusal(self) -> NoPlanError:
        """Return the error for a budget in which no batch of 1 was planned."""
        error = self.errors[1]
        budget = f"{format_bytes(self.budget_bytes)} ({self.budget_bytes} bytes)"
        is_proved = error.least_budget_bound_bytes > self.budget_bytes
        head = (
            f"not even a batch of 1 fits {budget}"
            if is_proved
            else f"no plan was found within {budget} for a batch of 1"
        )
        return type(error)(
            f"{self.target}: {head}: {error}",
            least_budget_found_bytes=error.least_budget_found_bytes,
            least_budget_bound_bytes=error.least_budget_bound_bytes,
        )


def largest_fitting(fits: Callable[[int], bool], first: int, largest: int, work: Work) -> int:
    """Return the largest size found that fits, 0 if none does: by doubling or halving, then by bisection.

    Args:
        fits: says whether a plan was found for a batch size.
        first: the size to begin with, at most `largest`.
        largest: the largest size to try.
        work: says whether Ctrl-C was pressed, which ends the search.
    """
    low, high = 0, largest + 1  # low fits, high does not
    size = first
    while size > low and size < high and not work.interrupted:
        if fits(size):
            low, size = size, min(2 * size, largest)
        else:
            high, size = size, size // 2
            if size == 0 or low > 0:
                break
    while high - low > max(1, low // _FINENESS) and low > 0 and not work.interrupted:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
