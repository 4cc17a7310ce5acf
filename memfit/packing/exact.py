"""Packer `exact`: branch and bound over capacities, until a layout is proved to be the lowest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.errors import InvalidOptionError
from memfit.packing.best_fit import fill_lines
from memfit.packing.blocks import Blocks, Layout, PackingProblem
from memfit.packing.branching import FAILED, FOUND, STOPPED, Tree, go_on, make_table, make_tree, start
from memfit.packing.searching import STEP_WORK, Best, Steps, search
from memfit.packing.sections import Sections, most_live_bytes, sections_of

MOST_BLOCKS = 4096  # a tree takes memory by their square
_ORDERS = ("WAT", "TAW", "TWA", "AW", "CAT", "ZW")
_NODE_WORK = 15  # for each block
_FIRST_NODES = 256
_FINEST_SHARE = 1 / 64  # of the gap between bound and height, in the first round; halved in each
_NOISE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """Decide for one capacity after the other whether the blocks fit, by depth-first search from below.

    Rounds double the nodes that a decision may take. A round tries the lower bound, then halves the gap between what is
    out of reach and what was found; each decision is tried with several orders of the blocks (by live-range length W or
    sections C, most live bytes met T, area A, size Z, as in MiniMalloc) and one drawn at random. A search that ends
    without a layout raises the lower bound; where the two meet, the layout is proven.

    Source: Moffitt 2023, "MiniMalloc"; sections to cover, nogoods, twins (see `branching`) and drawn orders are added.
    Beyond `MOST_BLOCKS` blocks no tree is built, and the answer is that of `best_fit`.
    """

    name: ClassVar[str] = "exact"
    source: ClassVar[str] = "Moffitt 2023 (MiniMalloc): canonical branch and bound; with sections to cover"

    nodes: int = field(default=0, metadata={"help": "nodes to visit in all; 0 goes on until proof or time limit"})

    def __post_init__(self) -> None:
        if self.nodes < 0:
            raise InvalidOptionError(f"exact has nodes {self.nodes}, expected 0 (no limit) or more")

    def pack(self, problem: PackingProblem) -> Layout:
        """Return the best layout found until it is proven, the nodes are used up, or the time limit is reached."""
        best, sections = Best(problem), sections_of(problem.blocks)
        steps = exact_steps(problem, sections, best, nodes=self.nodes or None)
        return search(problem, best, [steps], self.name)


def exact_steps(problem: PackingProblem, sections: Sections, best: Best, *, nodes: int | None = None) -> Steps:
    """Search in steps of some nodes; the first is best fit, whose height is the first to go below."""
    blocks = problem.blocks
    offsets = fill_lines(blocks, sections)
    best.offer(offsets, int((offsets + blocks.sizes_bytes).max(initial=0)), Exact.name)
    yield len(blocks) * 1000
    if len(blocks) <= MOST_BLOCKS and not best.proven:
        yield from _Decisions(blocks, sections, best, problem.seed, nodes).rounds()


class _Order(NamedTuple):
    """An order of the blocks; its tree is built when it is first searched."""

    number: int
    keys: list[NDArray[Any]]


class _Decisions:
    """Decisions about capacities, in units of the greatest common divisor of all sizes."""

    def __init__(self, blocks: Blocks, sections: Sections, best: Best, seed: int, nodes: int | None) -> None:
        self.blocks, self.sections, self.best, self.nodes_left = blocks, sections, best, nodes
        self.unit = int(np.gcd.reduce(blocks.sizes_bytes))
        self.columns = _columns(blocks, sections)
        self.random = np.random.default_rng(seed)
        self.table = make_table()
        self.orders = [_Order(number, [self.columns[c] for c in name]) for number, name in enumerate(_ORDERS)]
        self.trees: dict[int, tuple[NDArray[np.int64], Tree]] = {}
        self.drawn = len(_ORDERS)
        # A node looks at every block left, and at the sections of those that rise.
        self.node_work = _NODE_WORK * len(blocks) + int((sections.lasts - sections.firsts).sum())

    def rounds(self) -> Steps:
        nodes, finest = _FIRST_NODES, _FINEST_SHARE
        while not self.best.proven and self.nodes_left != 0:
            orders = [*self.orders, self.draw()]
            yield from self.try_capacity(self.best.bound_bytes, nodes, orders)
            out_of_reach = self.best.bound_bytes
            while not self.best.proven and self.nodes_left != 0:
                gap = self.best.height_bytes - out_of_reach
                if gap <= max(self.unit, int(finest * self.best.bound_bytes)):
                    break
                aim = out_of_reach + gap // (2 * self.unit) * self.unit
                yield from self.try_capacity(aim, nodes, orders)
                if self.best.height_bytes > aim:
                    out_of_reach = max(aim, self.best.bound_bytes)
            nodes, finest = 2 * nodes, finest / 2

    def try_capacity(self, capacity_bytes: int, nodes: int, orders: list[_Order]) -> Steps:
        """Offer a layout within the capacity, or raise the bound above it, or give up after `nodes` for each order."""
        for order in orders:
            if self.best.proven or self.best.height_bytes <= capacity_bytes or self.best.bound_bytes > capacity_bytes:
                return
            yield from self.decide(capacity_bytes, nodes, order)

    def decide(self, capacity_bytes: int, nodes: int, order: _Order) -> Steps:
        units = capacity_bytes // self.unit
        ranks, tree = self.tree_of(order)
        start(tree, units, hash((units, order.number)) & 0x7FFFFFFF)
        chunk = max(16, STEP_WORK // self.node_work)
        result = STOPPED
        while nodes > 0 and result == STOPPED:
            now = min(chunk, nodes, chunk if self.nodes_left is None else self.nodes_left)
            result = go_on(tree, now)
            nodes -= now
            if self.nodes_left is not None:
                self.nodes_left -= now
                nodes = min(nodes, self.nodes_left)
            if result == FOUND:
                offsets = np.zeros(len(self.blocks), np.int64)
                offsets[ranks] = tree.blocks["offset"] * self.unit
                self.best.offer(offsets, int((offsets + self.blocks.sizes_bytes).max()), Exact.name)
            elif result == FAILED:
                self.best.bound_bytes = max(self.best.bound_bytes, (units + 1) * self.unit)
            yield now * self.node_work

    def draw(self) -> _Order:
        """Return an order by a power of length, size and most live bytes, blurred."""
        powers, noise = self.random.uniform(0, 1, 3), self.random.normal(0, _NOISE, len(self.blocks))
        logs = [np.log(self.columns[c].astype(np.float64)) for c in "WZT"]
        self.drawn += 1
        return _Order(self.drawn, [sum(p * log for p, log in zip(powers, logs, strict=True)) + noise])

    def tree_of(self, order: _Order) -> tuple[NDArray[np.int64], Tree]:
        """Return the blocks in this order, and their tree; those of orders that come back are kept."""
        if order.number in self.trees:
            return self.trees[order.number]
        ranks = np.lexsort([-key for key in reversed(order.keys)])
        sizes = self.blocks.sizes_bytes[ranks] // self.unit
        built = ranks, make_tree(sizes, self.sections.firsts[ranks], self.sections.lasts[ranks], self.table)
        if order.number < len(_ORDERS):
            self.trees[order.number] = built
        return built


def _columns(blocks: Blocks, sections: Sections) -> dict[str, NDArray[Any]]:
    """Return what orders are made of: area A, sections C, most live bytes T, length W, size Z."""
    lengths = blocks.ends - blocks.starts
    return {
        "A": blocks.sizes_bytes * lengths.astype(np.float64),
        "C": (sections.lasts - sections.firsts).astype(np.int64),
        "T": most_live_bytes(blocks, sections),
        "W": lengths,
        "Z": blocks.sizes_bytes,
    }
