"""Closed sets and the division tree of a graph (Feng 2018, definitions 1 to 9, Algorithms 2 to 4).

Vertices are numbers in topological order, the first the source and the last the target; a set of them is an int with a
bit for each. A closed set s_ij is given by its ends i and j and the vertices between them: all that can only be
reached through i and only be left through j, and that has no edge to anything else.

Where the text leaves room:
- Definition 1 calls the largest closed set between two vertices s_ij; Algorithm 4 only forms it where *all* vertices
  between the two are in it. Definition 1 is followed: what leaks is left out, the rest is a closed set.
- An edge from i to j with nothing in it is a closed set too: a branch of its own where there are others (Algorithm 3,
  line 2), else a leaf. The leaves of the tree are therefore edges, and the single tensors are the vertices between
  members of a division.
- A member of a maximal split that is an edge needs no member of its own: its ends are stored anyway.
- Two closed sets in a maximal split may share ends, never a vertex inside (definition 7 says s_ab, not [s_ab]).

Source: Feng and Huang 2018, section 5.1 and Algorithms 2 to 4.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise


class Kind(enum.StrEnum):
    """What a closed set is: an edge, or of type 1, 2 or 3."""

    EDGE = "edge"
    SPLITTABLE = "splittable"  # type 1: has a splitting vertex
    BRANCHED = "branched"  # type 2: no splitting vertex, several independent branches
    WHOLE = "non-branched"  # type 3: neither


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedSet:
    """A node of the division tree: [s_ij], its type, and its division.

    Attributes:
        first, last: i and j.
        inside: s_ij, the vertices between them.
        between: the vertices that are stored where the set is expanded: for type 1 its splitting vertices, one fewer
            than children; for type 2 none; for type 3 all that are in no member of the maximal split.
        children: the division; members without vertices are left out for type 3.
    """

    kind: Kind
    first: int
    last: int
    inside: frozenset[int]
    between: tuple[int, ...] = ()
    children: tuple[ClosedSet, ...] = ()

    def walk(self, depth: int = 0) -> Iterator[tuple[int, ClosedSet]]:
        """Yield (depth, node) of this node and all below it, from the top."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)


def division_tree(readers: Sequence[Sequence[int]]) -> ClosedSet:
    """Return the division tree of a graph, given who reads each vertex; vertex 0 is the source, the last the target.

    >>> tree = division_tree([[1], [2, 3], [4], [4], [5], []])  # a chain with a diamond in it
    >>> tree.kind, tree.between, [child.kind for child in tree.children]
    (<Kind.SPLITTABLE: 'splittable'>, (1, 4), [<Kind.EDGE: 'edge'>, <Kind.BRANCHED: 'branched'>, <Kind.EDGE: 'edge'>])
    """
    return _Divider(readers).divide(0, len(readers) - 1, (1 << (len(readers) - 1)) - 2, has_edge=True)


def splitting_vertices(readers: Sequence[Sequence[int]], among: Iterable[int], *, with_edge: bool = True) -> list[int]:
    """Return the splitting vertices (definition 3, Algorithm 2) of the closed set whose [s_ij] is `among`, ascending.

    A vertex splits where no edge leads past it in topological order: then all paths run through it. `with_edge` says
    whether the edge from i to j, where there is one, is in the set.
    """
    inside = list(among)
    members, first, last = set(inside), inside[0], inside[-1]
    found: list[int] = []
    farthest = first
    for vertex in inside:
        if farthest <= vertex and vertex not in (first, last):
            found.append(vertex)
        for reader in readers[vertex]:
            if reader in members and (with_edge or (vertex, reader) != (first, last)):
                farthest = max(farthest, reader)
    return found


class _Divider:
    def __init__(self, readers: Sequence[Sequence[int]]) -> None:
        self.readers = readers
        self.after = [_bits(each) for each in readers]
        self.before = [0] * len(readers)
        for vertex, each in enumerate(readers):
            for reader in each:
                self.before[reader] |= 1 << vertex
        self.descendants = [0] * len(readers)
        for vertex in reversed(range(len(readers))):
            for reader in readers[vertex]:
                self.descendants[vertex] |= self.descendants[reader] | 1 << reader
        self.ancestors = [0] * len(readers)
        for vertex, each in enumerate(readers):
            for reader in each:
                self.ancestors[reader] |= self.ancestors[vertex] | 1 << vertex

    def divide(self, first: int, last: int, inside: int, *, has_edge: bool) -> ClosedSet:
        """Return the node of the closed set of these ends and vertices, with all that is below it."""
        has_edge = has_edge and bool(self.after[first] >> last & 1)
        vertices = frozenset(_numbers(inside))
        if not inside:
            return ClosedSet(kind=Kind.EDGE, first=first, last=last, inside=vertices)
        if not has_edge:
            splitting = self._splitting(first, last, inside)
            if splitting:
                children = self._segments(first, last, inside, splitting)
                return ClosedSet(
                    kind=Kind.SPLITTABLE,
                    first=first,
                    last=last,
                    inside=vertices,
                    between=tuple(splitting),
                    children=children,
                )
        branches = self._branches(inside)
        if has_edge or len(branches) > 1:
            children = tuple(self.divide(first, last, branch, has_edge=False) for branch in branches)
            if has_edge:
                children += (ClosedSet(kind=Kind.EDGE, first=first, last=last, inside=frozenset()),)
            return ClosedSet(kind=Kind.BRANCHED, first=first, last=last, inside=vertices, children=children)
        members = self._maximal_split(first, last, inside)
        covered = 0
        for _, _, bits in members:
            covered |= bits
        return ClosedSet(
            kind=Kind.WHOLE,
            first=first,
            last=last,
            inside=vertices,
            between=tuple(_numbers(inside & ~covered)),
            children=tuple(self.divide(i, j, bits, has_edge=False) for i, j, bits in members),
        )

    def _splitting(self, first: int, last: int, inside: int) -> list[int]:
        return splitting_vertices(self.readers, _numbers(inside | 1 << first | 1 << last), with_edge=False)

    def _segments(self, first: int, last: int, inside: int, splitting: list[int]) -> tuple[ClosedSet, ...]:
        ends = [first, *splitting, last]
        return tuple(self.divide(i, j, inside & _span(i + 1, j), has_edge=True) for i, j in pairwise(ends))

    def _branches(self, inside: int) -> list[int]:
        """Return the connected parts of `inside`, edges taken both ways (Algorithm 3)."""
        parts: list[int] = []
        left = inside
        while left:
            part = fresh = left & -left
            while fresh:
                vertex = fresh.bit_length() - 1
                fresh &= ~(1 << vertex)
                more = (self.after[vertex] | self.before[vertex]) & inside & ~part
                part |= more
                fresh |= more
            parts.append(part)
            left &= ~part
        return parts

    def _maximal_split(self, first: int, last: int, inside: int) -> list[tuple[int, int, int]]:
        """Return (i, j, vertices) of the largest closed sets within a set of type 3, by their first vertex."""
        among = inside | 1 << first | 1 << last
        # A closed set has a first vertex, which reads only i, and a last one, which only j reads.
        sources = {b.bit_length() - 1 for v in _numbers(inside) if (b := self.before[v]) & (b - 1) == 0}
        targets = {a.bit_length() - 1 for v in _numbers(inside) if (a := self.after[v]) & (a - 1) == 0}
        found: dict[int, tuple[int, int]] = {}
        for i in sorted(sources):
            reach = self.descendants[i] & among
            for j in sorted(targets):
                if (i, j) != (first, last) and reach >> j & 1:
                    bits = self._largest(i, j, reach & self.ancestors[j] & inside)
                    if bits:
                        found[bits] = (i, j)
        largest: list[int] = []
        for bits in sorted(found, key=lambda bits: -bits.bit_count()):
            if not any(bits & other == bits for other in largest):
                largest.append(bits)
        return [(*found[bits], bits) for bits in sorted(largest, key=lambda bits: bits & -bits)]

    def _largest(self, i: int, j: int, between: int) -> int:
        """Return s_ij: what is left of `between` once all that has an edge to elsewhere is taken out."""
        while True:
            allowed = between | 1 << i | 1 << j
            leaking = 0
            for vertex in _numbers(between):
                if (self.after[vertex] | self.before[vertex]) & ~allowed:
                    leaking |= 1 << vertex
            if not leaking:
                return between
            between &= ~leaking


def _bits(numbers: Iterable[int]) -> int:
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return bits


def _numbers(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits &= ~lowest


def _span(start: int, end: int) -> int:
    """The bits from `start` up to `end`, which is not among them."""
    return (1 << end) - (1 << start)
