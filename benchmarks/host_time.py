"""Host time of training steps on CUDA: what Python and torch take to launch a step, in turns with eager's.

Over a CUDA build without a GPU (`benchmarks/cuda_build.py`) kernels compute nothing, so that what is left is the host's
time: on fast GPUs it is the step, where kernels are short. Counted are processor seconds of all threads, medians of
turns; the update of the parameters (AdamW, as it is by default) is part of the step. A door gets three times the bytes
of eager's peak, so that its plan computes nothing again.

    python benchmarks/cuda_build.py run benchmarks/host_time.py
    python benchmarks/cuda_build.py run benchmarks/host_time.py gpt2 --door fit --share 2
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _record import store

import memfit
from memfit import TrainingStep
from memfit.workloads import build

CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"batch": 1, "layers": 12, "width": 256, "tokens": 64, "vocabulary": 1000},
    "encoder": {"batch": 4},
    "lstm": {"batch": 16},
    "resnet50": {"batch": 2, "size": 64},
}
SHARES = (3.0,)  # eager's twin lives beside the door's model, and counts in its budget
TURNS = 30
WARM = 6  # steps that prove plans


def by_fit(step: TrainingStep, budget_bytes: int) -> Callable[[], object]:
    """A step that `memfit.fit` has planned."""
    planned = memfit.fit(
        step.model, step.loss, step.batch, optimizer=step.optimizer, budget=budget_bytes, time_limit_seconds=5
    )
    return lambda: planned(step.batch)


def by_checkpoint(step: TrainingStep, budget_bytes: int) -> Callable[[], object]:
    """The loop with `memfit.checkpoint` around it."""
    memfit.checkpoint(step.model, budget=budget_bytes)
    return lambda: step.run_eager(step.batch)


def by_compile(step: TrainingStep, budget_bytes: int) -> Callable[[], object]:
    """The loop on a model that `memfit.compile` has compiled, with eager's kernels."""
    model = memfit.compile(step.model, budget=budget_bytes)

    def run() -> None:
        step.compute_loss(model, step.batch).backward()
        step.update()

    return run


DOORS = {"fit": by_fit, "checkpoint": by_checkpoint, "compile": by_compile}


def made(case: str) -> TrainingStep:
    """Return a case with its optimizer, on CUDA."""
    step = build(case, **CASES[case], device="cuda")
    optimizer = torch.optim.AdamW(step.model.parameters(), lr=1e-4)
    return TrainingStep(model=step.model, loss=step.loss, batch=step.batch, optimizer=optimizer, name=step.name)


def peak_bytes(step: TrainingStep) -> int:
    """Return the most bytes that eager's second step has allocated."""
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        step.run_eager(step.batch)
        step.model.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_reserved()


def measure(case: str, door: str, share: float, turns: int) -> dict[str, Any]:
    """Return the milliseconds of eager's steps and of a door's, and their ratio."""
    torch.manual_seed(0)
    eager, other = made(case), made(case)
    budget_bytes = int(share * peak_bytes(eager))
    base: dict[str, Any] = {"case": case, "door": door, "share": share}
    try:
        run = DOORS[door](other, budget_bytes)
        for _ in range(WARM):
            run()
            other.model.zero_grad(set_to_none=True)
    except memfit.MemfitError as error:
        return base | {"refused": str(error).partition(";")[0]}
    runs = {"eager": lambda: eager.run_eager(eager.batch), door: run}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    gc.collect()
    gc.disable()
    for turn in range(turns):
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            for step in (eager, other):
                step.model.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            started = time.process_time()
            runs[name]()
            seconds[name].append(time.process_time() - started)
    gc.enable()
    ratio = statistics.median(mine / its for its, mine in zip(*seconds.values(), strict=True))
    return base | {
        "time_ratio": ratio,
        "eager_ms": statistics.median(seconds["eager"]) * 1e3,
        "door_ms": statistics.median(seconds[door]) * 1e3,
    }


def main() -> None:
    """Measure the cases named on the command line, or all; print and store them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--door", choices=DOORS, action="append", help="one or more; all unless given")
    parser.add_argument("--share", type=float, action="append", help="of eager's reserved peak (3)")
    parser.add_argument("--turns", type=int, default=TURNS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.cudnn.enabled = False  # which the build without a GPU lacks
    rows: list[dict[str, Any]] = []
    for case in asked.cases:
        for share in asked.share or SHARES:
            for door in asked.door or DOORS:
                rows.append(measure(case, door, share, asked.turns))
                print(rows[-1], flush=True)
                torch.compiler.reset()
    if not (asked.door or asked.share) and len(asked.cases) == len(CASES):
        store("host_time", {"turns": asked.turns, "rows": rows})


if __name__ == "__main__":
    main()
