"""Packer `exact`: branch and bound over capacities, until a layout is proved to be the lowest."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from memfit.packing.best_fit import fill_lines
from memfit.packing.blocks import Blocks, Layout, PackingProblem
from memfit.packing.exact.apart import parts_in_time, steps_apart
from memfit.packing.exact.branching import FAILED, FOUND, STOPPED, go_on, start
from memfit.packing.exact.tree import Tree, make_tree
from memfit.packing.improve.searching import STEP_WORK, Best, Steps, Turns, require_limit, search
from memfit.packing.parts import RULES, WITHOUT_HELP, Parts, parts_without
from memfit.packing.sections import Sections, most_live_bytes, sections_of

MOST_BLOCKS = 4096  # a tree takes memory by their square
# Powers of live-range length, size, most live bytes met, and sections, whose product is a block's key in an order. High
# powers of the most live bytes come before the others; low ones break ties.
_ORDERS = (
    (1.0, 0.001, 0.01, 0.0),
    (0.1, 0.1, 100.0, 0.0),
    (1.0, 0.0, 100.0, 0.0),
    (1.0, 1.0, 0.0, 0.0),
    (0.001, 1.0, 0.0, 0.0),
    (0.0, 0.0, 0.0, 1.0),
)
_FIRST_NODES = 256
_FINEST_SHARE = 1 / 64  # of the gap between bound and height, in the first round; halved in each
_SHORT_NODES, _SHORT_FACTOR = 1000, 4  # of a search that restarts, and at least so many for each block
_AT_BOUND = 8  # restarts at the bound for each one at a capacity above it, from the second round on
_NODE_WORK = 5  # for each block
_NOISE = (0.5, 2.0)  # deviation of the logarithms of a drawn order's keys
_TREES = 2  # searches at once, one on each of two cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """Decide for one capacity after the other whether the blocks fit, by depth-first search from below.

    Each round tries the lower bound, then halves the gap between the highest capacity that failed and the lowest
    layout. A decision is one search in a fixed order of the blocks (by live-range length, size, area, most live bytes
    met, as in MiniMalloc), with twice the nodes in each round, and short searches in orders that are drawn at random
    around these: how long a search takes has a heavy tail in the order. Two short searches run at once, each on a core.
    A search that ends without a layout raises the lower bound; a layout at that bound is proven.

    More than `MOST_BLOCKS` blocks are not searched; they get the layout of `best_fit`.

    Source: Moffitt 2023, "MiniMalloc"; basins (see `branching`) and restarts are added.
    """

    name: ClassVar[str] = "exact"
    source: ClassVar[str] = "Moffitt 2023 (MiniMalloc): canonical branch and bound; with basins and restarts"

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
    left, alone = _Nodes(nodes), parts_in_time(problem.blocks)
    with ThreadPoolExecutor(1) as second_core:

        def steps_of(part: PackingProblem, best: Best) -> Steps:
            return _part_steps(part, sections_of(part.blocks), best, parts, left, second_core)

        if len(alone) > 1 and parts.apart:
            yield from steps_apart(problem, best, alone, steps_of)
        else:
            yield from _part_steps(problem, sections, best, parts, left, second_core)


def _part_steps(
    problem: PackingProblem,
    sections: Sections,
    best: Best,
    parts: Parts,
    nodes: _Nodes,
    second_core: ThreadPoolExecutor,
) -> Steps:
    blocks = problem.blocks
    if parts.best_fit:
        best.offer(fill_lines(blocks, sections), Exact.name)
        yield len(blocks) * 1000
    if len(blocks) <= MOST_BLOCKS and not best.proven:
        yield from _Decisions(problem, sections, best, parts, nodes, second_core).rounds()


@dataclass(slots=True)
class _Nodes:
    """How many nodes may still be visited; none is no limit."""

    left: int | None


class _Decisions:
    """Decisions about capacities, in units of the greatest common divisor of all sizes."""

    def __init__(
        self,
        problem: PackingProblem,
        sections: Sections,
        best: Best,
        parts: Parts,
        nodes: _Nodes,
        second_core: ThreadPoolExecutor,
    ) -> None:
        blocks = problem.blocks
        self.blocks, self.best, self.parts, self.nodes = blocks, best, parts, nodes
        self.second_core = second_core
        self.unit = int(np.gcd.reduce(blocks.sizes_bytes))
        self.random = np.random.default_rng(problem.seed)
        sizes = blocks.sizes_bytes // self.unit
        self.trees = [make_tree(sizes, sections.firsts, sections.lasts, parts) for _ in range(_TREES)]
        self.keys = _keys(blocks, sections)
        self.drawn = 0
        self.short_nodes = max(_SHORT_NODES, _SHORT_FACTOR * len(blocks))
        # A node reads every remaining block some times, and the blocks in the sections of one.
        live = float((sections.lasts - sections.firsts).sum())
        self.node_work = _NODE_WORK * len(blocks) + sections.count + int(2 * live * live / len(blocks) / sections.count)

    def rounds(self) -> Steps:
        """Decide about lower and lower capacities until the best layout is proven or the nodes are used up."""
        number, finest = 0, _FINEST_SHARE
        while not self.best.proven and self.nodes.left != 0:
            yield from self.try_capacity(self.best.bound_bytes, number, _AT_BOUND if number else 1)
            out_of_reach = self.best.bound_bytes
            while not self.best.proven and self.nodes.left != 0:
                gap = self.best.height_bytes - out_of_reach
                if gap <= max(self.unit, int(finest * self.best.bound_bytes)):
                    break
                aim = out_of_reach + gap // (2 * self.unit) * self.unit
                yield from self.try_capacity(aim, number, 1)
                if self.best.height_bytes > aim:
                    out_of_reach = max(aim, self.best.bound_bytes)
            number, finest = number + 1, finest / 2

    def try_capacity(self, capacity_bytes: int, number: int, times: int) -> Steps:
        """Offer a layout within the capacity, or raise the bound above it, or stop after the searches of a round.

        Args:
            capacity_bytes: what the layout is to fit.
            number: of the round, from 0.
            times: how many pairs of restarts for each one of a usual decision.
        """
        order = self.keys[number % len(self.keys)]
        yield from self.decide(capacity_bytes, _FIRST_NODES << number, [order])
        restarts = times << number if self.parts.restarts else 0
        while restarts > 0 and self.nodes.left != 0 and not self.is_decided(capacity_bytes):
            yield from self.decide(capacity_bytes, self.short_nodes, [self.draw() for _ in range(_TREES)])
            restarts -= 1

    def is_decided(self, capacity_bytes: int) -> bool:
        """Return whether the best layout is within a capacity, or the bound above it."""
        return self.best.proven or self.best.height_bytes <= capacity_bytes or self.best.bound_bytes > capacity_bytes

    def decide(self, capacity_bytes: int, nodes: int, orders: list[NDArray[np.float64]]) -> Steps:
        """Search with all orders at once, in steps of about a millisecond, until one ends or all nodes are visited.

        Args:
            capacity_bytes: of the layouts that are looked for.
            nodes: to visit in each search at most.
            orders: float64[blocks] for each search: blocks with larger keys are tried first.
        """
        units, chunk = capacity_bytes // self.unit, max(16, STEP_WORK // self.node_work)
        trees = self.trees[: len(orders)]
        for tree, keys in zip(trees, orders, strict=True):
            ranks = np.zeros(len(keys), np.int32)
            ranks[np.argsort(-keys, kind="stable")] = np.arange(len(keys))
            if not start(tree, ranks, units):
                self.best.bound_bytes = max(self.best.bound_bytes, (units + 1) * self.unit)
                return
        while nodes > 0 and self.nodes.left != 0:
            now = min(chunk, nodes, chunk if self.nodes.left is None else self.nodes.left)
            nodes -= now
            if self.nodes.left is not None:
                self.nodes.left = max(0, self.nodes.left - now * len(trees))
            results = self.go_on_at_once(trees, now)
            yield now * self.node_work
            if self.has_ended(trees, results, units):
                return

    def go_on_at_once(self, trees: list[Tree], nodes: int) -> list[int]:
        """Search in all trees at once; return how each search stands, as `go_on` does.

        Args:
            trees: begun by `start`; the first is searched in this thread, the others on the second core.
            nodes: how many are visited in each tree at most.
        """
        others = [self.second_core.submit(go_on, tree, nodes) for tree in trees[1:]]
        return [go_on(trees[0], nodes), *(other.result() for other in others)]

    def has_ended(self, trees: list[Tree], results: list[int], units: int) -> bool:
        """Return whether a search has ended; offer its layout, or raise the bound if it proved that none fits.

        Args:
            trees: that were searched.
            results: what `go_on` returned for each of them.
            units: the capacity, in units of `unit` bytes.
        """
        for tree, result in zip(trees, results, strict=True):
            if result == FOUND:
                self.best.offer(tree.blocks["offset"] * self.unit, Exact.name)
            elif result == FAILED:
                self.best.bound_bytes = max(self.best.bound_bytes, (units + 1) * self.unit)
        return any(result != STOPPED for result in results)

    def draw(self) -> NDArray[np.float64]:
        """Return the keys of the next order: first the fixed ones, then ones that are drawn around them."""
        keys = self.keys[self.drawn % len(self.keys)]
        noise = self.random.uniform(*_NOISE) if self.drawn >= len(self.keys) else 0.0
        self.drawn += 1
        return keys + self.random.normal(0, noise, len(keys))


def _keys(blocks: Blocks, sections: Sections) -> list[NDArray[np.float64]]:
    """Return the logarithms of the keys of each fixed order; the largest stands first."""
    columns = (
        blocks.ends - blocks.starts,
        blocks.sizes_bytes,
        most_live_bytes(blocks, sections),
        sections.lasts - sections.firsts,
    )
    return list(np.array(_ORDERS) @ np.log(np.array(columns, np.float64)))
