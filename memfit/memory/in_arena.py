"""A planned step in an arena: the workspaces that its ops take there, and the places of its requests."""

from __future__ import annotations

from dataclasses import replace

import torch

from memfit.capture import Captured
from memfit.memory.arena.devices import ALIGNMENT_BYTES, library_for
from memfit.memory.arena.places import Places, make_places, with_orders
from memfit.memory.arena.probing import Orders, orders_of, orders_of_first_updates, with_arena_workspaces
from memfit.memory.placed_plans import PACKER, PACKING_SECONDS, places_of
from memfit.plan import Plan


class InArena:
    """What an arena needs to know of the programs of a step.

    Args:
        device: of the step.
        seed: of all that is random in the packer.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device, self._seed = device, seed
        self._library = library_for(device)
        self._alignment_bytes = ALIGNMENT_BYTES[device.type]
        self.at = self._library.at

    def with_workspaces(self, captured: Captured) -> Captured:
        """Return a captured step whose ops have as much workspace as the places of their requests take."""
        graph = with_arena_workspaces(captured.graph, self._orders(captured), self._alignment_bytes)
        return replace(captured, graph=graph)

    def places(self, captured: Captured, plan: Plan) -> Places:
        """Return the places of the requests that a plan's program makes.

        Args:
            captured: the step, with its costs.
            plan: made for the same graph.
        """
        return self._placed(plan, self._orders(captured))

    def first_places(self, captured: Captured, plan: Plan) -> Places:
        """Return the places for a step that makes the optimizer's state, which is ordinary memory.

        Args:
            captured, plan: as for `places`.
        """
        orders, making = orders_of_first_updates(captured.graph, captured.binding, self._library, self._alignment_bytes)
        return self._placed(plan, {**self._orders(captured), **orders}, making)

    def _orders(self, captured: Captured) -> Orders:
        return orders_of(captured.graph, captured.binding, self._library, self._alignment_bytes)

    def _placed(self, plan: Plan, orders: Orders, closed: list[int] | None = None) -> Places:
        places = places_of(plan, self._device, self._seed)
        requests = with_orders(places.requests, plan.schedule, orders, closed or ())
        if requests.blocks is places.requests.blocks:
            return replace(places, requests=requests)
        return make_places(requests, packer=PACKER, time_limit_seconds=PACKING_SECONDS, seed=self._seed)
