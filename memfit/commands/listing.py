"""`memfit planners`, `packers`, `workloads`, `devices`: lists with options and sources; imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from memfit.commands.answer import Answer, columns_table
from memfit.device import Device
from memfit.packing import PACKERS
from memfit.planners import PLANNERS
from memfit.system.budget import format_bytes
from memfit.system.lines import printable
from memfit.workloads import WORKLOADS

_MORE = {
    "planners": "memfit plan resnet50 --budget 60% --planner sublinear",
    "packers": "memfit pack trace.csv --packer first_fit --option by=area",
    "workloads": "memfit fit gpt2 --set batch=2 --set layers=6 --budget 60%",
    "devices": "memfit plan resnet50 --set batch=256 --budget 14GiB --device-profile t4",
}
EXAMPLES = {noun: f"\nExamples:\n\nmemfit {noun}\n\n{more}\n" for noun, more in _MORE.items()}


def planners() -> Answer:
    """List the planners, with their options and sources."""
    return _listed("planners", _entries(PLANNERS), "--option")


def packers() -> Answer:
    """List the packers, with their options and sources."""
    return _listed("packers", _entries(PACKERS), "--option")


def workloads() -> Answer:
    """List the built-in workloads, with their options and sources."""
    entries: list[dict[str, Any]] = [
        {
            "name": workload.name,
            "description": workload.description,
            "source": workload.source,
            "requires": workload.requires,
            "options": [
                {"name": o.name, "default": o.default, "description": o.what, "choices": list(o.choices)}
                for o in workload.options
            ],
        }
        for workload in WORKLOADS.values()
    ]
    return _listed("workloads", entries, "--set")


def devices() -> Answer:
    """List the device profiles that a plan can be made for."""
    from memfit.cost.device_profiles import DEVICES

    rows = [_device_row(name, device) for name, device in DEVICES.items()]
    columns = ("name", "memory", "float32", "bfloat16", "memory rate", "link")
    sources = [Text(f"{name}: {printable(device.source)}", style="dim") for name, device in DEVICES.items()]
    keys = {"devices": [msgspec.to_builtins(device) for device in DEVICES.values()]}
    parts: tuple[RenderableType, ...] = (columns_table(columns, rows), Text(), *sources)
    return Answer(keys=keys, parts=parts)


def _entries(classes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the description, the source and the options of each planner or packer."""
    return [
        {
            "name": name,
            "description": (kind.__doc__ or "").strip().partition("\n")[0],
            "source": kind.source,
            "options": [
                {"name": option.name, "default": option.default, "description": option.metadata.get("help", "")}
                for option in dataclasses.fields(kind)
            ],
        }
        for name, kind in classes.items()
    ]


def _device_row(name: str, device: Device) -> tuple[str, ...]:
    def rate(figure: float | None, unit: str) -> str:
        if figure is None:
            return "-"
        return f"{figure / 1e12:.3g} T{unit}" if figure >= 1e12 else f"{figure / 1e9:.3g} G{unit}"

    return (
        name,
        "-" if device.memory_bytes is None else format_bytes(device.memory_bytes),
        rate(device.flops_per_second.get("float32"), "flop/s"),
        rate(device.flops_per_second.get("bfloat16"), "flop/s"),
        rate(device.memory_bytes_per_second, "B/s"),
        rate(device.to_host_bytes_per_second, "B/s"),
    )


def _listed(noun: str, entries: list[dict[str, Any]], option_flag: str) -> Answer:
    parts = tuple(_entry_part(entry, option_flag) for entry in entries)
    return Answer(keys={noun: entries}, parts=parts)


def _entry_part(entry: dict[str, Any], option_flag: str) -> RenderableType:
    head = Text.assemble(
        (entry["name"], "bold"), f"  {entry['description']}\n", (f"  source: {entry['source']}", "dim")
    )
    rows = [(f"  {option_flag} {o['name']}={_shown(o['default'])}", _meaning(o)) for o in entry["options"]]
    return Group(head, columns_table(("", ""), rows), Text()) if rows else Group(head, Text())


def _meaning(option: dict[str, Any]) -> str:
    choices = option.get("choices")
    return f"{option['description']} ({', '.join(map(_shown, choices))})" if choices else str(option["description"])


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
