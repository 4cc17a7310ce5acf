"""The planners: one a file, each a frozen dataclass whose fields are its options, all `plan(problem) -> Result`.

>>> from memfit.planners import make_planner
>>> make_planner("none")
KeepEverything()
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from memfit.papers.dqn.planner import DqnPlanner
from memfit.papers.planners.autoswap import AutoSwap
from memfit.papers.planners.capuchin import Capuchin
from memfit.papers.planners.division_tree import DivisionTree
from memfit.papers.planners.drop_cheap import DropCheap
from memfit.papers.planners.linear_split import LinearSplit
from memfit.papers.planners.mirror import Mirror, MirrorPlan, read_mirrors, with_mirrors
from memfit.papers.planners.recursive import Recursive
from memfit.papers.planners.segments import Segments
from memfit.papers.planners.sublinear import Sublinear
from memfit.papers.planners.superneurons import SuperNeurons
from memfit.papers.planners.tflms import TFLMS
from memfit.papers.planners.vdnn import VDNN
from memfit.plan import Problem, Result
from memfit.planners.auto import AutoPlanner
from memfit.planners.none import KeepEverything
from memfit.planners.offload import OffloadPlanner
from memfit.planners.protocols import Planner
from memfit.planners.search import SearchPlanner
from memfit.system.registered import make_registered, options_of

PLANNERS: dict[str, type[Planner]] = {
    kind.name: kind
    for kind in (
        KeepEverything,
        MirrorPlan,
        Segments,
        Sublinear,
        Recursive,
        DropCheap,
        LinearSplit,
        DivisionTree,
        VDNN,
        TFLMS,
        SuperNeurons,
        AutoSwap,
        Capuchin,
        SearchPlanner,
        OffloadPlanner,
        DqnPlanner,
        AutoPlanner,
    )
}

__all__ = ["MIRROR_OPTION", "PLANNERS", "Marked", "make_planner", "options_of", "uses_files"]

MIRROR_OPTION = "mirror"
"""The option that every planner takes beside its own: what `memfit.mirror` returns (see there)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """A planner whose problems carry the user's mirror marks."""

    name: ClassVar[str] = "marked"
    source: ClassVar[str] = "Chen et al. 2016, section 4.5"

    planner: Planner
    mirrors: tuple[Mirror, ...]

    def plan(self, problem: Problem) -> Result:
        """Return the planner's answer to the problem with these marks as constraints.

        Raises:
            InvalidOptionError: a mark that names nothing, or that cannot be honoured.
        """
        return self.planner.plan(self.constrained(problem))

    def constrained(self, problem: Problem) -> Problem:
        """Return the problem with these marks as constraints."""
        return with_mirrors(problem, self.mirrors)


def uses_files(planner: Planner) -> bool:
    """Return whether a planner reads or writes files of its own, so that no kept plan may take its place."""
    under = planner.planner if isinstance(planner, Marked) else planner
    return isinstance(under, DqnPlanner) and under.uses_files


def make_planner(name: str, **options: object) -> Planner:
    """Return the planner called `name` with these options, and `mirror` beside them (see `memfit.mirror`).

    Raises:
        InvalidOptionError: no such planner, or it has no such option; the message lists those that exist.
    """
    own = {option: value for option, value in options.items() if option != MIRROR_OPTION}
    planner = make_registered("planner", PLANNERS, name, own)
    if MIRROR_OPTION not in options:
        return planner
    return Marked(planner=planner, mirrors=read_mirrors(options[MIRROR_OPTION]))
