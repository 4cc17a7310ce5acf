"""The meaning of a schedule, written as plainly as it can be said: checker and simulator in one, slow on purpose.

It shares nothing with memfit but the graph and the instructions, and looks for versions, orders and bytes at each step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from memfit.device import GENERIC, Device
from memfit.graph import Graph
from memfit.schedule import Compute, CrossBoundary, Drop, DropHost, Instruction, Offload, Prefetch, Schedule, Wait


class IllegalError(Exception):
    """An instruction, or the end, breaks a rule; says nothing more."""


def need(condition: object) -> None:
    if not condition:
        raise IllegalError


@dataclass
class Reference:
    graph: Graph
    device: Device = GENERIC
    versions: dict[int, int] = field(default_factory=dict)  # on the device
    host: dict[int, int] = field(default_factory=dict)  # versions on the host
    stale: set[int] = field(default_factory=set)
    offloading: dict[int, float] = field(default_factory=dict)  # storage -> when the copy ends
    prefetching: dict[int, float] = field(default_factory=dict)
    users: set[int] = field(default_factory=set)
    computed: list[int] = field(default_factory=list)
    crossed: int = 0
    outside: int = 0
    clocks: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # compute, to host, to device
    sent: float = 0.0  # when the last collective ends
    sent_at: dict[int, float] = field(default_factory=dict)  # storage -> when its last collective ends
    rows: list[tuple[float, float, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.versions = {storage.id: 0 for storage in self.graph.storages if storage.resident}

    def size(self, storages: object, alignment: int = 1) -> int:
        return sum(math.ceil(self.graph.storages[s].bytes / alignment) * alignment for s in storages)

    def removable(self, s: int) -> bool:
        taken = s in self.versions and not self.graph.storages[s].resident
        return taken and s not in self.users and s not in self.offloading

    def run(self, instruction: Instruction) -> None:
        start, briefly, is_collective = self.clocks[0], 0, False
        match instruction:
            case Compute(op=op, in_place_of=taken):
                start, briefly = self.compute(op, taken)
                is_collective = self.graph.ops[op].group is not None
            case Drop(storage=s):
                need(self.removable(s) and s not in self.prefetching)
                del self.versions[s]
            case Offload(storage=s):
                need(s in self.versions and not self.graph.storages[s].resident and s not in self.offloading)
                need(s in self.stale or self.host.get(s) != self.versions[s])
                self.host[s] = self.versions[s]
                self.stale.discard(s)
                start = max(self.clocks[0], self.clocks[1])
                self.offloading[s] = self.clocks[1] = start + self.size([s]) / self.device.to_host_bytes_per_second
            case Wait(storage=s):
                need(s in self.offloading)
                self.clocks[0] = max(self.clocks[0], self.offloading.pop(s))
            case Prefetch(storage=s):
                need(s in self.host and not {s} & {*self.stale, *self.offloading, *self.versions})
                self.versions[s] = self.host[s]
                start = max(self.clocks[0], self.clocks[2])
                self.prefetching[s] = self.clocks[2] = start + self.size([s]) / self.device.to_device_bytes_per_second
            case DropHost(storage=s):
                need(s in self.host and s not in self.offloading and s not in self.prefetching)
                del self.host[s]
                self.stale.discard(s)
            case CrossBoundary(boundary=number, bytes_outside=outside):
                self.cross(number, outside)
        end = {Offload: self.clocks[1], Prefetch: self.clocks[2]}.get(type(instruction), self.clocks[0])
        end = self.sent if is_collective else end
        live = self.size(self.versions, self.device.alignment_bytes) + self.outside + briefly
        self.rows.append((start, end, live, self.size(self.host)))

    def compute(self, number: int, taken: int | None) -> tuple[float, int]:
        need(number < len(self.graph.ops))
        op, before = self.graph.ops[number], self.graph.ops[:number]
        mutated = {s for each in self.graph.ops for s in each.mutates}
        touched = {*op.reads, *op.mutates}
        if number in self.computed:
            need(op.recomputable and not op.mutates)
        else:
            need(all(boundary.position > number for boundary in self.graph.boundaries[self.crossed :]))
            for each in before:
                shared = touched & {*each.reads, *each.mutates} & mutated
                tied = {*op.kept_in_order} & {*each.kept_in_order}
                need(each.id in self.computed or not (shared or tied))
        need(all(self.versions.get(s) == sum(s in each.mutates for each in before) for s in touched))
        need(not self.offloading.keys() & set(op.mutates))
        start = max([self.clocks[0], *(self.prefetching.pop(s, 0.0) for s in touched)])
        if op.group is None:
            start = max([start, *(self.sent_at.get(s, 0.0) for s in touched)])
            self.clocks[0] = start + op.seconds
        else:
            self.clocks[0] = start
            start = max(start, self.sent)
            self.sent = start + op.seconds
            self.sent_at |= dict.fromkeys({*touched, *op.writes}, self.sent)
        self.versions.update({s: self.versions[s] + 1 for s in op.mutates})
        self.stale |= set(op.mutates) & self.host.keys()
        fresh = [s for s in op.writes if s not in self.versions]
        if taken is not None:
            need(any(read == taken and written in fresh for read, written in op.reuses))
            need(self.removable(taken) and taken not in op.mutates)
            del self.versions[taken]
        self.versions.update(dict.fromkeys(fresh, 0))
        self.computed.append(number)
        second_copies = self.size(set(op.writes) - set(fresh), self.device.alignment_bytes)
        return start, second_copies + (op.workspace_bytes or 0)

    def cross(self, number: int, outside: int) -> None:
        need(number == self.crossed and number < len(self.graph.boundaries))
        boundary = self.graph.boundaries[number]
        before = self.graph.ops[: boundary.position]
        need({op.id for op in before} <= set(self.computed))
        for s in boundary.departures:
            need(self.versions.get(s) == sum(s in op.mutates for op in before))
            self.clocks[0] = max(self.clocks[0], self.prefetching.pop(s, 0.0), self.sent_at.get(s, 0.0))
        self.users |= set(boundary.departures)
        self.versions.update(dict.fromkeys(boundary.arrivals, 0))
        self.outside += outside
        self.crossed += 1

    def finish(self) -> None:
        need(set(self.computed) == {op.id for op in self.graph.ops} and self.crossed == len(self.graph.boundaries))
        for storage in self.graph.storages:
            last = sum(storage.id in op.mutates for op in self.graph.ops)
            need(not storage.required_at_end or self.versions.get(storage.id) == last)


def first_illegal(graph: Graph, schedule: Schedule, device: Device) -> int | str | None:
    """Return the position of the first illegal instruction, "the end", or None for a legal schedule."""
    reference = Reference(graph, device)
    for position, instruction in enumerate(schedule):
        try:
            need(getattr(instruction, "storage", 0) < len(graph.storages))
            reference.run(instruction)
        except IllegalError:
            return position
    try:
        reference.finish()
    except IllegalError:
        return "the end"
    return None
