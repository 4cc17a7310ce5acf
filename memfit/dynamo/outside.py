"""What user code holds beside a graph: at most between its halves, and on its own, while the backward half runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from memfit.errors import InfeasibleBudgetError, NoPlanError
from memfit.graph import Graph
from memfit.memory.fit_by import Sizes, fit_by
from memfit.memory.placed_plans import allocator_settings, taken_bytes
from memfit.plan import Plan
from memfit.schedule import Code
from memfit.simulate.simulator import simulate
from memfit.step.prepare import Prepared
from memfit.system.budget import format_bytes

HEADROOM = 0.005  # of the budget: logged losses and the like, which come and go between steps
_MOST_PLANS = 4
_TAKEN = "taken"  # the attribute of a plan that keeps what `taken_by` returns


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """Bytes outside of a graph, above those that were live at the end of its forward half.

    Attributes:
        between_bytes: the most between the halves: what a loss takes, or the steps of other graphs.
        held_bytes: when the backward half begins, the tangents included; less than 0 where results were freed.
    """

    between_bytes: int
    held_bytes: int

    def scaled(self, size: int, known: int) -> Outside:
        """Return the same at a size, where this is what was seen at a known one.

        Args:
            size: bytes of the outputs now.
            known: bytes of the outputs that this was seen with.
        """
        return Outside(
            between_bytes=-(-self.between_bytes * size // known), held_bytes=-(-self.held_bytes * size // known)
        )

    def beside(self, graph: Graph) -> int:
        """Return what is held while the backward half runs, without the tangents, which are the graph's own."""
        return max(0, self.held_bytes - tangent_bytes(graph))

    def peak_bytes(self, plan: Plan) -> int:
        """Return what a plan takes at its peak, with this outside of it in the place of what it was made for."""
        taken = taken_by(plan)
        between = taken.between_bytes - plan.bytes_outside - tangent_bytes(plan.graph) + self.between_bytes
        after = taken.after_bytes - plan.bytes_outside + self.beside(plan.graph)
        return max(taken.before_bytes, between, after)


class Taken(NamedTuple):
    """The most bytes that a plan takes: before the boundary of its halves, at it, and from it on."""

    before_bytes: int
    between_bytes: int
    after_bytes: int


def taken_by(plan: Plan) -> Taken:
    """Return what a plan takes; it is asked in each step, and simulated once."""
    if _TAKEN not in vars(plan):
        taken = simulate(plan.graph, plan.schedule, plan.device).device_bytes
        at = int(np.argmax(plan.schedule.codes == Code.BOUNDARY))
        vars(plan)[_TAKEN] = Taken(int(taken[:at].max(initial=0)), int(taken[at]), int(taken[at:].max()))
    return vars(plan)[_TAKEN]


class OutsideOfGraphs:
    """What was outside of graphs, by the graph, whatever its sizes, and by the bytes of its outputs."""

    def __init__(self) -> None:
        self._seen: dict[frozenset[int], dict[int, Outside]] = {}

    def note(self, graph: frozenset[int], departing_bytes: int, outside: Outside) -> None:
        """Note what was outside of a graph between its halves.

        Args:
            graph: names it.
            departing_bytes: of its outputs.
            outside: that was seen.
        """
        self._seen.setdefault(graph, {})[departing_bytes] = outside

    def estimated(self, graph: frozenset[int], departing_bytes: int) -> Outside | None:
        """Return the bytes outside at new sizes, in proportion to those at the nearest known sizes; None if unknown.

        Args:
            graph: names it, as in `note`.
            departing_bytes: of its outputs at these sizes.
        """
        seen = self._seen.get(graph, {})
        known = [each for each in seen if each or not departing_bytes]  # an empty batch tells nothing of others
        if not known:
            return None
        near = min(known, key=lambda each: abs(each - departing_bytes))
        return seen[near].scaled(departing_bytes, near) if near else seen[near]


def tangent_bytes(graph: Graph) -> int:
    """Return the bytes that come from user code between the halves of a graph."""
    return sum(graph.storages[storage].bytes for each in graph.boundaries for storage in each.arrivals)


def planned_beside(make: Callable[[int], Prepared], outside: Outside, left_bytes: int, *, is_least: bool) -> Prepared:
    """Return a graph planned so that neither its halves nor what runs between them take more than is left.

    Args:
        make: plans the graph for so many bytes, with what is held during backward.
        outside: of the graph.
        left_bytes: of the budget.
        is_least: take what takes the least where nothing fits.

    Raises:
        NoPlanError: no plan was found.
    """

    def sizes_of(prepared: Prepared) -> Sizes:
        plan = prepared.plan
        return Sizes(
            planned_bytes=plan.predicted.peak_bytes, taken_bytes=outside.peak_bytes(plan), budget_bytes=left_bytes
        )

    try:
        fitted = fit_by(make, sizes_of, left_bytes, most_plans=_MOST_PLANS)
    except NoPlanError as error:
        found_bytes, error.least_budget_found_bytes = error.least_budget_found_bytes, None
        if found_bytes is not None:
            with suppress(NoPlanError):  # what that plan takes with its outside, and as its bytes are placed
                least = make(found_bytes)
                error.least_budget_found_bytes = max(found_bytes, sizes_of(least).taken_bytes)
                allocator = allocator_settings(least.captured.binding.device)
                if allocator is not None:
                    placed_bytes = taken_bytes(least.plan, None, allocator)
                    error.unused_bytes = max(0, placed_bytes - least.plan.predicted.peak_bytes)
        raise
    if fitted.fits or is_least:
        return fitted.made
    raise InfeasibleBudgetError(
        f"what the loop runs between forward and backward (the loss) takes {outside.between_bytes} bytes beside what "
        "the graph keeps for backward, and no plan was found that keeps so little",
        least_budget_found_bytes=fitted.sizes.taken_bytes,
        least_budget_bound_bytes=0,
    )


def holding_budget(taken_bytes: int, unused_share: float = 0.0) -> int:
    """Return the budget of which plans may take so many bytes.

    Args:
        taken_bytes: by plans, and by what steps took beyond them.
        unused_share: of the budget, which torch's allocator may leave unused beside that.
    """
    return math.ceil(taken_bytes / (1 - HEADROOM - unused_share)) + 1


OTHER_DOOR = 'memfit.checkpoint (door="checkpoint" of a callback) holds it'


def of_whole_budget(
    error: NoPlanError,
    budget_bytes: int,
    beside_bytes: int,
    reserved_bytes: int,
    excess_bytes: int,
    unused_share: float,
    *,
    is_alone: bool,
    assumed_bytes: int,
) -> NoPlanError:
    """Return the error about the bytes that the budget leaves as one about the budget.

    Args:
        error: that no plan was found.
        budget_bytes: the whole.
        beside_bytes: of it, beside the graph.
        reserved_bytes: of it, set aside for the optimizer.
        excess_bytes: that steps took beyond plans.
        unused_share: as for `holding_budget`.
        is_alone: whether no other call of a graph is in the step, which would keep more with a larger budget.
        assumed_bytes: that the loss takes; 0 if a step has shown it.
    """
    taken_bytes = beside_bytes + reserved_bytes
    found_bytes = error.least_budget_found_bytes if is_alone else None
    if found_bytes is not None:
        found_bytes = holding_budget(taken_bytes + found_bytes + max(excess_bytes, error.unused_bytes), unused_share)
    reserved = f" and {format_bytes(reserved_bytes)} set aside for the optimizer" if reserved_bytes else ""
    needed = "" if found_bytes is None else f"; a budget of {found_bytes} bytes was reached"
    wheres = [f"the loss takes no more than {format_bytes(assumed_bytes)} before backward"] if assumed_bytes else []
    wheres += ["PyTorch's allocator leaves no more unused than is predicted"] if unused_share else []
    if needed and wheres:
        needed += f", where {' and '.join(wheres)}"
    return type(error)(
        f"of the budget of {format_bytes(budget_bytes)}, {format_bytes(beside_bytes + excess_bytes)} are beside this "
        f"graph{reserved}{needed}; in what is left {error}; or try whether {OTHER_DOOR}",
        least_budget_found_bytes=found_bytes,
        least_budget_bound_bytes=error.least_budget_bound_bytes + (taken_bytes + excess_bytes if is_alone else 0),
    )
