"""Packer `exact`: branch and bound over capacities, until a layout is proved to be the lowest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.packing.blocks import Blocks, Layout, PackingProblem
from memfit.packing.exact.branching import FAILED, FOUND, STOPPED, go_on, start
from memfit.packing.exact.tree import Tree, make_tree
from memfit.packing.improve.searching import STEP_WORK, Best, Steps, Turns, require_limit, search
from memfit.packing.parts import RULES, WITHOUT_HELP, Parts, parts_without
from memfit.packing.published.best_fit import fill_lines
from memfit.packing.sections import Sections, most_live_bytes, sections_of

MOST_BLOCKS = 4096  # a tree takes memory by their square
_ORDERS = ("WAT", "TAW", "TWA", "AW", "CAT", "ZW")
_NODE_WORK = 15  # for each block
_FIRST_NODES = 256
_FINEST_SHARE = 1 / 64  # of the gap between bound and height, in the first round; halved in each
_CLIMB_NODES = 1000  # of a search while climbing: it soon finds a layout, or hardly ever
_CLIMB_FROM = 4096  # nodes of a round: the first rounds find what is easy, and good layouts elsewhere
_CLIMBS = 32  # nodes of climbing at the bound in a round, for each that a fixed order is given
_CHANGED, _CHANGE, _PATIENCE = 0.2, 2.0, 30  # share of keys, deviation of their logarithms; changes that place no more
_NOISE, _CLIMB_NOISE = 0.5, (0.5, 2.5)  # of the logarithms of a drawn order's keys, and while climbing


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """Decide for one capacity after the other whether the blocks fit, by depth-first search from below.

    Each round doubles the nodes that a decision may visit. A round tries the lower bound, then halves the gap between
    the highest capacity that failed and the lowest layout. Each decision is tried with several orders of the blocks (by
    live-range length W or sections C, most live bytes met T, area A, size Z, as in MiniMalloc) and one drawn at random.
    Short searches climb, too: how long a search takes has a heavy tail in the order, so that an order that places more
    blocks in few nodes is changed further. A search that ends without a layout raises the lower bound; a layout at that
    bound is proven.

    More than `MOST_BLOCKS` blocks are not searched; they get the layout of `best_fit`.

    Source: Moffitt 2023, "MiniMalloc"; sections to cover and supports (see `branching`), drawn orders and climbing are
    added.
    """

    name: ClassVar[str] = "exact"
    source: ClassVar[str] = "Moffitt 2023 (MiniMalloc): canonical branch and bound; with sections to cover"

    nodes: int = field(default=0, metadata={"help": "nodes to visit in all; 0 goes on until proof or time limit"})

    without: str = field(default="", metadata={"help": WITHOUT_HELP.format(", ".join(RULES))})

    def __post_init__(self) -> None:
        parts_without(self.name, self.without)
        require_limit(self.name, "nodes", self.nodes)

    def pack(self, problem: PackingProblem) -> Layout:
        """Return the best layout found until it is proven, the nodes are used up, or the time limit is reached."""
        best, sections = Best(problem), sections_of(problem.blocks)
        parts = parts_without(self.name, self.without)
        steps = exact_steps(problem, sections, best, parts=parts, nodes=self.nodes or None)
        return search(problem, best, [Turns(steps)], self.name)


def exact_steps(
    problem: PackingProblem, sections: Sections, best: Best, *, parts: Parts, nodes: int | None = None
) -> Steps:
    """Search in steps of some nodes; the first layout is that of best fit.

    Args:
        problem: its blocks and its seed.
        sections: those of the blocks.
        best: gets each lower layout and each higher bound.
        parts: which rules are switched on.
        nodes: how many may be visited in all; none is no limit.
    """
    blocks = problem.blocks
    if parts.best_fit:
        offsets = fill_lines(blocks, sections)
        best.offer(offsets, Exact.name)
        yield len(blocks) * 1000
    if len(blocks) <= MOST_BLOCKS and not best.proven:
        yield from _Decisions(problem, sections, best, parts, nodes).rounds()


class _Order(NamedTuple):
    """An order of the blocks; its tree is built when it is first searched."""

    number: int
    keys: list[NDArray[Any]]


@dataclass(slots=True)
class _Climb:
    """The keys of the order that placed the most blocks, how many, and how many changes placed no more."""

    keys: NDArray[np.float64]
    placed: int = 0
    unchanged: int = _PATIENCE + 1


class _Decisions:
    """Decisions about capacities, in units of the greatest common divisor of all sizes."""

    def __init__(
        self, problem: PackingProblem, sections: Sections, best: Best, parts: Parts, nodes: int | None
    ) -> None:
        blocks = problem.blocks
        self.blocks, self.sections, self.best, self.parts, self.nodes_left = blocks, sections, best, parts, nodes
        self.unit = int(np.gcd.reduce(blocks.sizes_bytes))
        self.columns = _columns(blocks, sections)
        self.random = np.random.default_rng(problem.seed)
        self.climb_random = np.random.default_rng((problem.seed, 1))
        self.orders = [_Order(number, [self.columns[c] for c in name]) for number, name in enumerate(_ORDERS)]
        self.trees: dict[int, tuple[NDArray[np.int64], Tree]] = {}
        self.drawn = len(_ORDERS)
        self.climbs: dict[int, _Climb] = {}  # by capacity
        self.placed = 0  # blocks, by the search that runs
        # A node reads every remaining block, and the sections of those that rise.
        self.node_work = _NODE_WORK * len(blocks) + int((sections.lasts - sections.firsts).sum())

    def rounds(self) -> Steps:
        """Decide about lower and lower capacities until the best layout is proven or the nodes are used up."""
        nodes, finest = _FIRST_NODES, _FINEST_SHARE
        while not self.best.proven and self.nodes_left != 0:
            yield from self.try_capacity(self.best.bound_bytes, nodes)
            if self.parts.climbing and nodes >= _CLIMB_FROM:
                yield from self.climb(self.best.bound_bytes, _CLIMBS * nodes)
            out_of_reach = self.best.bound_bytes
            while not self.best.proven and self.nodes_left != 0:
                gap = self.best.height_bytes - out_of_reach
                if gap <= max(self.unit, int(finest * self.best.bound_bytes)):
                    break
                aim = out_of_reach + gap // (2 * self.unit) * self.unit
                yield from self.try_capacity(aim, nodes)
                if self.best.height_bytes > aim:
                    out_of_reach = max(aim, self.best.bound_bytes)
            nodes, finest = 2 * nodes, finest / 2

    def try_capacity(self, capacity_bytes: int, nodes: int) -> Steps:
        """Offer a layout within the capacity, or raise the bound above it, or stop after `nodes` for each order."""
        for order in self.orders:
            if self.is_decided(capacity_bytes):
                return
            yield from self.decide(capacity_bytes, nodes, order)
        if self.parts.drawn_orders and not self.is_decided(capacity_bytes):
            yield from self.decide(capacity_bytes, nodes, self.draw())

    def climb(self, capacity_bytes: int, nodes: int) -> Steps:
        """Search a capacity by short searches of so many nodes together, with orders that place more and more blocks.

        An order is changed at random; the change stays unless the search then places fewer blocks. Where no change
        places more for a while, another order is drawn.
        """
        climb = self.climbs.setdefault(capacity_bytes, _Climb(keys=np.zeros(0)))
        while nodes > 0 and not self.is_decided(capacity_bytes):
            is_drawn = climb.unchanged > _PATIENCE
            random = self.climb_random
            keys = self.drawn_keys(random, random.uniform(*_CLIMB_NOISE)) if is_drawn else self.changed(climb.keys)
            self.placed = 0
            self.drawn += 1
            yield from self.decide(capacity_bytes, min(nodes, _CLIMB_NODES), _Order(self.drawn, [keys]))
            nodes -= _CLIMB_NODES
            is_better = is_drawn or self.placed > climb.placed
            climb.unchanged = 0 if is_better else climb.unchanged + 1
            if is_better or self.placed == climb.placed:
                climb.keys, climb.placed = keys, self.placed

    def changed(self, keys: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return keys of an order with a share of them changed."""
        changes = self.climb_random.random(len(keys)) < _CHANGED
        return keys + changes * self.climb_random.normal(0, _CHANGE, len(keys))

    def is_decided(self, capacity_bytes: int) -> bool:
        """Return whether the best layout is within a capacity, or the bound above it."""
        return self.best.proven or self.best.height_bytes <= capacity_bytes or self.best.bound_bytes > capacity_bytes

    def decide(self, capacity_bytes: int, nodes: int, order: _Order) -> Steps:
        """Search with one order, in steps of about a millisecond."""
        units = capacity_bytes // self.unit
        ranks, tree = self.tree_of(order)
        start(tree, units)
        chunk = max(16, STEP_WORK // self.node_work)
        result = STOPPED
        while nodes > 0 and result == STOPPED:
            now = min(chunk, nodes, chunk if self.nodes_left is None else self.nodes_left)
            result = go_on(tree, now)
            nodes -= now
            self.placed = max(self.placed, int(tree.blocks["placed"].sum()))
            if self.nodes_left is not None:
                self.nodes_left -= now
                nodes = min(nodes, self.nodes_left)
            if result == FOUND:
                offsets = np.zeros(len(self.blocks), np.int64)
                offsets[ranks] = tree.blocks["offset"] * self.unit
                self.best.offer(offsets, Exact.name)
            elif result == FAILED:
                self.best.bound_bytes = max(self.best.bound_bytes, (units + 1) * self.unit)
            yield now * self.node_work

    def draw(self) -> _Order:
        """Return an order drawn at random."""
        self.drawn += 1
        return _Order(self.drawn, [self.drawn_keys(self.random, _NOISE)])

    def drawn_keys(self, random: np.random.Generator, noise: float) -> NDArray[np.float64]:
        """Return a random product of powers of length, size and most live bytes, as logarithms, with noise."""
        powers, noises = random.uniform(0, 1, 3), random.normal(0, noise, len(self.blocks))
        logs = [np.log(self.columns[c].astype(np.float64)) for c in "WZT"]
        return sum(p * log for p, log in zip(powers, logs, strict=True)) + noises

    def tree_of(self, order: _Order) -> tuple[NDArray[np.int64], Tree]:
        """Return the blocks in this order, and their tree; trees of the fixed orders are kept for later rounds."""
        if order.number in self.trees:
            return self.trees[order.number]
        ranks = np.lexsort([-key for key in reversed(order.keys)])
        sizes = self.blocks.sizes_bytes[ranks] // self.unit
        firsts, lasts = self.sections.firsts[ranks], self.sections.lasts[ranks]
        built = ranks, make_tree(sizes, firsts, lasts, self.parts)
        if order.number < len(_ORDERS):
            self.trees[order.number] = built
        return built


def _columns(blocks: Blocks, sections: Sections) -> dict[str, NDArray[Any]]:
    """Return the keys of the orders: area A, sections C, most live bytes T, length W, size Z."""
    lengths = blocks.ends - blocks.starts
    return {
        "A": blocks.sizes_bytes * lengths.astype(np.float64),
        "C": (sections.lasts - sections.firsts).astype(np.int64),
        "T": most_live_bytes(blocks, sections),
        "W": lengths,
        "Z": blocks.sizes_bytes,
    }
