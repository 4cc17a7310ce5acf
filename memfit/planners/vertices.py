"""The forward part of a step as Feng 2018 sees it: vertices with a memory cost, from one source to one target.

The paper's vertices are the tensors of a network, its edges the operations between them. Here a vertex is a forward op
with all that it writes. Where the text leaves room:

- The cost of a vertex is the aligned bytes of its results that backward or another vertex reads.
- An op is no vertex of its own where a single other vertex reads it and backward does not want what that one reads: it
  joins its reader, as the input of an in-place operation is overwritten (batch normalization before ReLU). What
  backward wants of it otherwise, such as its statistics, is counted there.
- An op that reads neither a batch nor another vertex is not a part of the chain (a dropout mask, a constant): it joins
  its only reader; with several readers its results are kept like a parameter.
- The source stands before all vertices that read no other, the target behind all that no other reads; both are free:
  what they stand for (batch, loss) is on the device anyway.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from memfit.graph import Role
from memfit.planners.mirrored import Counts, counts_of
from memfit.planners.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Vertices:
    """A directed acyclic graph in topological order: vertex 0 is the source, the last one the target.

    Attributes:
        names: for pictures and messages.
        cost_bytes: l(v).
        readers: of each vertex, those that read it, ascending.
        ops: of each vertex, the forward ops that are in it.
        always_kept: ops that are in no vertex, whose results are kept.
    """

    names: tuple[str, ...]
    cost_bytes: tuple[int, ...]
    readers: tuple[tuple[int, ...], ...]
    ops: tuple[tuple[int, ...], ...]
    always_kept: tuple[int, ...] = ()

    def mirror_counts(self, program: Program, stored: Iterable[int]) -> Counts:
        """Return the mirror counts that keep the results of these vertices, and drop those of all others."""
        kept = [op for vertex in stored for op in self.ops[vertex]]
        return counts_of(program, dict.fromkeys([*kept, *self.always_kept], 0), otherwise=1)


def vertices_of(program: Program) -> Vertices:
    """Return the vertices of a program's forward part."""
    return _Builder(program).build()


class _Builder:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph = program.graph
        forward = [op for op in program.op_at[: program.backward_start] if op >= 0]
        inside = set(forward)
        self.forward = [op for op in forward if self.graph.ops[op].writes]  # what only mutates is no vertex
        writer_of = self.graph.writer_of
        self.read_by: defaultdict[int, set[int]] = defaultdict(set)  # forward op -> forward ops that read it
        self.saved: set[int] = set()  # storages that backward reads
        for op in self.graph.ops:
            for storage in op.reads:
                writer = writer_of.get(storage)
                if op.id not in inside:
                    self.saved.add(storage)
                elif writer is not None and op.writes:
                    self.read_by[writer].add(op.id)
        self.group = {op: op for op in self.forward}  # forward op -> the op whose vertex it is in
        self.kept: set[int] = set()

    def build(self) -> Vertices:
        from_batch = self._from_batch()
        for op_id in reversed(self.forward):
            readers = self._readers(op_id)
            op = self.graph.ops[op_id]
            if op_id not in from_batch:
                if len(readers) == 1:
                    self.group[op_id] = readers.pop()
                else:
                    self.kept.add(op_id)
            elif len(readers) == 1 and not self.saved.intersection(op.writes).intersection(self._read_on(op_id)):
                self.group[op_id] = readers.pop()
        members: defaultdict[int, list[int]] = defaultdict(list)
        for op_id in self.forward:
            if op_id not in self.kept and self.group[op_id] not in self.kept:
                members[self.group[op_id]].append(op_id)
        return self._numbered({op_id: members[op_id] for op_id in self.forward if op_id in members})

    def _readers(self, op_id: int) -> set[int]:
        """The vertices that read an op, by the op they are named after; those of what is kept do not count."""
        return {self.group[reader] for reader in self.read_by[op_id] if self.group[reader] not in self.kept}

    def _read_on(self, op_id: int) -> set[int]:
        """The storages that the forward readers of an op read."""
        return {storage for reader in self.read_by[op_id] for storage in self.graph.ops[reader].reads}

    def _from_batch(self) -> set[int]:
        """The forward ops that read the batch, or what comes from it."""
        storages, writer_of = self.graph.storages, self.graph.writer_of
        found: set[int] = set()
        for op_id in self.forward:
            for storage in self.graph.ops[op_id].reads:
                writer = writer_of.get(storage)
                if writer in found if writer is not None else storages[storage].role is Role.INPUT:
                    found.add(op_id)
        return found or set(self.forward)  # a graph file need not say which of its residents are the batch

    def _numbered(self, members: dict[int, list[int]]) -> Vertices:
        number = {op: index for index, (_, ops) in enumerate(members.items(), start=1) for op in ops}
        target = len(members) + 1
        readers: list[set[int]] = [set() for _ in range(target + 1)]
        is_read = [False] * (target + 1)
        for op_id, vertex in number.items():
            for reader in self.read_by[op_id]:
                if reader in number and number[reader] != vertex:
                    readers[vertex].add(number[reader])
                    is_read[number[reader]] = True
        readers[0] = {vertex for vertex in range(1, target) if not is_read[vertex]} or {target}
        for vertex in range(1, target):
            readers[vertex] = readers[vertex] or {target}
        ops = [self.graph.ops[op] for op in members]
        return Vertices(
            names=("source", *(op.name for op in ops), "target"),
            cost_bytes=(0, *(self._cost(inside) for inside in members.values()), 0),
            readers=tuple(tuple(sorted(each)) for each in readers),
            ops=((), *(tuple(inside) for inside in members.values()), ()),
            always_kept=tuple(sorted(self.kept)),
        )

    def _cost(self, inside: list[int]) -> int:
        graph, device = self.graph, self.program.problem.device
        total = 0
        for op_id in inside:
            op = graph.ops[op_id]
            outside = self.read_by[op_id].difference(inside)
            wanted = self.saved.union(*(graph.ops[reader].reads for reader in outside))
            total += sum(device.aligned(graph.storages[s].bytes) for s in op.writes if s in wanted)
        return total
