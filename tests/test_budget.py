"""Budgets as people write them, and every one that must be refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import InvalidBudgetError
from memfit.system.budget import format_bytes, parse_budget


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
