"""Budgets and sizes as text: `6GiB`, `500MB`, `60%` and `90% of the card` to bytes, and bytes to text.

>>> from memfit.system.budget import format_bytes, parse_budget
>>> parse_budget("1.5GiB", unplanned_peak_bytes=0)
1610612736
>>> parse_budget("60%", unplanned_peak_bytes=1000)
600
>>> format_bytes(1610612736)
'1.5 GiB'
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from memfit.errors import InvalidBudgetError

_BYTES_PER_UNIT = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _BYTES_PER_UNIT.update({f"{_prefix}b": 1000**_power, f"{_prefix}ib": 1024**_power})
_NUMBER = re.compile(r"(?P<number>-?[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[A-Za-z]*|%)")
_OF_CARD = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*%\s+of\s+the\s+card", re.IGNORECASE)
_FORMS = "write 6GiB, 500MB, a whole number of bytes, 60% of the step's peak, or '90% of the card'"
_MOST_BYTES = 1 << 62  # the limit of a storage in a graph file; larger numbers are typing errors
_MOST_CHARACTERS = 64
_ANY_PEAK_BYTES = 1 << 50  # of which a percentage is taken while only its form is checked


def parse_budget(text: object, unplanned_peak_bytes: int) -> int:
    """Return the bytes that `text` stands for, rounded down, so that the budget is never exceeded.

        >>> parse_budget("500MB", unplanned_peak_bytes=0)
        500000000

    Args:
        text: `6GiB`, `1.5 GiB`, `500MB`, a whole number of bytes, or a percentage of the unplanned peak.
            Units are B, kB, MB, GB, TB (powers of 1000) and KiB, MiB, GiB, TiB (powers of 1024), in any case.
        unplanned_peak_bytes: the bytes of 100%.

    Raises:
        InvalidBudgetError: not a size, an unknown unit, less than one byte, or more than any device has; a share of
            the card, which `on_card` reads where the device is known.
    """
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise InvalidBudgetError(f"budget {text!r} is a {type(text).__name__}, expected text or an integer: {_FORMS}")
    if isinstance(text, int):
        return _checked(Fraction(text), str(text))
    shown = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
    match = _NUMBER.fullmatch(text.strip()) if len(text) <= _MOST_CHARACTERS else None
    if is_of_card(text):
        raise InvalidBudgetError(f"budget {shown!r} is a share of a device's memory, and no device is known here")
    if match is None:
        raise InvalidBudgetError(f"budget {shown!r} is not a size: {_FORMS}")
    number, unit = Fraction(match["number"]), match["unit"].lower()
    if unit == "%":
        return _checked(number * unplanned_peak_bytes / 100, shown)
    if unit not in _BYTES_PER_UNIT:
        raise InvalidBudgetError(
            f"budget {shown!r} has the unknown unit {match['unit']!r}: "
            "expected one of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB, or %"
        )
    if not unit and number.denominator != 1:
        raise InvalidBudgetError(f"budget {shown!r} has no unit, so it is in bytes and must be whole: {_FORMS}")
    return _checked(number * _BYTES_PER_UNIT[unit], shown)


def is_share(budget: object) -> bool:
    """Return whether a budget is a percentage of a peak, which has to be known before it can be read.

    >>> is_share("60%"), is_share("90% of the card"), is_share("6GiB"), is_share(1 << 30)
    (True, False, False, False)
    """
    return str(budget).strip().endswith("%")


def is_of_card(text: object) -> bool:
    """Return whether a budget is a share of the device's memory, and not of the peak of a step.

    >>> is_of_card("90% of the card"), is_of_card("90%")
    (True, False)
    """
    return isinstance(text, str) and _OF_CARD.fullmatch(text.strip()) is not None


def require_budget(text: object) -> None:
    """Refuse a budget that cannot be read, before the peak of the step, or the device, is known.

    Raises:
        InvalidBudgetError: as `parse_budget`.
    """
    if not is_of_card(text):
        parse_budget(text, _ANY_PEAK_BYTES)


class Card(NamedTuple):
    """The memory of a device.

    Attributes:
        whole_bytes: its size; None if it is unknown.
        beside_bytes: of it, what a budget does not count: CUDA's context, communicators, other processes.
    """

    whole_bytes: int | None
    beside_bytes: int = 0


def on_card(text: str | int, card: Callable[[], Card]) -> str | int:
    """Return a budget such as `90% of the card` in bytes, rounded down; any other budget as it is.

        >>> on_card("90% of the card", lambda: Card(1000)), on_card("90%", lambda: Card(1000))
        (900, '90%')
        >>> on_card("90% of the card", lambda: Card(1000, beside_bytes=50))
        850

    All that is on the card stays within that share: what a budget does not count is taken off. Every door that knows
    its device calls it, before the budget is read by `parse_budget`.

    Args:
        text: the budget.
        card: returns the device's memory: called only if it is asked for.

    Raises:
        InvalidBudgetError: more than the card has, nothing of it, or a device whose memory is unknown.
    """
    match = _OF_CARD.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        return text
    share = Fraction(match["number"])
    if not 0 < share <= 100:
        raise InvalidBudgetError(f"budget {text!r}: expected more than 0% and at most 100% of the card")
    whole_bytes, beside_bytes = card()
    if whole_bytes is None:
        raise InvalidBudgetError(f"budget {text!r}: the device's profile has no memory_bytes; give bytes, such as 6GiB")
    left_bytes = share * whole_bytes / 100 - beside_bytes
    if beside_bytes and left_bytes < 1:
        raise InvalidBudgetError(
            f"budget {text!r}: {format_bytes(beside_bytes)} of the card's {format_bytes(whole_bytes)} are taken by "
            "CUDA's context, communicators and other processes, which leaves nothing of that share"
        )
    return _checked(left_bytes, str(text))


def format_bytes(size_bytes: int) -> str:
    """Return `size_bytes` with at most four digits, in the largest binary unit in which it is 1 or more.

    >>> format_bytes(300), format_bytes(2048), format_bytes(710462464)
    ('300 B', '2 KiB', '677.5 MiB')
    """
    size: float = size_bytes
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:,.2f} TiB"


def _checked(size_bytes: Fraction, shown: str) -> int:
    if size_bytes < 1:
        raise InvalidBudgetError(f"budget {shown!r} is less than one byte: {_FORMS}")
    if size_bytes > _MOST_BYTES:
        raise InvalidBudgetError(f"budget {shown!r} is more than any device has ({_MOST_BYTES} bytes): {_FORMS}")
    return int(size_bytes)


def parse_host_budget(given: str | int | None) -> int:
    """Return the bytes that storages may be offloaded to; None and 0 offload nothing.

    >>> parse_host_budget("2GiB"), parse_host_budget(0), parse_host_budget(None)
    (2147483648, 0, 0)

    Raises:
        InvalidBudgetError: not a size; a share of the peak is none.
    """
    if given is None or str(given).strip() == "0":
        return 0
    if is_share(given) or is_of_card(given):
        raise InvalidBudgetError(f"host budget {given!r} is a share; expected a size such as 64GiB")
    return parse_budget(given, unplanned_peak_bytes=0)


def parse_rate(text: str) -> float:
    """Return the bytes per second that a text stands for.

    >>> parse_rate("12.5GB/s")
    12500000000.0

    Raises:
        InvalidBudgetError: not a size by the second.
    """
    size = text.strip()
    if not size.endswith("/s") or size.endswith("%/s"):
        raise InvalidBudgetError(f"rate {text!r} is not a size by the second: write 25GB/s")
    return float(parse_budget(size.removesuffix("/s"), unplanned_peak_bytes=0))
