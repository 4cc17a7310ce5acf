"""The planners: one a file, each a frozen dataclass whose fields are its options, all `plan(problem) -> Result`.

>>> from memfit.planners import make_planner
>>> make_planner("none")
KeepEverything()
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Protocol

from memfit.errors import InvalidOptionError
from memfit.plan import Problem, Result
from memfit.planners.auto import Auto
from memfit.planners.division_tree import DivisionTree
from memfit.planners.drop_cheap import DropCheap
from memfit.planners.linear_split import LinearSplit
from memfit.planners.mirror import Mirror, MirrorPlan, read_mirrors, with_mirrors
from memfit.planners.none import KeepEverything
from memfit.planners.offload import Offload
from memfit.planners.recursive import Recursive
from memfit.planners.search import Search
from memfit.planners.segments import Segments
from memfit.planners.sublinear import Sublinear


class Planner(Protocol):
    """What every planner is. Its dataclass fields are its options; each has a line of `help` in its metadata."""

    name: ClassVar[str]
    source: ClassVar[str]

    def plan(self, problem: Problem) -> Result:
        """Return the best plan found, or the status that says why there is none."""
        ...


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
        Search,
        Offload,
        Auto,
    )
}

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
        return self.planner.plan(with_mirrors(problem, self.mirrors))


def make_planner(name: str, **options: object) -> Planner:
    """Return the planner called `name` with these options, and `mirror` beside them (see `memfit.mirror`).

    Raises:
        InvalidOptionError: no such planner, or it has no such option; the message lists those that exist.
    """
    if name not in PLANNERS:
        raise InvalidOptionError(f"no planner is called {name!r}; there are {', '.join(sorted(PLANNERS))}")
    kind = PLANNERS[name]
    if MIRROR_OPTION in options:
        mirrors = read_mirrors(options.pop(MIRROR_OPTION))
        return Marked(planner=make_planner(name, **options), mirrors=mirrors)
    known = options_of(kind)
    for option in options:
        if option not in known:
            there = ", ".join(known) if known else "none"
            raise InvalidOptionError(f"planner {name!r} has no option {option!r}; its options: {there}")
    return kind(**options)


def options_of(kind: type[Planner]) -> dict[str, str]:
    """Return option -> what it does, for `memfit planners`."""
    fields = dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
    return {field.name: field.metadata.get("help", "") for field in fields}
