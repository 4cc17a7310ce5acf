"""Orders: what an op requests one after another, and a place for each: a result's own, or one within its workspace."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

SPARE, ELSEWHERE = -1, -2  # in place of a result: workspace, and what stays after the op and is no result
RESULT = -1  # the offset of a turn that is a result: its slot's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The requests of one op, in order.

    Attributes:
        sizes_bytes: of each, aligned.
        starts, ends: when each was made and freed, on any clock; the end of what stayed is after all others.
        results: the storage that each is for, SPARE or ELSEWHERE.
    """

    sizes_bytes: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    results: tuple[int, ...]


class Turn(NamedTuple):
    """The place of one request.

    Attributes:
        slot: the key of the slot in which it lies, SPARE or ELSEWHERE.
        offset: within the slot or the workspace; RESULT if it is what the slot is for.
        size_bytes: of the request.
    """

    slot: int
    offset: int
    size_bytes: int


def arranged(order: Order, rooms: Mapping[int, int], slots: Collection[int]) -> tuple[tuple[Turn, ...], int]:
    """Return the turns of an op's requests, and the bytes of workspace that they need.

    Workspace that is freed before a result is requested may lie where the result will. The largest requests are placed
    first, each at the lowest offset that is free.

    Args:
        order: of the op.
        rooms: bytes of the slot of each result that lies in the arena.
        slots: the results that have a slot, in the arena or not.
    """
    requested_at = {result: order.starts[number] for number, result in enumerate(order.results) if result in rooms}
    turns: dict[int, Turn] = {}
    placed: dict[int, list[tuple[int, int]]] = {SPARE: [], **{slot: [] for slot in rooms}}  # slot -> number, offset
    workspace_bytes = 0
    for number in sorted(range(len(order.results)), key=lambda number: -order.sizes_bytes[number]):
        size_bytes, result = order.sizes_bytes[number], order.results[number]
        if result != SPARE:
            known = result if result in slots else ELSEWHERE
            turns[number] = Turn(known, RESULT, size_bytes)
            continue
        slot, offset = SPARE, _lowest(order, number, placed[SPARE])
        for each, room_bytes in rooms.items():
            if order.ends[number] <= requested_at.get(each, -1):
                lowest = _lowest(order, number, placed[each])
                if lowest + size_bytes <= room_bytes:
                    slot, offset = each, lowest
                    break
        placed[slot].append((number, offset))
        turns[number] = Turn(slot, offset, size_bytes)
        workspace_bytes = max(workspace_bytes, offset + size_bytes if slot == SPARE else 0)
    return tuple(turns[number] for number in range(len(order.results))), workspace_bytes


def _lowest(order: Order, number: int, placed: list[tuple[int, int]]) -> int:
    """Return the lowest offset that is free while a request lives."""
    offset = 0
    for other, begin in sorted(placed, key=lambda each: each[1]):
        is_beside = order.starts[other] < order.ends[number] and order.starts[number] < order.ends[other]
        if is_beside and begin < offset + order.sizes_bytes[number] and begin + order.sizes_bytes[other] > offset:
            offset = begin + order.sizes_bytes[other]
    return offset
