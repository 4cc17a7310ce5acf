"""Budgets of compiled models in steps that are not like the last one: new sizes, and several calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from occupied import bytes_now
from torch import nn

import memfit
from memfit.dynamo.account import Account
from memfit.dynamo.outside import Outside, OutsideOfGraphs
from memfit.dynamo.share import Share
from memfit.dynamo.window import Window, apart
from memfit.errors import BudgetNotHeldError, NoPlanError
from memfit.system.recorder import record

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def make_model(width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(width, 16))


def peaks_of_calls(rows: Sequence[int], share: float | None, steps: int = 5) -> tuple[list[int], int]:
    """Return the peak of each step that calls a model once for each batch, and the budget: a share of eager's peak."""
    before_bytes = bytes_now(CPU)

    def train(budget: int) -> list[int]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if budget:
            memfit.compile(model, budget=before_bytes + budget, optimizer=optimizer, options={"iterations": 20_000})
        peaks: list[int] = []
        for _ in range(steps):
            batches = [torch.randn(count, 64) for count in rows]
            with record("cpu") as usage:
                loss = torch.stack([model(batch).square().mean() for batch in batches]).sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                del loss
            peaks.append(bytes_now(CPU) - before_bytes - usage.end_bytes + usage.start_bytes + usage.peak_bytes)
        return peaks

    budget = int((share or 1.0) * max(train(0)))
    return train(budget), budget


@pytest.mark.slow
@pytest.mark.parametrize("rows", [(2048, 2048), (2048, 2048, 2048), (2048, 2080), (2048, 2080, 2112)])
def test_several_calls_in_a_step_keep_the_budget_and_the_first_step_says_what_it_takes(
    rows: Sequence[int], caplog: pytest.LogCaptureFixture
) -> None:
    peaks, budget = peaks_of_calls(rows, 0.75)
    over = [peak for peak in peaks if peak > budget]
    assert all(peak <= budget for peak in peaks[2:]), (peaks, budget)
    assert caplog.text.count("more than the budget") >= len(over)


def test_a_first_step_at_a_new_size_that_takes_more_than_the_budget_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = bytes_now(CPU) + (6 << 20)
    memfit.compile(model, budget=budget, optimizer=optimizer, options={"iterations": 20_000})
    with pytest.raises(BudgetNotHeldError) as caught:
        for rows in (800, 760, 840, 720, 880):
            outputs = model(torch.randn(rows, 64))
            # what the loss saves is as large as the budget
            torch.stack([outputs.exp().square().mean() for _ in range(120)]).mean().backward()
            del outputs
            optimizer.step()
            optimizer.zero_grad()
    assert "more than the budget" in caplog.text and caught.value.over_bytes > 0


def test_fit_says_what_measuring_ops_of_a_new_size_takes(caplog: pytest.LogCaptureFixture) -> None:
    """An op is run on copies of its inputs, of a frozen weight too."""
    frozen = torch.nn.Linear(1024, 1024).requires_grad_(requires_grad=False)
    model = torch.nn.Sequential(frozen, torch.nn.Linear(1024, 4))
    step = memfit.fit(model, lambda model, rows: model(rows).square().mean(), torch.randn(64, 1024), budget="6MiB")
    assert "measuring the ops" not in caplog.text
    for rows in (48, 40, 48):
        step(torch.randn(rows, 1024))
    assert caplog.text.count("measuring the ops of a new graph took") in (1, 2)  # again only where it took more


def test_what_runs_apart_is_left_out_of_the_windows_that_are_open() -> None:
    window = Window(CPU)
    small = torch.empty(1 << 10)
    with apart(CPU) as own:
        torch.empty(1 << 20)
    window.close()
    assert own.live_bytes - window.live_bytes >= (4 << 20) - small.nbytes > 0


def test_a_share_is_half_until_a_step_has_shown_what_follows() -> None:
    account = Account(1 << 30, CPU)
    account.begin()
    share = Share(account, ends_in_break=True)
    assert share.of(1000, 200) == 600 and not share.is_too_small and not share.is_of_several
    share.end_forward()
    share.begin_backward()
    assert share.is_too_small and share.of(1000, 200) == 600  # the graph was called in this step
    account.steps += 1
    assert share.of(1000, 200) == 1000
    other = Share(account, ends_in_break=False)
    assert other.of(1000, 200) == 1000
    for _ in range(4):
        other.end_forward()
    assert other.is_repeated and other.of(1000, 200) == 600 and other.is_of_several
    account.steps += 1
    assert not other.is_repeated and other.of(1000, 200) == 400  # four calls


@pytest.mark.parametrize("breaks", [False, True])
def test_a_refusal_names_a_budget_where_no_other_call_shares_it(breaks: bool) -> None:
    halves = make_model()[:4], make_model()[-5:]

    def forward(rows: torch.Tensor) -> torch.Tensor:
        inner = halves[0](rows)
        if breaks:
            torch._dynamo.graph_break()
        return halves[1](inner)

    options = {"reserve": 0, "options": {"iterations": 2000}}

    def refusal(budget: int) -> tuple[str, int | None]:
        torch.compiler.reset()
        compiled = torch.compile(forward, backend="memfit", options=options | {"budget": budget})
        try:
            for _ in range(3):
                compiled(torch.randn(4096, 64)).square().mean().backward()
                for half in halves:
                    half.zero_grad()
        except NoPlanError as error:
            return str(error), error.least_budget_found_bytes
        return "", None

    text, named = refusal(bytes_now(CPU) + (1 << 20))
    assert "are beside this graph" in text and ("was reached, where the loss takes" in text) is not breaks
    assert (named is None) is breaks
    if named is not None:
        text, named = refusal(named)  # the loss takes more
        assert "was reached; in what is left what the loop runs" in text
        assert named is not None and refusal(named) == ("", None)


def test_what_is_outside_is_scaled_to_the_size_of_the_outputs() -> None:
    seen = OutsideOfGraphs()
    graph = frozenset({1})
    assert seen.estimated(graph, 100) is None
    seen.note(graph, 100, Outside(between_bytes=500, held_bytes=200))
    seen.note(graph, 1000, Outside(between_bytes=9000, held_bytes=1000))
    assert seen.estimated(graph, 110) == Outside(between_bytes=550, held_bytes=220)
    assert seen.estimated(graph, 900) == Outside(between_bytes=8100, held_bytes=900)
    assert seen.estimated(frozenset({2}), 100) is None
    seen.note(frozenset({2}), 0, Outside(between_bytes=0, held_bytes=0))  # an empty batch tells nothing of others
    assert seen.estimated(frozenset({2}), 100) is None
    assert seen.estimated(frozenset({2}), 0) == Outside(between_bytes=0, held_bytes=0)
