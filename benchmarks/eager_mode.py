"""Eager mode: its own cost when nothing has to go, and loops that never repeat at 60% of their peak.

The cost: steps of three workloads, bare, under a dispatch mode that does nothing, and under `memfit.eager` with memory
to spare, in turns; the difference to the bare step, divided by the operators that it calls.

The loops: a ResNet-110 of which blocks are skipped at random (stochastic depth, as dqn2020 runs it), a mixture of
experts, GPT-2 over sentences of all lengths, and a recursive network over random trees. Each trains from the same seed
bare, in eager mode, with checkpoints placed by hand, and in a plain DTR, in turns of a few steps; the budget is 60% of
what the longest, deepest step takes bare, residents included, and for eager mode once more what checkpoints take.

    python benchmarks/eager_mode.py              # all that is not stored yet, stored as it comes: 10 minutes
    python benchmarks/eager_mode.py lstm trees   # some
    python benchmarks/eager_mode.py --again      # all of it
    python benchmarks/eager_mode.py --steps 20   # shorter loops, nothing stored
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import nullcontext
from typing import Any

import torch
from _eager_loops import LOOPS
from _eager_turns import in_turns, largest_bytes
from _process import answer_if_child, in_fresh_process
from _record import load, result_path, store
from torch.utils._python_dispatch import _disable_current_modes

import memfit
from memfit.torch_private.autograd import TorchDispatchMode
from memfit.workloads import build

COSTS: dict[str, dict[str, Any]] = {  # small, so that the operators' own work does not hide what a mode adds to it
    "resnet50": {"batch": 2, "size": 32},
    "gpt2": {"batch": 1, "tokens": 16, "width": 64, "vocabulary": 500},
    "lstm": {"batch": 2, "width": 32},
}
ROUNDS = 60
WARM_UP = 5  # rounds: first calls are not what is asked for
STEPS = 50
SIZED = ("bare", "checkpoints")  # ways in which a step takes as much as it takes
KEYS = {"costs": "workload", "loops": "loop"}
CHILD_SECONDS = 3600


class Empty(TorchDispatchMode):
    """Does nothing, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def cost(workload: str) -> dict[str, Any]:
    """Return processor time in microseconds an operator, under an empty mode and under eager mode."""
    calls = 0
    torch.set_num_threads(1)
    step = build(workload, **COSTS[workload])
    empty = Empty()
    seconds: dict[str, list[float]] = {"bare": [], "empty": [], "eager": []}
    with memfit.eager(step.model, budget=1 << 40):
        for number in range(WARM_UP + ROUNDS):
            for name in ("eager", "bare", "empty") if number % 2 else ("eager", "empty", "bare"):
                empty.calls = 0
                with (
                    nullcontext() if name == "eager" else _disable_current_modes(),
                    empty if name == "empty" else nullcontext(),
                ):
                    began = time.process_time()
                    step.run_eager(step.batch)
                    took = time.process_time() - began
                calls = empty.calls or calls
                step.model.zero_grad(set_to_none=True)
                seconds[name] += [took] if number >= WARM_UP else []
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    return {
        "workload": workload,
        "options": COSTS[workload],
        "calls": calls,
        "seconds": medians,
        "us_a_call": {name: 1e6 * (medians[name] - medians["bare"]) / calls for name in ("empty", "eager")},
    }


def child(what: str, name: str, steps: int) -> dict[str, Any]:
    """Return what a process of its own is asked for."""
    if what == "costs":
        return cost(name)
    if what == "sizes":
        return {"bytes": largest_bytes(name, checkpoints=steps > 0)}
    return in_turns(name, steps, {way: _asked("sizes", name, way == "checkpoints")["bytes"] for way in SIZED})


def _asked(what: str, name: str, steps: int) -> dict[str, Any]:
    answer = in_fresh_process(
        __file__, {"what": what, "name": name, "steps": int(steps)}, timeout_seconds=CHILD_SECONDS
    )
    if "error" in answer:
        raise SystemExit(f"{name}: {answer['error']}")
    return answer


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: " + ", ".join([*COSTS, *LOOPS]))
    parser.add_argument("--steps", type=int, default=STEPS, help="of each loop; others than %(default)s are not stored")
    parser.add_argument("--again", action="store_true", help="measure again what is stored already")
    options = parser.parse_args()
    path = result_path("eager_mode")
    found: dict[str, Any] = load(path)["payload"] if path.exists() else {"costs": [], "loops": []}
    is_stored = options.steps == STEPS
    there = {row[KEYS[what]] for what in KEYS for row in found[what]}
    for name in options.names or [*COSTS, *LOOPS]:
        if is_stored and name in there and not options.again:
            continue
        what = "costs" if name in COSTS else "loops"
        row = _asked(what, name, options.steps)
        print(json.dumps(row, indent=1), flush=True)
        found[what] = [each for each in found[what] if each[KEYS[what]] != name] + [row]
        if is_stored:
            store("eager_mode", found | {"rounds": ROUNDS})


if __name__ == "__main__" and not answer_if_child(child):
    main()
