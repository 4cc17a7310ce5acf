"""The user's mirror attribute: which results may be computed again, and how often (Chen 2016, sections 4.1 and 4.5)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, ClassVar

from memfit.errors import InvalidOptionError
from memfit.graph import Graph, Phase
from memfit.plan import Problem, Result
from memfit.planners.answer import answer
from memfit.planners.mirrored import counts_of, evaluate_mirror
from memfit.planners.order import update_at_once_order
from memfit.planners.program import build_program


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirror:
    """A mark on all forward ops of a module, or on one op: `count` is the mirror count m(v); 0 keeps."""

    where: str
    count: int

    def counts(self, graph: Graph) -> dict[int, int]:
        """Return op id -> count of the ops that are marked. Those that can never be computed again are left out.

        Raises:
            InvalidOptionError: nothing in the forward part of the graph has that name, or none of it can be computed
                again.
        """
        inside = f"{self.where}." if self.where else ""
        forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
        marked = [op for op in forward if self.where in (op.module, op.name) or op.module.startswith(inside)]
        if not marked:
            names = list(dict.fromkeys(name for op in forward for name in (op.module, op.name) if name))
            near = get_close_matches(self.where, names, n=3)
            hint = f"; near it are {', '.join(near)}" if near else ""
            raise InvalidOptionError(
                f"mirror names {self.where!r}, which is no module and no op of the forward part of {graph.name!r}{hint}"
            )
        able = [op for op in marked if not op.computed_once and not any(graph.last_version[s] for s in op.writes)]
        if self.count and not able:
            raise InvalidOptionError(
                f"mirror wants {self.where!r} computed again {self.count} times, but none of its {len(marked)} ops can "
                f"be computed more than once; expected a count of 0"
            )
        return {op.id: self.count for op in (able if self.count else marked)}


def mirror(where: Any, count: int = 1, *, of: Any = None) -> Mirror:
    """Mark a module or an op: 0 keeps its results, a higher count lets them be computed again that many times.

        >>> import memfit
        >>> memfit.mirror("features.stage1", 1)
        Mirror(where='features.stage1', count=1)

    Give it to any planner as the option `mirror`: `memfit.fit(..., options={"mirror": memfit.mirror("encoder.0", 1)})`,
    or on the command line `--option mirror=encoder.0:1,head:0`. Results with a count of 0 are kept to their last use;
    the others are dropped after the forward pass and computed again. Planners that work by mirror counts (`mirror`,
    `segments`, `sublinear`, `recursive`, `drop_cheap`) take counts above one as they stand, for the others they are as
    good as 1.

    Args:
        where: the name of a module (all that is inside it counts) or of an op; or a module of the model `of`.
        count: the mirror count, 0 or more.
        of: the model that `where` is a module of, where it is not a name.

    Raises:
        InvalidOptionError: a negative count, or a module that is not one of `of`.

    Source: Chen et al. 2016, section 4.5: "enable user to set the mirror attribute in the computation graph".
    """
    if count < 0:
        raise InvalidOptionError(f"mirror got the count {count}, expected 0 (keep) or more")
    if isinstance(where, str):
        return Mirror(where=where, count=count)
    names = {id(module): name for name, module in of.named_modules()} if of is not None else {}
    if id(where) not in names:
        wanted = "expected a module of the model given as `of`" if of is not None else "give its model as `of`"
        raise InvalidOptionError(f"mirror got a {type(where).__name__} whose name is not known; {wanted}, or its name")
    return Mirror(where=names[id(where)], count=count)


def read_mirrors(given: Any) -> tuple[Mirror, ...]:
    """Return the marks of the option `mirror`: a Mirror, several of them, or text such as `encoder.0:1,head:0`.

    Raises:
        InvalidOptionError: anything else.
    """
    if isinstance(given, Mirror):
        return (given,)
    if isinstance(given, str):
        return tuple(_read(text.strip()) for text in given.split(",") if text.strip())
    if isinstance(given, Iterable):
        several: list[Any] = list(given)  # pyright: ignore[reportUnknownArgumentType]
        if all(isinstance(each, Mirror) for each in several):
            return tuple(several)
    raise InvalidOptionError(
        f"option mirror is {given!r}, expected what memfit.mirror returns, or text like encoder.0:1"
    )


def _read(text: str) -> Mirror:
    where, _, count = text.rpartition(":")
    if not count.isdecimal() or not where:
        raise InvalidOptionError(f"option mirror has {text!r}, expected NAME:COUNT, such as encoder.0:1")
    return Mirror(where=where, count=int(count))


def with_mirrors(problem: Problem, mirrors: Sequence[Mirror]) -> Problem:
    """Return the problem with these marks as constraints; where two meet, the later one counts."""
    counts = dict(problem.mirror_counts)
    for mark in mirrors:
        counts |= mark.counts(problem.graph)
    pinned = {**problem.pinned, **{op: count == 0 for op, count in counts.items()}}
    return replace(problem, pinned=pinned, mirror_counts=counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorPlan:
    """Carry out the mirror counts that the user gave (option `mirror`), and keep everything else.

    Source: Chen et al. 2016, Algorithm 2: "the user specify a function m".
    """

    name: ClassVar[str] = "mirror"
    source: ClassVar[str] = "Chen et al. 2016, Algorithm 2"

    def plan(self, problem: Problem) -> Result:
        """Return the plan of the mirror construction, with status infeasible where it does not fit.

        Raises:
            InvalidOptionError: a pin that cannot be honoured.
        """
        started_seconds = problem.clock()
        program = build_program(problem, update_at_once_order(problem.graph))
        found = [evaluate_mirror(program, counts_of(program, problem.mirror_counts))]
        return answer(program, found, planner=self.name, started_seconds=started_seconds)
