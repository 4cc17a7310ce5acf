"""Planner `segments`: a chain in k equal segments; only their borders are kept (Chen et al. 2016, Algorithm 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from memfit.errors import InvalidOptionError
from memfit.graph import Graph
from memfit.papers.options import refuse
from memfit.papers.planners.recompute_counts import CountPlanner, Counts, counts_keeping
from memfit.planners.engine.retention.instance import Instance
from memfit.planners.engine.starts.forward_part import ForwardPart, divide


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments(CountPlanner):
    """Keep the input of each segment, drop all results inside it, and recompute a segment right before its backward.

    There are `count` equal segments, or `ends` names the ops that end them. Without either option there are sqrt(n)
    segments of n layers, as in section 4.3. As in the algorithm, the last segment is recomputed too.

    Where the paper leaves a choice: a layer is a forward op. A segment may end where the bytes that later forward ops
    read are at a local minimum (on a chain of equal layers: anywhere). The nearest such place is taken, and all
    storages that cross it are kept.

    Source: Chen et al. 2016, Algorithm 1, sections 4.1 and 4.3.
    """

    name: ClassVar[str] = "segments"
    source: ClassVar[str] = "Chen et al. 2016, Algorithm 1"

    count: int | None = field(default=None, metadata={"help": "equal segments; sqrt(n) of n layers if left out"})
    ends: str = field(
        default="", metadata={"help": "in place of a count: the ops (names or ids, with commas) that end a segment"}
    )

    def counts(self, instance: Instance) -> list[Counts]:
        """Return the counts of these segments.

        Raises:
            InvalidOptionError: a count below 1, an op in `ends` that is not a forward op.
        """
        forward_part = ForwardPart.of(instance)
        if self.ends:
            places = given_places(instance.graph, forward_part, self.ends)
        else:
            if self.count is not None and self.count < 1:
                refuse(self, "count", "1 or more")
            count = self.count or max(1, round(math.sqrt(len(forward_part.ops))))
            places = equal_places(forward_part, count)
        return [counts_keeping(instance, forward_part.crossing(places))]


def equal_places(forward_part: ForwardPart, count: int) -> list[int]:
    """Return the places after which `count` equal segments end, the last left out; fewer if there are few candidates.

    Args:
        forward_part: the forward part.
        count: 1 or more.
    """
    candidates = [place for place, may in enumerate(forward_part.is_candidate) if may]
    return divide(candidates, 0, len(forward_part.ops), count - 1)


def given_places(graph: Graph, forward_part: ForwardPart, ends: str) -> list[int]:
    """Return the places of the ops that `ends` names.

    Args:
        graph: gives the names.
        forward_part: its forward part.
        ends: names or ids of forward ops, with commas.

    Raises:
        InvalidOptionError: one of them is not a forward op.
    """
    place_of = {graph.ops[op].name: place for place, op in enumerate(forward_part.ops)}
    place_of |= {str(op): place for place, op in enumerate(forward_part.ops)}
    example = graph.ops[forward_part.ops[0]].name if forward_part.ops else "none"
    texts = [text.strip() for text in ends.split(",") if text.strip()]
    for text in texts:
        if text not in place_of:
            raise InvalidOptionError(
                f"planner 'segments': ends has {text!r}, which is no forward op of {graph.name!r}; "
                f"expected a name or an id, such as {example}"
            )
    return sorted({place_of[text] for text in texts})
