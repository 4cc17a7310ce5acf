"""Updates by `foreach`, torch's default on a GPU, hold budgets below what one call would take, in reserved bytes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from _gpu_measure import each_step
from _measure import MIB
from conftest import InChild

import memfit

WIDTH, LAYERS, ROWS = 2048, 12, 64
MATRICES_BYTES = LAYERS * 4 * WIDTH * WIDTH
STATE_BYTES = 4 * MATRICES_BYTES  # with gradients and two states


def trained(door: str, budget_bytes: int) -> dict[str, Any]:
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.GELU()) for _ in range(LAYERS)]
    model: Any = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    batch, called, block = torch.randn(ROWS, WIDTH, device="cuda"), model, nullcontext()
    if door == "checkpoint":
        memfit.checkpoint(model, budget_bytes)
    elif door == "compile":
        called = memfit.compile(model, budget=budget_bytes)
    elif door == "backend":
        called = torch.compile(model, backend="memfit", options={"budget": budget_bytes})
    elif door == "eager":
        block = memfit.eager(model, budget=budget_bytes)

    def step() -> None:
        optimizer.zero_grad()
        called(batch).sum().backward()
        optimizer.step()

    with block:
        return {"taken": [each["reserved_bytes"] for each in each_step(step, 6, 0)]}


@pytest.mark.parametrize("door", ["bare", "checkpoint", "compile", "backend", "eager"])
def test_an_update_holds_a_budget_that_one_call_would_exceed(door: str, in_child: InChild) -> None:
    budget_bytes = STATE_BYTES + 2 * MATRICES_BYTES // 3
    found = in_child(trained, door, budget_bytes)
    assert "error" not in found, found["error"]
    print([each // MIB for each in found["taken"]], budget_bytes // MIB)
    assert (max(found["taken"]) <= budget_bytes) is (door != "bare")
