"""Eager mode returns what a pass has left unused before an update that leaves nothing to free."""

from __future__ import annotations

import logging
from typing import Any

import torch
from _gpu_measure import each_step
from _measure import MIB
from conftest import InChild

import memfit

FIXED = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}  # whose blocks serve few other sizes
WIDTH, LAYERS, ROWS = 2048, 8, 1536  # 16 MiB a matrix, 12 MiB a result, which no matrix fits into
UPDATE_BYTES = LAYERS * 6 * 4 * WIDTH * WIDTH  # with gradients, two states, and two results for each
BUDGET_BYTES = UPDATE_BYTES + 32 * MIB


def trained(budget_bytes: int, *, beside_bytes: int = 0) -> dict[str, Any]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("memfit").addHandler(handler)
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.GELU()) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    batch = torch.randn(ROWS, WIDTH, device="cuda")

    beside: list[int] = []

    def step() -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        if beside_bytes and len(optimizer.state) and not beside:  # as a library takes it, of which no call shows it
            beside.append(torch.cuda.caching_allocator_alloc(beside_bytes))
            torch.cuda.caching_allocator_delete(beside[0])

    with memfit.eager(model, budget=budget_bytes):
        taken = [each["reserved_bytes"] for each in each_step(step, 4, 0)]
    return {"taken": taken, "told": told}


def test_what_a_pass_left_takes_none_of_the_budget(in_child: InChild) -> None:
    found = in_child(trained, BUDGET_BYTES, environment=FIXED)
    assert "error" not in found, found["error"]
    told = [each >> 20 for each in (*found["taken"], BUDGET_BYTES)]
    print(told)
    assert max(told[:-1]) <= told[-1], told
    assert not found["told"]


def test_a_pass_that_took_more_than_the_budget_is_told(in_child: InChild) -> None:
    found = in_child(trained, BUDGET_BYTES, beside_bytes=400 * MIB, environment=FIXED)
    assert "error" not in found, found["error"]
    assert max(found["taken"]) > BUDGET_BYTES
    (told,) = found["told"]
    assert "a step took" in told and "more than the budget of 800 MiB" in told
