"""Gradients of models with dropout under torch's activation memory budget, and of the halves that memfit takes from it.

Torch computes Inductor's seeds anew in the backward half at some settings, so that dropout has other masks there than
forward. What is printed is how far the gradients are from those of `torch.compile` without a budget, over the same
seed: a share of their norm. memfit lets the same partitioner divide the same graph, with its draws to be kept.

    python benchmarks/inductor_masks.py            # minutes
    python benchmarks/inductor_masks.py gpt2       # one model, not stored
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
import torch._functorch.config
from _process import answer_if_child, fresh_cache, in_fresh_process
from _record import store
from inductor import MODELS, SEED, SHARES
from torch import nn

from memfit.torch_private.inductor import compiled_by_inductor

WITH_DROPOUT = ("gpt2", "bert")
CHILD_SECONDS = 900


def gradients(model: nn.Module, batch: dict[str, torch.Tensor], backend: Any) -> torch.Tensor:
    """Return the gradients of a copy of the model, end to end."""
    torch.compiler.reset()
    mine = copy.deepcopy(model)
    call = torch.compile(mine, backend=backend)
    for _ in range(2):
        mine.zero_grad()
        torch.manual_seed(SEED)
        call(**batch)[0].backward()
    return torch.cat([each.grad.flatten() for each in mine.parameters() if each.grad is not None])


def memfits_halves(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """A backend that takes torch's halves as memfit does."""
    return compiled_by_inductor(
        module,
        inputs,
        partition=lambda _joint, _outputs, as_inductor: as_inductor(None),
        around=lambda _half, call: call,
        keeps_order=lambda: False,
    )


def measure(*, model: str, share: float) -> dict[str, Any]:
    """Return how far the gradients are at one setting of torch's budget."""
    torch.manual_seed(SEED)
    made, batch = MODELS[model](small=True)
    expected = gradients(made, batch, "inductor")
    row: dict[str, Any] = {"model": model, "share": share}
    with torch._functorch.config.patch(activation_memory_budget=share):
        for whose, backend in (("torch", "inductor"), ("memfit", memfits_halves)):
            found = gradients(made, batch, backend)
            row[whose] = float((found - expected).norm() / expected.norm())
    return row


def main() -> None:
    """Measure all models, and store what they show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(WITH_DROPOUT)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=list(WITH_DROPOUT), help=names)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for model, share in [(model, share) for model in given.models for share in SHARES]:
        with fresh_cache():
            row = in_fresh_process(
                __file__,
                {"model": model, "share": share},
                timeout_seconds=CHILD_SECONDS,
                environment={"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"},
            )
        if "error" in row:
            raise SystemExit(f"{model}, {share}: {row['error']}")
        print(f"{model:8} {share:.1f}  torch {row['torch']:.1e}  memfit {row['memfit']:.1e}", flush=True)
        rows.append(row)
    if set(given.models) == set(WITH_DROPOUT):
        store("inductor_masks", {"rows": rows})


if __name__ == "__main__" and not answer_if_child(measure):
    main()
