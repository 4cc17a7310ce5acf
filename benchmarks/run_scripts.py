"""Scripts of the usual kinds under `memfit run`, beside themselves: prints, exit status, weights, and the most bytes.

The scripts are in `benchmarks/scripts`, written as users write them, without memfit. Each runs as it is,
and then within shares of the most bytes that it took by itself, of the whole process: "same" says that what it printed,
its exit status and all that it has stored are the same, to the bit. The most bytes are recorded by a record around the
whole process, which is none of `memfit run`. Weights, gradients, the optimizer's state and batches count.

    python benchmarks/run_scripts.py
    python benchmarks/run_scripts.py gpt2 gan
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
WATCHED = FOLDER / "_script_watched.py"
SHARES = (90, 70, 50)
MOST_SECONDS = 600

# script -> ranks
SCRIPTS = {
    "gpt2": 1,
    "resnet": 1,
    "accumulation": 1,
    "trainer": 1,
    "own_trainer": 1,
    "lightning_fit": 1,
    "fabric": 1,
    "accelerate_loop": 1,
    "gan": 1,
    "lstm": 1,
    "vae": 1,
    "ddp": 2,
}
_OF_MACHINE = re.compile(r"^\[?(W\d|rank\d).*$|^\*{10,}$|^Setting OMP_NUM_THREADS.*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Ran:
    """What one run did: its peak is of the rank with the most."""

    status: int
    printed: str
    said: str
    stored: dict[str, Any]
    peak_bytes: int
    seconds: float


def run(script: str, how: str, *, ranks: int = 1) -> Ran:
    """Run a script of the folder, as it is (`plain`), or by a door within a budget in bytes (`auto:1234567`)."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        stored, peak = Path(folder, "stored.pt"), Path(folder, "peak")
        words = [str(WATCHED), str(peak), how, str(FOLDER / "scripts" / f"{script}.py"), str(stored)]
        start = [sys.executable]
        if ranks > 1:
            start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        done = subprocess.run(
            [*start, *words], capture_output=True, text=True, timeout=MOST_SECONDS, env=environment, check=False
        )
        seen = [json.loads(path.read_text()) for path in Path(folder).glob("peak.*")]
        found = {"": torch.load(stored, weights_only=False)} if stored.exists() else {}
    return Ran(
        status=done.returncode,
        printed=done.stdout,
        said=_OF_MACHINE.sub("", done.stderr),
        stored=found,
        peak_bytes=max((each["peak_bytes"] for each in seen), default=0),
        seconds=max((each["seconds"] for each in seen), default=0.0),
    )


def are_same(one: Any, other: Any) -> bool:
    """Return whether two stored objects hold the same bits."""
    import torch

    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return list(one) == list(other) and all(are_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(are_same, one, other))
    return one == other


def measure(script: str, shares: Sequence[int] = SHARES) -> list[dict[str, Any]]:
    """Run one script as it is and at each share."""
    ranks = SCRIPTS[script]
    plain = run(script, "plain", ranks=ranks)
    rows: list[dict[str, Any]] = [
        {"script": script, "share": None, "peak_bytes": plain.peak_bytes, "seconds": plain.seconds}
    ]
    print(
        f"{script:16} as it is: {plain.peak_bytes / 2**20:.1f} MiB, {plain.seconds} s, exit {plain.status}", flush=True
    )
    for share in shares:
        for door in ("auto", "eager"):
            budget_bytes = plain.peak_bytes * share // 100
            ran = run(script, f"{door}:{budget_bytes}", ranks=ranks)
            rows.append(_row(script, share, door, budget_bytes, plain, ran))
            if rows[-1]["is_held"] and not rows[-1]["error"]:  # which names the other door
                break
    return rows


def _row(script: str, share: int, door: str, budget_bytes: int, plain: Ran, ran: Ran) -> dict[str, Any]:
    error = re.search(r"memfit: error: (.*)", ran.said)
    is_same = (ran.status, ran.printed) == (plain.status, plain.printed) and are_same(plain.stored, ran.stored)
    row: dict[str, Any] = {
        "script": script,
        "share": share,
        "door": door,
        "budget_bytes": budget_bytes,
        "peak_bytes": ran.peak_bytes,
        "seconds": ran.seconds,
        "is_held": ran.peak_bytes <= budget_bytes,
        "is_same": is_same,
        "error": error[1] if error else None,
        "by": sorted(set(re.findall(r"memfit: [\w ]+, (memfit\.\w+)", ran.said))),
        "said": [line for line in ran.said.splitlines() if line.startswith("memfit:")],
    }
    print(
        f"{script:16} {share}% {door}: {ran.peak_bytes / budget_bytes:.3f} of the budget, {ran.seconds} s, "
        f"{'same' if is_same else 'OTHER'}; {row['error'] or row['by']}",
        flush=True,
    )
    return row


def main() -> None:
    """Run, print and store."""
    from _record import load, result_path, store

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", help=f"of {', '.join(SCRIPTS)}; all, and stored, if none is named")
    parser.add_argument(
        "--shares", nargs="*", type=int, default=SHARES, help="of the bytes that a script takes as it is"
    )
    parser.add_argument(
        "--add", action="store_true", help="store the scripts that are named beside those stored before"
    )
    options = parser.parse_args()
    rows = [row for script in options.scripts or SCRIPTS for row in measure(script, options.shares)]
    if options.add:
        before = load(result_path("run_scripts"))["payload"]["rows"]
        rows += [row for row in before if row["script"] not in options.scripts]
        rows.sort(key=lambda row: list(SCRIPTS).index(row["script"]))
    if options.add or not options.scripts:
        print("stored in", store("run_scripts", {"rows": rows}))


if __name__ == "__main__":
    main()
