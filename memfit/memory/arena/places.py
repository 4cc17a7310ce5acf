"""Places: an address for every request of a planned step, from the plan's own layout, before the step runs.

The schedule says at which position each storage is made and dropped, so that a packer can lay the step out. A running
step says which position it is at; a request there gets the place that its op's order has for it, as far as that is
known, or else that of a result of its size, or one within the bytes that the op has for workspace
(`arena_places.cpp`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from memfit.device import Device
from memfit.graph import Graph
from memfit.memory.arena.layout import OUTLIVES
from memfit.memory.arena.orders import ELSEWHERE, SPARE, Order, Turn, arranged
from memfit.packing import Blocks, Layout, pack
from memfit.packing.blocks import live_bytes
from memfit.packing.from_schedule import blocks_of
from memfit.plan import Plan
from memfit.schedule import Code, Schedule
from memfit.simulate.live_ranges import live_ranges

OUTSIDE = -1  # the offset of what outlives the step, and has ordinary memory
NOWHERE = -2  # in `Seen.offsets`: ordinary memory, unplanned
_NEVER = int(np.iinfo(np.int64).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A request that a schedule makes for a storage at some position.

    Attributes:
        storage: its id.
        size_bytes: of the request, aligned.
        block: of the arena; None for what outlives the step.
    """

    storage: int
    size_bytes: int
    block: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """All that a schedule requests, and the blocks to be laid out for it.

    Attributes:
        positions: the length of the schedule.
        alignment_bytes: of all addresses.
        blocks: of storages and workspaces.
        slots: by position.
        spare: position -> the block of its workspace.
        turns: position -> those of its requests, whose slots are numbers within `slots`.
        closed: positions whose workspace is only handed out by turns: what is requested there may outlive the step.
    """

    positions: int
    alignment_bytes: int
    blocks: Blocks
    slots: Mapping[int, Sequence[Slot]]
    spare: Mapping[int, int]
    turns: Mapping[int, tuple[Turn, ...]]
    closed: frozenset[int] = frozenset()

    def with_orders(self, orders: Mapping[int, Order]) -> Requests:
        """Return the same requests with turns by these orders, by position, and as much workspace as they need."""
        turns, least_bytes = dict(self.turns), dict[int, int]()
        for position, order in orders.items():
            slots = self.slots.get(position, ())
            rooms = {slot.storage: slot.size_bytes for slot in slots if slot.block is not None}
            number_of = {slot.storage: number for number, slot in enumerate(slots)}
            by_storage, least_bytes[position] = arranged(order, rooms, number_of)
            turns[position] = tuple(
                turn if turn.slot < 0 else turn._replace(slot=number_of[turn.slot]) for turn in by_storage
            )
        least_bytes = {at: size for at, size in least_bytes.items() if size > self.spare_bytes(at)}
        return replace(self._with_workspaces(least_bytes) if least_bytes else self, turns=turns)

    def spare_bytes(self, position: int) -> int:
        """Return the bytes that a position has for workspace."""
        return int(self.blocks.sizes_bytes[self.spare[position]]) if position in self.spare else 0

    def _with_workspaces(self, least_bytes: Mapping[int, int]) -> Requests:
        """Return the same requests with at least so many bytes of workspace at these positions."""
        spare = dict(self.spare)
        sizes, starts, ends = self.blocks.sizes_bytes.tolist(), self.blocks.starts.tolist(), self.blocks.ends.tolist()
        for position, size_bytes in least_bytes.items():
            if position not in spare:
                spare[position] = len(sizes)
                sizes.append(size_bytes)
                starts.append(position)
                ends.append(position + 1)
            sizes[spare[position]] = max(sizes[spare[position]], size_bytes)
        blocks = Blocks(
            ids=np.arange(len(sizes)),
            sizes_bytes=sizes,
            starts=starts,
            ends=ends,
            alignment_bytes=self.alignment_bytes,
        )
        return replace(self, blocks=blocks, spare=spare)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The requests of a step that had places; times are of its clock, which counts requests and positions.

    Attributes:
        sizes_bytes: int64[n], as requested.
        starts, ends: int64[n], when each was made and freed; OUTLIVES for what outlived the step or was not followed.
        positions: int64[n], of the schedule; -1 for none.
        offsets: int64[n], in the arena, OUTSIDE or NOWHERE.
        begun_at: int64[m], when each position began.
    """

    sizes_bytes: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    positions: NDArray[np.int64]
    offsets: NDArray[np.int64]
    begun_at: NDArray[np.int64]

    @property
    def stays(self) -> NDArray[np.bool_]:
        """Of each request, whether it was still alive when the next position began."""
        closes = np.append(self.begun_at, np.iinfo(np.int64).max)
        closed_at = closes[np.searchsorted(self.begun_at, self.starts, side="right")]
        return (self.ends == OUTLIVES) | (self.ends > closed_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The address of each request of a planned step.

    Attributes:
        requests: that the layout was made for.
        layout: of their blocks; None if there are none.
        peak_bytes: the greatest number of live bytes of these blocks.
        apart_bytes: the sum of their sizes.
        seconds: how long the search for the layout took.
    """

    requests: Requests
    layout: Layout | None
    peak_bytes: int
    apart_bytes: int
    seconds: float

    @property
    def height_bytes(self) -> int:
        """The bytes of the arena."""
        return self.layout.height_bytes if self.layout else 0

    @property
    def lower_bound_bytes(self) -> int:
        """A lower bound on the height of any layout of these blocks."""
        return self.layout.lower_bound_bytes if self.layout else 0

    @property
    def proven(self) -> bool:
        """Whether no layout is lower."""
        return self.layout is None or self.layout.proven

    def offset_of(self, block: int | None) -> int:
        """Return the address of a block; OUTSIDE for None."""
        return OUTSIDE if block is None or self.layout is None else int(self.layout.offsets_bytes[block])

    def arrays(self) -> list[Sequence[int]]:
        """Return what `memfit_arena_set_places` takes, in its order."""
        asked = self.requests
        every = range(asked.positions)
        slots = [slot for at in every for slot in asked.slots.get(at, ())]
        turns = [turn for at in every for turn in asked.turns.get(at, ())]
        return [
            [asked.positions, len(slots), len(turns), asked.alignment_bytes, self.height_bytes],
            _begins(len(asked.slots.get(at, ())) for at in every),
            [slot.size_bytes for slot in slots],
            [self.offset_of(slot.block) for slot in slots],
            [self.offset_of(asked.spare.get(at)) if at in asked.spare else 0 for at in every],
            [0 if at in asked.closed else asked.spare_bytes(at) for at in every],
            _begins(len(asked.turns.get(at, ())) for at in every),
            *([turn[each] for turn in turns] for each in range(3)),
        ]

    def corrected(self, seen: Seen) -> Requests | None:
        """Return the requests as a step was seen to make them; None if its places suited it as they are.

        Args:
            seen: of a step with these places.
        """
        stays = seen.stays
        orders = {at: _order_of(self.requests, at, seen, stays) for at in self._misplaced(seen, stays)}
        corrected = self.requests.with_orders(orders)
        is_same = corrected.turns == self.requests.turns and corrected.blocks is self.requests.blocks
        return None if is_same else corrected

    def _misplaced(self, seen: Seen, stays: NDArray[np.bool_]) -> list[int]:
        """Return the positions at which a request had no place, or what stayed has another one than its slot."""
        found = set(seen.positions[seen.offsets == NOWHERE].tolist())
        for number in np.flatnonzero((seen.offsets >= 0) & stays).tolist():
            position = int(seen.positions[number])
            slots = self.requests.slots.get(position, ())
            if int(seen.offsets[number]) not in {self.offset_of(slot.block) for slot in slots}:
                found.add(position)
        return sorted(found - {-1})


def requests_of(graph: Graph, schedule: Schedule, device: Device) -> Requests:
    """Return what a schedule requests, as blocks with a device's alignment.

    Args:
        graph: gives sizes; workspace that is not known counts as none.
        schedule: legal on `graph`.
        device: gives the alignment.
    """
    blocks = blocks_of(graph, schedule, device)
    found = live_ranges(graph, schedule)
    slots: defaultdict[int, list[Slot]] = defaultdict(list)
    for stay in found.ranges:
        size_bytes = device.aligned(graph.storages[stay.storage].bytes)
        if stay.begun_by in (Code.COMPUTE, Code.PREFETCH) and stay.memory_of is None and size_bytes:
            block = blocks.block_of.get((stay.first, stay.storage))
            slots[stay.first].append(Slot(storage=stay.storage, size_bytes=size_bytes, block=block))
    for (position, storage), block in blocks.copy_of.items():
        size_bytes = device.aligned(graph.storages[storage].bytes)
        slots[position].append(Slot(storage=storage, size_bytes=size_bytes, block=block))
    return Requests(
        positions=len(schedule),
        alignment_bytes=device.alignment_bytes,
        blocks=blocks.blocks,
        slots={position: tuple(each) for position, each in slots.items()},
        spare=dict(blocks.workspace_of),
        turns={},
    )


def make_places(requests: Requests, *, packer: str, time_limit_seconds: float, seed: int) -> Places:
    """Lay requests out.

    Args:
        requests: of a step.
        packer: one of `memfit packers`.
        time_limit_seconds: how long the packer may search.
        seed: of all that is random in the packer.
    """
    started = time.perf_counter()
    blocks = requests.blocks
    layout = pack(blocks, packer, time_limit_seconds=time_limit_seconds, seed=seed) if len(blocks) else None
    return Places(
        requests=requests,
        layout=layout,
        peak_bytes=int(live_bytes(blocks)[1].max(initial=0)),
        apart_bytes=int(blocks.sizes_bytes.sum()),
        seconds=time.perf_counter() - started,
    )


def with_orders(
    requests: Requests, schedule: Schedule, orders: Mapping[int, Order], closed: Collection[int] = ()
) -> Requests:
    """Return requests that have turns wherever the order of an op's requests is known.

    Args:
        requests: of a schedule.
        schedule: says which op is computed at each position.
        orders: of ops.
        closed: ops that may request what outlives the step.
    """
    computed = schedule.codes == Code.COMPUTE
    apart = np.flatnonzero(computed & (schedule.extras < 0)).tolist()  # not in place of another
    ops: list[int] = schedule.operands.tolist()
    by_position = {position: orders[ops[position]] for position in apart if ops[position] in orders}
    shut = np.flatnonzero(computed & np.isin(schedule.operands, tuple(closed))).tolist()
    return replace(requests.with_orders(by_position), closed=frozenset(shut))


def aligned_as(device: Device, alignment_bytes: int) -> Device:
    """Return a device's profile with the alignment that its arena has."""
    return msgspec.structs.replace(device, alignment_bytes=alignment_bytes)


def bytes_beside(plan: Plan, places: Places) -> int:
    """Return the most bytes that a plan takes beside its arena, if no allocator keeps more than is live.

    Args:
        plan: of a step; its bytes outside are included.
        places: of its schedule.
    """
    device = aligned_as(plan.device, places.requests.alignment_bytes)
    outside = blocks_of(plan.graph, plan.schedule, device).outside_bytes
    return device.resident_bytes(plan.graph) + int(outside.max(initial=0)) + plan.bytes_outside


def _begins(counts: Iterable[int]) -> list[int]:
    return [0, *np.cumsum(list(counts), dtype=np.int64).tolist()]


def _order_of(requests: Requests, position: int, seen: Seen, stays: NDArray[np.bool_]) -> Order:
    """Return the order of a position's requests: what stayed is a result of its size, all else is workspace."""
    numbers: list[int] = np.flatnonzero(seen.positions == position).tolist()
    open_slots = list(requests.slots.get(position, ()))
    sizes = [-(-int(seen.sizes_bytes[n]) // requests.alignment_bytes) * requests.alignment_bytes for n in numbers]
    results: list[int] = []
    for number, size_bytes in zip(numbers, sizes, strict=True):
        fitting = [slot for slot in open_slots if slot.size_bytes == size_bytes]
        if stays[number] and fitting:
            open_slots.remove(fitting[0])
        results.append((fitting[0].storage if fitting else ELSEWHERE) if stays[number] else SPARE)
    return Order(
        sizes_bytes=tuple(sizes),
        starts=tuple(int(seen.starts[number]) for number in numbers),
        ends=tuple(_NEVER if stays[number] else int(seen.ends[number]) for number in numbers),
        results=tuple(results),
    )
