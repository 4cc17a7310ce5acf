"""A training step of your own: run this file, or plan it with `memfit fit examples/train.py:make_step --budget 60%`."""

from __future__ import annotations

import torch
from torch import nn

import memfit


class Block(nn.Module):
    """Two convolutions with a shortcut around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(images + self.body(images))


def make_model() -> nn.Module:
    """Return a small residual network for images of any size."""
    blocks = [Block(32) for _ in range(4)]
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(32, 10),
    )


def make_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random images and labels."""
    return torch.randn(size, 3, 32, 32), torch.randint(0, 10, (size,))


def make_step() -> memfit.TrainingStep:
    """Return the step that the command line plans."""
    model = make_model()
    return memfit.TrainingStep(
        model=model,
        loss=nn.CrossEntropyLoss(),
        batch=make_batch(16),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    )


def main() -> None:
    """Train for a few batches inside 60% of what the step would take unplanned."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    batches = [make_batch(16) for _ in range(5)] + [make_batch(7)]  # the last batch of an epoch is smaller
    step = memfit.fit(model, nn.CrossEntropyLoss(), batches[0], optimizer=optimizer, budget="60%", time_limit_seconds=2)
    for number, batch in enumerate(batches):
        loss = step(batch)
        scheduler.step()
        print(f"batch {number}: loss {loss.item():.4f}")
    print(step.plan.explain())


if __name__ == "__main__":
    main()
