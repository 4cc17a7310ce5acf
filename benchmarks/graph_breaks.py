"""Steps with graph breaks beside the same steps without: seconds and peaks, at two budgets.

GPT-2 and a ResNet, with 0, 1, 2 and 4 lines in them that look at a tensor's value. Each is planned within a share of
the eager peak; the planned steps take turns in an order drawn anew for each round, and the times are
ratios to the step without breaks.

    python benchmarks/graph_breaks.py           # all, stored
    python benchmarks/graph_breaks.py gpt2
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import torch
from _process import answer_if_child, in_fresh_process
from _record import load, result_path, store
from torch import nn

from memfit.capture import TrainingStep
from memfit.planning import Settings
from memfit.runtime.fitting import fit_step
from memfit.runtime.measure import measured_eager_peak
from memfit.workloads import build

WORKLOADS: dict[str, tuple[str, dict[str, Any], str]] = {  # name, options, and the blocks after which the model looks
    "gpt2": ("gpt2", {"batch": 2, "layers": 8, "width": 256, "tokens": 128, "vocabulary": 5000}, "transformer.h."),
    "gpt2, width 768": (
        "gpt2",
        {"batch": 2, "layers": 12, "width": 768, "tokens": 256, "vocabulary": 5000},
        "transformer.h.",
    ),
    "resnet50": ("resnet50", {"batch": 16, "size": 128}, "features.stage"),
}
BREAKS = (0, 1, 2, 4)
SHARES = (1.0, 0.7)
ROUNDS = 12
SEARCH_SECONDS = 10.0
CHILD_SECONDS = 3600


class Looks(nn.Module):
    """A block after which the value of a tensor is looked at."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block, and look."""
        result = self.block(*args, **kwargs)
        seen = result[0] if isinstance(result, tuple) else result
        if seen.sum().item() > 1e30:
            raise ValueError("the values explode")
        return result


def broken(workload: str, breaks: int) -> TrainingStep:
    """Return the workload's step, with so many lines in its model that look at a tensor's value."""
    torch.manual_seed(0)
    name, options, prefix = WORKLOADS[workload]
    step = build(name, **options)
    blocks = [name for name, _ in step.model.named_modules() if _is_block(name, prefix)]
    for number in range(breaks):
        name = blocks[(number + 1) * len(blocks) // (breaks + 1) - 1]
        parent, _, last = name.rpartition(".")
        setattr(step.model.get_submodule(parent), last, Looks(step.model.get_submodule(name)))
    return step


def _is_block(name: str, prefix: str) -> bool:
    """Return whether a module is one of the blocks: the names go on with a number, or with one and a unit's."""
    rest = name.removeprefix(prefix)
    return name.startswith(prefix) and (rest.isdigit() or (rest.count(".") == 1 and "unit" in rest))


def run(workload: str, share: float) -> dict[str, Any]:
    """Return seconds and peaks of the steps with each number of breaks, planned within one budget."""
    steps = {breaks: broken(workload, breaks) for breaks in BREAKS}
    budget_bytes = int(share * measured_eager_peak(steps[0], torch.device("cpu")))
    settings = Settings(budget=budget_bytes, time_limit_seconds=SEARCH_SECONDS)
    planned = {breaks: fit_step(step, settings) for breaks, step in steps.items()}
    seconds: dict[int, list[float]] = {breaks: [] for breaks in BREAKS}
    for number in range(ROUNDS + 1):
        for breaks in random.Random(number).sample(BREAKS, len(BREAKS)):  # each of them after each other one
            each = planned[breaks]
            began = time.perf_counter()
            each(each.step.batch)
            seconds[breaks] += [time.perf_counter() - began] if number else []
            each.step.model.zero_grad(set_to_none=True)
    ratios = {
        breaks: statistics.median(mine / whole for mine, whole in zip(found, seconds[0], strict=True)) - 1.0
        for breaks, found in seconds.items()
    }
    peaks = {breaks: each.measure(repeats=1).peak_bytes for breaks, each in planned.items()}
    for each in planned.values():
        each.verify()
    return {
        "workload": workload,
        "share": share,
        "options": WORKLOADS[workload][1],
        "budget_bytes": budget_bytes,
        "breaks": [
            {
                "breaks": breaks,
                "graphs": len(getattr(planned[breaks], "plans", (None,))),
                "seconds": statistics.median(seconds[breaks]),
                "above_whole": ratios[breaks],
                "peak_bytes": peaks[breaks],
            }
            for breaks in BREAKS
        ],
    }


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help="default: " + " ".join(WORKLOADS))
    options = parser.parse_args()
    path = result_path("graph_breaks")
    rows: list[dict[str, Any]] = load(path)["payload"]["rows"] if path.exists() else []
    for workload in options.workloads or list(WORKLOADS):
        for share in SHARES:
            request = {"workload": workload, "share": share}
            found = in_fresh_process(__file__, request, timeout_seconds=CHILD_SECONDS)
            if "error" in found:
                raise SystemExit(f"{request}: {found['error']}")
            print(workload, f"{share:.0%}", found["breaks"], flush=True)
            rows = [row for row in rows if (row["workload"], row["share"]) != (workload, share)] + [found]
            store("graph_breaks", {"rows": rows, "rounds": ROUNDS})


if __name__ == "__main__" and not answer_if_child(run):
    main()
