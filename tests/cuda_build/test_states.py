"""Optimizer's state is on the host between steps where a step fits in no other way, and each step keeps its budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _gpu_measure import each_step
from _measure import MIB
from conftest import InChild

import memfit
from memfit.memory.kept_on_host import is_kept_on_host

WIDTH, LAYERS = 1024, 16
RESIDENT_BYTES = LAYERS * 4 * WIDTH * WIDTH
WAYS: dict[str, dict[str, Any]] = {
    "foreach": {},
    "for each": {"optimizer": {"foreach": False}},
    "fused, amsgrad": {"optimizer": {"fused": True, "amsgrad": True}},
    "clipped": {"given": {"clip_norm": 1.0}},
    "torch's allocator": {"given": {"arena": False}},
}


def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def kept(optimizer: torch.optim.Optimizer) -> int:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return sum(isinstance(state, torch.Tensor) and is_kept_on_host(state) for state in states)


def trained(budget_bytes: int, optimizer: dict[str, Any] | None = None, given: dict[str, Any] | None = None) -> Any:
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).cuda()
    updates = torch.optim.AdamW(model.parameters(), **(optimizer or {}))
    batch = torch.randn(64, WIDTH, device="cuda"), torch.randn(64, WIDTH, device="cuda")
    options = {"options": {"iterations": 300}, "time_limit_seconds": 60.0, **(given or {})}
    step = memfit.fit(
        model, loss, batch, optimizer=updates, budget=budget_bytes, host_budget=4 * RESIDENT_BYTES, **options
    )
    taken = [each["reserved_bytes"] for each in each_step(lambda: step(batch), 4, 0)]
    on_host = kept(updates)
    updates.load_state_dict(updates.state_dict())  # moves all of it to the device
    moved = kept(updates)
    step(batch)  # which finds it there
    taken += [each["reserved_bytes"] for each in each_step(lambda: step(batch), 2, 0)]
    measured = step.measure(repeats=1)
    return {
        "taken": taken,
        "budget_bytes": budget_bytes,
        "on_host": on_host,
        "moved": moved,
        "back": kept(updates),
        "corrections": len(step.corrections),
        "eager_bytes": measured.baseline_peak_bytes,
        "plan": repr(step.plan),
    }


@pytest.mark.parametrize("way", WAYS)
def test_states_are_on_the_host_between_steps(way: str, in_child: InChild) -> None:
    budget_bytes = int((4.2 if way == "clipped" else 3.3) * RESIDENT_BYTES)
    found = in_child(trained, budget_bytes, **WAYS[way])
    assert "error" not in found, found["error"]
    print(way, [round(each / MIB) for each in found["taken"]], round(budget_bytes / MIB), found["plan"])
    assert found["on_host"] >= LAYERS  # matrices, each with two states or more
    assert max(found["taken"]) <= budget_bytes
    assert found["corrections"] == 0
    assert found["moved"] == 0 and found["back"] == found["on_host"]
    assert found["eager_bytes"] >= 3 * RESIDENT_BYTES  # with all of its state on the device
