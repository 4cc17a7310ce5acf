"""Steps that are planned before there are any ranks, and then run on real ones with these plans."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_steps import convolutions, loss, loss_in_bfloat16, perceptron
from shard_steps import Blocks, Tied, in_blocks
from torch.distributed.fsdp import MixedPrecisionPolicy

import memfit
from memfit.cli import main

FOLDER = "MEMFIT_ABSENT_RANKS"  # where plans are
SEARCH = ("--option", "iterations=600", "--time-limit", "60")


def step_of(
    model: Any, batch: Any, function: Any = loss, *, clip_norm: float | None = None, make: Any = torch.optim.AdamW
) -> memfit.TrainingStep:
    """Return a step of some parameters."""
    optimizer = make([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return memfit.TrainingStep(model=model, loss=function, batch=batch, optimizer=optimizer, clip_norm=clip_norm)


def _data(width: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, width), torch.randint(0, 8, (rows,))


def ddp() -> memfit.TrainingStep:
    return step_of(perceptron(), _data(64, 512))


def ddp_clipped_in_bfloat16() -> memfit.TrainingStep:
    return step_of(perceptron(), _data(64, 512), loss_in_bfloat16, clip_norm=0.5)


def ddp_of_convolutions() -> memfit.TrainingStep:
    return step_of(convolutions(), (torch.randn(8, 3, 32, 32), torch.randint(0, 8, (8,))), make=torch.optim.SGD)


def sharded() -> memfit.TrainingStep:
    return step_of(Blocks(128, inner=512), _data(128, 256))


def sharded_of_many_parameters() -> memfit.TrainingStep:
    return step_of(Blocks(256, inner=1024), _data(256, 16), make=torch.optim.SGD)


def sharded_unevenly_and_clipped() -> memfit.TrainingStep:
    return step_of(Blocks(33, inner=65), _data(33, 300), clip_norm=1.0)


def sharded_with_tied_weights() -> memfit.TrainingStep:
    tokens = torch.randint(0, 8, (400,))
    return step_of(Tied(), (tokens, tokens.clone()))


def sharded_with_a_frozen_base() -> memfit.TrainingStep:
    model = Blocks(128, inner=512)
    model.blocks[:2].requires_grad_(False)
    return step_of(model, _data(128, 256))


def by_its_own_code_in_mixed_precision() -> memfit.TrainingStep:
    """What a user's file does that calls `fully_shard` itself."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.bfloat16)
    return step_of(in_blocks(Blocks(128, inner=512), mp_policy=policy), _data(128, 256))


MAKERS: dict[str, Callable[[], memfit.TrainingStep]] = {
    made.__name__: made
    for made in (
        ddp,
        ddp_clipped_in_bfloat16,
        ddp_of_convolutions,
        sharded,
        sharded_of_many_parameters,
        sharded_unevenly_and_clipped,
        sharded_with_tied_weights,
        sharded_with_a_frozen_base,
        by_its_own_code_in_mixed_precision,
    )
}
FEW = ("ddp", "sharded_unevenly_and_clipped", "by_its_own_code_in_mixed_precision")
BUDGETS = ("100%", "90%")


def plan_all(ranks: int, folder: Path, names: Sequence[str] = tuple(MAKERS)) -> None:
    """Plan steps for so many ranks, in this process alone; plans are left in the folder."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as on the ranks, for kernels take other workspaces with more
    try:
        for name in names:
            for budget in BUDGETS:
                shard = ("--shard",) if name.startswith("sharded") else ()
                asked = ("plan", f"{__file__}:{name}", "--budget", budget, "--ranks", f"{ranks}", *shard, *SEARCH)
                assert main([*asked, "--no-cache", "--save", str(_path(folder, name, budget)), "--json"]) == 0, asked
    finally:
        torch.set_num_threads(threads)


def _path(folder: Path, name: str, budget: str) -> Path:
    return folder / f"{name}-{budget.removesuffix('%')}.plan.json"


def run_planned(rank: int, _count: int) -> dict[str, dict[str, Any]]:
    """Run each plan on this rank; say what was predicted, and what it took."""
    folder, found = Path(os.environ[FOLDER]), dict[str, dict[str, Any]]()
    there = [(name, budget) for name in MAKERS for budget in BUDGETS if _path(folder, name, budget).exists()]
    for name, budget in there:
        torch.manual_seed(rank)
        step, plan = MAKERS[name](), memfit.Plan.load(_path(folder, name, budget))
        planned: Any = memfit.fit(
            step.model,
            step.loss,
            step.batch,
            optimizer=step.optimizer,
            clip_norm=step.clip_norm,
            budget=plan.budget_bytes,
            plan=plan,
            process_group=dist.group.WORLD,
            shard=name.startswith("sharded"),
        )
        measured = planned.measure(repeats=1)
        found[f"{name} at {budget}"] = {
            "predicted_bytes": plan.predicted.peak_bytes,
            "measured_bytes": measured.peak_bytes,
            "corrections": len(planned.corrections),
        }
    return found
