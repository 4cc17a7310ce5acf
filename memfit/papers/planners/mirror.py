"""The user's marks, and planner `mirror`, which carries them out (Chen et al. 2016, sections 4.1 and 4.5).

A mark says how often the results of a module or an op may be recomputed. The paper calls it the mirror attribute.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, ClassVar

from memfit.errors import InvalidOptionError
from memfit.graph import Graph, Op, Phase
from memfit.papers.planners.recompute_counts import CountPlanner, Counts, counts_of
from memfit.plan import Problem
from memfit.planners.engine.retention.instance import Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirror:
    """A mark on all forward ops of a module, or on one op.

    Attributes:
        where: the name of the module or op.
        count: how often results may be recomputed (m(v) in the paper); 0 keeps them.
    """

    where: str
    count: int

    def counts(self, graph: Graph) -> dict[int, int]:
        """Return op id -> count of the marked ops. Ops that can never be recomputed are left out.

        Raises:
            InvalidOptionError: nothing in the forward part of the graph has that name, or none of it can be recomputed.
        """
        marked = self.marked(graph)
        if not marked:
            forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
            names = list(dict.fromkeys(name for op in forward for name in (op.module, op.name) if name))
            near = get_close_matches(self.where, names, n=3)
            hint = f"; near it are {', '.join(near)}" if near else ""
            raise InvalidOptionError(
                f"mirror names {self.where!r}, which is no module and no op of the forward part of {graph.name!r}{hint}"
            )
        able = [op for op in marked if not op.computed_once and not any(graph.last_version[s] for s in op.writes)]
        if self.count and not able:
            raise InvalidOptionError(
                f"mirror has {self.where!r} recomputed {self.count} times, but none of its {len(marked)} ops can be "
                f"computed more than once; expected a count of 0"
            )
        return {op.id: self.count for op in (able if self.count else marked)}

    def marked(self, graph: Graph) -> list[Op]:
        """Return the forward ops of a graph that bear the mark's name, or lie in a module of that name."""
        inside = f"{self.where}." if self.where else ""
        forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
        return [op for op in forward if self.where in (op.module, op.name) or op.module.startswith(inside)]


def mirror(where: Any, count: int = 1, *, of: Any = None) -> Mirror:
    """Mark a module or an op: 0 keeps its results, a higher count allows that many recomputations of each.

        >>> import memfit
        >>> memfit.mirror("features.stage1", 1)
        Mirror(where='features.stage1', count=1)

    Give it to any planner as the option `mirror`: `memfit.fit(..., options={"mirror": memfit.mirror("encoder.0", 1)})`,
    or on the command line `--option mirror=encoder.0:1,head:0`. Results with a count of 0 are kept to their last use;
    the others are dropped after the forward pass and recomputed. The planners `mirror`, `segments`, `sublinear`,
    `recursive` and `drop_cheap` use counts above 1 as they are; all others treat them as 1.

    Args:
        where: the name of a module (with all modules inside it) or of an op; or a module of the model `of`.
        count: recomputations of each result, 0 or more.
        of: the model with the module `where`, if that is not a name.

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
        remedy = "expected a module of the model given as `of`" if of is not None else "give its model as `of`"
        raise InvalidOptionError(f"mirror got a {type(where).__name__} whose name is not known; {remedy}, or its name")
    return Mirror(where=names[id(where)], count=count)


def read_mirrors(given: Any) -> tuple[Mirror, ...]:
    """Return the marks that the option `mirror` holds: a Mirror, several of them, or text like `encoder.0:1,head:0`.

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
        f"option mirror is {given!r}, expected the result of memfit.mirror, or text like encoder.0:1"
    )


def _read(text: str) -> Mirror:
    where, _, count = text.rpartition(":")
    if not count.isdecimal() or not where:
        raise InvalidOptionError(f"option mirror has {text!r}, expected NAME:COUNT, such as encoder.0:1")
    return Mirror(where=where, count=int(count))


def with_mirrors(problem: Problem, mirrors: Sequence[Mirror]) -> Problem:
    """Return the problem with these marks as constraints; of two marks on one op, the later one is used.

    Args:
        problem: what to plan.
        mirrors: the marks, in the order in which they were given.
    """
    counts = dict(problem.mirror_counts)
    for mark in mirrors:
        counts |= mark.counts(problem.graph)
    pinned = {**problem.pinned, **{op: count == 0 for op, count in counts.items()}}
    return replace(problem, pinned=pinned, mirror_counts=counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorPlan(CountPlanner):
    """Recompute the results that the user marked (option `mirror`), and keep all others.

    Source: Chen et al. 2016, Algorithm 2: "the user specify a function m".
    """

    name: ClassVar[str] = "mirror"
    source: ClassVar[str] = "Chen et al. 2016, Algorithm 2"

    def counts(self, instance: Instance) -> list[Counts]:
        """Return the counts that the user gave."""
        return [counts_of(instance, instance.problem.mirror_counts)]
