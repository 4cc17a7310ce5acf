"""Groups of calls whose inputs are recomputed from the first one's (Chen et al. 2016, section 4.4). Torch-free.

All inputs of a group are recomputed at once when its backward pass begins (`CHAINED`), which is the paper's
division into segments; or about the logarithm of them is there at once, and stretches in between are recomputed as
they are needed (`HALVED`), which is the paper's recursion, with halves in the place of its k parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

CHAINED = "full, input too"
"""Rule of a block that is recomputed, and whose input is recomputed, too, from the block before it."""
HALVED = "full, input by halves"
"""The same, but few of a group's inputs are there at once: those at halves of what is left are kept on the way."""
HOSTED = "full, input on the host"
"""Rule of a block that is recomputed, and whose input is on the host from its forward to its backward pass."""
CHAINS = (CHAINED, HALVED)
INPUT_RULES = (*CHAINS, HOSTED)


def kept_on_the_way(distance: int) -> frozenset[int]:
    """Return which inputs stay when the one at a distance is computed from one that is there, by their distances.

    >>> sorted(kept_on_the_way(8))
    [4, 6, 7]
    """
    kept: set[int] = set()
    place = 0
    while distance - place > 1:
        place += (distance - place) // 2
        kept.add(place)
    return frozenset(kept)


@dataclass(frozen=True, slots=True)
class Course:
    """How the backward pass of a group goes.

    Attributes:
        runs: by call: how often it is run again for the inputs of later ones.
        absent: by call: those, 0 being the first, whose inputs are not there in its backward pass.
    """

    runs: tuple[int, ...]
    absent: tuple[frozenset[int], ...]


@cache
def course_of(length: int, rule: str) -> Course:
    """Return how the backward pass of a group of calls goes.

        >>> course_of(8, HALVED).runs
        (2, 2, 1, 2, 1, 1, 1, 0)

    Args:
        length: of the group.
        rule: CHAINED or HALVED.
    """
    runs, absent = [0] * length, [frozenset[int]()] * length
    there = {0}
    for call in reversed(range(length)):
        last = max(place for place in there if place <= call)
        on_the_way = kept_on_the_way(call - last) if rule == HALVED else frozenset(range(1, call - last))
        for place in range(last, call):
            runs[place] += 1
        there |= {last + place for place in on_the_way}
        absent[call] = frozenset(range(1, call)) - there
        there.discard(call)
    return Course(tuple(runs), tuple(absent))


@dataclass(frozen=True, slots=True)
class Group:
    """Calls in a row.

    Attributes:
        calls: their numbers in the pass.
        rule: of all but the first, CHAINED or HALVED.
    """

    calls: range
    rule: str

    @property
    def ruled(self) -> Sequence[int]:
        """The calls that have the rule."""
        return self.calls[1:]

    @property
    def runs(self) -> dict[int, int]:
        """How often each call is run again for the inputs of later ones."""
        return dict(zip(self.calls, course_of(len(self.calls), self.rule).runs, strict=True))

    def absent(self, own: int | None, last: int) -> list[int]:
        """Return the calls whose inputs are not there at a moment.

        Args:
            own: the call whose backward pass it is; None outside of backward passes.
            last: the last call that is live.
        """
        first = self.calls.start
        if own is not None and own in self.calls:
            return [first + place for place in course_of(len(self.calls), self.rule).absent[own - first]]
        return [call for call in self.calls[1:] if call < (last if own is None else own)]


@dataclass(frozen=True, slots=True)
class Hosted:
    """Calls whose inputs are on the host; the last one that is there is fetched while the call after it is on its way.

    Attributes:
        calls: their numbers in the pass.
    """

    calls: tuple[int, ...]

    @property
    def rule(self) -> str:
        """Of all of them."""
        return HOSTED

    @property
    def ruled(self) -> Sequence[int]:
        """The calls that have the rule."""
        return self.calls

    @property
    def runs(self) -> dict[int, int]:
        """No call is run again for an input."""
        return {}

    def absent(self, own: int | None, last: int) -> list[int]:
        """Return the calls whose inputs are not there at a moment; the latest one before a backward pass is.

        Args:
            own, last: see `Group.absent`.
        """
        if own is None:
            return [call for call in self.calls if call < last]
        before = [call for call in self.calls if call < own]
        return before[:-1]


def groups_of_chains(chains: Sequence[int], length: int, rule: str) -> list[Group]:
    """Return the calls in groups of at most `length`, each a chain.

    Args:
        chains: by call: how many in a row, up to it, got what the one before returned.
        length: of the longest group.
        rule: of all groups.
    """
    found: list[range] = []
    for call, position in enumerate(chains):
        if position == 0 or len(found[-1]) == length:
            found.append(range(call, call + 1))
        else:
            found[-1] = range(found[-1].start, call + 1)
    return [Group(calls, rule) for calls in found if len(calls) > 1]
