"""What planners have in common: protocols for callers, and the options of those that search."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from memfit.plan import Problem, Result
from memfit.planners.engine.parts import WITHOUT_HELP


class Planner(Protocol):
    """A planner: a frozen dataclass with its options as fields, each with a line of `help` in its metadata."""

    name: ClassVar[str]
    source: ClassVar[str]

    def plan(self, problem: Problem) -> Result:
        """Return the best plan found, or the status that says why there is none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions(ABC):
    """The options of the planners that search."""

    iterations: int | None = field(
        default=None, metadata={"help": "moves to try in all, in place of the time limit: the same plan on any machine"}
    )
    threads: int = field(default=2, metadata={"help": "runs at a time; they are part of what a seed determines"})
    without: str = field(default="", metadata={"help": WITHOUT_HELP})

    @abstractmethod
    def plan(self, problem: Problem) -> Result:
        """Return the best plan found within the problem's time limit.

        Raises:
            InvalidOptionError: a pin that cannot be honoured, or a name in `without` that is no part's.
        """
        ...
