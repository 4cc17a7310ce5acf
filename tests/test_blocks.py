"""Long graphs cut into blocks: figures that add up, segments within segments, and joins that no single family gives."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from chains import chain, network, problem
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.graph import Graph, Op, Role, Storage
from memfit.planners.engine.bounds.bounds import least_recompute_seconds
from memfit.planners.engine.order import update_at_once_order
from memfit.planners.engine.retention.decisions import evaluate, keep_everything, keep_only, simulated
from memfit.planners.engine.retention.instance import Instance, build_instance
from memfit.planners.engine.starts.block_dynamic_program import join
from memfit.planners.engine.starts.blocks import Blocks, nested, option_of
from memfit.planners.engine.starts.candidates import structured
from memfit.planners.search import SearchPlanner


def program_of(graph: Graph, budget_bytes: int = 1 << 60) -> Instance:
    return build_instance(problem(graph, budget_bytes), update_at_once_order(graph))


@given(length=st.integers(8, 60), every=st.integers(1, 5), most=st.integers(2, 40))
@settings(max_examples=30, deadline=None)
def test_what_windows_take_in_each_block_adds_up_to_what_they_take(length: int, every: int, most: int) -> None:
    instance = program_of(chain(length))
    blocks = Blocks.of(instance, most)
    retention = keep_only(instance, blocks.borders(every))
    option, exact = option_of(blocks, retention), evaluate(instance, simulated(instance, retention))
    before = np.cumsum(option.kept_bytes) - option.kept_bytes
    assert int(option.seconds.sum()) == int(exact.seconds) == int(option.total_seconds)
    assert int((before + option.transient_bytes).max()) + instance.base_bytes == exact.peak_bytes == option.peak_bytes
    assert option.is_border[every - 1 : -1 : every].all()


def test_a_chain_that_keeps_its_borders_keeps_one_storage_a_border() -> None:
    instance = program_of(chain(64))
    blocks = Blocks.of(instance, 16)
    option = option_of(blocks, keep_only(instance, blocks.borders(4)))
    assert blocks.count == 16
    assert option.kept_bytes.tolist() == [0, 0, 0, 100] * 3 + [0] * 4
    assert np.flatnonzero(option.is_border).tolist() == [3, 7, 11]


def test_segments_within_segments_take_the_cube_root_for_two_more_forward_passes() -> None:
    instance = program_of(chain(512))
    blocks = Blocks.of(instance, 512)
    own = np.maximum(instance.tables.storages["writer"], 0)
    levels = [(blocks.borders(8), own // 64), (frozenset[int](), own // 8)]
    retention = nested(instance, blocks.borders(64), levels)
    found = evaluate(instance, simulated(instance, retention))
    assert found.peak_bytes <= (8 + 8 + 8 + 4) * 100
    assert 1024 + 2 * 448 <= found.seconds <= 1024 + 2 * 512


def test_what_is_joined_keeps_more_than_segments_where_there_is_room() -> None:
    graph = chain(128)
    unplanned = program_of(graph)
    everything = evaluate(unplanned, simulated(unplanned, keep_everything(unplanned)))
    budget_bytes = everything.peak_bytes // 2
    blocks = Blocks.of(program_of(graph, budget_bytes), 32)
    kept = keep_everything(blocks.instance), keep_only(blocks.instance, blocks.borders(1))
    options = [option_of(blocks, retention) for retention in kept]
    fitting = [option for option in join(blocks, options) if option.peak_bytes <= budget_bytes]
    best = min(option.total_seconds for option in fitting)
    # 32 blocks of 4 layers: one that is dropped frees 3 storages for 3 seconds, and 64 storages must go.
    assert everything.seconds + 64 <= best <= everything.seconds + 64 + 6
    assert best < options[1].total_seconds - 20


def test_layers_that_are_cheap_to_compute_again_go_first() -> None:
    """Layers cost 1 s to recompute in the first half, 5 s in the second: 40 of the first have to go."""
    graph = network([100] * 120, seconds=[1.0] * 60 + [5.0] * 60)
    everything = program_of(graph)
    unplanned = evaluate(everything, simulated(everything, keep_everything(everything)))
    budget_bytes = unplanned.peak_bytes - 4000
    found = structured(program_of(graph, budget_bytes), lambda _: False)
    assert min(option.total_seconds for option in found if option.peak_bytes <= budget_bytes) == unplanned.seconds + 40


@pytest.mark.slow
def test_a_search_begins_within_budgets_that_only_nested_segments_reach() -> None:
    result = SearchPlanner(iterations=2000).plan(
        problem(chain(400), 2400)
    )  # sqrt(400) borders and as much again: 4,000
    assert result.plan is not None
    assert result.plan.predicted.peak_bytes <= 2400


def test_counters_beside_a_chain_do_not_hide_its_bound() -> None:
    """Every op of a chain stands among counters, which depend on nothing: the bound is that of the chain alone."""
    plain = chain(200)
    storages = [*plain.storages, Storage(id=len(plain.storages), name="count", bytes=1, role=Role.STATE)]
    ops: list[Op] = []
    for op in plain.ops:
        for _ in range(10):
            written = Storage(id=len(storages), name=f"count{len(storages)}", bytes=1, role=Role.ACTIVATION)
            storages.append(written)
            reads = (len(plain.storages),)
            ops.append(Op(id=len(ops), name="count", phase=op.phase, reads=reads, writes=(written.id,), seconds=0.0))
        ops.append(msgspec.structs.replace(op, id=len(ops)))
    graph = Graph.build(name="counting", storages=storages, ops=ops)
    alone, among = (least_recompute_seconds(problem(each, 8000 + 100)).seconds for each in (plain, graph))
    assert alone > 100
    assert among >= alone - 2
