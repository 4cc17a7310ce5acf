"""The graph of one training step: storages, and the ops that read, write and mutate them, in execution order.

A graph knows no torch. It comes from `memfit.capture`, or from a file that anybody wrote:

    >>> from memfit.graph import Graph, Op, Phase, Role, Storage
    >>> graph = Graph.build(
    ...     name="double",
    ...     storages=[
    ...         Storage(id=0, name="x", bytes=4096, role=Role.INPUT),
    ...         Storage(id=1, name="y", bytes=4096, role=Role.OUTPUT),
    ...     ],
    ...     ops=[Op(id=0, name="mul", phase=Phase.FORWARD, reads=(0,), writes=(1,), seconds=1e-6)],
    ... )
    >>> graph.storages[0].resident, graph.storages[1].required_at_end
    (True, True)
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec

from memfit.errors import InvalidFileError, InvalidGraphError
from memfit.files import decode, read_bytes, write_atomically

FORMAT = "memfit-graph"
VERSION = 1
_MOST_BYTES = 1 << 60  # so that any sum of bytes that can be live at once is far from what int64 holds

Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Id = Annotated[int, msgspec.Meta(ge=0)]


class Role(enum.StrEnum):
    """What a storage holds. A role labels; `resident` and `required_at_end` rule."""

    PARAMETER = "parameter"
    STATE = "state"
    INPUT = "input"
    CONSTANT = "constant"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    OUTPUT = "output"


class Phase(enum.StrEnum):
    """The part of the training step an op belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


# The objects are msgspec Structs rather than dataclasses: as frozen, slotted and keyword-only, and strict to decode.
class Storage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes that live and die together; every view of them is the same storage."""

    id: Id
    name: str
    bytes: Bytes
    role: Role
    resident: bool = False
    required_at_end: bool = False


class Op(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One operation.

    `reads`, `writes` and `mutates` are storage ids; a mutated storage is read as well, whether or not `reads` says so.
    `workspace_bytes` are held while it runs; None says they are not known (a capture with fake tensors).
    `random` names the generator it draws from. `reuses` are pairs (read, written) of equal bytes whose kernel may write
    its result over its input.
    """

    id: Id
    name: str
    phase: Phase
    reads: tuple[Id, ...]
    writes: tuple[Id, ...]
    seconds: Seconds
    target: str = ""
    module: str = ""
    mutates: tuple[Id, ...] = ()
    workspace_bytes: Bytes | None = 0
    recomputable: bool = True
    random: str | None = None
    reuses: tuple[tuple[Id, Id], ...] = ()

    @property
    def computed_once(self) -> bool:
        """Whether every schedule must compute this op exactly once: it mutates, or is not recomputable."""
        return bool(self.mutates) or not self.recomputable


class Boundary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where control goes to the user and comes back: before the op at `position`, departures leave, arrivals come.

    A departure is the user's from there on: it stays on the device to the end (it is `required_at_end`). An arrival is
    a storage that no op writes and that is not resident: it is on the device from the boundary until it is dropped.
    """

    position: Id
    arrivals: tuple[Id, ...]
    departures: tuple[Id, ...]


class Graph(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True, weakref=True):
    """A whole training step. `Graph.build` and `Graph.load` make one: they fill what may be left out, and verify."""

    name: str
    storages: tuple[Storage, ...]
    ops: tuple[Op, ...]
    boundaries: tuple[Boundary, ...] = ()
    device: str = ""
    source: str = ""
    notes: str = ""

    @staticmethod
    def build(
        *,
        name: str,
        storages: Iterable[Storage],
        ops: Iterable[Op],
        boundaries: Iterable[Boundary] = (),
        device: str = "",
        source: str = "",
        notes: str = "",
    ) -> Graph:
        """Return a verified graph; a storage that nothing writes becomes resident, an output required at the end.

        Raises:
            InvalidGraphError: see `verify`.
        """
        graph = Graph(
            name=name,
            storages=tuple(storages),
            ops=tuple(ops),
            boundaries=tuple(boundaries),
            device=device,
            source=source,
            notes=notes,
        )
        return _with_flags(graph).verify()

    @staticmethod
    def load(path: Path | str) -> Graph:
        """Read a `*.graph.json` or `*.graph.json.gz` file.

        Raises:
            InvalidFileError: unreadable, malformed, an unknown key, a wrong type; names the file and the place.
            InvalidGraphError: well-formed, but breaks a rule of graphs; names the file as well.
        """
        document = decode(read_bytes(Path(path)), GraphDocument, path)
        return document.to_graph(str(path))

    def save(self, path: Path | str) -> None:
        """Write the graph to `path`, atomically; gzip if the name ends in `.gz`."""
        write_atomically(Path(path), msgspec.json.format(msgspec.json.encode(GraphDocument.of(self)), indent=1))

    def verify(self) -> Graph:
        """Return self, or raise InvalidGraphError at the first rule that is broken.

        Rules: ids count up from 0; ids in ops and boundaries exist; a storage is written by at most one op and never
        when it is resident; nothing is read or mutated before it is there (execution order, so no cycles); `reuses`
        pair a read with a written storage of equal bytes; boundaries stand in order; departures are there.
        """
        _verify(self)
        return self

    @cached_property
    def writer_of(self) -> dict[int, int]:
        """storage id -> id of the op that writes it; residents and arrivals are not in it."""
        return {storage: op.id for op in self.ops for storage in op.writes}

    @cached_property
    def read_versions(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each op: (storage, version) of all it reads or mutates; the version counts the mutations before it."""
        version = [0] * len(self.storages)
        needs: list[tuple[tuple[int, int], ...]] = []
        for op in self.ops:
            needs.append(tuple((s, version[s]) for s in dict.fromkeys(op.reads + op.mutates)))
            for storage in op.mutates:
                version[storage] += 1
        return tuple(needs)

    @cached_property
    def last_version(self) -> tuple[int, ...]:
        """For each storage: how many times the step mutates it."""
        count = [0] * len(self.storages)
        for op in self.ops:
            for storage in op.mutates:
                count[storage] += 1
        return tuple(count)

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes that are on the device for the whole step (unaligned sum)."""
        return sum(storage.bytes for storage in self.storages if storage.resident)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of structure, bytes and aliasing, not of seconds or names: a plan is good for one fingerprint."""
        digest = hashlib.sha256()
        for s in self.storages:
            digest.update(f"s{s.bytes},{s.resident:d}{s.required_at_end:d};".encode())
        for op in self.ops:
            flags = f"{op.recomputable:d}{op.random or ''}"
            digest.update(f"o{op.target},{op.phase},{op.reads},{op.writes},{op.mutates},{op.reuses},{flags};".encode())
        for b in self.boundaries:
            digest.update(f"b{b.position},{b.arrivals},{b.departures};".encode())
        return digest.hexdigest()[:32]


class GraphDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The graph file, version 1 (DESIGN.md, section 2). A plan file holds one as well."""

    format: str
    version: int
    name: str
    source: str = ""
    notes: str = ""
    device: str = ""
    storages: tuple[Storage, ...]
    ops: tuple[Op, ...]
    boundaries: tuple[Boundary, ...] = ()

    @staticmethod
    def of(graph: Graph) -> GraphDocument:
        return GraphDocument(
            format=FORMAT,
            version=VERSION,
            name=graph.name,
            source=graph.source,
            notes=graph.notes,
            device=graph.device,
            storages=graph.storages,
            ops=graph.ops,
            boundaries=graph.boundaries,
        )

    def to_graph(self, where: str) -> Graph:
        if self.format != FORMAT:
            raise InvalidFileError(f"{where}: format is {self.format!r}, expected {FORMAT!r} - at `$.format`")
        if self.version != VERSION:
            raise InvalidFileError(
                f"{where}: version is {self.version}, this memfit reads {VERSION} - at `$.version`; upgrade memfit"
            )
        try:
            return Graph.build(
                name=self.name,
                storages=self.storages,
                ops=self.ops,
                boundaries=self.boundaries,
                device=self.device,
                source=self.source,
                notes=self.notes,
            )
        except InvalidGraphError as error:
            raise InvalidGraphError(f"{where}: {error}") from error


def _with_flags(graph: Graph) -> Graph:
    """Return the graph with `resident` and `required_at_end` filled in where the rules imply them."""
    written = {s for op in graph.ops for s in op.writes} | {s for b in graph.boundaries for s in b.arrivals}
    departing = {s for b in graph.boundaries for s in b.departures}

    def flagged(storage: Storage) -> Storage:
        resident = storage.resident or storage.id not in written
        required = storage.required_at_end or storage.role == Role.OUTPUT or storage.id in departing
        if resident == storage.resident and required == storage.required_at_end:
            return storage
        return msgspec.structs.replace(storage, resident=resident, required_at_end=required)

    return msgspec.structs.replace(graph, storages=tuple(flagged(storage) for storage in graph.storages))


def _fail(place: str, message: str) -> NoReturn:
    raise InvalidGraphError(f"{message} - at `$.{place}`")


def _verify(graph: Graph) -> None:
    _verify_storages(graph)
    present = [storage.resident for storage in graph.storages]
    boundaries = list(enumerate(graph.boundaries))
    for index, op in enumerate(graph.ops):
        if op.id != index:
            _fail(f"ops[{index}].id", f"op {op.name!r} has id {op.id}, expected {index}")
        while boundaries and boundaries[0][1].position <= index:
            _verify_boundary(graph, *boundaries.pop(0), present, index)
        _verify_op(graph, op, present)
    for number, boundary in boundaries:
        _verify_boundary(graph, number, boundary, present, len(graph.ops))
    for storage in graph.storages:
        if not present[storage.id]:
            _fail(f"storages[{storage.id}]", f"storage {storage.name!r} is not resident and nothing writes it")


def _verify_storages(graph: Graph) -> None:
    for index, storage in enumerate(graph.storages):
        if storage.id != index:
            _fail(f"storages[{index}].id", f"storage {storage.name!r} has id {storage.id}, expected {index}")
        if storage.bytes < 0:
            _fail(f"storages[{index}].bytes", f"storage {storage.name!r} has {storage.bytes} bytes, expected 0 or more")
    total = sum(storage.bytes for storage in graph.storages)
    if total > _MOST_BYTES:
        _fail("storages", f"all storages together have {total} bytes, expected at most {_MOST_BYTES}")


def _verify_op(graph: Graph, op: Op, present: list[bool]) -> None:
    place = f"ops[{op.id}]"
    for field, storages in (("reads", op.reads), ("mutates", op.mutates)):
        for index, storage in enumerate(storages):
            name = _known(graph, f"{place}.{field}[{index}]", f"op {op.name!r}", storage).name
            if not present[storage]:
                _fail(
                    f"{place}.{field}[{index}]",
                    f"op {op.name!r} needs storage {storage} {name!r} before any op wrote it (a cycle or wrong order)",
                )
    if len(set(op.mutates)) < len(op.mutates):
        _fail(f"{place}.mutates", f"op {op.name!r} mutates a storage twice, expected each once: {list(op.mutates)}")
    for index, storage in enumerate(op.writes):
        known = _known(graph, f"{place}.writes[{index}]", f"op {op.name!r}", storage)
        if present[storage]:
            why = "resident (say `mutates`)" if known.resident else "written before, or arrives at a boundary"
            _fail(f"{place}.writes[{index}]", f"op {op.name!r} writes storage {storage} {known.name!r}, which is {why}")
        present[storage] = True
    if not 0 <= op.seconds < math.inf:
        _fail(f"{place}.seconds", f"op {op.name!r} has {op.seconds} seconds, expected a number from 0")
    if not 0 <= (op.workspace_bytes or 0) <= _MOST_BYTES:
        _fail(
            f"{place}.workspace_bytes",
            f"op {op.name!r} has {op.workspace_bytes} workspace bytes, expected 0 to {_MOST_BYTES}",
        )
    _verify_reuses(graph, op)


def _verify_reuses(graph: Graph, op: Op) -> None:
    for index, (read, written) in enumerate(op.reuses):
        place = f"ops[{op.id}].reuses[{index}]"
        if read not in op.reads or written not in op.writes:
            _fail(place, f"op {op.name!r} reuses {read} -> {written}, expected a read and a write of it")
        sizes = graph.storages[read].bytes, graph.storages[written].bytes
        if sizes[0] != sizes[1]:
            _fail(
                place, f"op {op.name!r} reuses {read} -> {written} of {sizes[0]} and {sizes[1]} bytes, expected equal"
            )


def _verify_boundary(graph: Graph, number: int, boundary: Boundary, present: list[bool], position: int) -> None:
    place = f"boundaries[{number}]"
    if boundary.position != position:
        _fail(
            f"{place}.position",
            f"boundary stands at {boundary.position}, expected {position}: in order, and within the ops",
        )
    for index, storage in enumerate(boundary.departures):
        name = _known(graph, f"{place}.departures[{index}]", "boundary", storage).name
        if not present[storage]:
            _fail(f"{place}.departures[{index}]", f"storage {storage} {name!r} departs before any op wrote it")
    for index, storage in enumerate(boundary.arrivals):
        name = _known(graph, f"{place}.arrivals[{index}]", "boundary", storage).name
        if present[storage]:
            _fail(f"{place}.arrivals[{index}]", f"storage {storage} {name!r} arrives but is there already")
        present[storage] = True


def _known(graph: Graph, place: str, who: str, storage: int) -> Storage:
    if not 0 <= storage < len(graph.storages):
        _fail(place, f"{who} names storage {storage}, expected 0 to {len(graph.storages) - 1}")
    return graph.storages[storage]
