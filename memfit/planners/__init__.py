"""The planners: `registry` lists them; one file for each that a user can name; `engine` is shared by the searches."""

from memfit.planners.protocols import Planner, UsesHost, WarmStarts
from memfit.planners.registry import MIRROR_OPTION, PLANNERS, Marked, make_planner, options_of, uses_files, uses_host

__all__ = [
    "MIRROR_OPTION",
    "PLANNERS",
    "Marked",
    "Planner",
    "UsesHost",
    "WarmStarts",
    "make_planner",
    "options_of",
    "uses_files",
    "uses_host",
]
