"""Each door takes no more than its budget from the device, in each of ten steps, at three budgets."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import InChild
from doors import Case, ten_steps
from expected_failures import EXPECTED

MIB = 1 << 20
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
OFFLOAD = {"planner": "offload", "host_budget": "1GiB"}
SHARES = (0.9, 0.75, 0.6)

CASES: dict[str, Case] = {
    "fit": Case(door="fit"),
    "fit, torch's allocator": Case(door="fit", options={"arena": False}),
    "fit, capped": Case(door="fit", options={"hard": True}),
    "fit, user's expandable segments": Case(door="fit", environment=EXPANDABLE),
    "fit, capped, user's expandable segments": Case(door="fit", options={"hard": True}, environment=EXPANDABLE),
    "fit, scaler": Case(door="fit", loop="scaler"),
    "fit, accumulation": Case(door="fit", loop="accumulation"),
    "fit, accumulation, percent": Case(door="fit", loop="accumulation", percent=True),
    "fit, offloading": Case(door="fit", options=OFFLOAD),
    "fit, around a break": Case(door="fit", is_broken=True),
    "fit, side streams": Case(door="fit", place="stream"),
    "fit, offloading, side streams": Case(door="fit", options=OFFLOAD, place="stream"),
    "fit, threads": Case(door="fit", place="thread"),
    "fit, second device": Case(door="fit", device="cuda:1"),
    "fit, offloading, second device": Case(door="fit", options=OFFLOAD, device="cuda:1"),
    "fit, no segments can be mapped": Case(door="fit", vmm_fails=True),
    "compile": Case(door="compile"),
    "compile, accumulation": Case(door="compile", loop="accumulation"),
    "compile, scaler": Case(door="compile", loop="scaler"),
    "compile, around a break": Case(door="compile", is_broken=True),
    "compile, user's expandable segments": Case(door="compile", environment=EXPANDABLE),
    "compile, side streams": Case(door="compile", place="stream"),
    "compile, second device": Case(door="compile", device="cuda:1"),
    "compile, no segments can be mapped": Case(door="compile", vmm_fails=True),
    "backend": Case(door="backend"),
    "backend, accumulation": Case(door="backend", loop="accumulation"),
    "backend, around a break": Case(door="backend", is_broken=True),
    "backend, second device": Case(door="backend", device="cuda:1"),
    "backend, no segments can be mapped": Case(door="backend", vmm_fails=True),
    "eager": Case(door="eager"),
    "eager, accumulation": Case(door="eager", loop="accumulation"),
    "eager, scaler": Case(door="eager", loop="scaler"),
    "eager, around a break": Case(door="eager", is_broken=True),
    "eager, side streams": Case(door="eager", place="stream"),
    "eager, second device": Case(door="eager", device="cuda:1"),
    "eager, no segments can be mapped": Case(door="eager", vmm_fails=True),
}


def _cases() -> list[Any]:
    """Return name and share of each case; those which are expected to fail must fail."""
    unknown = set(EXPECTED) - set(CASES)
    assert not unknown, f"expected to fail, and no case: {unknown}"
    return [
        pytest.param(
            name,
            share,
            id=f"{name}, {share:.0%}",
            marks=[pytest.mark.xfail(strict=True, reason="a judge of its own")]
            if share in EXPECTED.get(name, ())
            else [],
        )
        for name in CASES
        for share in SHARES
    ]


@pytest.fixture(scope="session")
def wholes() -> dict[Any, int]:
    """Return what loops take without memfit: it is measured once for each."""
    return {}


def _whole_bytes(case: Case, in_child: InChild, wholes: dict[Any, int]) -> int:
    kind = (case.loop, case.is_broken)
    if kind not in wholes:
        plain = Case(door="none", loop=case.loop, is_broken=case.is_broken)
        wholes[kind] = max(in_child(ten_steps, plain, 1.0, 0)["taken_bytes"])
    return wholes[kind]


@pytest.mark.parametrize(("name", "share"), _cases())
def test_budget_is_held(name: str, share: float, in_child: InChild, wholes: dict[Any, int]) -> None:
    case = CASES[name]
    whole = _whole_bytes(case, in_child, wholes)
    found = in_child(ten_steps, case, share, whole, environment=case.environment)
    told = f"{[round(each / MIB) for each in found.get('taken_bytes', [])]} of {found.get('budget_bytes', 0) / MIB:.0f}"
    print(f"{name}, {share:.0%}: {told} MiB {found.get('error', '')}")
    assert "error" not in found, f"{found['error']}; {told}"
    assert max(found["taken_bytes"]) <= found["budget_bytes"], told
    assert found["retries"] == 0
    if case.device == "cuda:1":
        for count in ("mallocs", "streams", "registers", "contexts"):
            assert found[count][0] == 0, f"{count} on another device: {found[count]}"
