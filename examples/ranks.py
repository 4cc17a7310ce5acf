"""Training on several ranks within a budget each: `torchrun --standalone --nproc-per-node 2 examples/ranks.py`."""

from __future__ import annotations

import torch
import torch.distributed as dist

import memfit


def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the loss of one rank's batch."""
    inputs, labels = batch
    return torch.nn.functional.cross_entropy(model(inputs), labels)


def main() -> None:
    """Train for a few batches inside 70% of what the step would take unplanned."""
    dist.init_process_group("gloo")  # "nccl" on GPUs
    torch.manual_seed(dist.get_rank())
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(256, 256), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [(torch.randn(1024, 256), torch.randint(0, 10, (1024,))) for _ in range(4)]
    group = dist.group.WORLD
    step = memfit.fit(model, loss, batches[0], optimizer=optimizer, budget="70%", process_group=group)
    for batch in batches:
        print(f"rank {dist.get_rank()}: loss {step(batch).item():.4f}, budget {step.plan.budget_bytes} bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
