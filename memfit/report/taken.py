"""What a budget has to cover, by part: in the memory that serves the plan, and for a GPU in the others."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from memfit.memory.arena.places import Places, bytes_beside, make_places, requests_of
from memfit.plan import Plan
from memfit.simulate.cuda_allocator import CUDA_ALIGNMENT_BYTES, AllocatorSettings
from memfit.simulate.reserved import ARENA, DEFAULT, EXPANDABLE, reserved
from memfit.system.budget import format_bytes

MODES = (ARENA, EXPANDABLE, DEFAULT)
_PACKING_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The bytes that a plan takes of its device.

    On a GPU these are the bytes that torch's allocator takes from the device, an arena among them; the budget covers
    all but CUDA's context. On a CPU nothing is kept for later requests: the reserved bytes are the live bytes or, with
    an arena, the arena and the live bytes beside it.

    Attributes:
        resident_bytes: parameters, buffers, optimizer state and batch.
        plan_bytes: the most that is live beside them.
        library_bytes: workspaces that libraries keep, and all else that is not the graph's.
        fragmentation_bytes: gaps in the layout, and what torch's allocator leaves unused, in the memory that serves it.
        reserved_bytes: the sum of these.
        by_mode: the same sum in each of MODES; empty for a plan that is not for a GPU.
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
        names = dict(zip(MODES, ("arena_bytes", "expandable_segments_bytes", "default_bytes"), strict=True))
        return parts | {names[mode]: size for mode, size in by_mode.items()}

    def parts(self) -> dict[str, int]:
        """Return the bytes of each part of what is reserved."""
        return {
            "parameters, state, inputs": self.resident_bytes,
            "activations, gradients, workspaces": self.plan_bytes,
            "libraries, and what else is on the device": self.library_bytes,
            "fragmentation": self.fragmentation_bytes,
        }

    def other_modes(self) -> dict[str, str]:
        """Return what is reserved in each mode of torch's allocator, as text."""
        return {f"reserved with {mode}": format_bytes(size) for mode, size in self.by_mode.items()}

    @property
    def outside(self) -> str:
        """What is on the device, or beside it, and not in the budget."""
        return "CUDA's context" if self.by_mode else "the process of Python itself"

    def rows(self) -> dict[str, str]:
        """Return one line for each part, and one for what is outside of the budget."""
        each = ", ".join(f"{format_bytes(size)} with {mode}" for mode, size in self.by_mode.items())
        return {
            "residents": format_bytes(self.resident_bytes),
            "plan": format_bytes(self.plan_bytes),
            "library workspaces": f"{format_bytes(self.library_bytes)}, with what else is not the graph's",
            "fragmentation": format_bytes(self.fragmentation_bytes),
            "reserved": f"{format_bytes(self.reserved_bytes)}, predicted{f' ({each})' if each else ''}",
            "outside of the budget": self.outside,
        }


def is_for_gpu(plan: Plan) -> bool:
    """Return whether a plan's device has the alignment of CUDA's allocator."""
    return plan.device.alignment_bytes == CUDA_ALIGNMENT_BYTES


def taken_of(plan: Plan, served_by: str | None = None) -> Taken | None:
    """Return what a plan takes of its device; None for a part of a step, whose other parts take the same memory.

    Args:
        plan: of a step.
        served_by: the memory that serves it, one of MODES; None is the default of its device: an arena on a GPU.
    """
    if plan.graph.boundaries:
        return None
    by_mode: dict[str, int] = {}
    if is_for_gpu(plan):
        by_mode = _by_mode(plan, _places(plan).height_bytes)
        reserved_bytes = by_mode[served_by or ARENA]
    elif served_by == ARENA:
        places = _places(plan)
        reserved_bytes = bytes_beside(plan, places) + places.height_bytes
    else:
        reserved_bytes = plan.predicted.peak_bytes
    return Taken(
        resident_bytes=plan.device.resident_bytes(plan.graph),
        plan_bytes=plan.predicted.peak_bytes - plan.bytes_outside - plan.device.resident_bytes(plan.graph),
        library_bytes=plan.bytes_outside,
        fragmentation_bytes=reserved_bytes - plan.predicted.peak_bytes,
        reserved_bytes=reserved_bytes,
        by_mode=by_mode,
    )


def _by_mode(plan: Plan, height_bytes: int) -> dict[str, int]:
    settings = (AllocatorSettings(), AllocatorSettings(expandable_segments=True), AllocatorSettings())
    heights = (height_bytes, None, None)
    return {
        mode: reserved(plan.graph, plan.schedule, each, arena_bytes=height, outside_bytes=plan.bytes_outside).peak_bytes
        for mode, each, height in zip(MODES, settings, heights, strict=True)
    }


def _places(plan: Plan) -> Places:
    requests = requests_of(plan.graph, plan.schedule, plan.device)
    return make_places(requests, packer="auto", time_limit_seconds=_PACKING_SECONDS, seed=plan.seed)
