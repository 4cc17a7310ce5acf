"""Runs of `habits.py` through each door of memfit, beside the bare loop: bits, bytes, and what an error leaves.

python tests/habit_runs.py                                   # all, within 70% and 90% of the bare loop's peak
python tests/habit_runs.py "mixup*" --doors eager --shares 0.7
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "benchmarks")]
from _process import in_forked_child  # noqa: E402
from habits import HABITS, Habit  # noqa: E402

import memfit  # noqa: E402
from memfit.errors import MemfitError  # noqa: E402
from memfit.system.recorder import record  # noqa: E402
from memfit.torch_private.tensors import is_fake  # noqa: E402

DOORS = ("fit", "checkpoint", "compile", "backend", "eager", "run")
SHARES = (0.7, 0.9)
STEPS, SETTLED, SECONDS = 5, 3, 150.0
_RUNS = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import habit_runs; habit_runs.main_of_script()"


def train(name: str, door: str, budget_bytes: int) -> dict[str, Any]:
    """Train a habit by a door, in this process; return losses, peaks, what is left, and how it ended."""
    torch.set_num_threads(1)
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda line: said.append(line.getMessage()[:300])  # type: ignore[method-assign]
    logging.getLogger("memfit").addHandler(handler)
    row: dict[str, Any] = {"losses": [], "peaks_bytes": [], "said": said}
    torch.manual_seed(0)
    with record("cpu"):
        pass
    own = HABITS[name]()
    try:
        with ExitStack() as stack, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step = enter(stack, own, door, budget_bytes)
            for number in range(STEPS):
                torch.manual_seed(number + 1)
                if own.before is not None:
                    own.before(own, number)
                with record("cpu") as usage:
                    loss = step(number)
                row["peaks_bytes"].append(usage.start_bytes + usage.peak_bytes)
                row["losses"].append(loss.double().item().hex())
                del loss
                if own.after is not None:
                    own.after(own, number)
    except MemfitError as error:
        row["refused"] = f"{type(error).__name__}: {error}"[:600]
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a row
        frames = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[-6:]]
        row["error"] = f"{type(error).__name__}: {error}"[:500] + " " + " < ".join(reversed(frames))
    row["left"] = left(own)
    row["unlike"] = unlike(own)
    return row


def enter(stack: ExitStack, own: Habit, door: str, budget_bytes: int) -> Callable[[int], Tensor]:
    """Return the step of a door, by the number of the step."""
    model, called = own.model, own.model
    if door == "fit":
        fitted = memfit.fit(
            model, own.loss, own.batch(0), optimizer=own.optimizer, budget=budget_bytes, time_limit_seconds=0.5
        )
        return lambda number: fitted(own.batch(number))
    if door == "checkpoint":
        stack.callback(memfit.checkpoint(model, budget_bytes).close)
    elif door == "eager":
        stack.enter_context(memfit.eager(model, budget=budget_bytes))
    elif door == "compile":
        memfit.compile(model, optimizer=own.optimizer, budget=budget_bytes, time_limit_seconds=0.5)
    elif door == "backend":
        reserve = sum(2 * each.nbytes + 64 for each in model.parameters() if each.requires_grad)
        options: Any = {"budget": budget_bytes, "reserve": reserve, "time_limit_seconds": 0.5}
        called = torch.compile(model, backend="memfit", options=options)
    return lambda number: own.step(called, number)


def left(own: Habit) -> dict[str, str]:
    """Return digests of what training has left in the model and its optimizer."""
    found = {name: value for name, value in own.model.state_dict().items() if isinstance(value, Tensor)}
    found |= {f"gradient of {name}": p.grad for name, p in own.model.named_parameters() if p.grad is not None}
    if isinstance(own.beside, nn.Module):
        found |= {f"beside {name}": value for name, value in own.beside.state_dict().items()}
    for number, state in own.optimizer.state_dict()["state"].items():
        found |= {f"{name} of {number}": value for name, value in state.items() if isinstance(value, Tensor)}
    return {name: "fake" if is_fake(value) else digest(value) for name, value in found.items()}


def digest(tensor: Tensor) -> str:
    """Return the bytes of a tensor in short."""
    whole = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(whole.numpy().tobytes(), digest_size=8).hexdigest()


def unlike(own: Habit) -> list[str]:
    """Return what is no longer what it was in the user's model: fakes, and parameters of other kinds."""
    tensors = [*own.model.named_parameters(), *own.model.named_buffers()]
    tensors += [(name, value) for name, value in vars(own.model).items() if isinstance(value, Tensor)]
    return [name for name, value in tensors if is_fake(value)]


def main_of_script() -> None:
    """Train as a script that `memfit run` holds: arguments are the name, and a file for the row."""
    name, path = sys.argv[1:]
    Path(path).write_text(json.dumps(train(name, "bare", 0)))


def run_script(name: str, budget_bytes: int) -> dict[str, Any]:
    """Train a habit by `memfit run` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        script, path = Path(folder) / "script.py", Path(folder) / "row.json"
        script.write_text(_RUNS)
        command = [
            sys.executable,
            "-m",
            "memfit",
            "run",
            "--budget",
            str(budget_bytes),
            str(script),
            "--",
            name,
            str(path),
        ]
        environment = os.environ | {"PYTHONPATH": str(FOLDER.parent)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, env=environment)
        row = (
            json.loads(path.read_text())
            if path.exists()
            else {"losses": [], "peaks_bytes": [], "left": {}, "unlike": []}
        )
        row["said"] = [*row.get("said", []), done.stderr[-600:]]
        if done.returncode and "error" not in row and "refused" not in row:
            row["refused" if "Traceback" not in done.stderr else "error"] = done.stderr[-500:]
        return row


def judged(row: dict[str, Any], bare: dict[str, Any], budget_bytes: int) -> tuple[str, str]:
    """Return how a run ended, and what there is to say."""
    if row.get("unlike"):
        return "changed", f"{row['unlike'][:3]} {row.get('refused', '')}"
    if "error" in row:
        return "error", row["error"]
    for number, (mine, theirs) in enumerate(zip(row["losses"], bare["losses"], strict=False)):
        if mine != theirs:
            return (
                "other bits",
                f"loss of step {number}: {float.fromhex(mine)}, not {float.fromhex(theirs)}; {row['said'][:2]}",
            )
    peaks = [f"{peak / budget_bytes:.3f}" for peak in row["peaks_bytes"]]
    if "refused" in row:
        return "refused", f"after {len(row['losses'])} steps: {row['refused']}"
    other = [name for name, value in bare["left"].items() if row["left"].get(name) != value]
    if other or row["left"].keys() != bare["left"].keys():
        return (
            "other bits",
            f"left: {other[:3] or sorted(row['left'].keys() ^ bare['left'].keys())[:3]}; {row['said'][:2]}",
        )
    over = [number for number, peak in enumerate(row["peaks_bytes"]) if peak > budget_bytes]
    if any("are not the planned step's" in each for each in row["said"]):  # what `fit` tells of, and does not count
        return "held", "beside others: " + " ".join(peaks)
    is_said = any("more than" in each for each in row["said"])
    if any(number >= SETTLED for number in over) or (over and not is_said):
        return "over" if is_said else "unsaid", " ".join(peaks)
    return "held", " ".join(peaks)


def ended(name: str, door: str, share: float, bare: dict[str, Any]) -> tuple[str, str]:
    """Run a habit at a door within a share of the bare loop's peak; return how it ended, and what there is to say."""
    budget_bytes = int(max(bare["peaks_bytes"]) * share)
    if door == "run":
        return judged(run_script(name, budget_bytes), bare, budget_bytes)
    row = in_forked_child(lambda: train(name, door, budget_bytes), timeout_seconds=SECONDS)
    return (
        ("slow", row["error"]) if row.get("timed_out") else judged({"losses": [], "said": []} | row, bare, budget_bytes)
    )


def bare_of(name: str) -> dict[str, Any]:
    """Return what the bare loop takes and leaves."""
    bare = in_forked_child(lambda: train(name, "bare", 0), timeout_seconds=SECONDS)
    assert "error" not in bare, bare
    return bare


def doors_of(name: str) -> list[str]:
    """Return the doors that a habit can go through: `fit` runs no step of the habit's own."""
    return [door for door in DOORS if door != "fit" or HABITS[name]().own is None]


def main() -> None:
    """Run, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["*"])
    parser.add_argument("--doors", nargs="+", default=list(DOORS), choices=DOORS)
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES))
    options = parser.parse_args()
    import memfit.checkpointing.step
    import memfit.doors.checkpoint
    import memfit.doors.fit
    import memfit.dynamo.model
    import memfit.eager_mode.eager  # noqa: F401

    logging.getLogger("memfit").propagate = False
    for name in HABITS:
        if not any(fnmatch(name, each) for each in options.names):
            continue
        bare = bare_of(name)
        for door in doors_of(name):
            for share in options.shares if door in options.doors else ():
                kind, text = ended(name, door, share, bare)
                print(f"{kind} | {name} | {door} | {share:.0%} | {text}", flush=True)


if __name__ == "__main__":
    main()
