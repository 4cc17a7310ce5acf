"""Packers on instances by others, and on made traces: heights, deadlines, the same seed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from memfit.packing import Blocks, Layout, PackingProblem, check_layout, make_packer, pack
from memfit.packing.blocks import make_layout
from memfit.packing.improve.searching import Best
from memfit.packing.improve.tight import tight_steps
from memfit.packing.sections import sections_of
from memfit.packing.trace_file import read_trace

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # the made traces are those of the benchmarks

from _made_traces import made_trace

DATA = Path(__file__).parent / "data" / "packing"
INSTANCES = {
    name: read_trace(DATA / f"{file}.csv")
    for name, file in {**{letter: f"{letter}.1048576" for letter in "ABCDEK"}, "resnet50": "resnet50"}.items()
}
NO_TIME_LIMIT = 1e9


def packed(blocks: Blocks, packer: str = "auto", *, seed: int = 0, **options: object) -> Layout:
    """Return the layout of a packer that is limited by what it does, not by time."""
    problem = PackingProblem(blocks=blocks, time_limit_seconds=NO_TIME_LIMIT, seed=seed)
    layout = make_packer(packer, **options).pack(problem)
    check_layout(blocks, layout)
    return layout


class Ticks:
    """A clock that is one tick later at every look."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 0.01
        return self.seconds


@pytest.mark.parametrize("name", ["A", "B", "C", "E", "K", "resnet50"])
@pytest.mark.parametrize("seed", [0, 1])
def test_lower_bound_is_reached(name: str, seed: int) -> None:
    layout = packed(INSTANCES[name], seed=seed, work=2_000_000_000)
    assert (layout.ratio, layout.proven) == (1.0, True)


def test_what_is_found_by_a_second_of_work() -> None:
    """The bound of D is reached by ten seconds of work; the best ratio published is 1.063."""
    assert packed(INSTANCES["D"], work=1_000_000_000).ratio <= 1.05


def test_a_first_answer_is_good() -> None:
    layouts = [packed(INSTANCES[name], work=100_000_000) for name in "ABCD"]
    assert np.mean([layout.ratio for layout in layouts]) <= 1.15


@pytest.mark.parametrize("name", ["auto", "exact", "local_search", "ejection"])
@pytest.mark.parametrize("seconds", [0.2, 0.5])
def test_deadlines_are_kept(name: str, seconds: float) -> None:
    """No step is begun that would end after the limit if it took as long as the longest before it."""
    clock = Ticks()
    problem = PackingProblem(blocks=INSTANCES["D"], time_limit_seconds=seconds, clock=clock)
    make_packer(name).pack(problem)
    assert seconds - 0.05 <= clock.seconds <= seconds + 0.05


def test_a_longer_search_is_never_worse() -> None:
    heights = [packed(INSTANCES["D"], "exact", nodes=nodes).height_bytes for nodes in (300, 30_000)]
    assert heights[1] <= heights[0]


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("auto", {"work": 300_000_000}),
        ("exact", {"nodes": 20_000}),
        ("local_search", {"rounds": 80}),
        ("ejection", {"attempts": 5}),
    ],
)
def test_same_seed_and_count_give_the_same_layout(name: str, option: dict[str, int]) -> None:
    layouts = [packed(INSTANCES["D"], name, seed=5, **option) for _ in range(2)]
    assert np.array_equal(layouts[0].offsets_bytes, layouts[1].offsets_bytes)


def test_auto_is_not_worse_than_its_quick_parts() -> None:
    for name in "ABCD":
        quick = [packed(INSTANCES[name], part).height_bytes for part in ("first_fit", "best_fit")]
        assert packed(INSTANCES[name], work=30_000_000).height_bytes <= min(quick)


def test_a_hundred_thousand_blocks() -> None:
    assert packed(made_trace(100_000), work=10_000_000_000).ratio <= 1.02


def test_ejection_improves_on_first_fit() -> None:
    blocks = [made_trace(3000, seed=seed) for seed in range(4)]
    first = [pack(b, "first_fit").ratio for b in blocks]
    improved = [packed(b, "ejection", attempts=10).ratio for b in blocks]
    assert np.mean(improved) <= 1 + (np.mean(first) - 1) / 4


def packed_tight_first(blocks: Blocks, work: int) -> Best:
    """Return what the search over tight blocks finds with so much work."""
    problem = PackingProblem(blocks=blocks)
    best = Best(problem)
    for done in tight_steps(problem, sections_of(blocks), best):
        work -= done
        if work < 0:
            break
    return best


def test_tight_blocks_first_are_close_to_the_bound() -> None:
    """Counted in work, not in seconds. Measured: 1.0045 in the mean, where first fit by size has 1.042."""
    ratios: list[float] = []
    for seed in range(5):
        blocks = made_trace(10_000, seed=seed)
        best = packed_tight_first(blocks, 20_000 * len(blocks))
        layout = make_layout(blocks, best.offsets_bytes, packer="tight")
        check_layout(blocks, layout)
        assert layout.height_bytes == best.height_bytes
        ratios.append(layout.ratio)
    assert np.mean(ratios) <= 1.01


def test_where_all_blocks_are_tight_none_goes_first() -> None:
    blocks = Blocks(ids=list(range(99)), sizes_bytes=[5] * 99, starts=[0] * 99, ends=[1] * 99)
    assert packed_tight_first(blocks, 1 << 40).offsets_bytes.tolist() == []


def test_an_interrupted_search_answers_with_its_best() -> None:
    calls = 0

    def interrupted() -> float:
        nonlocal calls
        calls += 1
        if calls > 40:
            raise KeyboardInterrupt
        return 0.0

    problem = PackingProblem(blocks=INSTANCES["D"], time_limit_seconds=60, clock=interrupted)
    layout = make_packer("auto").pack(problem)
    check_layout(INSTANCES["D"], layout)


def test_made_traces_are_as_described() -> None:
    blocks = made_trace(100_000, seed=3)
    lengths = blocks.ends - blocks.starts
    assert blocks.starts.min() >= 0
    assert blocks.ends.max() <= 100_000
    assert blocks.sizes_bytes.min() >= 1 << 9
    assert blocks.sizes_bytes.max() <= 1 << 24
    assert 170 < np.median(lengths) / np.log(2) < 230
    assert made_trace(100, seed=1).sizes_bytes.tolist() == made_trace(100, seed=1).sizes_bytes.tolist()
