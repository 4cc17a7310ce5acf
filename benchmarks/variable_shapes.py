"""GPT-2 over sentences of 200 lengths, in random order, in 60% of the longest one's peak; padded; and batch tails.

Planned and eager training go side by side from the same state on the same batches, in turns: after each step the losses
and all parameters are compared bit by bit, and the planned step's peak is measured. The second run is a fresh process
with what the first one left on disk.

    python benchmarks/variable_shapes.py                  # all four runs, stored
    python benchmarks/variable_shapes.py lengths tails    # only these
    python benchmarks/variable_shapes.py --lengths 20     # a short try, not stored
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _process import CACHE, answer_if_child, in_fresh_process
from _record import load, result_path, store

import memfit
from memfit.near_plans import PROVISIONAL
from memfit.planning import SEARCHING
from memfit.step.measure import resident_bytes
from memfit.step.planned_step import PlannedStep
from memfit.system.recorder import record
from memfit.workloads import build

RUNS = ("lengths", "second run", "padded", "tails")
LENGTHS = 200
LONGEST = 216
ROWS = 4
VOCABULARY = 5000
MULTIPLE = 16  # of the padded lengths
TAILS = (3, 1, 2)
SHARE = "60%"
SEARCH_SECONDS = 10.0
CHILD_SECONDS = 3600
Size = tuple[int, int]
"""Rows and tokens of a batch."""


def sizes_of(run: str, lengths: int) -> list[list[Size]]:
    """Return the sizes of the batches of each pass over the loader."""
    if run == "tails":  # epochs of three whole batches and the rest of the texts
        return [[(rows, LONGEST) for tail in TAILS for rows in (ROWS, ROWS, ROWS, tail)]] * 2
    tokens = list(range(LONGEST - lengths + 1, LONGEST + 1))
    if run == "padded":
        tokens = [-(-each // MULTIPLE) * MULTIPLE for each in tokens]
    shuffled = random.Random(0)
    return [[(ROWS, each) for each in shuffled.sample(tokens, lengths)] for _ in range(1 if run == "second run" else 2)]


class Training:
    """Planned and eager training of one model, side by side."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        made = build("gpt2", layers=6, width=256, vocabulary=VOCABULARY, tokens=LONGEST, batch=ROWS)
        self.model, self.loss, self.eager = made.model, made.loss, copy.deepcopy(made.model)
        self.optimizer = torch.optim.AdamW(self.eager.parameters(), lr=1e-4)
        self.stages: list[tuple[str, float]] = []
        began = time.perf_counter()
        step = memfit.fit(
            self.model,
            self.loss,
            self.batch((ROWS, LONGEST)),
            optimizer=torch.optim.AdamW(self.model.parameters(), lr=1e-4),
            budget=SHARE,
            time_limit_seconds=SEARCH_SECONDS,
            on_stage=lambda stage: self.stages.append((stage, time.perf_counter())),
        )
        self.fit_seconds = time.perf_counter() - began
        assert isinstance(step, PlannedStep)
        self.step = step
        self.largest_share = 0.0  # of the budget, over all steps

    def batch(self, size: Size) -> dict[str, torch.Tensor]:
        """Return a batch of random words."""
        words = torch.randint(VOCABULARY, size)
        return {"input_ids": words, "labels": words.clone()}

    def both(self, size: Size, number: int) -> dict[str, Any]:
        """Train on one batch in both ways, in turns; return seconds and whether the bits are the same."""
        batch = self.batch(size)
        ways = [self._planned, self._eagerly]
        results = {way.__name__: way(batch, number) for way in (ways if number % 2 else ways[::-1])}
        (planned, planned_loss), (eager, eager_loss) = results["_planned"], results["_eagerly"]
        pairs = zip(self.model.parameters(), self.eager.parameters(), strict=True)
        same = torch.equal(planned_loss, eager_loss) and all(torch.equal(one, other) for one, other in pairs)
        return {"size": size, "same_bits": same, "eager_seconds": eager, **planned}

    def _planned(self, batch: Any, number: int) -> tuple[dict[str, Any], torch.Tensor]:
        known = len(self.step.plans)
        self.stages.clear()
        held_bytes = resident_bytes(self.step, batch)
        torch.manual_seed(number)
        with record("cpu") as usage:
            began = time.perf_counter()
            loss = self.step(batch)
            ended = time.perf_counter()
        self.largest_share = max(self.largest_share, (usage.peak_bytes + held_bytes) / self.step.plan.budget_bytes)
        took: dict[str, Any] = {"seconds": ended - began, "searches": _searches(self.stages)}
        if len(self.step.plans) > known:
            took |= self._stages(ended)
        return took, loss

    def _stages(self, ended: float) -> dict[str, float]:
        """Return the seconds of the parts of a step on a new size."""
        at = dict(self.stages)
        made = at["comparing with eager's calls"]
        prepared = self.step._programs.variants.latest.program.prepared.seconds  # pyright: ignore
        costs, plan = prepared["measure"], prepared["plan"]
        whole = made - at["capturing the step"]
        return {"costs": costs, "plan": plan, "capture_and_program": whole - costs - plan, "first_step": ended - made}

    def _eagerly(self, batch: Any, number: int) -> tuple[float, torch.Tensor]:
        torch.manual_seed(number)
        began = time.perf_counter()
        loss = self.loss(self.eager, batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - began, loss.detach()


def measure(run: str, lengths: int) -> dict[str, Any]:
    """Train on all batches of a run; return what it cost and whether it kept the promises."""
    training = Training()
    at_start = _searches(training.stages)
    training.both((ROWS, LONGEST), 0)
    held_bytes = _process_bytes()
    passes = sizes_of(run, lengths)
    steps = [
        [training.both(size, 1 + number + turn * len(order)) for number, size in enumerate(order)]
        for turn, order in enumerate(passes)
    ]
    grown_bytes = _process_bytes() - held_bytes
    training.step.wait_for_searches()
    every = [step for turn in steps for step in turn]
    new = [step for step in every if "plan" in step]
    usual = [step for step in every if "plan" not in step]
    parts = ("seconds", "capture_and_program", "costs", "plan", "first_step")
    return {
        "run": run,
        "sizes": len({step["size"] for step in every}),
        "steps": len(every),
        "same_bits": all(step["same_bits"] for step in every),
        "largest_share_of_budget": training.largest_share,
        "corrections": len(training.step.corrections),
        "fit_seconds": training.fit_seconds,
        "new": {part: _spread([step[part] for step in new]) for part in parts},
        "usual_seconds": _spread([step["seconds"] for step in usual]),
        "eager_seconds": _spread([step["eager_seconds"] for step in every]),
        "searches": at_start + sum(step["searches"] for step in every),
        "searched_plans": sum(plan.planner not in PROVISIONAL for plan in training.step.plans),
        "programs": len(training.step.plans),
        "grown_bytes": grown_bytes,
        "passes": [
            {
                "steps": len(turn),
                "seconds": sum(step["seconds"] for step in turn),
                "eager_seconds": sum(step["eager_seconds"] for step in turn),
            }
            for turn in steps
        ],
    }


def _searches(stages: Sequence[tuple[str, float]]) -> int:
    return sum(stage == SEARCHING for stage, _ in stages)


def _spread(numbers: list[float]) -> dict[str, float] | None:
    if len(numbers) < 2:
        return None
    return {"median": statistics.median(numbers), "percentile_90": statistics.quantiles(numbers, n=10)[-1]}


def _process_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"default: {', '.join(RUNS)}")
    parser.add_argument("--lengths", type=int, default=LENGTHS, help="how many; less than 200 is not stored")
    options = parser.parse_args()
    path = result_path("variable_shapes")
    found: dict[str, Any] = load(path)["payload"] if path.exists() else {"runs": []}
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE] = folder  # of the children too: the first run finds nothing, the second what it left
        for run in options.runs or RUNS:
            request = {"run": run, "lengths": options.lengths}
            row = in_fresh_process(__file__, request, timeout_seconds=CHILD_SECONDS)
            if "error" in row:
                raise SystemExit(f"{run}: {row['error']}")
            print(row, flush=True)
            found["runs"] = [each for each in found["runs"] if each["run"] != run] + [row]
            if options.lengths == LENGTHS:
                store("variable_shapes", found | {"share": SHARE})


if __name__ == "__main__" and not answer_if_child(measure):
    main()
