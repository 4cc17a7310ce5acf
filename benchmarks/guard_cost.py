"""What the guards of a planned step cost: one check in which nothing changed, and the first call after a change.

    python benchmarks/guard_cost.py

Each check is held against the price that was asked for: 20 us, and 0.2 us for each parameter, buffer and module. Beside
it stands a check of the same in plain Python, of shape, strides, offset, dtype, `requires_grad` and gradient.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _record import store
from torch import nn

import memfit
from memfit.capture import Guards, capture

BASE_SECONDS, SECONDS_EACH = 20e-6, 0.2e-6
REPEATS = 300


def layers(count: int) -> nn.Module:
    """Linear layers, activations and dropout."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1)) for _ in range(count)))


def normalized(count: int) -> nn.Module:
    """Convolutions, and batch normalization with its three buffers."""
    return nn.Sequential(
        *(nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(count))
    )


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "2 linear layers": (lambda: layers(2), (4, 8)),
    "30 linear layers": (lambda: layers(30), (4, 8)),
    "200 linear layers": (lambda: layers(200), (4, 8)),
    "50 convolutions, BatchNorm": (lambda: normalized(50), (4, 4, 16)),
}


def plain_check(tensors: list[torch.Tensor]) -> list[Any]:
    """Read in plain Python what the guards compare of each parameter and buffer."""
    return [(id(t), t.shape, t.stride(), t.storage_offset(), t.dtype, t.requires_grad, t.grad is None) for t in tensors]


def seconds_of(run: Callable[[], object]) -> tuple[float, float]:
    """Return the least and the median of many runs."""
    run()
    seconds: list[float] = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds), statistics.median(seconds)


def guards_of(model: nn.Module, shape: tuple[int, ...]) -> Guards:
    """Capture a step of the model, and return its guards."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(shape)
    guards = capture(
        memfit.TrainingStep(model=model, loss=lambda m, b: m(b).square().sum(), batch=batch, optimizer=optimizer)
    ).guards
    assert guards is not None
    guards.arm()
    return guards


def row(name: str) -> dict[str, Any]:
    """Measure one model."""
    make, shape = CASES[name]
    model = make()
    guards = guards_of(model, shape)
    held = sum(1 for _ in model.parameters()) + sum(1 for _ in model.buffers()) + sum(1 for _ in model.modules())
    assert guards.difference() is None
    least, median = seconds_of(guards.difference)
    tensors = [*model.parameters(), *model.buffers()]
    plain, _ = seconds_of(lambda: plain_check(tensors))
    price = BASE_SECONDS + held * SECONDS_EACH
    return {
        "model": name,
        "parameters_buffers_modules": held,
        "check_seconds": least,
        "check_seconds_median": median,
        "price_seconds": price,
        "within_price": least <= price,
        "plain_python_seconds": plain,
    }


def main() -> None:
    rows = [row(name) for name in CASES]
    print(f"{'model':28} {'held':>6} {'check us':>9} {'median':>8} {'price':>8} {'plain Python':>13}")
    for each in rows:
        print(
            f"{each['model']:28} {each['parameters_buffers_modules']:6} {each['check_seconds'] * 1e6:9.1f} "
            f"{each['check_seconds_median'] * 1e6:8.1f} {each['price_seconds'] * 1e6:8.1f} "
            f"{each['plain_python_seconds'] * 1e6:13.1f}"
        )
    print(f"stored in {store('guard_cost', rows)}")


if __name__ == "__main__":
    main()
