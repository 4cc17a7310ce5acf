"""Stage of `auto` for hundreds of blocks that leave hardly a gap: a beam of partial layouts, grown from below.

A state is a layout of some blocks, with a floor in each section and the slack there: the capacity that remains beside
the bytes of the remaining blocks. A step takes the lowest floor of each state, and there the section that the fewest
blocks can cover. It puts each of these blocks on the floor, or leaves a gap up to the least offset of another block, if
the slack allows. The best of all new states are kept: those with few wasted bytes, even floors, and long and large
blocks placed. The weights of these three are drawn for each attempt, and the beam gets wider.

A depth-first search such as `exact` rarely corrects an early choice near the bottom; a beam keeps many of them.
"""

# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.packing.blocks import Blocks, PackingProblem
from memfit.packing.improve.searching import Best, Steps
from memfit.packing.sections import Sections
from memfit.system.compiled import compiled, entry_point

NAME = "beam"
_LEAST_WIDTH, _MOST_WIDTH = 16, 512
_ATTEMPTS_A_WIDTH = 9
_SHARES = (0.5, 0.75, 0.25)  # of the gap between bound and height that is left below the cap, one after the other
_VARIANTS, _CHOICES = 4, 32  # for each state, in the mean: gaps left, blocks placed
_LENGTH_POWERS, _SIZE_POWERS = (0.3, 1.3), (0.2, 1.0)
_LOG_WEIGHTS = 1.5  # weights of the three parts of the score are drawn between e^-1.5 and e^1.5
_STATE_WORK = 3  # for each block and each section of a block, of looking at one state
_FAR = 1 << 62
_DEAD = -1


class _States(NamedTuple):
    """Layouts of some blocks: `floors`, `slacks` [state, section], `left` [state, block], sums of the score."""

    floors: NDArray[np.int64]
    slacks: NDArray[np.int64]
    left: NDArray[np.bool_]
    wasted: NDArray[np.float64]
    placed: NDArray[np.float64]
    hashes: NDArray[np.int64]


class _Choices(NamedTuple):
    """Blocks that can be placed next: on which variant, the unevenness added, and the hash of the remaining blocks."""

    variant: NDArray[np.int64]
    block: NDArray[np.int64]
    offset: NDArray[np.int64]
    unevenness: NDArray[np.int64]
    hashes: NDArray[np.int64]


class _Ranges(NamedTuple):
    """The blocks, and scratch arrays for each block (`bases`) and each section (`options`, `least`)."""

    sizes: NDArray[np.int64]
    firsts: NDArray[np.int64]
    lasts: NDArray[np.int64]
    keys: NDArray[np.int64]
    bases: NDArray[np.int64]
    options: NDArray[np.int64]
    least: NDArray[np.int64]


def beam_steps(problem: PackingProblem, sections: Sections, best: Best) -> Steps:
    """Try one capacity after the other, with wider and wider beams; a step is one layer of a beam.

    Args:
        problem: its blocks and its seed.
        sections: those of the blocks.
        best: gets each lower layout.
    """
    if len(problem.blocks) < 2:
        return
    draws = np.random.default_rng(problem.seed)
    beam = _Beam(problem.blocks, sections, best, draws)
    failed = share = 0
    while not best.proven:
        gap = best.height_bytes - best.bound_bytes
        capacity = best.bound_bytes + int(gap * _SHARES[share])
        width = min(_MOST_WIDTH, _LEAST_WIDTH << failed // _ATTEMPTS_A_WIDTH)
        height = best.height_bytes
        yield from beam.attempt(capacity // beam.unit, width)
        if best.height_bytes < height:
            share = 0
        else:
            failed, share = failed + 1, (share + 1) % len(_SHARES)


class _Beam:
    """Attempts to fit the blocks into a capacity, in units of the greatest common divisor of all sizes."""

    def __init__(self, blocks: Blocks, sections: Sections, best: Best, draws: np.random.Generator) -> None:
        self.best, self.draws, self.count, self.section_count = best, draws, len(blocks), sections.count
        self.unit = int(np.gcd.reduce(blocks.sizes_bytes))
        count = self.count
        self.ranges = _Ranges(
            sizes=blocks.sizes_bytes // self.unit,
            firsts=sections.firsts.astype(np.int64),
            lasts=sections.lasts.astype(np.int64),
            keys=draws.integers(1, _FAR, count),
            bases=np.zeros(count, np.int64),
            options=np.zeros(sections.count, np.int64),
            least=np.zeros(sections.count, np.int64),
        )
        self.state_work = _STATE_WORK * (count + int((sections.lasts - sections.firsts).sum()) // 2)
        self.width = 0

    def make_room(self, width: int) -> None:
        if width == self.width:
            return
        self.width = width
        self.states, self.next = self.empty(width), self.empty(width)
        self.variants, self.parents = self.empty(_VARIANTS * width), np.zeros(_VARIANTS * width, np.int64)
        self.choices = _Choices(*(np.zeros(_CHOICES * width, np.int64) for _ in _Choices._fields))

    def empty(self, width: int) -> _States:
        return _States(
            floors=np.zeros((width, self.section_count), np.int64),
            slacks=np.zeros((width, self.section_count), np.int64),
            left=np.ones((width, self.count), np.bool_),
            wasted=np.zeros(width),
            placed=np.zeros(width),
            hashes=np.zeros(width, np.int64),
        )

    def attempt(self, capacity: int, width: int) -> Steps:
        """Offer a layout within the capacity, if a beam of this width finds one."""
        self.make_room(width)
        difficulty, weights = self.difficulty(), np.exp(self.draws.uniform(-_LOG_WEIGHTS, _LOG_WEIGHTS, 3))
        _begin(capacity, self.states, self.ranges)
        count, trail = 1, list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]()
        for _ in range(self.count):
            variants, choices, looked = _look_on(
                capacity, count, self.states, self.variants, self.parents, self.choices, self.ranges
            )
            yield looked * self.state_work
            if choices == 0 or self.best.height_bytes <= capacity * self.unit:
                return
            chosen = self.select(capacity, variants, choices, width, difficulty, weights)
            count = len(chosen)
            block, variant = self.choices.block[chosen], self.choices.variant[chosen]
            trail.append((self.parents[variant], block, self.choices.offset[chosen]))
            _keep(chosen, self.states, self.next, self.variants, self.parents, self.choices, self.ranges, difficulty)
            self.states, self.next = self.next, self.states
        self.offer(trail)

    def difficulty(self) -> NDArray[np.float64]:
        """Return float64[n], the merit of having placed each block: random powers of length and size, normalised."""
        length_power, size_power = self.draws.uniform(*_LENGTH_POWERS), self.draws.uniform(*_SIZE_POWERS)
        lengths = (self.ranges.lasts - self.ranges.firsts).astype(np.float64)
        weights = lengths**length_power * self.ranges.sizes.astype(np.float64) ** size_power
        return weights * (self.section_count / weights.sum())

    def select(
        self,
        capacity: int,
        variants: int,
        choices: int,
        width: int,
        difficulty: NDArray[np.float64],
        weights: NDArray[np.float64],
    ) -> NDArray[np.int64]:
        """Return the best choices; of those with the same remaining blocks only the best.

        Args:
            capacity: in units.
            variants: how many there are.
            choices: how many there are.
            width: how many are returned at most.
            difficulty: float64[n], from `difficulty`.
            weights: float64[3], of waste, unevenness and blocks placed.
        """
        variant, block = self.choices.variant[:choices], self.choices.block[:choices]
        uneven = np.abs(np.diff(self.variants.floors[:variants], axis=1)).sum(axis=1)
        scores = weights[0] * self.variants.wasted[variant]
        scores += weights[1] * (uneven[variant] + self.choices.unevenness[:choices]) / capacity
        scores -= weights[2] * (self.states.placed[self.parents[variant]] + difficulty[block])
        order = np.argsort(scores, kind="stable")
        first = np.unique(self.choices.hashes[:choices][order], return_index=True)[1]
        return order[np.sort(first)[:width]]

    def offer(self, trail: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]) -> None:
        offsets, state = np.zeros(self.count, np.int64), 0
        for parents, blocks, bases in reversed(trail):
            offsets[blocks[state]] = bases[state] * self.unit
            state = parents[state]
        self.best.offer(offsets, NAME)


@entry_point
def _begin(capacity: int, states: Any, ranges: Any) -> None:
    """Make the first state the empty layout."""
    floors, slacks, left, wasted, placed, hashes = states
    wasted[0], placed[0], hashes[0] = 0.0, 0.0, 0
    for s in range(floors.shape[1]):
        floors[0, s], slacks[0, s] = 0, capacity
    for b in range(left.shape[1]):
        left[0, b] = True
        for s in range(ranges.firsts[b], ranges.lasts[b]):
            slacks[0, s] -= ranges.sizes[b]


@compiled
def _section_to_cover(floors: Any, slacks: Any, left: Any, ranges: Any) -> int:
    """Return the section at the lowest floor that the fewest blocks can cover; sets the base of each block."""
    _, firsts, lasts, _, bases, options, least = ranges
    for s in range(len(floors)):
        options[s], least[s] = 0, _FAR
    for b in range(len(left)):
        if left[b]:
            base = 0
            for s in range(firsts[b], lasts[b]):
                base = max(base, floors[s])
            bases[b] = base
            for s in range(firsts[b], lasts[b]):
                least[s] = min(least[s], base)
                options[s] += base == floors[s]
    lowest, chosen, fewest = _FAR, _DEAD, _FAR
    for s in range(len(floors)):
        if least[s] < _FAR:
            if least[s] - floors[s] > slacks[s]:
                return _DEAD
            lowest = min(lowest, floors[s])
    for s in range(len(floors)):
        ways = 2 * options[s] + (slacks[s] > 0)
        if least[s] < _FAR and floors[s] == lowest and ways < fewest:
            chosen, fewest = s, ways
    return chosen


@compiled
def _copy(source: Any, i: int, target: Any, j: int) -> None:
    for s in range(source.floors.shape[1]):
        target.floors[j, s], target.slacks[j, s] = source.floors[i, s], source.slacks[i, s]
    for b in range(source.left.shape[1]):
        target.left[j, b] = source.left[i, b]
    target.wasted[j], target.placed[j], target.hashes[j] = source.wasted[i], source.placed[i], source.hashes[i]


@compiled
def _change(floors: Any, first: int, last: int, top: int) -> int:
    """Return the unevenness of floors that is added if the sections `[first, last)` rise to `top`."""
    change = 0
    if first > 0:
        change += abs(top - floors[first - 1]) - abs(floors[first] - floors[first - 1])
    if last < len(floors):
        change += abs(top - floors[last]) - abs(floors[last - 1] - floors[last])
    return change


@compiled
def _enter_choices(variant: int, section: int, known: int, variants: Any, choices: Any, ranges: Any) -> tuple[int, int]:
    """Enter the blocks that can cover the section at its floor; return how many choices there are then, and the least
    offset of any other block there."""
    sizes, firsts, lasts, keys, bases, _, _ = ranges
    floors, left = variants.floors[variant], variants.left[variant]
    begin, above = known, _FAR
    for b in range(len(left)):
        if not left[b] or firsts[b] > section or lasts[b] <= section:
            continue
        if bases[b] > floors[section]:
            above = min(above, bases[b])
            continue
        twin = known >= len(choices.block)
        for k in range(begin, known):
            other = choices.block[k]
            twin |= sizes[other] == sizes[b] and firsts[other] == firsts[b] and lasts[other] == lasts[b]
        if not twin:
            choices.variant[known], choices.block[known], choices.offset[known] = variant, b, floors[section]
            choices.unevenness[known] = _change(floors, firsts[b], lasts[b], floors[section] + sizes[b])
            choices.hashes[known] = variants.hashes[variant] ^ keys[b]
            known += 1
    return known, above


@entry_point
def _look_on(
    capacity: int, count: int, states: Any, variants: Any, parents: Any, choices: Any, ranges: Any
) -> tuple[int, int, int]:
    """Fill in variants of the states, with gaps left, and choices; return how many of each, and the looks taken."""
    made = known = looked = 0
    for state in range(count):
        if made == len(parents):
            break
        _copy(states, state, variants, made)
        parents[made] = state
        made += 1
        while True:
            at = made - 1
            looked += 1
            floors, slacks = variants.floors[at], variants.slacks[at]
            section = _section_to_cover(floors, slacks, variants.left[at], ranges)
            if section < 0:
                break
            known, above = _enter_choices(at, section, known, variants, choices, ranges)
            gap = above - floors[section]
            if above == _FAR or gap > slacks[section] or made == len(parents):
                break
            _copy(variants, at, variants, made)
            parents[made] = state
            variants.floors[made, section] = above
            variants.slacks[made, section] -= gap
            variants.wasted[made] += gap / capacity * (1.0 + gap / slacks[section])
            made += 1
    return made, known, looked


@entry_point
def _keep(
    chosen: Any, states: Any, following: Any, variants: Any, parents: Any, choices: Any, ranges: Any, difficulty: Any
) -> None:
    """Make the chosen choices the following states."""
    for number in range(len(chosen)):
        variant, block = choices.variant[chosen[number]], choices.block[chosen[number]]
        _copy(variants, variant, following, number)
        top = choices.offset[chosen[number]] + ranges.sizes[block]
        for s in range(ranges.firsts[block], ranges.lasts[block]):
            following.floors[number, s] = top
        following.left[number, block] = False
        following.placed[number] = states.placed[parents[variant]] + difficulty[block]
        following.hashes[number] = choices.hashes[chosen[number]]
