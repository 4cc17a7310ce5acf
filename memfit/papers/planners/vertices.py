"""The forward part of a step as a graph of vertices with a cost in bytes, as Feng and Huang 2018 define it.

The paper's vertices are the tensors of a network, its edges the operations between them. Here a vertex is a forward op
with all its results. Where the paper leaves a choice:

- The cost of a vertex is the aligned bytes of its results that backward or another vertex reads.
- An op joins the vertex of its reader if that is the only one, and backward reads no result that the reader uses: the
  input of an in-place operation is overwritten, as in batch normalization before ReLU. Its other results that backward
  reads, such as statistics, are counted in that vertex.
- An op that depends on no batch is not a part of the chain (a dropout mask, a constant). It joins its only reader; with
  several readers its results are kept like a parameter.
- The source precedes all vertices without inputs, the target follows all vertices without readers. Both cost nothing:
  batch and loss are on the device in any case.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from memfit.graph import Role
from memfit.papers.planners.recompute_counts import Counts, counts_of
from memfit.planners.engine.retention.instance import Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class Vertices:
    """A directed acyclic graph in topological order; vertex 0 is the source, the last one the target.

    Attributes:
        names: for pictures and messages.
        cost_bytes: of each vertex, l(v) in the paper.
        readers: of each vertex, the vertices that read it, ascending.
        ops: of each vertex, its forward ops.
        always_kept: ops in no vertex, whose results are kept.
    """

    names: tuple[str, ...]
    cost_bytes: tuple[int, ...]
    readers: tuple[tuple[int, ...], ...]
    ops: tuple[tuple[int, ...], ...]
    always_kept: tuple[int, ...] = ()

    def recompute_counts(self, instance: Instance, stored: Iterable[int]) -> Counts:
        """Return int64[positions]: 0 for ops of the stored vertices and those always kept, 1 for all others.

        Args:
            instance: the tables of the graph.
            stored: vertices.
        """
        kept = [op for vertex in stored for op in self.ops[vertex]]
        return counts_of(instance, dict.fromkeys([*kept, *self.always_kept], 0), otherwise=1)


def vertices_of(instance: Instance) -> Vertices:
    """Return the vertices of the forward part of an instance."""
    return _Builder(instance).build()


class _Builder:
    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.graph = instance.graph
        forward = [op for op in instance.op_at[: instance.backward_start] if op >= 0]
        inside = set(forward)
        self.forward = [op for op in forward if self.graph.ops[op].writes]  # an op that only mutates is no vertex
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
        """Return the vertices that read an op, by the op that names them; kept ones do not count."""
        return {self.group[reader] for reader in self.read_by[op_id] if self.group[reader] not in self.kept}

    def _read_on(self, op_id: int) -> set[int]:
        """Return the storages that the forward readers of an op read."""
        return {storage for reader in self.read_by[op_id] for storage in self.graph.ops[reader].reads}

    def _from_batch(self) -> set[int]:
        """Return the forward ops that depend on the batch."""
        storages, writer_of = self.graph.storages, self.graph.writer_of
        found: set[int] = set()
        for op_id in self.forward:
            for storage in self.graph.ops[op_id].reads:
                writer = writer_of.get(storage)
                if writer in found if writer is not None else storages[storage].role is Role.INPUT:
                    found.add(op_id)
        return found or set(self.forward)  # a graph file need not name its batch

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
        graph, device = self.graph, self.instance.problem.device
        total = 0
        for op_id in inside:
            op = graph.ops[op_id]
            outside = self.read_by[op_id].difference(inside)
            read = self.saved.union(*(graph.ops[reader].reads for reader in outside))
            total += sum(device.aligned(graph.storages[s].bytes) for s in op.writes if s in read)
        return total
