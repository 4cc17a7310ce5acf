"""Eager mode on structures that repeat: they are planned in the background, and their plans are followed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from eager_loops import compared, convolutions, images_loss, mlp, mlp_loss
from torch import nn

from memfit.device import Device
from memfit.planners import make_planner
from memfit.planning import Settings, make_problem
from memfit.runtime.eager import structures
from memfit.runtime.eager.pass_graph import decisions_of, graph_of
from memfit.runtime.eager.trace import BEFORE, Content, Trace, TracedCall


@pytest.fixture(autouse=True)
def nothing_left_of_other_tests() -> None:
    """Free what compiled models of other tests hold."""
    torch.compiler.reset()
    gc.collect()


@pytest.fixture(autouse=True)
def short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structures, "_TIME_LIMIT_SECONDS", 0.4)
    monkeypatch.setattr(structures, "_PAID_SECONDS", 0.0)


def wait_for_plans(block: Any) -> None:
    planned = block._mode.passes._structures._planned
    if planned is not None:
        planned[1].join()


def planned(
    make: Callable[[], nn.Module],
    loss: Callable[[nn.Module, int], torch.Tensor],
    share: float,
    *,
    steps: int = 9,
    largest: int = 0,
) -> Any:
    """Compare as `compared` does, with all plans made by the next step."""
    return compared(make, loss, share, steps=steps, largest=largest, after=wait_for_plans)


def with_dropout() -> nn.Module:
    return nn.Sequential(mlp()[:6], nn.Dropout(0.3), mlp()[:4], nn.Dropout(0.2), mlp()[-1])  # type: ignore[index]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], torch.Tensor]]] = {
    "mlp": (mlp, mlp_loss),
    "dropout": (with_dropout, mlp_loss),
    "convolutions in place, batch normalization": (convolutions, images_loss),
    "attention": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True), 3),
        lambda model, _: model(torch.randn(8, 32, 32)).square().mean(),
    ),
    "recurrent": (lambda: nn.GRU(32, 64, 2), lambda model, _: model(torch.randn(20, 32, 32))[0].square().mean()),
}


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.85, 0.7])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_a_loop_that_repeats_follows_a_plan(case: str, share: float) -> None:
    report = planned(*CASES[case], share)
    assert report.by_plan.passes >= 2, report
    assert report.left_plan.passes == report.calm.passes == 0
    assert report.by_policy.passes + report.by_plan.passes == report.passes == 9


def test_a_search_waits_until_calls_made_again_have_cost_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structures, "_PAID_SECONDS", 1000.0)
    report = planned(mlp, mlp_loss, 0.7)
    assert report.by_policy.passes == report.passes == 9 and report.by_policy.again_seconds > 0


def test_what_others_hold_takes_nothing_from_a_plan() -> None:
    held = torch.ones(1 << 25)
    report = planned(mlp, mlp_loss, 0.7)
    assert report.by_plan.passes >= 2, report
    del held


def test_a_structure_that_changes_midway() -> None:
    def loss(model: nn.Module, number: int) -> torch.Tensor:
        hidden = model[:8](torch.randn(2048, 64))  # type: ignore[index]
        if number in (6, 8):
            hidden = hidden.sigmoid() * 2
        return model[8:](hidden).square().mean()  # type: ignore[index]

    report = planned(mlp, loss, 0.7, steps=10, largest=6)
    assert report.left_plan.passes >= 1 and report.by_plan.passes >= 2


def test_two_structures_in_turns() -> None:
    def loss(model: nn.Module, number: int) -> torch.Tensor:
        return model(torch.randn(2048 if number % 2 else 1900, 64)).square().mean()

    report = planned(mlp, loss, 0.7, steps=16, largest=1)
    assert report.by_plan.passes >= 6 and report.left_plan.passes <= 1, report


@pytest.mark.slow
def test_in_turns_with_a_common_beginning() -> None:
    def loss(model: nn.Module, number: int) -> torch.Tensor:
        hidden = model[:8](torch.randn(2048, 64))  # type: ignore[index]
        if number % 3 == 0:
            hidden = hidden.sigmoid() * 2
        return model[8:](hidden).square().mean()  # type: ignore[index]

    report = planned(mlp, loss, 0.7, steps=18, largest=0)
    assert report.by_plan.passes >= 3, report


def test_what_code_holds_is_live_in_the_graph() -> None:
    def loss(model: nn.Module, _number: int) -> torch.Tensor:
        hidden, held = torch.randn(2048, 64), []
        for layer in model:  # type: ignore[attr-defined]
            hidden = layer(hidden)
            held.append(hidden)
        return hidden.square().mean() + 0.0 * sum(float(each.detach().sum()) for each in held[::4])

    compared(mlp, loss, 1.0, steps=6, after=wait_for_plans)


def test_calls_that_raise_errors() -> None:
    def loss(model: nn.Module, _number: int) -> torch.Tensor:
        hidden = model[:8](torch.randn(2048, 64))  # type: ignore[index]
        with pytest.raises(RuntimeError):
            hidden @ torch.ones(3, 3)
        return model[8:](hidden).square().mean()  # type: ignore[index]

    report = planned(mlp, loss, 0.7, steps=6)
    assert report.made_again > 0 and report.left_plan.passes == 0


def test_a_pass_within_the_budget_is_not_planned() -> None:
    report = planned(mlp, mlp_loss, 1.5)
    assert report.by_plan.passes == 0 and report.let_go == 0


def pass_of_three() -> Trace:
    """Return x -> a -> b -> gradient of a, in which autograd saves a and b."""
    trace = Trace.__new__(Trace)
    x = Content(1 << 20, BEFORE, 0, can_be_remade=False)
    a, b = (Content(1 << 20, born, 0, can_be_remade=True) for born in (0, 1))
    c = Content(1 << 10, 2, 0, can_be_remade=True)
    gradient = Content(1 << 20, 3, 0, can_be_remade=False)
    need = structures_need()
    rows = [([x], [a]), ([a], [b]), ([b], [c]), ([b, c], [gradient]), ([a, gradient], [])]
    calls: list[TracedCall] = []
    for position, (reads, makes) in enumerate(rows):
        call = TracedCall(f"op{position}", need, 1e-3, is_backward=position > 2)
        call.reads, call.makes = reads, makes
        for content in reads:
            content.reads.append(position)
        calls.append(call)
    a.dies, b.dies, c.dies, gradient.dies = 5, 4, 4, 5
    trace.calls, trace.contents, trace.live_bytes = calls, [x, a, b, c, gradient], 1 << 20
    return trace


def structures_need() -> Any:
    from memfit.runtime.eager.needs import Need

    return Need(0, 0, 1e-3, 0)


def test_decisions_of_a_plan() -> None:
    made = graph_of(pass_of_three(), Device(name="test"))
    assert [storage.resident for storage in made.graph.storages] == [True, False, False, False, False]
    assert [op.recomputable for op in made.graph.ops[1:]] == [True, True, True, False, False]
    settings = Settings(budget=(3 << 20) + (1 << 11), planner="search", options={"without": "peak_reducing_order"})
    problem = make_problem(made.graph, Device(name="test"), settings)
    plan = make_planner("search", without="peak_reducing_order").plan(problem).plan
    assert plan is not None
    decisions = decisions_of(made, plan.schedule)
    assert decisions.let_go == {2: [(0, 0)]}  # a goes before b's reader, and is made again for the last call


def test_what_code_holds_is_read_to_its_end() -> None:
    trace = pass_of_three()
    trace.contents[1].is_held = True
    made = graph_of(trace, Device(name="test"))
    assert not made.graph.ops[1].recomputable
    trace = pass_of_three()
    trace.contents[4].dies = None
    assert graph_of(trace, Device(name="test")).graph.storages[4].required_at_end
