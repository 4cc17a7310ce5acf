"""A training step of which somebody captures a CUDA graph is refused by each door; a call without gradients is not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from _gpu_doors import BY_ITERATIONS
from conftest import InChild

import memfit
from memfit.errors import UnsupportedStepError

Call = Callable[[torch.Tensor], torch.Tensor]


def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).sum()


def _fit(model: torch.nn.Module, batch: torch.Tensor) -> tuple[Call, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step: Any = memfit.fit(model, loss, batch, optimizer=optimizer, budget="1GiB", **BY_ITERATIONS)
    return step, nullcontext()


DOORS: dict[str, Callable[[torch.nn.Module, torch.Tensor], tuple[Call, Any]]] = {
    "checkpoint": lambda model, _: (model, memfit.checkpoint(model, "1GiB")),
    "compile": lambda model, _: (memfit.compile(model, budget="1GiB", **BY_ITERATIONS), nullcontext()),
    "eager": lambda model, _: (model, memfit.eager(model, budget="1GiB")),
    "fit": _fit,
}


def _refused(door: str) -> dict[str, Any]:
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]).cuda()
    batch = torch.randn(32, 64, device="cuda")
    call, context = DOORS[door](model, batch)
    with context:
        found = call(batch)
        if door != "fit":
            found.sum().backward()
        with patch("torch.cuda.is_current_stream_capturing", lambda: True):  # nothing is captured over this driver
            if door != "fit":
                with torch.no_grad():
                    call(batch)
            try:
                call(batch)
            except UnsupportedStepError as error:
                return {"refused": str(error)}
    return {}


@pytest.mark.parametrize("door", DOORS)
def test_a_captured_training_step_is_refused(door: str, in_child: InChild) -> None:
    found = in_child(_refused, door)
    assert "error" not in found, found["error"]
    assert "a CUDA graph is being captured" in found["refused"]
    assert "cuda_graph=True" in found["refused"]
