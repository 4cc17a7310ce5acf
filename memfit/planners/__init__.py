"""The planners: one a file, each a frozen dataclass whose fields are its options, all `plan(problem) -> Result`.

>>> from memfit.planners import make_planner
>>> make_planner("none")
KeepEverything()
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Protocol

from memfit.errors import InvalidOptionError
from memfit.plan import Problem, Result
from memfit.planners.none import KeepEverything
from memfit.planners.search import Search
from memfit.planners.sublinear import Sublinear


class Planner(Protocol):
    """What every planner is. Its dataclass fields are its options; each has a line of `help` in its metadata."""

    name: ClassVar[str]
    source: ClassVar[str]

    def plan(self, problem: Problem) -> Result:
        """Return the best plan found, or the status that says why there is none."""
        ...


PLANNERS: dict[str, type[Planner]] = {kind.name: kind for kind in (KeepEverything, Sublinear, Search)}


def make_planner(name: str, **options: object) -> Planner:
    """Return the planner called `name` with these options.

    Raises:
        InvalidOptionError: no such planner, or it has no such option; the message lists those that exist.
    """
    if name not in PLANNERS:
        raise InvalidOptionError(f"no planner is called {name!r}; there are {', '.join(sorted(PLANNERS))}")
    kind = PLANNERS[name]
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
