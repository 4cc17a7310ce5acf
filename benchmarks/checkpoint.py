"""`memfit.checkpoint` beside checkpoints by hand: peak, time and bits, at shares of what the bare loop takes.

Each way of training has a process of its own: bare, `torch.utils.checkpoint` around every block, and
`memfit.checkpoint` within 90%, 70%, 50% of the bare peak, within the peak of the checkpoints by hand, and at the least
that it was seen to take. All train from the same seed, first until plans stay, then in turns of two steps. Seconds are
of the processor, of one thread, so that other processes matter less; the ratio is the median over turns of a way's
seconds to the bare loop's in the same turn. Peaks are all that torch takes, residents included, as a share of the bare
loop's. Bits are those of losses, parameters and buffers at the end.

    python benchmarks/checkpoint.py                    # all models, stored: 40 minutes
    python benchmarks/checkpoint.py gpt2 --turns 5     # one model, nothing stored
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
from _record import load, result_path, store
from torch.utils.checkpoint import checkpoint as stock_checkpoint

import memfit
from memfit.checkpointing.blocks import find_blocks
from memfit.system.recorder import record
from memfit.workloads import build

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"batch": 4, "tokens": 128, "layers": 6, "width": 256, "vocabulary": 2000, "optimizer": "adamw"}),
    "gpt2 small": (
        "gpt2",
        {"batch": 2, "tokens": 32, "layers": 6, "width": 64, "vocabulary": 500, "optimizer": "adamw"},
    ),
    "encoder": ("encoder", {"batch": 4, "tokens": 128, "width": 256, "feedforward": 1024, "optimizer": "adamw"}),
    "resnet18": ("resnet50", {"depth": 18, "batch": 16, "size": 112, "optimizer": "sgd"}),
    "unet": ("unet", {"batch": 2, "size": 96, "width": 16, "optimizer": "sgd"}),
    "densenet121": ("densenet121", {"batch": 4, "size": 64, "optimizer": "sgd"}),
}
SHARES = (0.9, 0.7, 0.5)
SETTLE = 16  # steps until plans stay
TURN = 2  # steps
TURNS = 15
_ANSWER_SECONDS = 900.0


class Child:
    """A process that trains in one way.

    Args:
        name: of the model.
        way: `bare`, `by hand`, or `memfit`.
        budget_bytes: of `memfit`.
    """

    def __init__(self, name: str, way: str, budget_bytes: int = 0) -> None:
        self.seconds: list[float] = []
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_train, args=(theirs, name, way, budget_bytes), daemon=True)
        self._process.start()
        theirs.close()
        self.settled: dict[str, Any] = self._answer()

    def turn(self) -> None:
        """Train for some steps."""
        self._pipe.send(True)
        self.seconds.append(self._answer()["seconds"])

    def end(self) -> dict[str, Any]:
        """Return what the way took, and its bits."""
        self._pipe.send(False)
        found = self._answer()
        self._process.join()
        return found

    def _answer(self) -> dict[str, Any]:
        if not self._pipe.poll(_ANSWER_SECONDS):
            raise SystemExit("a step takes too long")
        answer = self._pipe.recv()
        if "error" in answer:
            raise SystemExit(answer["error"])
        return answer


def _train(pipe: Connection, name: str, way: str, budget_bytes: int) -> None:
    try:
        _train_in_turns(pipe, name, way, budget_bytes)
    except Exception as error:  # noqa: BLE001 - it is raised in the parent
        pipe.send({"error": f"{name}, {way}: {type(error).__name__}: {error}"})


def _train_in_turns(pipe: Connection, name: str, way: str, budget_bytes: int) -> None:
    torch.set_num_threads(1)
    with record("cpu"):
        pass
    workload, options = MODELS[name]
    step = build(workload, **options)
    torch.manual_seed(0)
    handle = None
    if way == "by hand":
        for _, block in find_blocks(step.model):
            _checkpoint_by_hand(block)
    elif way == "memfit":
        handle = memfit.checkpoint(step.model, budget_bytes, budget_is="soft")
    digest = hashlib.sha256()
    steps = _steps(step, digest)
    peaks = [next(steps)[1] for _ in range(SETTLE)]
    pipe.send({"peak_bytes": max(peaks[2:])})
    while pipe.recv():
        took = [next(steps) for _ in range(TURN)]
        peaks += [peak for _, peak in took]
        pipe.send({"seconds": min(seconds for seconds, _ in took)})
    for tensor in step.model.state_dict().values():
        digest.update(tensor.detach().numpy().tobytes())
    found: dict[str, Any] = {"peak_bytes": max(peaks[2:]), "bits": digest.hexdigest()}
    if handle is not None:
        report = handle.report()
        found |= {
            "over": sum(peak > budget_bytes for peak in peaks),
            "plans": report.sizes[0].plans,
            "last_peak_bytes": peaks[-1],
            "predicted_bytes": report.sizes[0].planned.predicted_bytes,
            "kinds": str(report.sizes[0]).split(";")[0],
        }
        handle.close()
    pipe.send(found)


def _checkpoint_by_hand(block: torch.nn.Module) -> None:
    forward = block.forward
    block.forward = lambda *args, **kwargs: stock_checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _steps(step: Any, digest: Any) -> Iterator[tuple[float, int]]:
    """Yield (processor seconds, peak bytes) of one step after another."""
    while True:
        began = time.process_time()
        with record("cpu") as usage:
            loss = step.run_eager(step.batch)
        seconds = time.process_time() - began
        digest.update(loss.numpy().tobytes())
        del loss
        yield seconds, usage.start_bytes + usage.peak_bytes


def measure(name: str, turns: int) -> dict[str, Any]:
    """Return the rows of one model."""
    children = {"bare": Child(name, "bare"), "by hand": Child(name, "by hand")}
    bare_bytes = children["bare"].settled["peak_bytes"]
    hand_bytes = children["by hand"].settled["peak_bytes"]
    lean = Child(name, "memfit", 1)
    least_bytes = lean.end()["last_peak_bytes"]
    budgets = {f"memfit {share:.0%}": int(bare_bytes * share) for share in SHARES}
    budgets |= {"memfit as by hand": hand_bytes, "memfit least": int(least_bytes * 1.005)}
    children |= {way: Child(name, "memfit", budget) for way, budget in budgets.items()}
    for turn in range(turns):
        for child in children.values() if turn % 2 == 0 else reversed(children.values()):
            child.turn()
    ends = {way: child.end() for way, child in children.items()}
    bare = children["bare"]
    rows: list[dict[str, Any]] = []
    for way, child in children.items():
        ratios = sorted(mine / its for mine, its in zip(child.seconds, bare.seconds, strict=True))
        rows.append(
            {
                "way": way,
                "budget_share": budgets[way] / bare_bytes if way in budgets else None,
                "peak_share": ends[way]["peak_bytes"] / bare_bytes,
                "time_ratio": statistics.median(ratios),
                "time_ratio_quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
                "same_bits": ends[way]["bits"] == ends["bare"]["bits"],
            }
            | {key: ends[way][key] for key in ("over", "plans", "kinds") if key in ends[way]}
        )
    seconds = statistics.median(bare.seconds)
    return {"model": name, "options": MODELS[name][1], "bare_bytes": bare_bytes, "bare_seconds": seconds, "rows": rows}


def show(found: dict[str, Any]) -> None:
    """Print the rows of one model."""
    print(f"{found['model']}: bare {found['bare_bytes'] / 2**20:.1f} MiB, {found['bare_seconds'] * 1e3:.0f} ms")
    for row in found["rows"]:
        budget = "" if row["budget_share"] is None else f"{row['budget_share']:.3f}"
        low, high = row["time_ratio_quartiles"]
        print(
            f"  {row['way']:18} budget {budget:5} peak {row['peak_share']:.3f} time {row['time_ratio']:.3f} "
            f"({low:.2f} to {high:.2f}) bits {'same' if row['same_bits'] else 'OTHER'} "
            f"{'' if 'over' not in row else 'over ' + str(row['over'])} {row.get('kinds', '')}",
            flush=True,
        )


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: " + ", ".join(MODELS))
    parser.add_argument("--turns", type=int, default=TURNS, help="others than %(default)s are not stored")
    options = parser.parse_args()
    path = result_path("checkpoint")
    stored: list[dict[str, Any]] = []
    with suppress(Exception):
        stored = load(path)["payload"]["models"]
    for name in options.names or MODELS:
        found = measure(name, options.turns)
        show(found)
        stored = [each for each in stored if each["model"] != name] + [found]
        if options.turns == TURNS:
            store("checkpoint", {"turns": TURNS, "models": json.loads(json.dumps(stored))})


if __name__ == "__main__":
    main()
