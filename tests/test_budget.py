"""Budgets as people write them, and every one that must be refused."""

from __future__ import annotations

import pytest
import torch
from command_line import Run, json_of
from hypothesis import given
from hypothesis import strategies as st

import memfit
from memfit.cost.calibration import memory_bytes
from memfit.cost.device_profiles import card_of_profile, load_device
from memfit.dynamo.settings import read_options
from memfit.errors import InvalidBudgetError
from memfit.system.budget import Card, format_bytes, is_of_card, on_card, parse_budget, parse_host_budget


@pytest.mark.parametrize(
    ("text", "expected_bytes"),
    [
        ("6GiB", 6 * 2**30),
        ("6 gib", 6 * 2**30),
        ("500MB", 500_000_000),
        ("1.5GiB", 3 * 2**29),
        ("  1KiB ", 1024),
        ("1kB", 1000),
        ("12B", 12),
        ("1234567", 1234567),
        (1234567, 1234567),
        ("60%", 6_000),
        ("100%", 10_000),
        ("100.01%", 10_001),
        ("250%", 25_000),
        ("33.335%", 3_333),
        ("0.0015kb", 1),
        ("2TiB", 2**41),
    ],
)
def test_reads_sizes(text: str | int, expected_bytes: int) -> None:
    assert parse_budget(text, unplanned_peak_bytes=10_000) == expected_bytes


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0", "less than one byte"),
        (0, "less than one byte"),
        (-1, "less than one byte"),
        ("-1", "less than one byte"),
        ("12XB", "unknown unit 'XB'"),
        ("9" * 20 + "%", "more than any device has"),
        ("0%", "less than one byte"),
        ("nan", "not a size"),
        ("inf", "not a size"),
        ("1e9", "not a size"),
        ("", "not a size"),
        ("GiB", "not a size"),
        ("%", "not a size"),
        ("6GiB6", "not a size"),
        ("1.5", "must be whole"),
        ("1.GiB", "not a size"),
        ("٣GiB", "not a size"),
        ("9" * 65, "not a size"),
        ("9" * 60, "more than any device has"),
        ("99999999TiB", "more than any device has"),
    ],
)
def test_refuses_and_says_why(text: str | int, why: str) -> None:
    with pytest.raises(InvalidBudgetError, match=why.replace("%", "[%]")) as caught:
        parse_budget(text, unplanned_peak_bytes=10_000)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


@given(st.text(max_size=20))
def test_any_text_is_a_size_or_refused(text: str) -> None:
    try:
        size_bytes = parse_budget(text, unplanned_peak_bytes=10_000)
    except InvalidBudgetError:
        return
    assert size_bytes >= 1


@given(st.integers(min_value=1, max_value=2**50))
def test_formatted_bytes_read_back_close(size_bytes: int) -> None:
    text = format_bytes(size_bytes).replace(",", "")
    assert parse_budget(text, unplanned_peak_bytes=0) == pytest.approx(size_bytes, rel=1e-2)


def test_a_share_of_the_card_is_read_where_the_device_is_known() -> None:
    assert on_card(" 12.5 % of  the Card", lambda: Card(1001)) == 125
    assert on_card("6GiB", lambda: 1 // 0) == "6GiB"
    assert on_card("60%", lambda: 1 // 0) == "60%"
    assert not is_of_card("60%")
    for text in ("0% of the card", "101% of the card"):
        with pytest.raises(InvalidBudgetError, match="expected more than 0% and at most 100% of the card"):
            on_card(text, lambda: Card(1000))
    with pytest.raises(InvalidBudgetError, match="no memory_bytes"):
        on_card("90% of the card", lambda: Card(None))
    with pytest.raises(InvalidBudgetError, match="no device is known here"):
        parse_budget("90% of the card", 1000)
    with pytest.raises(InvalidBudgetError, match="is a share"):
        parse_host_budget("90% of the card")


def test_each_door_takes_a_share_of_the_card() -> None:
    half_bytes = memory_bytes("cpu") // 2
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    with memfit.checkpoint(model, "50% of the card") as handle:
        assert handle.report().budget_bytes == half_bytes
    assert memfit.eager(model, budget="50% of the card").budget_bytes == half_bytes
    step = memfit.fit(model, torch.nn.MSELoss(), (torch.ones(2, 4), torch.ones(2, 4)), budget="50% of the card")
    assert step.plan.budget_bytes == half_bytes
    assert read_options({"budget": "50% of the card"}, device=torch.device("cpu")).settings.budget == half_bytes


def test_a_plan_for_another_device_takes_a_share_of_its_memory(run: Run) -> None:
    words = ("plan", "unet", "--set", "size=32", "--set", "width=4", "--set", "batch=1", "--json")
    status, out, _ = run(*words, "--budget", "50% of the card", "--device-profile", "a100-40")
    assert status == 0
    card = card_of_profile(load_device("a100-40"))
    assert card.whole_bytes == 40 << 30 and card.beside_bytes == 800 << 20
    assert json_of(out)["budget_bytes"] == card.whole_bytes // 2 - card.beside_bytes
