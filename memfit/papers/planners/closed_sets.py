"""Closed sets and the division tree of a graph (Feng and Huang 2018, definitions 1 to 9, Algorithms 2 to 4).

Vertices are numbers in topological order, the first the source and the last the target. A set of them is an int with
one bit for each. A closed set s_ij has two ends i and j, and contains vertices between them: paths enter it only
through i, leave it only through j, and it has no other edges.

Where the paper leaves a choice:
- By definition 1, s_ij is the largest closed set between i and j; Algorithm 4 forms it only if it contains *all*
  vertices between them. Definition 1 is followed: vertices with an edge to the outside are left out, and the rest is a
  closed set.
- An edge from i to j is a closed set without vertices: a branch of its own beside others (Algorithm 3, line 2), else a
  leaf. The leaves of the tree are therefore edges, and single tensors are the vertices between members of a division.
- An edge in a maximal split is not a member of the division: its ends are stored in any case.
- Two closed sets in a maximal split may share ends, but no vertex inside (definition 7 says s_ab, not [s_ab]).

Source: Feng and Huang 2018, section 5.1 and Algorithms 2 to 4.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise


class Kind(enum.StrEnum):
    """The types of closed sets: an edge, or type 1, 2 or 3 of the paper."""

    EDGE = "edge"
    SPLITTABLE = "splittable"  # type 1: has a splitting vertex
    BRANCHED = "branched"  # type 2: no splitting vertex, several independent branches
    WHOLE = "non-branched"  # type 3: neither of the two


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedSet:
    """A node of the division tree: [s_ij], its type, and its division.

    Attributes:
        kind: its type.
        first, last: i and j.
        inside: s_ij, the vertices between them.
        between: the vertices to store if the set is expanded: for type 1 its splitting vertices, one fewer than
            children; for type 2 none; for type 3 the vertices in no member of the maximal split.
        children: the division; members without vertices are left out for type 3.
    """

    kind: Kind
    first: int
    last: int
    inside: frozenset[int]
    between: tuple[int, ...] = ()
    children: tuple[ClosedSet, ...] = ()

    def walk(self, depth: int = 0) -> Iterator[tuple[int, ClosedSet]]:
        """Yield (depth, node) of this node and of all its descendants, from the top."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)


def division_tree(readers: Sequence[Sequence[int]]) -> ClosedSet:
    """Return the division tree of a graph; vertex 0 is the source, the last one the target.

    >>> tree = division_tree([[1], [2, 3], [4], [4], [5], []])  # a chain with a diamond in it
    >>> tree.kind, tree.between, [child.kind for child in tree.children]
    (<Kind.SPLITTABLE: 'splittable'>, (1, 4), [<Kind.EDGE: 'edge'>, <Kind.BRANCHED: 'branched'>, <Kind.EDGE: 'edge'>])

    Args:
        readers: of each vertex, in topological order, the vertices that read it.

    Source: Feng and Huang 2018, Algorithms 2 to 4.
    """
    return _Divider(readers).divide(0, len(readers) - 1, (1 << (len(readers) - 1)) - 2, has_edge=True)


def splitting_vertices(readers: Sequence[Sequence[int]], among: Iterable[int], *, with_edge: bool = True) -> list[int]:
    """Return the splitting vertices (definition 3, Algorithm 2) of a closed set, ascending.

    A vertex is a splitting vertex if no edge leads past it in topological order: then it lies on all paths.

    Args:
        readers: of each vertex of the graph, the vertices that read it.
        among: [s_ij], the vertices of the set with its ends, ascending.
        with_edge: whether an edge from i to j belongs to the set.
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
        self.after, self.descendants = [0] * len(readers), [0] * len(readers)
        self.before, self.ancestors = [0] * len(readers), [0] * len(readers)
        for vertex, each in enumerate(readers):
            for reader in each:
                self.before[reader] |= 1 << vertex
                self.ancestors[reader] |= self.ancestors[vertex] | 1 << vertex
        for vertex in reversed(range(len(readers))):
            for reader in readers[vertex]:
                self.after[vertex] |= 1 << reader
                self.descendants[vertex] |= self.descendants[reader] | 1 << reader

    def divide(self, first: int, last: int, inside: int, *, has_edge: bool) -> ClosedSet:
        """Return the node of the closed set with these ends and vertices, with its subtree.

        Args:
            first: i, a vertex.
            last: j, a vertex.
            inside: s_ij, one bit for each vertex.
            has_edge: whether an edge from i to j belongs to the set, if there is one.
        """
        has_edge = has_edge and bool(self.after[first] >> last & 1)
        node = partial(ClosedSet, first=first, last=last, inside=frozenset(_numbers(inside)))
        if not inside:
            return node(kind=Kind.EDGE)
        if not has_edge:
            splitting = splitting_vertices(self.readers, _numbers(inside | 1 << first | 1 << last), with_edge=False)
            if splitting:
                segments = pairwise([first, *splitting, last])
                children = tuple(self.divide(i, j, inside & _span(i + 1, j), has_edge=True) for i, j in segments)
                return node(kind=Kind.SPLITTABLE, between=tuple(splitting), children=children)
        branches = self._branches(inside)
        if has_edge or len(branches) > 1:
            children = tuple(self.divide(first, last, branch, has_edge=False) for branch in branches)
            if has_edge:
                children += (ClosedSet(kind=Kind.EDGE, first=first, last=last, inside=frozenset()),)
            return node(kind=Kind.BRANCHED, children=children)
        members = self._maximal_split(first, last, inside)
        covered = 0
        for _, _, bits in members:
            covered |= bits
        return node(
            kind=Kind.WHOLE,
            between=tuple(_numbers(inside & ~covered)),
            children=tuple(self.divide(i, j, bits, has_edge=False) for i, j, bits in members),
        )

    def _branches(self, inside: int) -> list[int]:
        """Return the connected components of `inside`, directions of edges ignored (Algorithm 3)."""
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
        """Return (i, j, vertices) of the largest closed sets inside a set of type 3, by their first vertex."""
        among = inside | 1 << first | 1 << last
        # In a closed set, some first vertex reads only i, and some last vertex is read only by j.
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
        """Return s_ij: `between` without the vertices that have an edge to the outside."""
        while True:
            allowed = between | 1 << i | 1 << j
            leaking = 0
            for vertex in _numbers(between):
                if (self.after[vertex] | self.before[vertex]) & ~allowed:
                    leaking |= 1 << vertex
            if not leaking:
                return between
            between &= ~leaking


def _numbers(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits &= ~lowest


def _span(start: int, end: int) -> int:
    """Return the bits [start, end)."""
    return (1 << end) - (1 << start)
