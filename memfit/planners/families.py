"""Families of windows for a whole step, and the best of them joined block by block: where a search begins.

Kept sets by price (minimum cuts), with gradients that wait to be added or without, segments of many lengths, segments
within segments, and the products of these: at every so manieth border of a block all that crosses is kept, and inside
what a price keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from memfit.planners.blocks import Blocks, Option, nested, option_of
from memfit.planners.cuts import Cuts, kept_at
from memfit.planners.joining import join, worth_joining
from memfit.planners.program import NOT_AN_OP, Program
from memfit.planners.sublinear import Frontier
from memfit.planners.windows import Integers, Windows, keep_everything, keep_only, waiting

_EVERY = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # blocks in a segment
_INNER = (1, 2, 4, 8)  # blocks in a segment within a segment
_PRICES = 2.0 ** np.arange(-4.0, 4.0, 0.5)  # in seconds of the whole step for all that could be kept
_SPLITS = 12  # segment sizes tried by themselves, spread evenly on a logarithmic scale
_WAITING = (0.5, 0.05)  # of the largest gradient: what has as many bytes waits for what reads it
_MOST_JOINED = 128  # of the families' windows; more cost time and gain little

Make = Callable[[], Windows]
_NOTHING: frozenset[int] = frozenset()


def structured(program: Program, is_enough: Callable[[int], bool]) -> list[Option]:
    """Return windows to begin a search with: what block by block is best of all families, at several aims, and the
    fastest of a single family that fits.

    Args:
        program: within its budget.
        is_enough: given how many windows have been simulated: whether to leave it at that.
    """
    blocks = Blocks.of(program)
    if blocks.count == 1:
        return []
    budget_bytes = program.budget_bytes
    options: list[Option] = []
    alone: Option | None = None
    for count, make in enumerate(families(blocks, kept_by_price(program))):
        if options and is_enough(count):
            break
        option = option_of(blocks, make())
        is_faster = alone is None or option.total_seconds < alone.total_seconds
        if option.peak_bytes <= program.problem.budget_bytes and is_faster:
            alone = option
        if len(options) == 2 * _MOST_JOINED:
            options = worth_joining(options, budget_bytes, _MOST_JOINED)
        options.append(option)
    joined = join(blocks, worth_joining(options, budget_bytes, _MOST_JOINED))
    return joined if alone is None else [*joined, alone]


def kept_by_price(program: Program) -> list[frozenset[int]]:
    """Return the kept sets, by id, of minimum cuts where backward begins, from the lowest price up."""
    turning = next((op for op in program.op_at[program.backward_start :] if op != NOT_AN_OP), None)
    if turning is None:
        return []
    cuts = Cuts(program.graph, program.problem.device)
    at = cuts.at(turning)
    unit = float(cuts.seconds.sum()) / max(1, at.wanted_bytes)
    return list(dict.fromkeys(kept_at(program.graph, at.cut(price * unit)) for price in _PRICES))


def kept_by_segments(program: Program) -> list[Windows]:
    """Return the windows of Chen's segments of all sizes, from one candidate to half of everything."""
    frontier = Frontier.of(program)
    largest = max(2, sum(frontier.written_bytes) // 2)
    sizes = np.geomspace(max(1, largest / 500), largest, _SPLITS)
    kept = dict.fromkeys(frontier.split(int(size)).kept for size in (0, *sizes))
    return [keep_only(program, storages) for storages in kept]


def families(blocks: Blocks, by_price: Sequence[frozenset[int]]) -> Iterator[Make]:
    """Yield what makes windows: the plain ones first, then the products in an order that covers them evenly."""
    program = blocks.program
    yield partial(keep_everything, program)
    for kept in by_price:
        yield partial(keep_only, program, kept)
    plain = [keep_everything(program), *(keep_only(program, kept) for kept in by_price)]
    written = program.tables.storages["writer"] >= program.backward_start
    largest = int(program.tables.storages["size_bytes"][written].max(initial=0))
    for share in _WAITING:
        for windows in plain:
            yield partial(waiting, program, windows, int(share * largest))
    products = list(_products(blocks, by_price))
    for index in np.random.default_rng(0).permutation(len(products)):
        yield products[int(index)]


def _products(blocks: Blocks, by_price: Sequence[frozenset[int]]) -> Iterator[Make]:
    program, own = blocks.program, blocks.of_storage
    for every in _EVERY:
        if every >= blocks.count:
            return
        borders = blocks.borders(every)
        outer = own // every
        yield partial(nested, program, borders, [(_NOTHING, outer)])
        for kept in by_price:
            yield partial(keep_only, program, kept | borders)
            yield partial(nested, program, kept | borders, [(_NOTHING, own)])
        for inner in _INNER:
            if inner < every:
                for kept in (_NOTHING, *by_price):
                    levels: list[tuple[frozenset[int], Integers]]
                    levels = [(blocks.borders(inner) | kept, outer), (_NOTHING, own // inner)]
                    yield partial(nested, program, borders, levels)
