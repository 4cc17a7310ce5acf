"""What memfit plans with: `engine` is shared by the searches; `registry` lists these planners and those of papers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memfit.planners.registry import PLANNERS, Marked, make_planner, options_of, uses_files

__all__ = ["PLANNERS", "Marked", "make_planner", "options_of", "uses_files"]


def __getattr__(name: str) -> Any:
    """Load the registry when a name of it is first used: it imports the papers' planners, which import this room."""
    if name not in __all__:
        raise AttributeError(f"module 'memfit.planners' has no attribute {name!r}")
    from memfit.planners import registry

    return getattr(registry, name)
