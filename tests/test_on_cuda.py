"""On a CUDA device: copies to the host and back, a step that is planned with them, and the backend of torch.compile."""

from __future__ import annotations

import copy

import pytest
import torch

import memfit
from memfit.memory.host.store import HostStore
from memfit.memory.snapshot import StepState

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.arithmetic,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),  # those of a driver are no fault of memfit's
]


def model_on_cuda() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Dropout(0.1))]
    return torch.nn.Sequential(*layers, torch.nn.Linear(512, 16)).cuda()


def batch_on_cuda() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8192, 512, device="cuda"), torch.randint(0, 16, (8192,), device="cuda")


def loss_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_what_goes_to_the_host_comes_back_while_its_memory_is_used_again() -> None:
    numbers = torch.arange(1 << 22, dtype=torch.float32)
    source = numbers.to("cuda")
    store = HostStore(torch.device("cuda", 0), 1 << 25)
    copy = store.reserve(1 << 24).begin().offload(source, 0)
    copy.wait()
    del source
    torch.empty(1 << 22, device="cuda").fill_(-1.0)  # on the same stream, in the memory that was let go
    returned = copy.prefetch()
    copy.arrived()
    assert torch.equal((returned + 0).cpu(), numbers)


@pytest.mark.parametrize("planner", ["auto", "offload"])
def test_a_planned_step_gives_eagers_bits_within_its_budget(planner: str) -> None:
    model, batch = model_on_cuda(), batch_on_cuda()
    step = memfit.fit(
        model,
        loss_of,
        batch,
        optimizer=torch.optim.AdamW(model.parameters()),
        budget="70%",
        planner=planner,
        host_budget="1GiB" if planner == "offload" else 0,
        time_limit_seconds=2.0,
        verify=True,
    )
    for _ in range(2):
        step(batch)
    step.verify()
    measured = step.measure()
    asked = step.settings.budget  # type: ignore[union-attr]
    assert measured.peak_bytes <= asked < measured.baseline_peak_bytes


def test_a_step_is_replayed_as_a_graph_with_eagers_bits() -> None:
    model, batch = model_on_cuda(), batch_on_cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3, device="cuda"), capturable=True)
    step = memfit.fit(model, loss_of, batch, optimizer=optimizer, budget="80%", cuda_graph=True)
    assert isinstance(step, memfit.PlannedStep)
    eager = copy.deepcopy(step.step)
    for seed in range(8):
        batch = batch_on_cuda()
        losses: list[torch.Tensor] = []
        for run in (step, eager.run_eager):
            torch.cuda.manual_seed(seed)
            losses.append(run(batch))
        assert torch.equal(*losses)
    assert step.is_replayed
    assert StepState.take(eager).first_difference(StepState.take(step.step)) is None


def test_a_compiled_model_gives_eagers_bits() -> None:
    model, batch = model_on_cuda(), batch_on_cuda()
    gradients: list[list[torch.Tensor]] = []
    for run in (model, torch.compile(model, backend="memfit", options={"budget": "1GiB", "reserve": 0})):
        torch.cuda.manual_seed(1)
        model.zero_grad()
        loss_of(run, batch).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == 14
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
