"""A loop of your own around a model that torch.compile keeps inside a budget."""

from __future__ import annotations

import torch
from torch import nn


def main() -> None:
    """Train a small multilayer perceptron inside 24 MiB."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(
        model, backend="memfit", options={"budget": "24MiB", "reserve": 0, "time_limit_seconds": 2}
    )
    for number in range(3):
        inputs, labels = torch.randn(1024, 256), torch.randint(0, 10, (1024,))
        loss = nn.functional.cross_entropy(compiled(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"batch {number}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
