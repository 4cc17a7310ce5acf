"""Blocks of a model that the backend compiles one by one: they share one budget."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from occupied import bytes_now
from torch import nn

from memfit.dynamo.backend import PlannedGraph, memfit_backend
from memfit.errors import UnsupportedStepError
from memfit.system.recorder import allocated_bytes, record

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own
CPU = torch.device("cpu")
BLOCKS, WIDTH, ROWS = 6, 32, 512


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number  # read by forward, so that equal blocks are graphs of their own, unless it is the same
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1.0 + self.number / 8
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)) * scale)))


class Net(nn.Module):
    def __init__(self, *, are_equal: bool, blocks: int = BLOCKS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(0 if are_equal else number) for number in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def train(model: nn.Module, sizes: list[list[int]]) -> tuple[list[float], list[int]]:
    """Train for a step of micro-batches of each list of sizes; return the losses, and the most bytes of each step."""
    start = allocated_bytes(CPU)
    optimizer = torch.optim.AdamW(model.parameters())
    losses: list[float] = []
    peaks: list[int] = []
    torch.manual_seed(1)
    for micro_batches in sizes:
        with record(CPU) as usage:
            for rows in micro_batches:
                loss = model(torch.randn(rows, WIDTH))
                loss.backward()
                losses.append(loss.item())
                del loss
            optimizer.step()
            optimizer.zero_grad()
        peaks.append(usage.start_bytes + usage.peak_bytes - start)
    return losses, peaks


def beside_eager(
    model: Net, sizes: list[list[int]], share: float, backend: Any = "memfit"
) -> tuple[int, list[int], list[int]]:
    """Train a model within a share of what it takes in eager; return its budget, the peaks, and those of eager."""
    train(copy.deepcopy(model), sizes[:1])  # what a first use makes
    other = copy.deepcopy(model)
    expected, bare = train(other, sizes)
    start = bytes_now(CPU)
    budget = start + int(share * max(bare))
    for block in model.blocks:
        block.compile(backend=backend, options={"budget": budget, "reserve": 0, "options": {"iterations": 500}})
    losses, peaks = train(model, sizes)
    assert losses == expected
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    return budget - start, peaks, bare


@pytest.mark.parametrize("are_equal", [True, False])
def test_blocks_fill_their_budget_and_no_step_is_over_it(are_equal: bool) -> None:
    budget, peaks, bare = beside_eager(Net(are_equal=are_equal), [[ROWS]] * 7, 0.75)
    assert max(peaks) <= budget < max(bare)
    assert peaks[-1] > 0.92 * budget


@pytest.mark.parametrize("sizes", [[[ROWS, ROWS]] * 6, [[ROWS], [ROWS // 2]] * 5, [[ROWS, ROWS // 2]] * 6])
def test_micro_batches_and_other_sizes_share_it_too(sizes: list[list[int]]) -> None:
    budget, peaks, _ = beside_eager(Net(are_equal=True), sizes, 0.75)
    assert max(peaks) <= budget


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Inductor's own
def test_equal_blocks_with_inductors_kernels_are_refused_before_they_are_compiled_one_by_one() -> None:
    model = Net(are_equal=True)
    start = bytes_now(CPU)
    budget = start + int(0.75 * max(train(copy.deepcopy(model), [[ROWS]] * 2)[1]))
    options = {"budget": budget, "reserve": 0, "kernels": "inductor", "options": {"iterations": 500}}
    for block in model.blocks:
        block.compile(backend="memfit", options=options)
    with pytest.raises(UnsupportedStepError, match=r"let memfit.checkpoint\(model, budget\) hold them"):
        train(model, [[ROWS]])


def test_a_forward_pass_without_backward_takes_no_share() -> None:
    model = Net(are_equal=True)
    start = bytes_now(CPU)
    bare = train(copy.deepcopy(model), [[ROWS]] * 2)[1]
    budget = start + int(0.75 * max(bare))
    for block in model.blocks:
        block.compile(backend="memfit", options={"budget": budget, "reserve": 0, "options": {"iterations": 500}})
    train(model, [[ROWS]])
    model(torch.randn(ROWS, WIDTH))
    _, peaks = train(model, [[ROWS]] * 4)
    assert peaks[-1] > 0.85 * (budget - start)


def test_a_block_alone_is_planned_for_all_that_is_left() -> None:
    graphs: list[PlannedGraph] = []

    def noted(*given: Any, **named: Any) -> PlannedGraph:
        graphs.append(memfit_backend(*given, **named))
        return graphs[-1]

    budget, peaks, _ = beside_eager(Net(are_equal=True, blocks=1), [[ROWS]] * 5, 0.9, backend=noted)
    assert max(peaks) <= budget
    assert len(graphs) == 1 and graphs[0].sharing is None
