"""The graph of one training step: storages, and the ops that read, write and mutate them, in execution order.

A graph needs no torch. `memfit.capture` makes one from a training step, or anyone writes one as a file:

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
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Annotated

import msgspec

from memfit.errors import InvalidFileError, InvalidGraphError
from memfit.graph_rules import verify
from memfit.system.files import decode, read_bytes, write_atomically

FORMAT = "memfit-graph"
SAVE_GENERATOR_STATE = "save_generator_state"
"""Target of an op that a planned step adds to the user's, and runs only where the state is replayed."""
VERSION = 1

Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Id = Annotated[int, msgspec.Meta(ge=0)]


class Role(enum.StrEnum):
    """The contents of a storage: a label; only `resident` and `required_at_end` have effects."""

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
    """Bytes that are allocated and freed together; every view of them is the same storage.

    Attributes:
        id: the index in the graph's storages.
        name: for reports.
        bytes: the size.
        role: a label, such as `Role.ACTIVATION`; the two flags below are what counts.
        resident: whether it is on the device from the start of the step, and stays there.
        required_at_end: whether it must be on the device at the end, in its last version.
    """

    id: Id
    name: str
    bytes: Bytes
    role: Role
    resident: bool = False
    required_at_end: bool = False


class Op(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One operation.

    Attributes:
        id: the index in the graph's ops.
        name: for reports.
        phase: forward, backward or update.
        reads, writes: ids of storages.
        seconds: of one run.
        target: the operator, such as `aten.addmm`.
        module: the name of the module that calls it.
        mutates: ids of storages that it changes in place; these are read as well, whether or not `reads` says so.
        workspace_bytes: held while it runs; None if unknown (a capture with fake tensors).
        recomputable: whether it may run more than once.
        random: the generator that it draws from.
        group: the ranks that a collective runs between.
        reuses: pairs (read, written) of storages of equal bytes: the kernel may write its result over that input.
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
    group: str | None = None
    reuses: tuple[tuple[Id, Id], ...] = ()

    @property
    def computed_once(self) -> bool:
        """Whether every schedule must compute this op exactly once: it mutates, or is not recomputable."""
        return bool(self.mutates) or not self.recomputable

    @property
    def compute_seconds(self) -> float:
        """The op's seconds on the compute stream, where collectives take none."""
        return self.seconds if self.group is None else 0.0

    @property
    def is_gather(self) -> bool:
        """Whether the op is a collective that makes what it gives, and may be repeated."""
        return self.group is not None and bool(self.writes) and not self.computed_once

    @property
    def kept_in_order(self) -> tuple[str, ...]:
        """What ops share whose first computations keep their order: a generator, or the ranks of collectives."""
        return tuple(shared for shared in (self.random, self.group) if shared is not None)

    @property
    def saves_generator(self) -> bool:
        """Whether the op saves a generator's state, which only a rematerialization of the next random op reads."""
        return self.target == SAVE_GENERATOR_STATE


class Boundary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A place where the graph hands control to the user: before the op at `position`.

    A departure belongs to the user from there on: it stays on the device to the end (it is `required_at_end`). An
    arrival is a storage that no op writes and that is not resident: it is on the device from the boundary until it is
    dropped.
    """

    position: Id
    arrivals: tuple[Id, ...]
    departures: tuple[Id, ...]


class Graph(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True, weakref=True):
    """A whole training step. `Graph.build` and `Graph.load` make one: they fill in defaults, and verify."""

    name: str
    storages: tuple[Storage, ...]
    ops: tuple[Op, ...]
    boundaries: tuple[Boundary, ...] = ()
    device: str = ""
    source: str = ""
    notes: str = ""

    def __repr__(self) -> str:
        return f"Graph({self.name!r}, {len(self.ops):,} ops, {len(self.storages):,} storages)"

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
        """Return a verified graph; a storage that no op writes becomes resident, an output required at the end.

        Args:
            name: of the step.
            storages: with ids that count up from 0.
            ops: likewise.
            boundaries: in order of position.
            device: free text, kept in the graph's file, as the next two.
            source: where the graph comes from.
            notes: anything else.

        Raises:
            InvalidGraphError: see `verify`.
        """
        ops, boundaries = tuple(ops), tuple(boundaries)
        return Graph(
            name=name,
            storages=_with_flags(storages, ops, boundaries),
            ops=ops,
            boundaries=boundaries,
            device=device,
            source=source,
            notes=notes,
        ).verify()

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
        when it is resident; a storage is on the device before it is read or mutated (execution order, so no cycles);
        `reuses` pair a read with a written storage of equal bytes; boundaries stand in order; departures are on the
        device.
        """
        verify(self)
        return self

    @cached_property
    def writer_of(self) -> dict[int, int]:
        """storage id -> id of the op that writes it; residents and arrivals are not in it."""
        return {storage: op.id for op in self.ops for storage in op.writes}

    def writer(self, storage: int) -> Op | None:
        """Return the op that writes a storage; None for residents and arrivals."""
        return self.ops[self.writer_of[storage]] if storage in self.writer_of else None

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
    def compute_seconds(self) -> float:
        """Seconds of computing each op once on the compute stream: of all ops but collectives."""
        return sum(op.compute_seconds for op in self.ops)

    @cached_property
    def has_collectives(self) -> bool:
        """Whether ops run between ranks."""
        return any(op.group is not None for op in self.ops)

    @cached_property
    def all_bytes(self) -> int:
        """Bytes of all storages, by which graphs of one structure are ordered (unaligned sum)."""
        return sum(storage.bytes for storage in self.storages)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of structure and bytes. A plan is good for one fingerprint.

        Names, seconds and workspaces are not in it, and neither are `reuses`: which inputs a kernel may write over
        differs between devices, and the checker judges each schedule by the `reuses` of the graph at hand.
        """
        return self._digest(has_bytes=True)[:32]

    @cached_property
    def structure(self) -> str:
        """A hash that two graphs share if they differ only in bytes, seconds, workspaces, names and `reuses`.

        A schedule that is legal on one of them, and reuses nothing in place, is legal on the other.
        """
        return self._digest(has_bytes=False)

    def _digest(self, *, has_bytes: bool) -> str:
        digest = hashlib.sha256()
        for s in self.storages:
            size = f"{s.bytes}," if has_bytes else ""
            digest.update(f"s{size}{s.resident:d}{s.required_at_end:d};".encode())
        for op in self.ops:
            flags = f"{op.recomputable:d}{','.join(op.kept_in_order)}"
            digest.update(f"o{op.target},{op.phase},{op.reads},{op.writes},{op.mutates},{flags};".encode())
        for b in self.boundaries:
            digest.update(f"b{b.position},{b.arrivals},{b.departures};".encode())
        return digest.hexdigest()


class GraphDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The graph file, version 1 (see the docs on file formats). A plan file holds one as well."""

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
        """Return the document of a graph."""
        return GraphDocument(format=FORMAT, version=VERSION, **msgspec.structs.asdict(graph))

    def to_graph(self, where: str) -> Graph:
        """Return the verified graph.

        Args:
            where: names the file in errors.

        Raises:
            InvalidFileError: another format or version.
            InvalidGraphError: breaks a rule of graphs.
        """
        if self.format != FORMAT:
            raise InvalidFileError(f"{where}: format is {self.format!r}, expected {FORMAT!r} - at `$.format`")
        if self.version != VERSION:
            raise InvalidFileError(
                f"{where}: version is {self.version}, this memfit reads {VERSION} - at `$.version`; upgrade memfit"
            )
        try:
            return Graph.build(**{name: getattr(self, name) for name in Graph.__struct_fields__})
        except InvalidGraphError as error:
            raise InvalidGraphError(f"{where}: {error}") from error


def _with_flags(storages: Iterable[Storage], ops: Iterable[Op], boundaries: Iterable[Boundary]) -> tuple[Storage, ...]:
    """Return the storages with `resident` and `required_at_end` filled in where the rules imply them."""
    written = {s for op in ops for s in op.writes} | {s for b in boundaries for s in b.arrivals}
    departing = {s for b in boundaries for s in b.departures}
    return tuple(
        msgspec.structs.replace(
            storage,
            resident=storage.resident or storage.id not in written,
            required_at_end=storage.required_at_end or storage.role == Role.OUTPUT or storage.id in departing,
        )
        for storage in storages
    )
