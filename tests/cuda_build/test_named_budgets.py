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

STEPS = 4


def trained(door: str, budget_bytes: int) -> dict[str, Any]:
    step = make_model("gpt2", GPT, with_state=False).step
    if door == "compile":
        model = memfit.compile(step.model, budget=budget_bytes, optimizer=step.optimizer)
    else:
        model = torch.compile(step.model, backend="memfit", options={"budget": budget_bytes})

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
    """The first refusal is of a step without the optimizer's state, the second one at most has seen it."""
    budget_bytes, found = 200 << 20, {"taken": [], "told": ""}
    for refusals in range(3):
        found = in_child(trained, door, budget_bytes)
        named = re.search(r"(?:a budget of|Raise the budget to) (\d+) bytes", found["told"])
        print(door, refusals, budget_bytes >> 20, [each >> 20 for each in found["taken"]])
        if named is None:
            break
        budget_bytes = int(named[1])
    assert len(found["taken"]) == STEPS and max(found["taken"]) <= budget_bytes, (found, budget_bytes)
