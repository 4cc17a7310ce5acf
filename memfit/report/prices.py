"""What another fate of each storage would cost: kept, computed again, or offloaded; by exact simulation of the plan.

Every price is of one change alone, all else being as the plan has it: prices of two storages do not add up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from memfit.report.edits import Edited, Edits
from memfit.report.fates import Fate, Kind
from memfit.report.words import printable
from memfit.schedule import Code, Compute, Offload, Prefetch, Wait

_MOST_WORK = 60_000_000  # instructions simulated for prices: some seconds; the largest storages come first
_IN_THE_WAY = "its copies, or what the step writes over, stand in the way"
_LONGEST_CHAIN = 2000  # ops computed again for one storage; nobody wants more


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What the whole step becomes by one change, against the plan.

    Attributes:
        seconds: how much longer it takes; negative: shorter.
        computations: how many more ops are computed.
        peak_bytes: its peak, everything included, and `peak_op`, the op that runs there.
        at_peak_bytes: how much more is on the device at the moment of the plan's own peak.
    """

    seconds: float
    computations: int
    peak_bytes: int
    peak_op: int | None
    at_peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What the fates of one storage cost.

    The fate that it has is told from keeping it: what that costs now. The others are told from the plan. None: the
    `why_not` of the same name says why there is no price.

    Attributes:
        at_peak: whether the storage is on the device at the plan's peak.
        keep, again, offload: kept to its last use; dropped and computed again; copied to the host and back.
        link_seconds: what the copies to the host and back take, each, where there is a link.
    """

    storage: int
    at_peak: bool
    keep: Change | None = None
    again: Change | None = None
    offload: Change | None = None
    link_seconds: tuple[float, float] | None = None
    why_not_keep: str = ""
    why_not_again: str = ""
    why_not_offload: str = ""


def price_all(edits: Edits, of_storage: Sequence[Fate]) -> dict[int, Price]:
    """Return the prices of the managed storages, by id: of all, or of the largest where a step is very long.

    Args:
        edits: of the plan.
        of_storage: the fate of each storage, in order of id.
    """
    storages = edits.graph.storages
    managed = [fate for fate in of_storage if fate.kind != Kind.RESIDENT]
    managed.sort(key=lambda fate: (-storages[fate.storage].bytes, fate.storage))
    most = _MOST_WORK // (3 * max(1, len(edits.base.schedule)))
    return {fate.storage: price_of(edits, fate) for fate in managed[:most]}


def price_of(edits: Edits, fate: Fate) -> Price:
    """Return what the fates of one managed storage cost."""
    storage, graph = fate.storage, edits.graph
    at_peak = any(stay.first <= edits.base.timeline.peak_position < stay.last for stay in edits.stays[storage])
    if graph.last_version[storage]:
        why = "the step writes over it"
        return Price(storage=storage, at_peak=at_peak, why_not_keep=why, why_not_again=why, why_not_offload=why)
    kept, why_not_keep = edits.base, ""
    if fate.rematerialized or fate.offloaded:
        kept = edits.attempt(kept=(storage,))
        why_not_keep = "" if kept else _IN_THE_WAY
    gap = None if kept is None else _gap(edits, storage, kept)
    again, why_not_again = _computed_again(edits, fate, kept, gap)
    offload, why_not_offload = _offloaded(edits, fate, kept, gap)
    return Price(
        storage=storage,
        at_peak=at_peak,
        keep=_change(edits, edits.base, kept),
        again=again,
        offload=offload,
        link_seconds=_link_seconds(edits, storage),
        why_not_keep=why_not_keep,
        why_not_again=why_not_again,
        why_not_offload=why_not_offload,
    )


def _change(edits: Edits, before: Edited, after: Edited | None) -> Change | None:
    """Return what `after` has more than `before`, with the peak of `after`."""
    if after is None:
        return None
    plan = edits.plan
    outside_bytes = 0 if plan.graph.boundaries else plan.bytes_outside
    return Change(
        seconds=after.seconds - before.seconds,
        computations=after.computations - before.computations,
        peak_bytes=after.timeline.peak_bytes + outside_bytes,
        peak_op=_op_at(after, after.timeline.peak_position),
        at_peak_bytes=_bytes_at(edits, after) - _bytes_at(edits, before),
    )


def _op_at(edited: Edited, position: int) -> int | None:
    schedule = edited.schedule
    computes = schedule.operands[position:][schedule.codes[position:] == Code.COMPUTE]
    return int(computes[0]) if len(computes) else None


def _bytes_at(edits: Edits, edited: Edited) -> int:
    """Return what is on the device at the plan's peak, or right after it where what runs there is left out."""
    places = edited.places[edits.peak_event :]
    place = places[places >= 0][:1]
    return int(edited.timeline.device_bytes[place[0]]) if len(place) else 0


def _gap(edits: Edits, storage: int, kept: Edited) -> tuple[int, int] | None:
    """Return the events around a stretch in which a kept storage lies unused: the one that holds the plan's peak, or
    the longest.
    """
    graph, end = edits.graph, len(kept.places)
    uses = [event for event in edits.uses[storage] if event == end or kept.places[event] >= 0]
    for number, boundary in enumerate(graph.boundaries):
        if storage in boundary.departures:  # from there on it is the user's, and stays
            uses = [event for event in uses if event <= edits.boundary_events[number]]
    pairs = [(first, last) for first, last in pairwise(uses) if last - first > 1]
    seconds = edits.event_seconds
    at_peak = [pair for pair in pairs if pair[0] < edits.peak_event < pair[1]]
    return max(at_peak or pairs, key=lambda pair: seconds[pair[1]] - seconds[pair[0] + 1], default=None)


def _computed_again(
    edits: Edits, fate: Fate, kept: Edited | None, gap: tuple[int, int] | None
) -> tuple[Change | None, str]:
    """Return the price of dropping the storage in a gap; what it costs now, where that is its fate."""
    if fate.kind == Kind.REMATERIALIZED:
        return _change(edits, kept, edits.base) if kept else None, "" if kept else "it cannot be kept to compare"
    if kept is None or gap is None:
        return None, "it never lies unused"
    chain = chain_of(edits, fate.storage, gap[1])
    if isinstance(chain, str):
        return None, chain
    inserted = [(gap[1], Compute(op=op)) for op in chain]
    after = edits.attempt(uncopied=(fate.storage,), inserted=inserted)
    return _change(edits, edits.base, after), "" if after else _IN_THE_WAY


def chain_of(edits: Edits, storage: int, event: int) -> list[int] | str:
    """Return the ops that bring a storage back before an event, given what else is there then, in order; or why none
    do.
    """
    graph = edits.graph
    order: list[int] = []
    done: set[int] = set()
    waiting = [(storage, False)]
    while waiting:
        wanted, ready = waiting.pop()
        name, writer = printable(graph.storages[wanted].name), graph.writer_of.get(wanted)
        if writer is None:
            return f"{name} comes from outside"
        op = graph.ops[writer]
        if writer in done:
            continue
        if ready:
            done.add(writer)
            order.append(writer)
            continue
        if op.computed_once or any(graph.last_version[written] for written in op.writes):
            return f"{printable(op.name)} can only be computed once"
        if len(waiting) > _LONGEST_CHAIN:
            return f"more than {_LONGEST_CHAIN:,} ops would have to be computed again"
        waiting.append((wanted, True))
        for read, version in graph.read_versions[writer]:
            if bisect_left(edits.mutated_at.get(read, []), event) != version:
                return f"{printable(op.name)} reads {printable(graph.storages[read].name)}, written over by then"
            if read == storage or not edits.is_there(read, event):
                waiting.append((read, False))
    return order


def _offloaded(edits: Edits, fate: Fate, kept: Edited | None, gap: tuple[int, int] | None) -> tuple[Change | None, str]:
    """Return the price of having the storage on the host in a gap; what it costs now, where that is its fate."""
    storage, device = fate.storage, edits.plan.device
    link = _link_seconds(edits, storage)
    if link is None:
        return None, f"{printable(device.name)} has no link to a host"
    if fate.kind == Kind.OFFLOADED:
        return _change(edits, kept, edits.base) if kept else None, "" if kept else "it cannot be kept to compare"
    if kept is None or gap is None:
        return None, "it never lies unused"
    (first, last), seconds = gap, edits.event_seconds
    begin, end = float(seconds[first + 1]), float(seconds[last])
    away = _away(edits, gap, link)
    out = int(np.searchsorted(seconds, begin + link[0]))
    back = int(np.searchsorted(seconds, end - link[1], side="right")) - 1
    inserted = (
        (first + 1, Offload(storage=storage)),
        (min(max(out, first + 1), away), Wait(storage=storage)),
        (max(min(back, last), away + 1), Prefetch(storage=storage)),
    )
    after = edits.attempt(kept=(storage,), inserted=inserted)
    return _change(edits, edits.base, after), "" if after else _IN_THE_WAY


def _away(edits: Edits, gap: tuple[int, int], link: tuple[float, float]) -> int:
    """Return the event while which the storage is on the host at least: the plan's peak, else where it waits least."""
    first, last = gap
    if first < edits.peak_event < last:
        return edits.peak_event
    seconds = edits.event_seconds[first + 1 : last + 1]
    not_hidden = np.maximum(0.0, link[0] - (seconds[:-1] - seconds[0]))
    not_hidden += np.maximum(0.0, link[1] - (seconds[-1] - seconds[1:]))
    return first + 1 + int(np.argmin(not_hidden))


def _link_seconds(edits: Edits, storage: int) -> tuple[float, float] | None:
    device, size_bytes = edits.plan.device, edits.graph.storages[storage].bytes
    to_host, to_device = device.to_host_bytes_per_second, device.to_device_bytes_per_second
    return (size_bytes / to_host, size_bytes / to_device) if to_host and to_device else None
