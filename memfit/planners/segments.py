"""Planner `segments`: a chain in k equal segments, of which only the borders are kept (Chen 2016, Algorithm 1)."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field
from typing import ClassVar

from memfit.errors import InvalidOptionError
from memfit.graph import Graph
from memfit.plan import Problem, Result
from memfit.planners.answer import answer
from memfit.planners.mirrored import counts_keeping, evaluate_mirror
from memfit.planners.order import update_at_once_order
from memfit.planners.program import build_program
from memfit.planners.sublinear import Frontier


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Remember the input of each segment, drop all inside it, and compute a segment again right before its backward.

    The segments are `count` equal ones, or end where `ends` says. Where neither is given there are sqrt(n) of n layers,
    the count of section 4.3. As in the algorithm, the last segment is computed again too.

    Where the text leaves room: a layer is a forward op; a segment of a graph that is not a chain may end where the
    bytes that later forward ops still need are at a local minimum (on a chain of equal layers: anywhere), the nearest
    such place is taken, and what is remembered there is all that crosses it.

    Source: Chen et al. 2016, Algorithm 1, sections 4.1 and 4.3.
    """

    name: ClassVar[str] = "segments"
    source: ClassVar[str] = "Chen et al. 2016, Algorithm 1"

    count: int | None = field(default=None, metadata={"help": "equal segments; sqrt(n) of n layers where left out"})
    ends: str = field(
        default="", metadata={"help": "in place of a count: the ops (name or id, with commas) that end a segment"}
    )

    def plan(self, problem: Problem) -> Result:
        """Return the plan of these segments, with status infeasible where it does not fit.

        Raises:
            InvalidOptionError: a count below 1, an op in `ends` that is not a forward op, a pin that cannot be
                honoured.
        """
        started_seconds = problem.clock()
        program = build_program(problem, update_at_once_order(problem.graph))
        frontier = Frontier.of(program)
        if self.ends:
            places = given_places(problem.graph, frontier, self.ends)
        else:
            count = round(math.sqrt(len(frontier.ops))) if self.count is None else self.count
            places = equal_places(frontier, max(1, count) if self.count is None else count)
        evaluation = evaluate_mirror(program, counts_keeping(program, frontier.crossing(places)))
        return answer(program, [evaluation], planner=self.name, started_seconds=started_seconds)


def equal_places(frontier: Frontier, count: int) -> list[int]:
    """Return the places behind which `count` equal segments end, the last left out; fewer where candidates lack.

    Raises:
        InvalidOptionError: a count below 1.
    """
    if count < 1:
        raise InvalidOptionError(f"planner 'segments': option count is {count}, expected 1 or more")
    candidates = [place for place, may in enumerate(frontier.is_candidate) if may]
    layers = len(frontier.ops)
    wanted = [round(number * layers / count) - 1 for number in range(1, count)]
    return sorted({nearest(candidates, place) for place in wanted if candidates})


def nearest(candidates: list[int], place: int) -> int:
    """Return the one of the ascending `candidates` that is nearest to `place`; of two, the earlier."""
    index = bisect.bisect_left(candidates, place)
    around = candidates[max(0, index - 1) : index + 1]
    return min(around, key=lambda candidate: (abs(candidate - place), candidate))


def given_places(graph: Graph, frontier: Frontier, ends: str) -> list[int]:
    """Return the places of the ops that `ends` names.

    Raises:
        InvalidOptionError: one of them is not a forward op.
    """
    place_of = {graph.ops[op].name: place for place, op in enumerate(frontier.ops)}
    place_of |= {str(op): place for place, op in enumerate(frontier.ops)}
    texts = [text.strip() for text in ends.split(",") if text.strip()]
    for text in texts:
        if text not in place_of:
            raise InvalidOptionError(
                f"planner 'segments': ends has {text!r}, which is no forward op of {graph.name!r}; "
                f"expected a name or an id, such as {graph.ops[frontier.ops[0]].name if frontier.ops else 'none'}"
            )
    return sorted({place_of[text] for text in texts})
