"""Families of retention for a whole step, and the best of them joined block by block: starting points of a search.

The families are kept sets by price (minimum cuts), with and without gradients that wait to be added; segments of many
lengths; segments within segments; and products of these: all storages that cross every k-th border of a block are kept,
and inside the segments those that a price keeps. For the least budgets there is recursive checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from memfit.planners.engine.bounds.minimum_cuts import Cuts, kept_at
from memfit.planners.engine.parts import ALL_PARTS, Parts
from memfit.planners.engine.retention.decisions import Retention, keep_everything, keep_only, waiting
from memfit.planners.engine.retention.instance import KEPT, NOT_AN_OP, Instance
from memfit.planners.engine.starts.block_dynamic_program import join, worth_joining
from memfit.planners.engine.starts.blocks import Blocks, Option, nested, option_of
from memfit.planners.engine.starts.forward_part import ForwardPart
from memfit.system.records import Integers

_EVERY = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # blocks in a segment
_INNER = (1, 2, 4, 8)  # blocks in a segment within a segment
_PRICES = 2.0 ** np.arange(-4.0, 4.0, 0.5)  # in seconds of the whole step for all that could be kept
_SPLITS = 12  # segment sizes tried by themselves, spread evenly on a logarithmic scale
_WAITING = (0.5, 0.05)  # share of the largest gradient: gradients of as many bytes wait for their reader
_MOST_JOINED = 128  # retentions in one block dynamic program; more cost time and gain little

Make = Callable[[], Retention]
_NOTHING: frozenset[int] = frozenset()


def structured(instance: Instance, is_enough: Callable[[int], bool], parts: Parts = ALL_PARTS) -> list[Option]:
    """Return starting points: the best of all families for each block, at several aims, and the fastest single one.

    Args:
        instance: gives the budget.
        is_enough: takes the number of simulated retentions, and returns whether to stop there.
        parts: which families there are.
    """
    blocks = Blocks.of(instance)
    if blocks.count == 1:
        return []
    budget_bytes = instance.budget_bytes
    options: list[Option] = []
    alone: Option | None = None
    for count, make in enumerate(families(blocks, kept_by_price(instance), parts)):
        if options and is_enough(count):
            break
        option = option_of(blocks, make())
        is_faster = alone is None or option.total_seconds < alone.total_seconds
        if option.peak_bytes <= instance.problem.budget_bytes and is_faster:
            alone = option
        if len(options) == 2 * _MOST_JOINED:
            options = worth_joining(options, budget_bytes, _MOST_JOINED)
        options.append(option)
    joined = join(blocks, worth_joining(options, budget_bytes, _MOST_JOINED))
    return joined if alone is None else [*joined, alone]


def kept_by_price(instance: Instance) -> list[frozenset[int]]:
    """Return the kept sets (storage ids) of minimum cuts at the first op of backward, in ascending order of price."""
    crossing = next((op for op in instance.op_at[instance.backward_start :] if op != NOT_AN_OP), None)
    if crossing is None:
        return []
    cuts = Cuts(instance.graph, instance.problem.device)
    at = cuts.at(crossing)
    unit = float(cuts.seconds.sum()) / max(1, at.needed_bytes)
    return list(dict.fromkeys(kept_at(instance.graph, at.cut(price * unit)) for price in _PRICES))


def kept_by_segments(instance: Instance) -> list[Retention]:
    """Return the retention of Chen's segments of all sizes, from one candidate to half of everything."""
    forward_part = ForwardPart.of(instance)
    largest = max(2, sum(forward_part.written_bytes) // 2)
    sizes = np.geomspace(max(1, largest / 500), largest, _SPLITS)
    kept = dict.fromkeys(forward_part.split(int(size)).kept for size in (0, *sizes))
    return [keep_only(instance, storages) for storages in kept]


def families(blocks: Blocks, by_price: Sequence[frozenset[int]], parts: Parts = ALL_PARTS) -> Iterator[Make]:
    """Yield functions that make retentions: the plain ones first, then the products in a random order.

    Args:
        blocks: of an instance.
        by_price: kept sets, by storage id.
        parts: which families there are.
    """
    instance = blocks.instance
    yield partial(keep_everything, instance)
    for kept in by_price:
        yield partial(keep_only, instance, kept)
    plain = [keep_everything(instance), *(keep_only(instance, kept) for kept in by_price)]
    written = instance.tables.storages["writer"] >= instance.backward_start
    largest = int(instance.tables.storages["size_bytes"][written].max(initial=0))
    for share in _WAITING if parts.waiting_gradients else ():
        for retention in plain:
            yield partial(waiting, instance, retention, int(share * largest))
    products = list(_products(blocks, by_price, parts))
    for index in np.random.default_rng(0).permutation(len(products)):
        yield products[int(index)]


def _products(blocks: Blocks, by_price: Sequence[frozenset[int]], parts: Parts) -> Iterator[Make]:
    instance, own = blocks.instance, blocks.of_storage
    for every in _EVERY:
        if every >= blocks.count:
            return
        borders = blocks.borders(every)
        outer = own // every
        yield partial(nested, instance, borders, [(_NOTHING, outer)])
        for kept in by_price:
            yield partial(keep_only, instance, kept | borders)
            yield partial(nested, instance, kept | borders, [(_NOTHING, own)])
        for inner in _INNER if parts.nested_segments else ():
            if inner < every:
                for kept in (_NOTHING, *by_price):
                    levels: list[tuple[frozenset[int], Integers]]
                    levels = [(blocks.borders(inner) | kept, outer), (_NOTHING, own // inner)]
                    yield partial(nested, instance, borders, levels)


def recursive_checkpoints(instance: Instance, stored: int) -> Retention:
    """Return the retention of recursive checkpointing with k = `stored`.

    k results of the forward pass are kept. When backward reaches a path between two of them, the path is recomputed,
    and k of its results are kept; and so on, until no path can be divided.

    Args:
        instance: the tables of the graph.
        stored: k, the results stored on each path.

    Source: Chen et al. 2016, section 4.4; planner `recursive` does it with mirror counts instead.
    """
    forward_part = ForwardPart.of(instance)
    first_read = _first_reads(instance, forward_part)
    hold_of: dict[int, int] = {}
    for path in forward_part.paths(stored):
        inside = slice(path.first, path.end)
        hold = int(first_read[inside].min()) if path.level else 0  # where results of the path are recomputed
        if path.places:
            here = forward_part.crossing(path.places)
        else:
            here = (storage for op in forward_part.ops[inside] for storage in instance.graph.ops[op].writes)
        for storage in here:
            hold_of.setdefault(storage, hold)
    intervals, everything = instance.tables.intervals, keep_everything(instance)
    hold = np.array([hold_of.get(storage, 0) for storage in instance.storage_of], np.int64)[intervals["storage"]]
    dropped = instance.crosses & (intervals["rule"] != KEPT) & (hold > 0)
    return Retention(
        release=np.where(dropped, intervals["start"], everything.release),
        hold=np.where(dropped, np.clip(hold, intervals["start"] + 1, intervals["end"]), everything.hold),
    )


def _first_reads(instance: Instance, forward_part: ForwardPart) -> Integers:
    """Return for each forward op the first position of backward that reads a result; the last position if none does."""
    first = np.full(len(instance.graph.ops), len(instance.op_at) - 1, np.int64)
    for position in range(len(instance.op_at) - 1, instance.backward_start - 1, -1):
        if instance.op_at[position] != NOT_AN_OP:
            for storage, _ in instance.graph.read_versions[instance.op_at[position]]:
                writer = instance.graph.writer_of.get(storage)
                if writer is not None:
                    first[writer] = position
    return first[list(forward_part.ops)]
