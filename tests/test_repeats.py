"""Repeated blocks: recognised exactly, windows moved from one to another, and what is best in one done in all."""

from __future__ import annotations

import numpy as np
from chains import chain, network, problem

from memfit.graph import Graph
from memfit.planners.blocks import Blocks, option_of
from memfit.planners.order import update_at_once_order
from memfit.planners.program import build_program
from memfit.planners.repeats import Repeats, spread
from memfit.planners.windows import Windows, evaluate, keep_everything, keep_only, simulated

MIDDLE = slice(6, -6)  # blocks that see neither end of the network


def repeats_of(graph: Graph, budget_bytes: int = 1 << 60, most: int = 32) -> Repeats:
    program = build_program(problem(graph, budget_bytes), update_at_once_order(graph))
    return Repeats.of(Blocks.of(program, most))


def test_equal_blocks_are_of_one_kind() -> None:
    repeats = repeats_of(chain(128))
    assert repeats.blocks.count == 32
    assert len(set(repeats.kind[MIDDLE].tolist())) == 1


def test_a_block_that_differs_in_the_seconds_of_one_op_is_of_another_kind() -> None:
    seconds = [1.0] * 128
    seconds[64] = 1.0 + 1e-12
    repeats = repeats_of(network([100] * 128, seconds=seconds))
    position = repeats.blocks.program.op_at.index(64)
    other = int(repeats.kind[repeats.blocks.of_stage[position]])
    assert repeats.kind.tolist().count(other) == 1
    assert len(set(repeats.kind[MIDDLE].tolist())) == 2


def test_a_block_that_writes_other_bytes_is_of_another_kind() -> None:
    sizes = [100] * 128
    sizes[65] = 101
    repeats = repeats_of(network(sizes))
    block = repeats.blocks.of_stage[repeats.blocks.program.op_at.index(65)]
    assert repeats.kind.tolist().count(int(repeats.kind[block])) == 1


def test_windows_moved_to_an_equal_block_are_those_that_it_has_where_all_do_alike() -> None:
    repeats = repeats_of(chain(128))
    windows = keep_only(repeats.blocks.program, repeats.blocks.borders(1))
    for source, target in ((7, 8), (20, 9), (10, 24)):
        release, hold = repeats.moved(windows, source, target)
        assert np.array_equal(release, windows.release[repeats.gaps[target]])
        assert np.array_equal(hold, windows.hold[repeats.gaps[target]])
        assert (release < hold).any()


def test_what_one_block_does_better_is_done_in_all_where_there_is_room() -> None:
    """Blocks of 4 layers that keep their borders; one keeps all: 3 storages more for 3 seconds less."""
    graph = chain(128)
    free = repeats_of(graph).blocks
    borders = keep_only(free.program, free.borders(1))
    bytes_with_borders = evaluate(free.program, simulated(free.program, borders)).peak_bytes
    repeats = repeats_of(graph, bytes_with_borders + 10 * 300)
    program = repeats.blocks.program
    everything = keep_everything(program)
    is_kept = np.isin(np.arange(len(borders.hold)), repeats.gaps[16])
    one = option_of(
        repeats.blocks,
        Windows(
            release=np.where(is_kept, everything.release, borders.release),
            hold=np.where(is_kept, everything.hold, borders.hold),
        ),
    )
    found = [each for each in spread(repeats, [one]) if each.peak_bytes <= program.problem.budget_bytes]
    best = min(option.total_seconds for option in found)
    assert best <= one.total_seconds - 3 * 8


def test_nothing_is_spread_where_no_block_is_repeated() -> None:
    repeats = repeats_of(network([100 + number for number in range(64)]))
    assert repeats.count == repeats.blocks.count
    assert spread(repeats, [option_of(repeats.blocks, keep_everything(repeats.blocks.program))]) == []
