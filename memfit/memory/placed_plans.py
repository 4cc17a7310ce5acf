"""Plans that fit as their bytes are placed: host copies in a slab, storages in what torch's CUDA allocator takes."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import msgspec
import torch

from memfit.errors import HostMemoryError
from memfit.memory.arena.arena import DEFAULT_SOLVER_SECONDS
from memfit.memory.arena.devices import ALIGNMENT_BYTES
from memfit.memory.arena.places import Places, aligned_as, bytes_beside, make_places, requests_of
from memfit.memory.fit_by import Sizes, fit_by
from memfit.memory.host.layout import host_layout
from memfit.memory.host.slab import alignment_bytes
from memfit.plan import Plan, Status
from memfit.planning import Settings
from memfit.schedule import Schedule
from memfit.simulate.cuda_allocator import AllocatorSettings, whole_segments_bytes
from memfit.simulate.reserved import reserved
from memfit.system.budget import format_bytes
from memfit.system.recorder import allocated_bytes, empty_cache, held_bytes
from memfit.torch_private.cuda import allocator_settings_text

_log = logging.getLogger("memfit")
_HOST_TRIES = 3  # plans that are made until the host copies fit as they are laid out
MOST_PLANS = 6  # for less and less, until the device's bytes fit
_SMALL_SEGMENT_BYTES = 2 << 20  # torch's allocator takes another one if a later step is on another stream
_SHARE = 0.5  # of the time limit, for each plan after the first
PACKER, PACKING_SECONDS = "auto", DEFAULT_SOLVER_SECONDS
_MOST_KEPT_PLACES = 8

Make = Callable[[Settings], Plan]

_kept_places: deque[tuple[Schedule, tuple[str, int], Places]] = deque(maxlen=_MOST_KEPT_PLACES)


def plan_as_placed(make: Make, settings: Settings, at: torch.device, unused_bytes: int) -> Plan:
    """Return a plan whose bytes fit their budgets as they are placed on a device and on the host.

    The bytes taken from the device have to fit, not the live bytes alone: the arena's height, if there is one, and on
    CUDA the bytes that torch's caching allocator takes, by the model of it (`memfit.simulate.reserved`).

    Args:
        make: makes a plan by settings.
        settings: have the budgets.
        at: the device that the step runs on.
        unused_bytes: that lie there beside the step's residents: see `unused_bytes_on`.

    Raises:
        HostMemoryError: no plan's host copies fit the host budget; with host budgets of a few pages, say.
        MemfitError: as `make`.
    """
    allocator = allocator_settings(at)

    def within_host(settings: Settings) -> Plan:
        return plan_within_host(make, settings, alignment_bytes(at))

    if allocator is None and not settings.arena:
        return within_host(settings)

    def placed(plan: Plan) -> int:
        places = places_of(plan, at, settings.seed) if settings.arena else None
        taken = taken_bytes(plan, places, allocator, unused_bytes)
        return taken + (0 if allocator is None else _SMALL_SEGMENT_BYTES)

    return plan_within(within_host, settings, placed)


def unused_bytes_on(at: torch.device) -> int:
    """Return the bytes that a device's allocator cannot return, as they lie beside what is live in its segments."""
    if at.type != "cuda":
        return 0
    empty_cache(at)
    return held_bytes(at) - allocated_bytes(at)


def taken_bytes(plan: Plan, places: Places | None, allocator: AllocatorSettings | None, unused_bytes: int = 0) -> int:
    """Return the bytes that a plan takes as they are placed.

    Args:
        plan: of a step.
        places: of its schedule in an arena; None is no arena.
        allocator: how torch's caching allocator is set; None for a device without one, which then has an arena.
        unused_bytes: that lie beside the step's residents where these are now; in their order they may be fewer.
    """
    if allocator is None:
        assert places is not None
        return bytes_beside(plan, places) + places.height_bytes
    height_bytes = None if places is None else whole_segments_bytes(places.height_bytes)
    found = reserved(plan.graph, plan.schedule, allocator, arena_bytes=height_bytes, outside_bytes=plan.bytes_outside)
    return found.peak_bytes + max(0, unused_bytes - found.resident_unused_bytes)


def places_of(plan: Plan, at: torch.device, seed: int) -> Places:
    """Return the places of a plan's requests on a device; the last few are kept.

    Args:
        plan: of a step.
        at: gives the alignment.
        seed: of all that is random in the packer.
    """
    for kept, place, places in _kept_places:
        if kept is plan.schedule and place == (at.type, seed):
            return places
    device = aligned_as(plan.device, ALIGNMENT_BYTES[at.type])
    requests = requests_of(plan.graph, plan.schedule, device)
    places = make_places(requests, packer=PACKER, time_limit_seconds=PACKING_SECONDS, seed=seed)
    _kept_places.append((plan.schedule, (at.type, seed), places))
    return places


def allocator_settings(at: torch.device) -> AllocatorSettings | None:
    """Return how torch's own allocator is set on a device; None if there is none that is modelled.

    Args:
        at: a device of this machine.
    """
    if at.type != "cuda" or torch.cuda.get_allocator_backend() != "native":
        return None
    return AllocatorSettings.parse(
        allocator_settings_text(), capacity_bytes=torch.cuda.get_device_properties(at).total_memory
    )


def plan_within(make: Make, settings: Settings, taken: Callable[[Plan], int]) -> Plan:
    """Return a plan that takes no more than the budget as its bytes are placed: one made for less, if need be.

    Its budget is the user's, and so are its bounds. If no plan gets there, the one that takes the fewest bytes is
    returned, and a warning says so: the first steps are measured, and show what is taken in fact.

    Args:
        make: makes a plan by settings.
        settings: have the budget, and say whether there is an arena.
        taken: returns the bytes that a plan takes.

    Raises:
        MemfitError: as `make`, for the whole budget.
    """
    first = make(settings)
    budget_bytes = first.budget_bytes
    own = replace(settings, time_limit_seconds=_SHARE * settings.time_limit_seconds)

    def within(aim_bytes: int) -> Plan:
        return first if aim_bytes == budget_bytes else make(own.within(aim_bytes))

    def sizes_of(plan: Plan) -> Sizes:
        planned_bytes = min(plan.budget_bytes, plan.predicted.peak_bytes)
        return Sizes(planned_bytes=planned_bytes, taken_bytes=taken(plan), budget_bytes=budget_bytes)

    placed = fit_by(within, sizes_of, budget_bytes, most_plans=MOST_PLANS)
    if not placed.fits:
        why = "torch's allocator leaves blocks unused that nothing fits into; memfit.fit with arena=True wastes less"
        if settings.arena:
            why = "the layout has gaps, or torch's allocator leaves blocks beside it unused"
        _log.warning(
            "memfit: as its bytes are placed the plan is predicted to take %s, more than the budget of %s: %s",
            format_bytes(placed.sizes.taken_bytes),
            format_bytes(budget_bytes),
            why,
        )
    if placed.made is first:
        return first
    return msgspec.structs.replace(placed.made, budget_bytes=budget_bytes, bounds=first.bounds, status=Status.FEASIBLE)


def plan_within_host(make: Make, settings: Settings, alignment_bytes: int) -> Plan:
    """Return a plan whose host copies fit the host budget as they are laid out, with their alignment.

    Args:
        make: makes a plan by settings.
        settings: have the host budget.
        alignment_bytes: of host copies.

    Raises:
        HostMemoryError: none of the plans fits; with host budgets of a few pages, say.
        MemfitError: as `make`.
    """
    host_budget_bytes = settings.host_budget_bytes

    def within(aim_bytes: int) -> tuple[Plan, int]:
        return make(replace(settings, host_budget_bytes=aim_bytes)), aim_bytes

    def sizes_of(made: tuple[Plan, int]) -> Sizes:
        plan, aim_bytes = made
        height_bytes = host_layout(plan.graph, plan.schedule, alignment_bytes).height_bytes
        return Sizes(planned_bytes=aim_bytes, taken_bytes=height_bytes, budget_bytes=host_budget_bytes)

    placed = fit_by(within, sizes_of, host_budget_bytes, most_plans=_HOST_TRIES)
    if placed.fits:
        return placed.made[0]
    raise HostMemoryError(
        f"no plan was found whose host copies, in blocks of {alignment_bytes} bytes, fit the host budget of "
        f"{format_bytes(host_budget_bytes)}; raise it"
    )
