"""Packers and the judge of layouts: hand-solved cases, brute force, and what must always hold."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cut_up import cut_up
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.errors import InvalidBlocksError, InvalidLayoutError, InvalidOptionError
from memfit.packing import PACKERS, Block, Blocks, PackingProblem, check_layout, make_packer, pack
from memfit.packing.blocks import live_bytes, make_layout
from memfit.packing.first_fit import ORDERS, measure
from memfit.packing.portfolio import pack_stretches
from memfit.packing.sections import sections_of
from memfit.papers.packers.colouring import colour_conflicts


@st.composite
def small_blocks(draw: st.DrawFn, most: int = 9) -> Blocks:
    rows = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=most))
    return Blocks.of(
        (Block(id=i, bytes=size, start=start, end=start + length) for i, (size, start, length) in enumerate(rows)),
        alignment_bytes=draw(st.sampled_from([1, 4])),
    )


def overlaps(blocks: Blocks, offsets: np.ndarray) -> bool:
    rows = list(zip(blocks, offsets.tolist(), strict=True))
    return any(
        a.start < b.end and b.start < a.end and x < y + b.bytes and y < x + a.bytes
        for (a, x), (b, y) in itertools.combinations(rows, 2)
    )


@settings(deadline=None, max_examples=300)
@given(blocks=small_blocks(), data=st.data())
def test_the_judge_agrees_with_brute_force(blocks: Blocks, data: st.DataObject) -> None:
    unit = blocks.alignment_bytes
    offsets = np.array([unit * data.draw(st.integers(0, 12)) for _ in range(len(blocks))])
    layout = make_layout(blocks, offsets, packer="random")
    if overlaps(blocks, offsets):
        with pytest.raises(InvalidLayoutError, match=r"blocks \d+ and \d+ overlap in bytes \[.*during steps \["):
            check_layout(blocks, layout)
    else:
        check_layout(blocks, layout)


@settings(deadline=None, max_examples=60)
@given(blocks=small_blocks())
@pytest.mark.parametrize("name", sorted(PACKERS))
def test_every_packer_gives_valid_layouts(name: str, blocks: Blocks) -> None:
    layout = pack(blocks, name, time_limit_seconds=0.05)
    assert not overlaps(blocks, layout.offsets_bytes)
    assert layout.height_bytes >= layout.lower_bound_bytes
    assert layout.packer in PACKERS


@settings(deadline=None, max_examples=100)
@given(blocks=small_blocks())
def test_sections_keep_who_meets_whom(blocks: Blocks) -> None:
    sections = sections_of(blocks)
    for (i, a), (j, b) in itertools.product(enumerate(blocks), enumerate(blocks)):
        meet = a.start < b.end and b.start < a.end
        assert meet == (sections.firsts[i] < sections.lasts[j] and sections.firsts[j] < sections.lasts[i])


@settings(deadline=None, max_examples=100)
@given(blocks=small_blocks())
def test_lower_bound_is_the_most_live_bytes(blocks: Blocks) -> None:
    live = [sum(b.bytes for b in blocks if b.start <= step < b.end) for step in range(16)]
    assert blocks.lower_bound_bytes == max(live)
    steps, sizes = live_bytes(blocks)
    assert [live[step] for step in steps] == sizes.tolist()


def test_best_fit_is_the_papers_example() -> None:
    """Figure 1's moves: the longest goes first, then on the lowest, leftmost line; what nothing fits is lifted.

    After blocks 0 and 3, the lines at 4 are [0, 2) and [8, 10). Block 4 fits the first; both are then lifted to 6.
    """
    rows = [(4, 0, 10), (2, 0, 4), (3, 6, 10), (2, 2, 8), (1, 0, 2)]
    blocks = Blocks.of(Block(id=i, bytes=size, start=start, end=end) for i, (size, start, end) in enumerate(rows))
    layout = pack(blocks, "best_fit")
    assert layout.offsets_bytes.tolist() == [0, 6, 6, 4, 4]


def test_colouring_is_solved_by_hand() -> None:
    """A and C share the first colour, as do B and D the second; E meets all. The papers leave the order open."""
    rows = [("A", 4, 0, 2), ("B", 4, 1, 3), ("C", 2, 2, 4), ("D", 2, 3, 5), ("E", 1, 0, 5)]
    blocks = Blocks.of(Block(id=name, bytes=size, start=start, end=end) for name, size, start, end in rows)
    layout = pack(blocks, "colouring")
    assert layout.offsets_bytes.tolist() == [0, 4, 0, 4, 8]
    assert (layout.height_bytes, layout.proven) == (9, True)


def test_colouring_shares_whole_blocks_only() -> None:
    """Two small blocks after a large one: one shares its memory, the other does not, where a packing lets both."""
    rows = [(4, 0, 1), (2, 1, 2), (2, 1, 2)]
    blocks = Blocks.of(Block(id=i, bytes=size, start=start, end=end) for i, (size, start, end) in enumerate(rows))
    assert pack(blocks, "colouring").offsets_bytes.tolist() == [0, 0, 4]
    assert (pack(blocks, "colouring").height_bytes, pack(blocks).height_bytes) == (6, 4)


@settings(deadline=None, max_examples=100)
@given(blocks=small_blocks())
@pytest.mark.parametrize("by", ORDERS)
def test_colours_of_blocks_that_meet_differ(by: str, blocks: Blocks) -> None:
    colours = colour_conflicts(blocks, np.argsort(-measure(blocks, by), kind="stable")).tolist()
    for (a, x), (b, y) in itertools.combinations(zip(blocks, colours, strict=True), 2):
        assert x != y or a.start >= b.end or b.start >= a.end
    assert set(colours) == set(range(max(colours) + 1))


def test_an_unknown_order_of_colouring_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="colouring has no order 'hue'; there are size, length"):
        make_packer("colouring", by="hue")


def test_alignment_is_of_offsets_and_sizes() -> None:
    blocks = Blocks.of((Block(id=i, bytes=100, start=0, end=1) for i in range(3)), alignment_bytes=64)
    layout = pack(blocks)
    assert sorted(layout.offsets_bytes.tolist()) == [0, 128, 256]
    assert (layout.height_bytes, layout.lower_bound_bytes, layout.proven) == (384, 384, True)


@pytest.mark.parametrize("name", sorted(PACKERS))
def test_nothing_to_pack(name: str) -> None:
    layout = pack(Blocks.of([]), name)
    assert (layout.height_bytes, layout.lower_bound_bytes, layout.ratio, layout.proven) == (0, 0, 1.0, True)


@pytest.mark.parametrize("name", sorted(PACKERS))
def test_one_block(name: str) -> None:
    assert pack(Blocks.of([Block(id="x", bytes=7, start=3, end=4)]), name).offsets_bytes.tolist() == [0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"height_bytes": 9}, "says height 9, expected 8"),
        ({"lower_bound_bytes": 7}, "says lower bound 7, expected 8"),
        ({"offsets_bytes": np.array([0, -4])}, "has offset -4, expected a multiple of 4 from 0"),
        ({"offsets_bytes": np.array([0, 5])}, "block b has offset 5, expected a multiple of 4"),
        ({"offsets_bytes": np.array([0])}, "offsets for 2 blocks"),
        ({"offsets_bytes": np.array([0, 0])}, r"blocks a and b overlap in bytes \[0, 4\) during steps \[1, 2\)"),
    ],
)
def test_the_judge_can_fail(change: dict[str, object], message: str) -> None:
    blocks = Blocks.of(
        [Block(id="a", bytes=4, start=0, end=2), Block(id="b", bytes=4, start=1, end=3)], alignment_bytes=4
    )
    layout = make_layout(blocks, np.array([0, 4]), packer="by hand")
    check_layout(blocks, layout)
    with pytest.raises(InvalidLayoutError, match=message):
        check_layout(blocks, dataclasses.replace(layout, **change))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"sizes_bytes": [1, 0]}, r"block 1 \(id 1\) has size 0, expected 1"),
        ({"sizes_bytes": [1, -3]}, "has size -3"),
        ({"sizes_bytes": [1, 1 << 63]}, "63 bits"),
        ({"sizes_bytes": [1, (1 << 62) + 1]}, "expected at most"),
        ({"sizes_bytes": [1 << 61, 1 << 62]}, "all blocks together"),
        ({"sizes_bytes": [1.5, 2]}, "whole numbers"),
        ({"starts": [0, 5], "ends": [1, 5]}, r"live range \[5, 5\), expected an end after the start"),
        ({"starts": [0, 1 << 62]}, "start"),
        ({"ids": [4, 4]}, "block 1 has id 4, which block 0 has already"),
        ({"ids": [1]}, "as many ids"),
        ({"alignment_bytes": 0}, "alignment is 0"),
    ],
)
def test_what_is_no_block_is_refused(columns: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"ids": [0, 1], "sizes_bytes": [1, 1], "starts": [0, 0], "ends": [1, 1]}
    with pytest.raises(InvalidBlocksError, match=message):
        Blocks(**(good | columns))  # pyright: ignore[reportArgumentType]


def test_options_are_named() -> None:
    with pytest.raises(InvalidOptionError, match="no packer is called 'worst_fit'; there are auto"):
        make_packer("worst_fit")
    with pytest.raises(InvalidOptionError, match="no option 'speed'; its options: by"):
        make_packer("first_fit", speed=1)
    with pytest.raises(InvalidOptionError, match="no order 'name'"):
        make_packer("first_fit", by="name")


def least_height(blocks: Blocks) -> int:
    """Return the least height of any layout: some order of first fit gives it, the order of its offsets."""
    rows, least = list(blocks), int(blocks.sizes_bytes.sum())
    for order in itertools.permutations(rows):
        placed: list[tuple[Block, int]] = []
        for block in order:
            offset = 0
            for other, at in sorted(placed, key=lambda entry: entry[1]):
                if other.start < block.end and block.start < other.end and at < offset + block.bytes:
                    offset = max(offset, at + other.bytes)
            placed.append((block, offset))
        least = min(least, max(at + block.bytes for block, at in placed))
    return least


@settings(deadline=None, max_examples=60)
@given(blocks=small_blocks(most=6))
@pytest.mark.parametrize("name", ["exact", "mip", "auto"])
def test_exact_packers_prove_the_least_height(name: str, blocks: Blocks) -> None:
    layout = pack(blocks, name)
    assert layout.proven
    assert layout.height_bytes == least_height(blocks)


@pytest.mark.parametrize(("count", "seed"), [(30, 0), (100, 1), (200, 1), (200, 2), (200, 3)])
def test_what_was_cut_up_is_put_together_again(count: int, seed: int) -> None:
    """Without a gap, as MiniMalloc's instances; counted in nodes, so that a busy machine gives the same."""
    blocks = cut_up(count, 300, 1 << 20, seed)
    layout = pack(blocks, make_packer("exact", nodes=200_000), time_limit_seconds=300)
    assert (layout.height_bytes, layout.proven) == (1 << 20, True)


@settings(deadline=None, max_examples=200)
@given(count=st.integers(1, 25), seed=st.integers(0, 1 << 20), height=st.integers(2, 12))
def test_small_cuts_are_always_put_together(count: int, seed: int, height: int) -> None:
    """Small sizes and few steps make many blocks alike, and many that end at one offset."""
    blocks = cut_up(min(count, 6 * height), 6, height, seed)
    assert pack(blocks, "exact", time_limit_seconds=60).height_bytes == height


def test_a_case_above_its_lower_bound_is_proven() -> None:
    rows = [(4, 0, 1), (3, 1, 2), (1, 0, 3), (1, 2, 3), (1, 1, 4), (2, 3, 4), (2, 2, 5), (3, 4, 5)]
    blocks = Blocks.of(Block(id=i, bytes=size, start=start, end=end) for i, (size, start, end) in enumerate(rows))
    assert (blocks.lower_bound_bytes, least_height(blocks)) == (5, 6)
    layouts = [pack(blocks, name) for name in ("exact", "mip", "auto")]
    assert {layout.height_bytes for layout in layouts} == {6}
    assert all(layout.proven for layout in layouts)


def test_tags_take_from_the_box() -> None:
    """Chen's Figure 2: a freed tag is used again, grows to the larger block, and tags never share an address."""
    rows = [(4, 0, 2), (2, 1, 3), (3, 2, 4), (5, 3, 5)]
    blocks = Blocks.of(Block(id=i, bytes=size, start=start, end=end) for i, (size, start, end) in enumerate(rows))
    layout = pack(blocks, "tags")
    assert layout.offsets_bytes.tolist() == [0, 4, 0, 4]
    assert layout.height_bytes == 9  # 4 + max(2, 5); a height of 8 needs sharing of parts


@settings(deadline=None, max_examples=20)
@given(blocks=small_blocks())
def test_same_seed_same_layout(blocks: Blocks) -> None:
    search = make_packer("local_search", rounds=20)
    problem = PackingProblem(blocks=blocks, seed=3)
    assert np.array_equal(search.pack(problem).offsets_bytes, search.pack(problem).offsets_bytes)


@pytest.mark.parametrize("alignment_bytes", [1, 64])
def test_many_blocks_are_packed_stretch_by_stretch(alignment_bytes: int) -> None:
    """Blocks of an earlier stretch that are still live keep their places; nothing is lost over packing at once."""
    random = np.random.default_rng(3)
    starts = random.permutation(random.integers(0, 6000, 3000))
    lengths = random.geometric(1 / 60, 3000) + 900 * (random.random(3000) < 0.02)  # some live over several stretches
    sizes = random.integers(1, 1 << 16, 3000)
    blocks = Blocks(
        ids=np.arange(3000), sizes_bytes=sizes, starts=starts, ends=starts + lengths, alignment_bytes=alignment_bytes
    )
    whole = pack(blocks, "first_fit")
    heights: list[int] = []
    problem = PackingProblem(blocks=blocks, progress=lambda progress: heights.append(progress.height_bytes))
    layout = pack_stretches(problem, "auto", stretch=250)
    check_layout(blocks, layout)
    assert len(heights) == 12 and heights[-1] == layout.height_bytes
    assert layout.height_bytes <= 1.1 * whole.height_bytes


# The peak is read as the kernel's VmHWM: what getrusage gives counts the process that started this one, too.
MANY = """
import re, sys
from pathlib import Path
from memfit.cli import main
status = main(["pack", sys.argv[1], "--json"])
peak_kib = int(re.search(r"VmHWM:\\s*([0-9]+)", Path("/proc/self/status").read_text())[1])
print(status, peak_kib * 1024, file=sys.stderr)
"""


@pytest.mark.slow
def test_two_million_rows_are_packed_in_100_bytes_a_row(tmp_path: Path) -> None:
    random, count = np.random.default_rng(0), 2_000_000
    starts = np.sort(random.integers(0, 2 * count, count))
    columns = (
        np.arange(count),
        starts,
        starts + 1 + random.geometric(1 / 200, count),
        random.integers(1, 1 << 20, count),
    )
    trace = tmp_path / "trace.csv"
    with trace.open("w", encoding="utf-8") as file:
        file.write("id,lower,upper,size\n")
        for place in range(0, count, 1_000_000):
            rows = zip(*(column[place : place + 1_000_000].tolist() for column in columns), strict=True)
            file.writelines("{},{},{},{}\n".format(*row) for row in rows)
    found = subprocess.run([sys.executable, "-c", MANY, str(trace)], capture_output=True, text=True, check=True)
    status, peak_bytes = map(int, found.stderr.split()[-2:])
    assert status == 0
    assert peak_bytes < 1_000_000_000
