"""The sizes of a step's batches: a new one is planned from others of its structure, and searched further later."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace

import msgspec
import torch

from memfit.capture import Captured
from memfit.capture.finish import finish_near
from memfit.capture.generators import states_kept
from memfit.cost.measurement import measure
from memfit.cost.samples import Samples
from memfit.device import Device
from memfit.graph import Graph
from memfit.memory.host.layout import host_layout
from memfit.memory.host.slab import alignment_bytes
from memfit.memory.placed_plans import plan_as_placed, unused_bytes_on
from memfit.near_plans import CARRIED, PROVISIONAL, is_carried, make_near_plan
from memfit.plan import Plan, Problem, Progress
from memfit.planners.engine.carried import carry_over, predicted_seconds
from memfit.planning import Settings, ignored, make_plan
from memfit.step.behind import Behind
from memfit.step.prepare import ANEW, Planning, Prepared

_LEAST_GAIN = 0.01  # of a step's seconds: for less, no plan is searched and no program is made anew
_NEAR = 16  # a size is not searched if one was that is larger by at most this part of its bytes
_SERVED = 4  # a searched plan is tried on sizes that are smaller by at most this part of its bytes


@dataclass(slots=True, kw_only=True)
class _Structure:
    """The known sizes of one structure.

    Attributes:
        first: the capture of the first size, whose ops were measured.
        samples: seconds of its ops at all sizes that were measured; None until they are needed.
        plans: of each variant, by its key.
        searched_bytes: the sizes for which a plan was searched, or is about to be.
    """

    first: Captured
    samples: Samples | None = None
    plans: dict[Hashable, Plan] = field(default_factory=dict[Hashable, Plan])
    searched_bytes: set[int] = field(default_factory=set[int])


class _Near(Planning):
    """Plans a step whose structure is known: costs and schedule are carried over from other sizes."""

    def __init__(self, structure: _Structure) -> None:
        self._structure = structure

    def with_costs(self, captured: Captured, settings: Settings) -> Captured:
        """Return the step finished on its device; each new op was run once."""
        settings.on_stage("carrying costs over from other sizes")
        first, samples = self._structure.first, self._structure.samples
        if samples is None:
            samples = self._structure.samples = Samples.of(first.graph, first.binding, first.observed)
        with states_kept():
            captured = finish_near(captured, first, samples)
            return replace(captured, graph=measure(captured.graph, captured.binding, captured.observed))

    def searched(self, graph: Graph, device: Device, settings: Settings, bytes_outside: int) -> Plan:
        """Return the plan of another size, carried over, or a searched one."""
        known = tuple(self._structure.plans.values())
        return make_near_plan(graph, device, settings, bytes_outside, known)


class NearSizes:
    """All sizes of one step's batches.

    A plan that was carried over is searched further behind the running steps, unless it costs next to nothing, or a
    size a little larger was searched. The searched plan is also tried on smaller sizes of its structure. `better`
    returns what was found for a variant, between two of its steps.

    Attributes:
        behind: searches behind the steps.
    """

    def __init__(self) -> None:
        self._structures: dict[str, _Structure] = {}
        self._structure_of: dict[Hashable, str] = {}
        self.behind = Behind()
        weakref.finalize(self, self.behind.end)

    def planning(self, captured: Captured, settings: Settings) -> Planning:
        """Return how a captured step is to be planned: anew if its structure is not known.

        Args:
            captured: on a batch of a new size.
            settings: the budget, and how plans are searched.
        """
        if not self._structures or not is_carried(settings):
            return ANEW
        structure = self._structures.get(captured.graph.structure)
        return ANEW if structure is None else _Near(structure)

    def add(self, key: Hashable, prepared: Prepared, settings: Settings) -> None:
        """Remember a variant that was planned, so that other sizes can be planned from it.

        Args:
            key: of the variant.
            prepared: its costs and its plan.
            settings: for a longer search.
        """
        if not is_carried(settings):
            return
        captured, plan = prepared.captured, prepared.plan
        name = captured.graph.structure
        if name not in self._structures:
            self._structures[name] = _Structure(first=captured)
        self._structure_of[key] = name
        known = self._structures[name]
        known.plans[key] = plan
        if plan.planner not in PROVISIONAL:
            known.searched_bytes.add(plan.graph.all_bytes)
        elif settings.search_behind and plan.overhead >= _LEAST_GAIN and not _is_near_searched(known, plan):
            known.searched_bytes.add(plan.graph.all_bytes)
            self.behind.add(_further_search(key, plan, known, settings, captured.binding.device))

    def forget(self, key: Hashable) -> None:
        """Forget the plan of a variant that is no longer run, or has another plan, and a structure without plans."""
        name = self._structure_of.pop(key, None)
        if name is not None:
            self._structures[name].plans.pop(key, None)
            if not self._structures[name].plans:
                del self._structures[name]
        self.behind.take(key)

    def better(self, key: Hashable, plan: Plan) -> Plan | None:
        """Return a better plan of a variant, if one was found since the last call.

        Args:
            key: of the variant.
            plan: that it runs; its budget may have been corrected meanwhile.
        """
        found = self.behind.take(key)
        if found is None or found.budget_bytes > plan.budget_bytes:
            return None
        return found if _is_gain(found.predicted.seconds, plan) else None


def _is_near_searched(known: _Structure, plan: Plan) -> bool:
    own_bytes = plan.graph.all_bytes
    return any(own_bytes <= searched <= own_bytes + own_bytes // _NEAR for searched in known.searched_bytes)


def _further_search(
    key: Hashable, plan: Plan, known: _Structure, settings: Settings, device: torch.device
) -> Callable[[Callable[[Progress], None]], dict[Hashable, Plan]]:
    """Return the work that searches a plan in the whole time limit, and tries it on smaller sizes."""

    unused_bytes = unused_bytes_on(device)  # not while steps run

    def work(listen: Callable[[Progress], None]) -> dict[Hashable, Plan]:
        own = replace(settings.within(plan.budget_bytes), on_stage=ignored, progress=listen, stops_on_interrupt=True)
        searched = plan_as_placed(
            lambda own: make_plan(plan.graph, plan.device, own, plan.bytes_outside), own, device, unused_bytes
        )
        found = {key: searched}
        for other, smaller in _served(known, searched):
            carried = _carried(searched, smaller)
            if carried is not None and _fits_host(carried, device):
                found[other] = carried
        return found

    return work


def _served(known: _Structure, searched: Plan) -> Iterator[tuple[Hashable, Plan]]:
    """Yield the variants whose plans are provisional and whose sizes are a little smaller."""
    most_bytes = searched.graph.all_bytes
    for key, plan in known.plans.copy().items():  # another thread adds to it
        if plan.planner in PROVISIONAL and most_bytes - most_bytes // _SERVED <= plan.graph.all_bytes < most_bytes:
            yield key, plan


def _carried(searched: Plan, smaller: Plan) -> Plan | None:
    """Return a searched plan carried over to a smaller size, if it is a gain there."""
    problem = Problem(
        graph=smaller.graph,
        device=smaller.device,
        budget_bytes=smaller.budget_bytes,
        host_budget_bytes=smaller.host_budget_bytes,
        bytes_outside=smaller.bytes_outside,
        seed=smaller.seed,
    )
    seconds = predicted_seconds(problem, searched.schedule)
    if seconds is None or not _is_gain(seconds, smaller):
        return None
    carried = carry_over(problem, [searched.schedule], problem.clock()).plan
    return None if carried is None else msgspec.structs.replace(carried, planner=CARRIED)


def _fits_host(plan: Plan, device: torch.device) -> bool:
    layout = host_layout(plan.graph, plan.schedule, alignment_bytes(device))
    return layout.height_bytes <= plan.host_budget_bytes


def _is_gain(seconds: float, plan: Plan) -> bool:
    return seconds <= plan.predicted.seconds * (1.0 - _LEAST_GAIN)
