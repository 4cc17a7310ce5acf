"""The checker: replays a schedule on its graph by the rules below; it shares no code with planners or the simulator.

Versions. A storage written, or there from the start, has version 0; each mutation of it adds one. An op needs each
storage that it reads or mutates at the version that it saw in the original order (`Graph.read_versions`).

- **Every op** is computed at least once. An op that mutates, or is not recomputable, exactly once. The first
  computations of ops that touch the same mutated storage, that draw from the same generator, or that are collectives
  between the same ranks, keep their original order.
- **Compute(op)** needs its reads on the device, at the right version. Its writes are then on the device at version 0.
  If a write is on the device already, that copy stays at its version, and the second copy is freed when the op ends.
- **Compute(op, in_place_of=s)**: `s` is freed, and one write reuses its memory in place: the first of `op.reuses` that
  pairs `s` with a write that is not on the device. `s` must not be resident, nor the user's, nor mutated by op, nor
  under a copy to the host.
- **Drop(s)** needs `s` on the device, not resident, not the user's, and no copy of it under way in either direction.
- **Offload(s)** needs `s` on the device and not resident; the host must not hold this version of it already. The copy
  is under way until `Wait(s)`. A mutation in between is refused; a later one makes the host's copy stale: it can be
  dropped, or overwritten by another offload, and nothing else.
- **Wait(s)** needs an offload of `s` that has not been waited for.
- **Prefetch(s)** needs a complete host copy that is not stale, and `s` not on the device. `s` has the host's version
  then. The copy is under way until an op reads `s`, or `s` departs at a boundary, or the schedule ends.
- **DropHost(s)** needs a host copy, and no copy of it under way in either direction.
- **CrossBoundary(b)** stands once for each boundary, in order, after a first computation of every op before its
  position and of none after. Departures must be on the device, with all mutations so far; they belong to the user from
  then on. Arrivals are on the device from then on.
- **At the end** storages `required_at_end` are on the device, at their last version. Host copies may be left over.
"""

from __future__ import annotations

from typing import NoReturn

from memfit.errors import InvalidScheduleError
from memfit.graph import Graph, Op
from memfit.schedule import Code, Schedule

_NOTHING = -1  # in `Schedule.extras`: a Compute that reuses nothing in place
_TITLES = ("Compute", "Drop", "Offload", "Wait", "Prefetch", "DropHost", "CrossBoundary")


def check(graph: Graph, schedule: Schedule) -> None:
    """Replay `schedule` on `graph` and return if it is legal.

        >>> from memfit.graph import Graph, Op, Phase, Role, Storage
        >>> from memfit.schedule import Compute, Drop, Schedule
        >>> graph = Graph.build(
        ...     name="double",
        ...     storages=[
        ...         Storage(id=0, name="x", bytes=4096, role=Role.INPUT),
        ...         Storage(id=1, name="y", bytes=4096, role=Role.OUTPUT),
        ...     ],
        ...     ops=[Op(id=0, name="mul", phase=Phase.FORWARD, reads=(0,), writes=(1,), seconds=1e-6)],
        ... )
        >>> check(graph, Schedule.of([Compute(op=0)]))
        >>> check(graph, Schedule.of([Compute(op=0), Drop(storage=1)]))  # doctest: +NORMALIZE_WHITESPACE
        Traceback (most recent call last):
        memfit.errors.InvalidScheduleError: the end: storage 1 'y' is required at the end but was dropped at 1;
        compute op 0 'mul' again

    Time is linear in the instructions and in what their ops read and write.

    Args:
        graph: the step.
        schedule: instructions on the ops, storages and boundaries of `graph`.

    Raises:
        InvalidScheduleError: the first rule broken: at which instruction, which storage, expected, found, remedy.
    """
    replay = _Replay(graph)
    actions = [getattr(replay, code.name.lower()) for code in Code]
    operand_counts = (len(graph.ops), *[len(graph.storages)] * 5, len(graph.boundaries))
    rows = zip(schedule.codes.tolist(), schedule.operands.tolist(), schedule.extras.tolist(), strict=True)
    for position, (code, operand, extra) in enumerate(rows):
        if not 0 <= code < len(actions):
            raise InvalidScheduleError(f"instruction {position} has code {code}, expected 0 to {len(actions) - 1}")
        if not 0 <= operand < operand_counts[code]:
            raise InvalidScheduleError(
                f"instruction {position} {_TITLES[code]}({operand}) names what is not in graph {graph.name!r}, "
                f"expected a number below {operand_counts[code]}; was the schedule made for another graph?"
            )
        replay.position, replay.code, replay.operand = position, code, operand
        actions[code](operand, extra)
    replay.finish()


class _Replay:
    """Where every storage is, instruction by instruction. `None` in a list: not on the device, not in copy, not yet.

    Each method named after an instruction takes the instruction's operand and its extra, as a `Schedule` has them.
    """

    def __init__(self, graph: Graph) -> None:
        count = len(graph.storages)
        self.graph = graph
        self.position = 0
        self.code = 0
        self.operand = 0
        self.needs = graph.read_versions
        self.first_after = _orders(graph)
        self.first_computed: list[int | None] = [None] * len(graph.ops)
        self.computed_count = 0
        self.next_boundary = 0
        self.device_version: list[int | None] = [0 if storage.resident else None for storage in graph.storages]
        self.mutation_count = [0] * count
        self.host_version: list[int | None] = [None] * count
        self.host_stale_since: list[int | None] = [None] * count
        self.offloading_since: list[int | None] = [None] * count
        self.prefetching_since: list[int | None] = [None] * count
        self.departed_at: list[int | None] = [None] * count
        self.left: list[tuple[str, int] | None] = [None] * count

    def compute(self, op_id: int, in_place_of: int) -> None:
        op = self.graph.ops[op_id]
        if self.first_computed[op_id] is None:
            self._require_first_allowed(op)
            self.first_computed[op_id] = self.position
            self.computed_count += 1
        elif op.computed_once:
            why = "it mutates" if op.mutates else "it is not recomputable"
            self._fail(
                f"computes op {op_id} again, which was computed at {self.first_computed[op_id]}; expected exactly "
                f"once, for {why}: keep or offload what it gives"
            )
        device_version = self.device_version
        for storage, version in self.needs[op_id]:
            if device_version[storage] != version:
                self._fail_needed("reads", storage, version)
            self.prefetching_since[storage] = None
        for storage in op.mutates:
            self._require_no_offload(storage, "mutates")
            version = device_version[storage]
            assert version is not None, "the needed version was there"
            device_version[storage] = version + 1
            self.mutation_count[storage] += 1
            if self.host_version[storage] is not None and self.host_stale_since[storage] is None:
                self.host_stale_since[storage] = self.position
        if in_place_of != _NOTHING:
            self._reuse_in_place(op, in_place_of)
        for storage in op.writes:
            if device_version[storage] is None:
                device_version[storage] = 0

    def _require_first_allowed(self, op: Op) -> None:
        if self.next_boundary < len(self.graph.boundaries):
            position = self.graph.boundaries[self.next_boundary].position
            if op.id >= position:
                self._fail(
                    f"computes op {op.id} before boundary {self.next_boundary}, which stands before op {position}; "
                    f"put boundary {self.next_boundary} first"
                )
        for earlier, why in self.first_after[op.id]:
            if self.first_computed[earlier] is None:
                name = self.graph.ops[earlier].name
                ways = {op.random: "draws from generator", op.group: "is a collective of"}
                shared = f"{ways[why]} {why!r}" if isinstance(why, str) else f"touches {self._name(why)}"
                self._fail(
                    f"computes op {op.id} for the first time before op {earlier} {name!r}, which {shared} "
                    f"as well; expected their original order: compute op {earlier} first"
                )

    def _reuse_in_place(self, op: Op, storage: int) -> None:
        if not 0 <= storage < len(self.graph.storages):
            self._fail(f"reuses storage {storage}, expected a number below {len(self.graph.storages)}")
        pairs = [written for read, written in op.reuses if read == storage]
        if not pairs:
            allowed = ", ".join(self._name(read) for read in sorted({read for read, _ in op.reuses})) or "nothing"
            self._fail(
                f"reuses {self._name(storage)}, which its kernel may not write over: its `reuses` allow {allowed}; "
                f"leave in_place_of out"
            )
        if all(self.device_version[written] is not None for written in pairs):
            self._fail(
                f"reuses {self._name(storage)} for {self._name(pairs[0])}, which is on the device already; "
                f"expected a write that needs memory: leave in_place_of out, or drop {pairs[0]} first"
            )
        self._require_removable(storage, "reuses")
        if storage in op.mutates:
            self._fail(f"reuses {self._name(storage)}, which it mutates as well; leave in_place_of out")
        self.device_version[storage] = None
        self.left[storage] = (f"reused by op {op.id} {op.name!r}", self.position)
        self.device_version[next(written for written in pairs if self.device_version[written] is None)] = 0

    def drop(self, storage: int, _: int) -> None:
        if self.device_version[storage] is None:
            self._fail(f"drops {self._name(storage)}, which {self._whereabouts(storage)}; remove this drop")
        self._require_removable(storage, "drops")
        if self.prefetching_since[storage] is not None:
            self._fail(
                f"drops {self._name(storage)}, whose prefetch at {self.prefetching_since[storage]} no op has read; "
                f"remove the prefetch"
            )
        self.device_version[storage] = None
        self.left[storage] = ("dropped", self.position)

    def _require_removable(self, storage: int, verb: str) -> None:
        self._require_managed(storage, verb)
        if self.departed_at[storage] is not None:
            self._fail(
                f"{verb} {self._name(storage)}, which is the user's since the boundary at {self.departed_at[storage]}; "
                f"expected it to stay to the end"
            )
        self._require_no_offload(storage, verb)

    def _require_no_offload(self, storage: int, verb: str, remedy: str = "wait for it first") -> None:
        if self.offloading_since[storage] is not None:
            since = self.offloading_since[storage]
            self._fail(f"{verb} {self._name(storage)}, whose offload at {since} is under way; {remedy}")

    def _require_managed(self, storage: int, verb: str) -> None:
        if self.graph.storages[storage].resident:
            self._fail(f"{verb} {self._name(storage)}, which is resident; expected a storage that an op writes")

    def offload(self, storage: int, _: int) -> None:
        version = self.device_version[storage]
        if version is None:
            remedy = self._way_back(storage, self.mutation_count[storage])
            self._fail(f"offloads {self._name(storage)}, which {self._whereabouts(storage)}; {remedy}")
        self._require_managed(storage, "offloads")
        self._require_no_offload(storage, "offloads", "remove one of the two")
        if self.host_version[storage] == version and self.host_stale_since[storage] is None:
            self._fail(
                f"offloads {self._name(storage)} at version {version}, which the host holds already; "
                f"remove this offload"
            )
        self.host_version[storage] = version
        self.host_stale_since[storage] = None
        self.offloading_since[storage] = self.position

    def wait(self, storage: int, _: int) -> None:
        if self.offloading_since[storage] is None:
            self._fail(f"waits for {self._name(storage)}, but no offload of it is under way; remove this wait")
        self.offloading_since[storage] = None

    def prefetch(self, storage: int, _: int) -> None:
        self._require_settled_host_copy(storage, "prefetches")
        if self.host_stale_since[storage] is not None:
            self._fail(
                f"prefetches {self._name(storage)}, whose host copy is stale since the mutation at "
                f"{self.host_stale_since[storage]}; offload it again after the mutation"
            )
        if self.device_version[storage] is not None:
            self._fail(
                f"prefetches {self._name(storage)}, which {self._whereabouts(storage)}; remove this prefetch, or drop "
                f"the storage first"
            )
        self.device_version[storage] = self.host_version[storage]
        self.prefetching_since[storage] = self.position

    def drop_host(self, storage: int, _: int) -> None:
        self._require_settled_host_copy(storage, "drops the host copy of")
        if self.prefetching_since[storage] is not None:
            self._fail(
                f"drops the host copy of {self._name(storage)}, whose prefetch at {self.prefetching_since[storage]} is "
                f"under way until an op reads it; move this after that op"
            )
        self.host_version[storage] = None
        self.host_stale_since[storage] = None

    def _require_settled_host_copy(self, storage: int, verb: str) -> None:
        if self.host_version[storage] is None:
            self._fail(f"{verb} {self._name(storage)}, of which the host holds no copy; offload it first")
        self._require_no_offload(storage, verb)

    def boundary(self, number: int, bytes_outside: int) -> None:
        if number != self.next_boundary:
            more = self.next_boundary < len(self.graph.boundaries)
            expected = f"boundary {self.next_boundary}" if more else "no other boundary"
            self._fail(f"stands out of order, expected {expected}: each exactly once, in order")
        if bytes_outside < 0:
            self._fail(f"has {bytes_outside} bytes outside, expected 0 or more")
        boundary = self.graph.boundaries[number]
        if self.computed_count < boundary.position:
            op = self.graph.ops[self.first_computed.index(None)]
            self._fail(
                f"stands before op {boundary.position}, but op {op.id} {op.name!r} has not been computed; "
                f"compute it first"
            )
        for storage in boundary.departures:
            # Every mutation by the ops before has happened, once, and none by the ops after.
            if self.device_version[storage] != self.mutation_count[storage]:
                self._fail_needed("hands out", storage, self.mutation_count[storage])
            self.prefetching_since[storage] = None
            self.departed_at[storage] = self.position
        for storage in boundary.arrivals:
            self.device_version[storage] = 0
        self.next_boundary += 1

    def finish(self) -> None:
        graph = self.graph
        if self.computed_count < len(graph.ops):
            missing = self.first_computed.index(None)
            raise InvalidScheduleError(
                f"the end: op {missing} {graph.ops[missing].name!r} was never computed, expected every op at least "
                f"once; add Compute({missing})"
            )
        if self.next_boundary < len(graph.boundaries):
            raise InvalidScheduleError(
                f"the end: boundary {self.next_boundary} was never reached, expected each exactly once; add "
                f"CrossBoundary({self.next_boundary})"
            )
        for storage in graph.storages:
            last = graph.last_version[storage.id]
            if storage.required_at_end and self.device_version[storage.id] != last:
                raise InvalidScheduleError(
                    f"the end: {self._name(storage.id)} is required at the end{_at_version(graph, storage.id, last)} "
                    f"but {self._whereabouts(storage.id)}; {self._way_back(storage.id, last, how='again')}"
                )

    def _fail_needed(self, verb: str, storage: int, version: int) -> NoReturn:
        """Raise for a storage that is not on the device, or is there at another version."""
        present = self.device_version[storage]
        remedy = self._way_back(storage, version, how="first" if present is None else "again after dropping it")
        if self.graph.storages[storage].resident and present is not None and present > version:
            remedy = "compute it before that mutation"
        needed = f"{self._name(storage)}{_at_version(self.graph, storage, version)}"
        self._fail(f"{verb} {needed}, which {self._whereabouts(storage)}; {remedy}")

    def _whereabouts(self, storage: int) -> str:
        version = self.device_version[storage]
        if version is not None:
            return f"is on the device{_at_version(self.graph, storage, version)}"
        left = self.left[storage]
        if left is not None:
            return f"was {left[0]} at {left[1]}"
        if storage in self.graph.writer_of:
            return "was never computed"
        return "has not arrived yet"

    def _way_back(self, storage: int, version: int, *, how: str = "first") -> str:
        """Return the remedy: how the storage can be on the device at this version."""
        if self.host_version[storage] == version and self.host_stale_since[storage] is None:
            return f"prefetch it {how}"
        if version > 0:  # the mutation is done: the order of first computations was kept
            mutating = [op for op in self.graph.ops if storage in op.mutates][version - 1]
            return f"it comes only from op {mutating.id} {mutating.name!r}, once: keep it, or offload it before"
        writer = self.graph.writer(storage)
        if writer is not None:
            return f"compute op {writer.id} {writer.name!r} {how}"
        for number, boundary in enumerate(self.graph.boundaries):
            if storage in boundary.arrivals and number >= self.next_boundary:
                return f"it arrives at boundary {number}"
        return "it arrives only once: do not drop it, or offload it before"

    def _name(self, storage: int) -> str:
        return f"storage {storage} {self.graph.storages[storage].name!r}"

    def _fail(self, what: str) -> NoReturn:
        named = self.graph.ops if self.code == Code.COMPUTE else self.graph.storages
        subject = self.operand if self.code == Code.BOUNDARY else named[self.operand].name
        raise InvalidScheduleError(f"instruction {self.position} {_TITLES[self.code]}({subject}) {what}")


def _at_version(graph: Graph, storage: int, version: int) -> str:
    return f" at version {version}" if graph.last_version[storage] else ""


def _orders(graph: Graph) -> list[list[tuple[int, int | str]]]:
    """For each op: the ops whose first computation must come before its own, with what they share."""
    orders: list[list[tuple[int, int | str]]] = [[] for _ in graph.ops]
    last: dict[int | str, int] = {}
    for op in graph.ops:
        shared: list[int | str] = [s for s, _ in graph.read_versions[op.id] if graph.last_version[s]]
        shared += op.kept_in_order
        for key in shared:
            if key in last:
                orders[op.id].append((last[key], key))
            last[key] = op.id
    return orders
