"""Budgets that refusals name hold, with what torch's allocator leaves unused beside the tensors."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from _gpu_doors import GPT
from _gpu_measure import each_step
from _gpu_models import make_model
from conftest import InChild

import memfit

STEPS, SECONDS = 4, 2


def trained(door: str, budget_bytes: int) -> dict[str, Any]:
    step = make_model("gpt2", GPT, with_state=False).step
    if door == "compile":
        model = memfit.compile(step.model, budget=budget_bytes, optimizer=step.optimizer, time_limit_seconds=SECONDS)
    else:
        options = {"budget": budget_bytes, "time_limit_seconds": SECONDS}
        model = torch.compile(step.model, backend="memfit", options=options)

    def run() -> None:
        step.model.zero_grad(set_to_none=True)
        step.loss(model, step.batch).backward()
        step.update()

    try:
        return {"taken": [each["reserved_bytes"] for each in each_step(run, STEPS, 0)], "told": ""}
    except (memfit.MemfitError, torch._dynamo.exc.BackendCompilerFailed) as error:
        return {"taken": [], "told": str(error)}


@pytest.mark.parametrize("door", ["compile", "backend"])
def test_a_budget_that_is_named_holds(door: str, in_child: InChild) -> None:
    """A first refusal may be of a step without the optimizer's state, and a later one has seen it."""
    budget_bytes, found = 200 << 20, {"taken": [], "told": ""}
    for refusals in range(4):
        found = in_child(trained, door, budget_bytes)
        named = re.search(r"(?:a budget of|Raise the budget to) (\d+) bytes", found["told"])
        print(door, refusals, budget_bytes >> 20, [each >> 20 for each in found["taken"]])
        if named is None:
            break
        budget_bytes = int(named[1])
    assert len(found["taken"]) == STEPS and max(found["taken"]) <= budget_bytes, (found, budget_bytes)
