"""What a step leaves unused in torch's allocator is returned before what needs blocks of other sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch
from _gpu_doors import GPT
from _gpu_measure import each_step, let_go
from _gpu_models import make_model
from conftest import InChild

import memfit

FIXED = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}  # whose blocks serve few other sizes
STEPS = 9
Batch = dict[str, torch.Tensor]


def every_third(model: Any, loss: Callable[[Any, Batch], torch.Tensor], batch: Batch, number: int) -> Batch:
    if number % 3 == 2:
        model.eval()
        with torch.no_grad():
            loss(model, {name: torch.cat([each, each[: len(each) // 2]]) for name, each in batch.items()})
        model.train()
    return batch


def longer(_model: Any, _loss: Any, batch: Batch, number: int) -> Batch:
    return {name: each[:, : 64 + 24 * number] for name, each in batch.items()}


def last_smaller(_model: Any, _loss: Any, batch: Batch, number: int) -> Batch:
    return {name: each[: 3 if number % 4 == 3 else 8] for name, each in batch.items()}


def of_many_sizes(model: Any, loss: Callable[[Any, Batch], torch.Tensor], batch: Batch, number: int) -> Batch:
    if number % 3 == 2:
        model.eval()
        with torch.no_grad():
            for rows in (6, 3, 5, 8, 2):
                loss(model, {name: torch.cat([each, each])[: 2 * rows] for name, each in batch.items()})
        model.train()
    return batch


LOOPS: dict[str, tuple[float, Callable[..., Batch]]] = {  # with the share of the bare loop's bytes
    "evaluations": (0.75, every_third),
    "evaluations of many sizes": (0.62, of_many_sizes),
    "longer each time": (0.75, longer),
    "the last of each epoch smaller": (0.68, last_smaller),
}


def trained(loop: str) -> dict[str, Any]:
    share, given = LOOPS[loop]
    step = make_model("gpt2", GPT, with_state=False).step
    assert step.optimizer is not None and isinstance(step.batch, dict)

    def run(model: Any, numbers: Iterator[int]) -> None:
        batch = given(model, step.loss, step.batch, next(numbers))
        step.model.zero_grad(set_to_none=True)
        step.loss(model, batch).backward()
        step.update()

    def reserved(model: Any) -> list[int]:
        numbers = count()
        return [each["reserved_bytes"] for each in each_step(lambda: run(model, numbers), STEPS, 0)]

    bare = reserved(step.model)
    step.optimizer.state.clear()
    step.model.zero_grad(set_to_none=True)
    let_go()
    budget_bytes = int(share * max(bare))
    with memfit.checkpoint(step.model, budget_bytes):
        return {"budget_bytes": budget_bytes, "taken": reserved(step.model)}


@pytest.mark.parametrize("loop", LOOPS)
def test_what_other_sizes_left_takes_none_of_the_budget(loop: str, in_child: InChild) -> None:
    found = in_child(trained, loop, environment=FIXED)
    assert "error" not in found, found["error"]
    told = [each >> 20 for each in (*found["taken"], found["budget_bytes"])]
    print(loop, told)
    assert max(found["taken"]) <= found["budget_bytes"], told
