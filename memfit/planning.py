"""The one way to a plan: settings -> Problem -> kept plans -> planner -> check -> Plan.

`make_plan` serves `fit`, the commands, the torch.compile backend and the graphs around a graph break. `TradeOff` plans
one graph at several budgets, for trade-off curves. Every planner returns a result that
`memfit.planners.engine.results.make_result` has checked and simulated, and a kept plan is checked when it is read.
Nothing here imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from memfit.device import Device
from memfit.errors import InfeasibleBudgetError, InvalidOptionError, NoPlanError, TimeLimitError
from memfit.graph import Graph
from memfit.memory.contract import FIRM, read_firm
from memfit.plan import Bounds, Plan, Problem, Progress, Result, Status
from memfit.plan_cache import plan_or_kept
from memfit.planners import Marked, make_planner
from memfit.planners.auto import AutoPlanner
from memfit.planners.engine.pace import processor_clock
from memfit.planners.engine.results import unplanned_peak_bytes
from memfit.planners.protocols import Planner, SearchOptions
from memfit.progress import SEARCHING, tell_search, tell_stage
from memfit.system.budget import Card, format_bytes, is_share, on_card, parse_budget
from memfit.system.spill_file import require_host_budget

DEFAULT_PLANNER = "auto"
DEFAULT_TIME_LIMIT_SECONDS = 5.0

_MOST_OPS_BY_MOVES, _MOVES_PER_SECOND = 600, 20_000  # of a curve's points: the same answers on each machine

_MOST_HOLDING_OPS = 3  # in a message: the ops that set the least budget


def ignored(_report: object) -> None:
    """A listener that does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All that a user sets for the plans of a step; every plan of the step is made with all of it.

        >>> Settings(budget="6GiB", planner="search", options={"iterations": 1000}).is_in_bytes
        True

    Args:
        budget: bytes on the device, as text (`6GiB`, `60%` of the unplanned peak) or as an integer.
        planner: the name of a planner (see `memfit planners`).
        options: of the planner, and `mirror` (see `memfit.mirror`).
        time_limit_seconds: how long the planner may search.
        seed: of all that is random in a planner.
        host_budget_bytes: the most bytes of host copies, where the device has a link to its host; 0 allows none.
        host_dir: where a CPU's host copies are kept, on a disk; None stands for the system's temporary directory.
        arena: whether calls are served from memory with a fixed layout; None is where the step runs on CUDA.
        device: takes the place of the step's own device, whose profile is then not read.
        whole_bytes: what a budget in percent is a share of; None stands for the unplanned peak of the graph.
        reads_kept_plans: whether a plan that was kept on disk is used; a new plan is kept in either case.
        carry_over: whether a batch of a new size is planned from the plans of other sizes, where one fits.
        search_behind: whether such plans are searched further on a thread, while steps run.
        budget_is: `firm`: a step that took more than the budget is an error where no other plan helps; `soft`: it is a
            warning.
        hard: whether the process is capped at the budget while a step runs; on a GPU only.
        cuda_graph: whether steps are captured once and replayed, on a GPU only.
        stops_on_interrupt: whether a Ctrl-C during a search is raised as KeyboardInterrupt. Otherwise the best
            plan so far is returned.
        on_stage: called with the name of each stage when it begins; by default it is logged.
        progress: called by the planner while it searches; by default a report is logged every ten seconds.

    Raises:
        InvalidOptionError: the time limit is not above 0, the seed is not a whole number from 0 on, there is a
            host_dir without a host budget, or the budget is neither firm nor soft, or soft and hard.
    """

    budget: str | int
    planner: str = DEFAULT_PLANNER
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    time_limit_seconds: float = DEFAULT_TIME_LIMIT_SECONDS
    seed: int = 0
    host_budget_bytes: int = 0
    host_dir: Path | None = None
    arena: bool | None = None
    device: Device | None = None
    whole_bytes: int | None = None
    reads_kept_plans: bool = True
    carry_over: bool = True
    search_behind: bool = True
    budget_is: str = FIRM
    hard: bool = False
    cuda_graph: bool = False
    stops_on_interrupt: bool = False
    on_stage: Callable[[str], None] = tell_stage
    progress: Callable[[Progress], None] = tell_search

    def __post_init__(self) -> None:
        seconds, seed = self.time_limit_seconds, self.seed
        if not isinstance(seconds, int | float) or not seconds > 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidOptionError(f"time_limit_seconds is {seconds!r}, expected a number of seconds above 0")
        if not isinstance(seed, int) or seed < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidOptionError(f"seed is {seed!r}, expected a whole number from 0 on")
        require_host_budget(self.host_dir, self.host_budget_bytes)
        if not read_firm(self.budget_is) and self.hard:
            raise InvalidOptionError(
                "hard=True caps the process at the budget, which is then not soft; give one of both"
            )

    @property
    def is_in_bytes(self) -> bool:
        """Whether the budget can be read before the unplanned peak is known."""
        return not is_share(self.budget)

    def on_card(self, card: Callable[[], Card]) -> Settings:
        """Return the same settings with a budget such as `90% of the card` in bytes.

        Args:
            card: returns the device's memory.

        Raises:
            InvalidBudgetError: see `memfit.system.budget.on_card`.
        """
        return replace(self, budget=on_card(self.budget, card))

    def within(self, budget_bytes: int) -> Settings:
        """Return the same settings with another budget."""
        return replace(self, budget=budget_bytes)

    def of_whole(self, whole_bytes: int) -> Settings:
        """Return the same settings with other bytes for 100%."""
        return replace(self, whole_bytes=whole_bytes)


def make_plan(graph: Graph, device: Device, settings: Settings, bytes_outside: int = 0) -> Plan:
    """Return a checked plan of `graph` within the settings' budget: a kept one, or a new one.

    Args:
        graph: a step with the seconds of its ops.
        device: what the plan is for.
        settings: the budget, the planner and its limits.
        bytes_outside: bytes on the device that are not the graph's (see `Problem`).

    Raises:
        InfeasibleBudgetError: a bound proves that no plan fits.
        TimeLimitError: the planner found no plan that fits, and nothing proves that there is none.
        InvalidBudgetError, InvalidOptionError: a setting that cannot be read.
        KeyboardInterrupt: Ctrl-C ended the search, and the settings say `stops_on_interrupt`.
    """
    problem = make_problem(graph, device, settings, bytes_outside)
    planner = make_planner(settings.planner, **settings.options)
    result = plan_or_kept(
        problem, planner, reads=settings.reads_kept_plans, on_search=lambda: settings.on_stage(SEARCHING)
    )
    if result.interrupted and settings.stops_on_interrupt:
        raise KeyboardInterrupt
    if result.plan is None:
        raise no_plan_error(result, problem, settings.planner)
    return result.plan


def make_problem(graph: Graph, device: Device, settings: Settings, bytes_outside: int = 0) -> Problem:
    """Return the Problem that a planner is given: the arguments are those of `make_plan`.

    Raises:
        InvalidBudgetError: a budget that cannot be read.
        InvalidOptionError: a host budget for a device without a link.
    """
    require_link(device, settings.host_budget_bytes)
    whole_bytes = settings.whole_bytes or 0
    if not settings.is_in_bytes and settings.whole_bytes is None:
        whole_bytes = unplanned_peak_bytes(graph, device, bytes_outside)
    return Problem(
        graph=graph,
        device=device,
        budget_bytes=parse_budget(settings.budget, whole_bytes),
        host_budget_bytes=settings.host_budget_bytes,
        bytes_outside=bytes_outside,
        time_limit_seconds=settings.time_limit_seconds,
        seed=settings.seed,
        progress=settings.progress,
    )


def require_link(device: Device, host_budget_bytes: int) -> None:
    """Refuse a host budget for a device that has no link to its host.

    Args:
        device: the step's.
        host_budget_bytes: 0 is allowed for every device.

    Raises:
        InvalidOptionError: names the device.
    """
    if host_budget_bytes > 0 and not device.has_link:
        raise InvalidOptionError(
            f"a host budget of {format_bytes(host_budget_bytes)} is of no use on device {device.name!r}, which has no "
            "link to its host; leave it out, or name a device with a link (see `memfit devices`)"
        )


def no_plan_error(result: Result, problem: Problem, planner: str) -> NoPlanError:
    """Return the error that a result without a plan stands for, with both least budgets and the remedy.

    Args:
        result: a planner's answer without a plan.
        problem: what the planner was given.
        planner: its name.
    """
    found_bytes, bound_bytes = result.bounds.least_budget_found_bytes, result.bounds.least_budget_bound_bytes
    budget = f"{format_bytes(problem.budget_bytes)} ({problem.budget_bytes} bytes)"
    bound = f"no plan can go below {format_bytes(bound_bytes)} ({bound_bytes} bytes){_held_up(result, problem)}"
    reached = f"{format_bytes(found_bytes)} ({found_bytes} bytes)" if found_bytes else "none"
    has_host, has_link = problem.host_budget_bytes > 0, problem.device.has_link
    offload = ", give a host budget for storages to go to," if has_link and not has_host else ""
    host = f" or the host budget of {format_bytes(problem.host_budget_bytes)}" if has_host else ""
    if result.status is Status.INFEASIBLE:
        kind, text = InfeasibleBudgetError, f"no plan fits {budget}: planner {planner!r} reached {reached}, and {bound}"
        remedy = f"raise the budget{offload} or make the batch smaller"
    elif result.tried_all:
        kind, text = TimeLimitError, f"planner {planner!r} has no plan within {budget} (it tried all of its plans)"
        text += f"; another planner may: it reached {reached}, and {bound}"
        remedy = f"name another planner, such as {DEFAULT_PLANNER}{offload} or raise the budget{host}"
    else:
        kind, text = TimeLimitError, f"planner {planner!r} found no plan within {budget}, and nothing proves that there"
        text += f" is none: it reached {reached}, and {bound}"
        remedy = f"raise the time limit or the budget{offload}{host} or name another planner"
    return kind(f"{text}; {remedy}", least_budget_found_bytes=found_bytes, least_budget_bound_bytes=bound_bytes)


def _held_up(result: Result, problem: Problem) -> str:
    holding = result.bounds.holding_ops
    names = [ascii(problem.graph.ops[op].name)[1:-1] for op in holding[:_MOST_HOLDING_OPS]]
    more = len(holding) - len(names)
    return f", held up by {', '.join(names)}{f' and {more} more' if more else ''}" if names else ""


def budgets_between(highest_bytes: int, lowest_bytes: int, count: int) -> list[int]:
    """Return `count` budgets in bytes, evenly from the highest down to the lowest.

    >>> budgets_between(1000, 400, 4)
    [1000, 800, 600, 400]

    Args:
        highest_bytes: the first budget.
        lowest_bytes: the last one, if there are several.
        count: 1 or more; of one budget it is the highest.
    """
    span_bytes = highest_bytes - lowest_bytes
    return [highest_bytes - span_bytes * step // max(count - 1, 1) for step in range(count)]


class TradeOff:
    """What one planner reaches on one graph, by budget.

        >>> from memfit.planners.none import KeepEverything
        >>> TradeOff(problem, KeepEverything()).reach([4096, 8192]).results  # doctest: +SKIP
        {4096: Result(status=..., plan=None, ...), 8192: Result(status=..., plan=Plan(...), ...)}

    A plan for a smaller budget is also a plan for a larger one: where it is faster, and the planner searches, it takes
    the other's place, so that a larger budget never gives a slower plan. The results of other planners stay as they
    are.

    Args:
        problem: what is planned; its own budget does not count, and its time limit holds for each budget.
        planner: with its options.
    """

    def __init__(self, problem: Problem, planner: Planner) -> None:
        if isinstance(planner, Marked):
            problem, planner = planner.constrained(problem), planner.planner
        self._problem = problem
        self._planner = planner
        self._found: dict[int, Result] = {}

    def reach(self, budgets: Iterable[int]) -> TradeOff:
        """Plan at these budgets (bytes), from the smallest to the largest; return self."""
        for budget in sorted(set(budgets) - set(self._found)):
            self._found[budget] = self._planner.plan(replace(self._problem, budget_bytes=budget))
        return self

    def reach_least(self) -> TradeOff:
        """Plan at the least peak that the planner has reached at any budget so far; return self."""
        found = [result.bounds.least_budget_found_bytes for result in self._found.values()]
        least_bytes = min((least for least in found if least is not None), default=None)
        if least_bytes is None or all(result.plan is not None for result in self._found.values()):
            return self
        leanest = [result.leanest for result in self._found.values() if result.leanest is not None]
        self.reach([least_bytes])
        if self._found[least_bytes].plan is None:
            at_least = next((plan for plan in leanest if plan.predicted.peak_bytes == least_bytes), None)
            if at_least is not None:
                self._found[least_bytes] = replace(self._found[least_bytes], status=at_least.status, plan=at_least)
        return self

    def add(self, budget_bytes: int, least_overhead: float) -> TradeOff:
        """Add a budget; it is planned only where no plan at hand fits it with at most `least_overhead`; return self.

        Args:
            budget_bytes: the budget.
            least_overhead: the overhead that another planner reached with these bytes.
        """
        fastest = self._fastest_within(budget_bytes)
        if budget_bytes not in self._found and (fastest is None or fastest.overhead > least_overhead):
            self.reach([budget_bytes])
        elif budget_bytes not in self._found and fastest is not None:
            self._found[budget_bytes] = _at_budget(fastest, budget_bytes, fastest.bounds.of_any_budget(fastest.graph))
        return self

    @property
    def results(self) -> dict[int, Result]:
        """Budget -> result, from the smallest budget to the largest."""
        if not isinstance(self._planner, SearchOptions):
            return dict(sorted(self._found.items()))
        results: dict[int, Result] = {}
        fastest: Plan | None = None
        for budget, result in sorted(self._found.items()):
            if fastest is not None and (
                result.plan is None or fastest.predicted.seconds < result.plan.predicted.seconds
            ):
                result = replace(
                    _at_budget(fastest, budget, result.bounds), stats=result.stats, interrupted=result.interrupted
                )
            fastest = result.plan or fastest
            results[budget] = result
        return results

    def _fastest_within(self, budget_bytes: int) -> Plan | None:
        plans = [result.plan for result in self._found.values() if result.plan is not None]
        fitting = [plan for plan in plans if plan.predicted.peak_bytes <= budget_bytes]
        return min(fitting, key=lambda plan: plan.predicted.seconds, default=None)


def _at_budget(plan: Plan, budget_bytes: int, bounds: Bounds) -> Result:
    """Return the plan of a smaller budget as the result for this one, with this one's bounds."""
    plan = msgspec.structs.replace(plan, budget_bytes=budget_bytes, status=Status.FEASIBLE, bounds=bounds)
    return Result(status=plan.status, plan=plan, bounds=bounds)


def plan_frontier(problem: Problem, budgets: Sequence[int], *, planner: Planner | None = None) -> list[Result]:
    """Return a result for each budget, in the order given; a larger budget never gives a slower plan.

    Args:
        problem: what is planned; its own budget does not count, and its time limit holds for each budget.
        budgets: bytes, in any order.
        planner: with its options; `auto` by default.
    """
    results = TradeOff(problem, planner or AutoPlanner()).reach(budgets).results
    return [results[budget] for budget in budgets]


def plan_again_at(plan: Plan, budgets: Sequence[int], settings: Settings, each_seconds: float) -> list[Result]:
    """Return what planner `auto` reaches on the graph of a plan at other budgets.

    Args:
        plan: gives the graph, the device, the host budget and the bytes outside.
        budgets: bytes, in any order.
        settings: give the seed and the progress listener.
        each_seconds: for each search. A small graph is given a number of moves for it, and gets the same plans on any
            machine; of a large one it is the processors' time, of which other processes take nothing.
    """
    by_moves = len(plan.graph.ops) <= _MOST_OPS_BY_MOVES
    planner = AutoPlanner(iterations=max(1, int(_MOVES_PER_SECOND * each_seconds)) if by_moves else None)
    problem = Problem(
        graph=plan.graph,
        device=plan.device,
        budget_bytes=plan.budget_bytes,
        host_budget_bytes=plan.host_budget_bytes,
        bytes_outside=plan.bytes_outside,
        time_limit_seconds=each_seconds,
        seed=settings.seed,
        progress=settings.progress,
        clock=time.monotonic if by_moves else processor_clock(planner.threads),
    )
    return plan_frontier(problem, budgets, planner=planner)
