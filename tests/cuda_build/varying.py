"""What holds its budget on some machines alone, by case and share of the bytes that eager reserves."""

from __future__ import annotations

VARYING: dict[str, tuple[float, ...]] = {"eager, accumulation": (0.6,), "eager, side streams": (0.6,)}
"""Eager mode chooses by the seconds that recomputing took."""
