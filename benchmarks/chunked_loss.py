"""Chunked loss: a projection to 128,000 classes and its cross entropy, forward and backward, in each of several ways.

`whole`: PyTorch's linear and cross_entropy. `memfit`: the same code within memfit's chunked loss. `torch`: PyTorch's
own `linear_cross_entropy` with chunks, where the version has it. `Liger`: the algorithm of Liger's fused linear cross
entropy, written in eager PyTorch. Peaks are of the bytes that each takes beside its inputs; seconds are medians in
turns.

    python benchmarks/chunked_loss.py     # a few minutes, stored
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _measure import MIB
from _record import store
from torch import Tensor, nn
from torch.nn import functional

from memfit.chunked_loss.heads import ChunkedHead
from memfit.system.recorder import record

CLASSES, WIDTHS, ROWS, TURNS = 128_000, (512,), 1024, 3
CPU = torch.device("cpu")
Way = Callable[[nn.Linear, Tensor, Tensor], Tensor]


def whole(head: nn.Linear, hidden: Tensor, target: Tensor) -> Tensor:
    """PyTorch's two functions."""
    return functional.cross_entropy(head(hidden), target)


def by_memfit(head: nn.Linear, hidden: Tensor, target: Tensor) -> Tensor:
    """The same code within a chunked head."""
    with ChunkedHead(nn.ModuleDict({"head": head})):
        return functional.cross_entropy(head(hidden), target)


def by_torch(head: nn.Linear, hidden: Tensor, target: Tensor) -> Tensor:
    """PyTorch's own function, by chunks of rows."""
    options = getattr(torch.nn, "LinearCrossEntropyOptions")  # noqa: B009 - not in all versions
    linear_cross_entropy: Any = getattr(functional, "linear_cross_entropy")  # noqa: B009
    return linear_cross_entropy(hidden, head.weight, target, options=options())


class _Liger(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        rows, width = hidden.shape
        chunks = -(-weight.shape[0] // width)
        size = 1 << (-(-rows // chunks) - 1).bit_length()
        hidden_gradient, weight_gradient = torch.empty_like(hidden), torch.zeros_like(weight)
        losses = torch.empty(rows)
        for start in range(0, rows, size):
            at = slice(start, start + size)
            logits = hidden[at] @ weight.t()
            losses[at] = functional.cross_entropy(logits, target[at], reduction="none")
            gradient = logits.softmax(-1)
            gradient[torch.arange(len(gradient)), target[at]] -= 1
            gradient /= rows
            hidden_gradient[at] = gradient @ weight
            weight_gradient.addmm_(gradient.t(), hidden[at])
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        return hidden.mul_(given[0]), weight.mul_(given[0]), None


def by_liger(head: nn.Linear, hidden: Tensor, target: Tensor) -> Tensor:
    """Liger's algorithm."""
    return _Liger.apply(hidden, head.weight, target)


WAYS: dict[str, Way] = {"whole": whole, "memfit": by_memfit, "Liger": by_liger}
if hasattr(torch.nn, "LinearCrossEntropyOptions"):
    WAYS["torch"] = by_torch


def measure(width: int) -> list[dict[str, Any]]:
    """Return peak, seconds and the difference from `whole` of each way."""
    torch.manual_seed(0)
    head = nn.Linear(width, CLASSES, bias=False)
    hidden, target = torch.randn(ROWS, width, requires_grad=True), torch.randint(0, CLASSES, (ROWS,))
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    rows: dict[str, dict[str, Any]] = {name: {"width": width, "way": name} for name in WAYS}
    right: list[Tensor] = []
    for turn in range(TURNS + 1):
        for name, way in WAYS.items():
            head.weight.grad = hidden.grad = None
            gc.collect()
            with record(CPU) as usage:
                began = time.perf_counter()
                loss = way(head, hidden, target)
                loss.backward()
                seconds[name].append(time.perf_counter() - began)
            rows[name]["peak_bytes"] = usage.peak_bytes
            if turn:
                continue
            found = [loss.detach(), *(each.grad.clone() for each in (hidden, head.weight) if each.grad is not None)]
            right = right or found
            rows[name]["difference"] = max(
                ((mine - theirs).norm() / theirs.norm()).item() for mine, theirs in zip(found, right, strict=True)
            )
    for name, row in rows.items():
        row["seconds"] = statistics.median(seconds[name][1:])
        row["ratio"] = statistics.median(
            mine / theirs for mine, theirs in zip(seconds[name][1:], seconds["whole"][1:], strict=True)
        )
        print(
            f"{width} {name}: {row['peak_bytes'] / MIB:.0f} MiB, {row['ratio']:.2f}, {row['difference']:.1e}",
            flush=True,
        )
    return list(rows.values())


def main() -> None:
    """Measure, print, and store."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = [row for width in WIDTHS for row in measure(width)]
    print(store("chunked_loss", {"classes": CLASSES, "rows_at_once": ROWS, "turns": TURNS, "rows": rows}))


if __name__ == "__main__":
    main()
