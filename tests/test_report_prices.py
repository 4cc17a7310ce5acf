"""What another fate of a storage would cost: against plans solved by hand, and against the checker on drawn ones."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from chains import heads
from hypothesis import given, settings
from hypothesis import strategies as st
from small_plans import LINKED, OFFLOADED, REMATERIALIZED, chain, lowered, plan_of, small_graph
from strategies import LINKED as SLOW_LINK
from strategies import graphs, legal_schedules

from memfit.checker import check
from memfit.device import GENERIC, Device
from memfit.errors import InvalidScheduleError
from memfit.graph import Graph, Phase
from memfit.plan import Plan, Problem
from memfit.planners import make_planner
from memfit.planners.bounds import least_seconds_again
from memfit.planners.result import unplanned_schedule
from memfit.report.edits import Edited, Edits
from memfit.report.explanation import Explanation, explained, explanation_keys
from memfit.report.fates import Kind, fates
from memfit.report.figures import CurvePoint
from memfit.report.more_memory import next_step_bytes
from memfit.report.price_words import again_text, keep_text, offload_text
from memfit.report.prices import chain_of, price_all
from memfit.simulate import simulate

A, B, LOSS, GRAD_B = 2, 3, 4, 5  # storages of the small graph
FC1, RELU_BACKWARD = 0, 4  # its ops


def tight(plan: Plan, budget_bytes: int) -> Plan:
    return msgspec.structs.replace(plan, budget_bytes=budget_bytes)


def words(explanation: Explanation, storage: int) -> tuple[str, str, str]:
    plan, fate, price = explanation.plan, explanation.fates[storage], explanation.prices[storage]
    return keep_text(plan, fate, price), again_text(plan, fate, price), offload_text(plan, fate, price)


def deep_plan(share: float = 0.5, planner: str = "search", device: Device = GENERIC) -> Plan:
    """A plan that a planner made for a chain of 20 ops and their backward."""
    graph = chain(20)
    unplanned = simulate(graph, unplanned_schedule(Problem(graph=graph, device=device, budget_bytes=1)), device)
    problem = Problem(
        graph=graph, device=device, budget_bytes=int(share * unplanned.peak_bytes), time_limit_seconds=1.0
    )
    plan = make_planner(planner).plan(problem).plan
    assert plan is not None
    return plan


# -- solved by hand ---------------------------------------------------------------------------------------------------


def test_what_is_computed_again_has_a_price_and_a_place_that_is_too_full() -> None:
    # At the peak, relu_backward holds w 100, x 50, a 400, loss 8, grad_b 400, grad_a 400. Kept from fc1 on, `a` cannot
    # be written over by relu; but mean_backward writes grad_b over b: 1358 bytes are the peak either way.
    explanation = explained(tight(plan_of(small_graph(), REMATERIALIZED), 1300))
    price = explanation.prices[A]
    assert price.keep is not None
    assert price.again is not None
    assert (price.keep.seconds, price.keep.computations, price.keep.peak_bytes) == (-1.0, -1, 1358)
    assert price.keep.peak_op == RELU_BACKWARD
    assert (price.again.seconds, price.again.computations) == (1.0, 1)
    assert words(explanation, A) == (
        "saves 1.000 s, 58 B over the budget while relu_backward runs",
        "costs 1.000 s (1 op) now, frees nothing at the peak",
        "no: generic has no link to a host",
    )


def test_what_is_kept_has_the_price_of_dropping_it() -> None:
    graph = small_graph()
    plan = plan_of(graph, unplanned_schedule(Problem(graph=graph, device=LINKED, budget_bytes=1)), LINKED)
    explanation = explained(plan)
    price = explanation.prices[A]
    assert explanation.fates[A].kind == Kind.KEPT
    assert price.again is not None
    assert price.offload is not None
    assert (price.again.seconds, price.again.computations) == (1.0, 1)  # fc1, whose inputs are always there
    assert price.link_seconds == (4.0, 2.0)  # 400 bytes at 100 and at 200 bytes a second
    # `a` lies unused while mean (1 s) and mean_backward (2 s) run. It has to be on the host for one of them: for mean,
    # while mean_backward hides the way back.
    assert price.offload.seconds == pytest.approx(4.0)
    assert words(explanation, A)[2].endswith("the step would take 4.000 s longer, frees nothing at the peak")
    assert explanation.prices[B].again is None
    assert explanation.prices[B].why_not_again == "it never lies unused"


def test_a_link_that_is_fast_enough_is_hidden() -> None:
    fast = Device(name="fast", to_host_bytes_per_second=1e8, to_device_bytes_per_second=1e8)
    explanation = explained(deep_plan(1.0, "none", fast))
    offload = explanation.prices[1].offload
    assert offload is not None
    assert offload.seconds == pytest.approx(0.0, abs=1e-12)
    assert offload.at_peak_bytes == -explanation.plan.graph.storages[1].bytes
    assert "hidden behind other ops, frees 1000 B at the peak" in words(explanation, 1)[2]


def test_what_is_offloaded_tells_what_that_costs_now() -> None:
    explanation = explained(plan_of(small_graph(), OFFLOADED, LINKED))
    price = explanation.prices[A]
    assert explanation.fates[A].kind == Kind.OFFLOADED
    assert price.keep is not None
    assert price.again is not None
    assert price.offload is not None
    assert (price.keep.seconds, price.again.seconds, price.offload.seconds) == (-6.0, -5.0, 6.0)
    assert words(explanation, A)[1] == "would cost 5.000 s less than now (1 op)"


def test_what_can_only_be_computed_once_says_so() -> None:
    graph = small_graph()
    once = [msgspec.structs.replace(op, recomputable=op.id != FC1) for op in graph.ops]
    graph = Graph.build(name="once", storages=graph.storages, ops=once)
    explanation = explained(plan_of(graph, unplanned_schedule(Problem(graph=graph, device=GENERIC, budget_bytes=1))))
    assert words(explanation, A)[1] == "no: fc1 can only be computed once"


def test_what_reads_an_overwritten_parameter_says_so() -> None:
    graph = small_graph()
    late = msgspec.structs.replace(graph.ops[FC1], id=7, name="late", phase=Phase.UPDATE, reads=(0, A), writes=())
    graph = Graph.build(name="late", storages=graph.storages, ops=[*graph.ops, late])
    edits = Edits(plan_of(graph, unplanned_schedule(Problem(graph=graph, device=GENERIC, budget_bytes=1))))
    assert chain_of(edits, A, 7) == "fc1 reads w, written over by then"
    assert chain_of(edits, A, 5) == [FC1]


def test_a_chain_is_as_long_as_what_is_not_there() -> None:
    graph = chain(6)
    edits = Edits(plan_of(graph, lowered(graph, {2, 3})))
    reads_five = next(e for e in edits.uses[5] if e > 6)
    assert chain_of(edits, 5, reads_five) == [4]  # 4 is there
    assert chain_of(edits, 4, reads_five) == [1, 2, 3]  # 1 is there, 2 and 3 are not


def test_prices_without_times_are_counted() -> None:
    explanation = explained(plan_of(small_graph(seconds=0.0), REMATERIALIZED))
    assert words(explanation, A)[:2] == (
        "saves 1 computation, and the budget has room for it",
        "costs 1 op now, frees nothing at the peak",
    )
    assert explanation.more_memory is None


# -- on plans that planners made --------------------------------------------------------------------------------------


@pytest.mark.parametrize("planner", ["none", "search", "sublinear", "auto"])
def test_a_planners_plan_is_put_together_again_as_it_was(planner: str) -> None:
    plan = deep_plan(1.0 if planner == "none" else 0.6, planner)
    assert Edits(plan).base.schedule == plan.schedule


def test_prices_are_those_of_schedules_that_the_checker_passes() -> None:
    plan = deep_plan()
    edits = Edits(plan)
    again = [fate for fate in fates(edits.run) if fate.kind == Kind.REMATERIALIZED]
    assert again
    for fate in again:
        edited = edits.edited(kept=[fate.storage])
        check(plan.graph, edited.schedule)
        price = price_all(edits, [fate])[fate.storage]
        assert price.keep is not None
        assert plan.predicted.seconds + price.keep.seconds == pytest.approx(edited.seconds)
        assert price.keep.seconds < 0
        assert price.keep.peak_bytes == simulate(plan.graph, edited.schedule).peak_bytes
        held = fates(edits.run)[fate.storage]
        assert held.rematerialized
        assert sum(op == plan.graph.writer_of[fate.storage] for op in _computed(edited)) == 1


def _computed(edited: Edited) -> list[int]:
    return edited.schedule.operands[edited.schedule.codes == 0].tolist()


def test_more_memory_lies_between_what_is_at_hand_and_what_is_proved() -> None:
    plan = deep_plan()
    larger = plan.budget_bytes + next_step_bytes(plan)
    more = explained(plan, [CurvePoint(larger, 0.01, plan.status)]).more_memory
    assert more is not None
    assert more.budget_bytes == larger
    assert more.bound_overhead is not None
    assert more.bound_overhead <= more.kept_overhead <= plan.overhead
    assert more.kept
    kept = Edits(plan).edited(kept=more.kept)
    check(plan.graph, kept.schedule)
    assert kept.timeline.peak_bytes <= larger
    assert kept.seconds / plan.unplanned.seconds - 1 == pytest.approx(more.kept_overhead)
    bound = least_seconds_again(Problem(graph=plan.graph, device=plan.device, budget_bytes=larger))
    assert more.bound_overhead == pytest.approx(bound.seconds / plan.unplanned.seconds)
    assert more.found == CurvePoint(larger, 0.01, plan.status)


def test_a_plan_with_copies_has_every_price() -> None:
    linked = Device(name="linked", to_host_bytes_per_second=5e6, to_device_bytes_per_second=5e6)
    graph = chain(20)
    problem = Problem(graph=graph, device=linked, budget_bytes=11_000, host_budget_bytes=8_000, time_limit_seconds=30.0)
    plan = make_planner("offload", iterations=4000, threads=1).plan(problem).plan
    assert plan is not None
    explanation = explained(plan)
    base = Edits(plan).base
    assert (base.seconds, base.timeline.peak_bytes) == (plan.predicted.seconds, plan.predicted.peak_bytes)
    kinds = {fate.kind for fate in explanation.fates}
    assert {Kind.OFFLOADED, Kind.REMATERIALIZED} <= kinds
    for fate in explanation.fates:
        if fate.kind in (Kind.OFFLOADED, Kind.REMATERIALIZED):
            price = explanation.prices[fate.storage]
            assert price.keep is not None
            assert price.again is not None
            assert price.offload is not None
    more = explained(plan).more_memory
    assert more is not None
    assert more.kept_overhead <= plan.overhead
    assert more.bound_overhead is None  # the bound is for plans without copies


def test_a_gib_more_is_asked_about_where_the_step_is_that_large() -> None:
    plan = deep_plan()
    assert next_step_bytes(plan) == plan.budget_bytes // 10
    large = msgspec.structs.replace(
        plan, budget_bytes=6 << 30, unplanned=msgspec.structs.replace(plan.unplanned, peak_bytes=7 << 30)
    )
    assert next_step_bytes(large) == 1 << 30


def test_a_plan_as_fast_as_the_unplanned_step_buys_nothing() -> None:
    plan = deep_plan(1.0, "none")
    assert explained(plan).more_memory is None
    assert "nothing: no plan is faster" in plan.explain()


@pytest.mark.parametrize("bytes_outside", [0, 4096])
def test_the_least_budget_is_the_sum_of_its_parts(bytes_outside: int) -> None:
    graph = chain(20)
    problem = Problem(
        graph=graph, device=GENERIC, budget_bytes=20_000 + bytes_outside, bytes_outside=bytes_outside,
        time_limit_seconds=1.0,
    )  # fmt: skip
    plan = make_planner("search").plan(problem).plan
    assert plan is not None
    least = explained(plan).least_budget
    assert least.ops
    for holding in least.ops:
        parts = sum(graph.storages[s].bytes for s in holding.reads + holding.writes) + (holding.workspace_bytes or 0)
        assert holding.total_bytes == parts - holding.written_over_bytes
        needed = least.resident_bytes + least.outside_bytes + holding.total_bytes + holding.kept_bytes
        assert needed == plan.bounds.least_budget_bound_bytes
    assert f"needs {least.ops[0].total_bytes / 1024:.4g} KiB at once" in plan.explain()


def test_what_is_kept_for_the_end_holds_the_least_budget_beside_an_op() -> None:
    plan = plan_of(heads(), unplanned_schedule(Problem(graph=heads(), device=GENERIC, budget_bytes=1)))
    least = explained(plan).least_budget
    assert [(holding.op, holding.total_bytes, holding.kept_bytes) for holding in least.ops] == [
        (1, 140, 80),
        (3, 140, 80),
        (5, 140, 80),
    ]
    assert "op1 needs 140 B at once" in plan.explain()
    assert "; with 80 B kept for the end of the step, beside 10 B always there" in plan.explain()


def test_gradients_that_are_handed_over_hold_the_least_budget() -> None:
    graph = small_graph()
    kept = [msgspec.structs.replace(s, required_at_end=s.id in (A, B, GRAD_B, 6, 7)) for s in graph.storages]
    graph = Graph.build(name="handed", storages=kept, ops=graph.ops[:-1])
    free = Problem(graph=graph, device=GENERIC, budget_bytes=1)
    least = explained(plan_of(graph, unplanned_schedule(free))).least_budget
    assert (least.ops, least.at_end_bytes, least.bound_bytes) == ((), 400 * 4 + 100 + 8, 150 + 1708)
    assert "1.668 KiB that the step hands over at its end" in _unplanned_words(graph, free)


def _unplanned_words(graph: Graph, problem: Problem) -> str:
    return plan_of(graph, unplanned_schedule(problem)).explain()


def test_the_explanation_as_json() -> None:
    explanation = explained(deep_plan())
    keys = msgspec.json.decode(msgspec.json.encode(explanation_keys(explanation)))
    assert len(keys["storages"]) == len(explanation.plan.graph.storages)
    paid = [-row["price"]["keep"]["seconds"] if row["price"] else 0.0 for row in keys["storages"]]
    assert paid == sorted(paid, reverse=True)
    first = keys["storages"][0]
    assert first["fate"] == "rematerialized"
    assert len(first["live"]) == 1 + first["rematerialized"]
    assert first["price"]["offload"] == {"why_not": "generic has no link to a host"}
    assert keys["more_memory"]["kept_overhead"] < explanation.plan.overhead
    assert keys["least_budget"]["bound_bytes"] == explanation.plan.bounds.least_budget_bound_bytes


# -- whatever is drawn ------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_edit_is_legal(data: st.DataObject) -> None:
    graph = data.draw(graphs(mutations=data.draw(st.booleans())))
    plan = plan_of(graph, data.draw(legal_schedules(graph)), SLOW_LINK)
    try:
        edits = Edits(plan)
    except InvalidScheduleError:  # where its drops stand matters
        return
    assert edits.base.timeline.peak_bytes <= plan.predicted.peak_bytes
    original = edits.edited

    def checked(**arguments: Any) -> Edited:
        edited = original(**arguments)
        check(graph, edited.schedule)
        return edited

    edits.edited = checked  # pyright: ignore[reportAttributeAccessIssue]
    of_storage = fates(edits.run)
    for storage, price in price_all(edits, of_storage).items():
        fate = of_storage[storage]
        for change, why_not in (
            (price.keep, price.why_not_keep),
            (price.again, price.why_not_again),
            (price.offload, price.why_not_offload),
        ):
            assert (change is None) == bool(why_not)
        if price.keep is not None and fate.kind not in (Kind.REMATERIALIZED, Kind.OFFLOADED):
            assert (price.keep.seconds, price.keep.computations) == (0.0, 0)
        if price.keep is not None and fate.kind == Kind.REMATERIALIZED:
            assert price.keep.computations <= 0
        if price.again is not None and fate.kind not in (Kind.REMATERIALIZED, Kind.OFFLOADED):
            assert price.again.computations >= 1
