"""Each door takes no more than its budget from the device, in each of ten steps, at three budgets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from _gpu_doors import BY_ITERATIONS, CASES, GPT, USERS_SEGMENTS, Case, measure_case
from _measure import MIB
from conftest import InChild

SHARES = (0.9, 0.75, 0.6)
OFFLOAD = {"planner": "offload", "host_budget": "1GiB"}

BESIDE = (
    Case(name="fit, hard, the user's expandable segments", allocator=USERS_SEGMENTS, given={"hard": True}),
    Case(name="fit, accumulation", loop="accumulation", optimizer={"none": True}),
    Case(name="fit, offloading, side streams", given=OFFLOAD, place="streams"),
    Case(name="fit, torch's allocator, side streams", given={"arena": False}, place="streams"),
    Case(name="fit, threads", place="threads"),
    Case(name="fit, second device", device=1),
    Case(name="fit, offloading, second device", given=OFFLOAD, device=1),
    Case(name="fit, no segments can be mapped", given={"arena": False}, segments_fail=True),
    Case(name="compile, accumulation", door="compile", loop="accumulation"),
    Case(name="compile, GradScaler", door="compile", scaler=True),
    Case(name="compile, side streams", door="compile", place="streams"),
    Case(name="compile, second device", door="compile", device=1),
    Case(name="compile, no segments can be mapped", door="compile", segments_fail=True),
    Case(name="compile, Inductor", door="compile", given={"kernels": "inductor"}),
    Case(name="compile, batches of three sizes", door="compile", loop="sizes"),
    Case(name="backend, accumulation", door="backend", loop="accumulation"),
    Case(name="backend, second device", door="backend", device=1),
    Case(name="backend, no segments can be mapped", door="backend", segments_fail=True),
    Case(name="graph break, backend", door="backend", model="broken mlp"),
    Case(name="graph break, eager", door="eager", model="broken mlp"),
    Case(name="eager, accumulation", door="eager", loop="accumulation"),
    Case(name="eager, GradScaler", door="eager", scaler=True),
    Case(name="eager, side streams", door="eager", place="streams"),
    Case(name="eager, second device", door="eager", device=1),
    Case(name="eager, no segments can be mapped", door="eager", segments_fail=True),
    *(
        Case(name=f"checkpoint, {name}", door="checkpoint", model="gpt2", options=GPT, **options)
        for name, options in {
            "accumulation": {"loop": "accumulation"},
            "the user's largest block that is split": {"allocator": "max_split_size_mb:64"},
            "side streams": {"place": "streams"},
            "second device": {"device": 1},
            "the user's expandable segments": {"allocator": USERS_SEGMENTS},
            "host": {"given": {"host_budget": "1GiB"}},
        }.items()
    ),
)
BY_NAME = {case.name: case for case in (*CASES, *BESIDE)}


def _cases() -> list[Any]:
    """Return name and share of each case."""
    return [pytest.param(name, share, id=f"{name}, {share:.0%}") for name in BY_NAME for share in SHARES]


@pytest.mark.parametrize(("name", "share"), _cases())
def test_budget_is_held(name: str, share: float, in_child: InChild) -> None:
    case = replace(BY_NAME[name], share=share)
    found = in_child(measure_case, case, search=BY_ITERATIONS)
    taken = [round(step["reserved_bytes"] / MIB) for step in found.get("steps", [])]
    told = f"{taken} of {found.get('budget_bytes', 0) / MIB:.0f} MiB"
    print(f"{name}, {share:.0%}: {told} {found.get('error', '')}")
    assert "error" not in found, f"{found['error']}; {told}"
    assert not found["failures"], f"{found['failures']}; {told}"
