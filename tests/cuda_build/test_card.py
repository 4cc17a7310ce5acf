"""Shares of the card, and what is on it beside torch's allocator, over a driver whose memory other code takes."""

from __future__ import annotations

import ctypes
import logging
import os
from typing import Any

import pytest
import torch
from _measure import MIB
from conftest import InChild

import memfit
from memfit.cost.calibration import card_of
from memfit.cost.environment import bytes_beside
from memfit.errors import InvalidBudgetError


def take_beside(size_bytes: int) -> None:
    """Take memory as a library does that has an allocator of its own."""
    torch.cuda.init()

    address = ctypes.c_void_p()
    assert ctypes.CDLL(os.environ["FAKE_GPU"]).cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size_bytes)) == 0


def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).sum()


def measured() -> dict[str, Any]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("memfit").addHandler(handler)
    model = torch.nn.Linear(256, 256).cuda()
    batch = torch.randn(64, 256, device="cuda")
    before = bytes_beside(torch.device("cuda", 0))
    held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    same = bytes_beside(torch.device("cuda", 0))
    take_beside(300 * MIB)
    after = bytes_beside(torch.device("cuda", 0))
    card = card_of("cuda")
    assert card.whole_bytes is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step: Any = memfit.fit(model, loss, batch, optimizer=optimizer, budget="90% of the card")
    quiet = list(told)
    take_beside(card.whole_bytes - card.beside_bytes - 50 * MIB - torch.cuda.memory_reserved())
    memfit.checkpoint(model, 200 * MIB).close()
    try:
        memfit.checkpoint(model, "90% of the card")
    except InvalidBudgetError as error:
        refused = str(error)
    del held
    return {
        "grown": [same - before, after - before],
        "budget_bytes": step.plan.budget_bytes,
        "expected_bytes": int(0.9 * card.whole_bytes) - card.beside_bytes,
        "quiet": quiet,
        "told": told,
        "refused": refused,
    }


def test_what_is_on_the_card_is_in_its_share(in_child: InChild) -> None:
    found = in_child(measured)
    assert "error" not in found, found["error"]
    assert found["grown"] == [0, 300 * MIB]
    assert found["budget_bytes"] == pytest.approx(found["expected_bytes"], abs=2)
    assert not any("of the card's" in each for each in found["quiet"])
    assert any("memfit.checkpoint: steps may take 200 MiB" in each for each in found["told"])
    assert "which leaves nothing of that share" in found["refused"]
