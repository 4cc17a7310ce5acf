"""Cells of tables: what a stored result says of memory and time, in the units of the tables."""

from __future__ import annotations

from typing import Any

from _measure import MIB


def memory(result: dict[str, Any], key: str) -> str:
    """Return the MiB of a result, or why there are none."""
    return f"{result[key] / MIB:.1f}" if key in result else why_not(result)


def memory_and_time(result: dict[str, Any], memory: str, time: str) -> str:
    """Return the MiB of a result and its time against eager, or why there are none."""
    if memory not in result:
        return why_not(result)
    return f"{result[memory] / MIB:.1f}, {f'{result[time]:.2f}' if time in result else 'untimed'}"


def ratio(result: dict[str, Any], key: str) -> str:
    """Return a ratio, or nothing where it was not taken."""
    return f"{result[key]:.3f}" if result.get(key) is not None else ""


def overhead(result: dict[str, Any]) -> str:
    """Return the predicted overhead, or nothing."""
    return f"{result['predicted_overhead']:.1%}" if "predicted_overhead" in result else ""


def why_not(result: dict[str, Any]) -> str:
    """Return what became of a result without figures."""
    return "failed" if "error" in result else result.get("status", "")


def yes(value: bool | None) -> str:
    """Return a verdict in words; nothing where there is none."""
    return {True: "yes", False: "**no**", None: ""}[value]


def configuration(point: dict[str, Any]) -> str:
    """Return what a point of torch's own was asked for."""
    if point["kind"] == "budget":
        return f"activation_memory_budget {point['budget']}"
    return f"checkpoint every {point['granularity']}" if point["kind"] == "checkpoint" else "eager"
