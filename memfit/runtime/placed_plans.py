"""Plans that fit as their bytes are placed: host copies in a slab, storages in what torch's CUDA allocator takes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from memfit.errors import HostMemoryError, NoPlanError
from memfit.plan import Plan
from memfit.planning import Settings
from memfit.runtime.host.layout import host_layout
from memfit.runtime.host.store import alignment_bytes
from memfit.simulate.cuda_allocator import AllocatorSettings
from memfit.simulate.reserved import reserved
from memfit.system.budget import format_bytes
from memfit.torch_private.cuda import allocator_settings_text

_log = logging.getLogger("memfit")
_HOST_TRIES = 3  # plans that are made until the host copies fit as they are laid out
MOST_PLANS = 6  # for less and less, until the device's bytes fit
_SHARE = 0.5  # of the time limit, for each plan after the first

Make = Callable[[Settings], Plan]


def plan_as_placed(make: Make, settings: Settings, at: torch.device) -> Plan:
    """Return a plan whose bytes fit their budgets as they are placed on a device and on the host.

    On CUDA without an arena, what torch's caching allocator takes from the device has to fit, by the model of it
    (`memfit.simulate.reserved`), and not only what is live.

    Args:
        make: makes a plan by settings.
        settings: have the budgets.
        at: the device that the step runs on.

    Raises:
        HostMemoryError: no plan's host copies fit the host budget; with host budgets of a few pages, say.
        MemfitError: as `make`.
    """
    allocator = None if settings.arena else allocator_settings(at)

    def within_host(settings: Settings) -> Plan:
        return plan_within_host(make, settings, alignment_bytes(at))

    return within_host(settings) if allocator is None else plan_within_allocator(within_host, settings, allocator)


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


def plan_within_allocator(make: Make, settings: Settings, allocator: AllocatorSettings) -> Plan:
    """Return a plan for which torch's CUDA allocator takes no more than the budget: one for less, if need be.

    If no plan gets there, the one that takes the fewest bytes is returned, and a warning says so: the first steps are
    measured, and show what is taken in fact.

    Args:
        make: makes a plan by settings.
        settings: have the budget.
        allocator: how torch's allocator is set.

    Raises:
        MemfitError: as `make`, for the whole budget.
    """
    placed = plan_for_less(
        make, settings, lambda plan: reserved(plan.graph, plan.schedule, allocator).peak_bytes + plan.bytes_outside
    )
    if placed.taken_bytes > placed.budget_bytes:
        _log.warning(
            "memfit: by the model of torch's CUDA allocator the plan takes %s from the device, more than the budget of "
            "%s: it leaves blocks unused that nothing fits into; an arena (arena=True), or PYTORCH_ALLOC_CONF="
            "expandable_segments:True, wastes less",
            format_bytes(placed.taken_bytes),
            format_bytes(placed.budget_bytes),
        )
    return placed.plan


class Placed(NamedTuple):
    """A plan, the bytes that it takes as they are placed, the budget for these, and how many plans were made."""

    plan: Plan
    taken_bytes: int
    budget_bytes: int
    tries: int


def plan_for_less(make: Make, settings: Settings, taken: Callable[[Plan], int]) -> Placed:
    """Return the first plan that takes no more than the budget, or the one that takes the fewest bytes.

    Each is made for as much less as the one before took too much; where no plan fits that, for the middle.

    Args:
        make: makes a plan by settings.
        settings: have the budget.
        taken: returns the bytes that a plan takes.

    Raises:
        MemfitError: as `make`, for the whole budget.
    """
    plan = make(settings)
    budget_bytes, floor_bytes = plan.budget_bytes, 0
    best = last = Placed(plan, taken(plan), budget_bytes, 1)
    own = replace(settings, time_limit_seconds=_SHARE * settings.time_limit_seconds)
    for tries in range(2, MOST_PLANS + 1):
        if best.taken_bytes <= budget_bytes:
            break
        aim_bytes = last.plan.budget_bytes - (last.taken_bytes - budget_bytes)
        if aim_bytes <= floor_bytes:
            aim_bytes = (floor_bytes + last.plan.budget_bytes) // 2
        try:
            plan = make(own.within(max(1, aim_bytes)))
        except NoPlanError as error:
            floor_bytes = max(aim_bytes, error.least_budget_bound_bytes)
            continue
        last = Placed(plan, taken(plan), budget_bytes, tries)
        best = min(best, last, key=lambda placed: placed.taken_bytes)
    return best


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
    for _ in range(_HOST_TRIES):
        plan = make(settings)
        excess_bytes = host_layout(plan.graph, plan.schedule, alignment_bytes).height_bytes - host_budget_bytes
        if excess_bytes <= 0:
            return plan
        settings = replace(settings, host_budget_bytes=max(0, settings.host_budget_bytes - excess_bytes))
    raise HostMemoryError(
        f"no plan was found whose host copies, in blocks of {alignment_bytes} bytes, fit the host budget of "
        f"{format_bytes(host_budget_bytes)}; raise it"
    )
