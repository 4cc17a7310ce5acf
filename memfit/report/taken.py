"""What a budget has to cover on a GPU, by part: in the memory that serves the plan, and in the others."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from memfit.plan import Plan
from memfit.runtime.arena.places import aligned_as, make_places, requests_of
from memfit.simulate.cuda_allocator import CUDA_ALIGNMENT_BYTES, AllocatorSettings
from memfit.simulate.reserved import ARENA, DEFAULT, EXPANDABLE, reserved
from memfit.system.budget import format_bytes

MODES = (ARENA, EXPANDABLE, DEFAULT)
_PACKING_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The bytes that a plan takes of a GPU; all but the context of CUDA are in the budget.

    Attributes:
        resident_bytes: parameters, buffers, optimizer state and batch.
        plan_bytes: the most that is live beside them.
        library_bytes: what libraries keep, and what else is not the graph's.
        fragmentation_bytes: gaps in the layout, and what torch's allocator leaves unused, in the memory that serves it.
        reserved_bytes: the sum of these.
        by_mode: the same sum in each of MODES.
    """

    resident_bytes: int
    plan_bytes: int
    library_bytes: int
    fragmentation_bytes: int
    reserved_bytes: int
    by_mode: dict[str, int]

    def keys(self) -> dict[str, Any]:
        """Return the JSON keys."""
        parts = asdict(self)
        by_mode = parts.pop("by_mode")
        names = ("arena_bytes", "expandable_segments_bytes", "default_bytes")
        return parts | dict(zip(names, (by_mode[mode] for mode in MODES), strict=True))

    def rows(self) -> dict[str, str]:
        """Return one line for each part, and one for what is outside of the budget."""
        each = ", ".join(f"{format_bytes(size)} with {mode}" for mode, size in self.by_mode.items())
        return {
            "residents": format_bytes(self.resident_bytes),
            "plan": format_bytes(self.plan_bytes),
            "library workspaces": f"{format_bytes(self.library_bytes)}, with what else is not the graph's",
            "fragmentation": format_bytes(self.fragmentation_bytes),
            "reserved": f"{format_bytes(self.reserved_bytes)}, predicted ({each})",
            "outside of the budget": "CUDA's context",
        }


def taken_of(plan: Plan, served_by: str = ARENA) -> Taken | None:
    """Return what a plan takes of a GPU; None for a plan for another device.

    Args:
        plan: of a step.
        served_by: the memory that serves it, one of MODES.
    """
    if plan.device.alignment_bytes != CUDA_ALIGNMENT_BYTES:
        return None
    requests = requests_of(plan.graph, plan.schedule, aligned_as(plan.device, CUDA_ALIGNMENT_BYTES))
    places = make_places(requests, packer="auto", time_limit_seconds=_PACKING_SECONDS, seed=plan.seed)
    settings = (AllocatorSettings(), AllocatorSettings(expandable_segments=True), AllocatorSettings())
    heights = (places.height_bytes, None, None)
    by_mode = {
        mode: reserved(plan.graph, plan.schedule, each, arena_bytes=height).peak_bytes + plan.bytes_outside
        for mode, each, height in zip(MODES, settings, heights, strict=True)
    }
    residents = sum(plan.device.aligned(storage.bytes) for storage in plan.graph.storages if storage.resident)
    return Taken(
        resident_bytes=residents,
        plan_bytes=plan.predicted.peak_bytes - plan.bytes_outside - residents,
        library_bytes=plan.bytes_outside,
        fragmentation_bytes=by_mode[served_by] - plan.predicted.peak_bytes,
        reserved_bytes=by_mode[served_by],
        by_mode=by_mode,
    )
