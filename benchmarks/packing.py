"""Packing: height over the lower bound, and seconds, on instances by others and on made traces of up to a million
blocks.

    python benchmarks/packing.py [--quick]
    python benchmarks/packing.py --instances J.1048576 G_1    # some instances again, the others as they are stored

Each instance is packed by every packer; the made traces by `auto` under the time limit asked for at their size. Times
are after compilation, which is measured apart, in a process of its own with an empty cache. Every layout is checked.

The instances are MiniMalloc's (google/minimalloc, benchmarks/challenging) and idealloc's (cappadokes/idealloc): see
`tests/data/packing/README.md`. Where `auto` proves nothing in its time, it is given 60 s as well.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _made_traces import made_trace
from _record import load, result_path, store

from memfit.errors import InvalidOptionError
from memfit.packing import PACKERS, Blocks, PackingProblem, PackingProgress, check_layout, make_packer
from memfit.packing.trace_file import read_trace

INSTANCES = (*(f"{letter}.1048576" for letter in "ABCDEFGHIJK"), "resnet50", "G_1", "S_1")
DATA = Path(__file__).parents[1] / "tests" / "data" / "packing"
TIME_LIMIT_SECONDS, FIRST_ANSWER_SECONDS, LONG_SECONDS = 10.0, 0.1, 60.0
SCALES = {1_000: 0.009, 10_000: 0.185, 100_000: 2.8, 1_000_000: 57.0}  # blocks -> seconds; what is left is the check's
SEEDS = range(5)
LITERATURE = {
    "minimalloc": {
        "source": "Moffitt 2023, MiniMalloc (ASPLOS), as published, on its own machine",
        "instances": "A to K, each at capacity 1,048,576",
        "seconds": [0.6, 5.4],
    },
    "known_ratio": {
        "A": 1.0,
        "B": 1.0,
        "C": 1.0,
        "D": 1.0,
        "E": 1.0,
        "K": 1.0,
        "source": "tests/data/packing/README.md",
    },
}
COMPILE = """
import json, time
from memfit.errors import InvalidOptionError
from memfit.packing import PACKERS, PackingProblem, check_layout, make_packer
from _made_traces import made_trace
blocks, seconds = made_trace(300, seed=1), {}
for name in PACKERS:
    times = []
    for _ in range(4):  # a packer under a time limit may compile its parts one call after the other
        begun = time.perf_counter()
        layout = make_packer(name).pack(PackingProblem(blocks=blocks, time_limit_seconds=0.1))
        check_layout(blocks, layout)
        times.append(time.perf_counter() - begun)
    seconds[name] = sum(times) - len(times) * min(times)
print(json.dumps(seconds))
"""


def packed(blocks: Blocks, packer: str, seconds: float, seed: int = 0) -> dict[str, Any]:
    """Pack and check; return what is stored of it."""
    answers: list[list[float]] = []

    def tell(progress: PackingProgress) -> None:
        answers.append([progress.seconds, progress.height_bytes / blocks.lower_bound_bytes])

    problem = PackingProblem(blocks=blocks, time_limit_seconds=seconds, seed=seed, progress=tell)
    begun = time.perf_counter()
    try:
        layout = make_packer(packer).pack(problem)
    except InvalidOptionError as error:  # too much for `mip`
        return {"refused": str(error)}
    taken = time.perf_counter() - begun
    begun = time.perf_counter()
    check_layout(blocks, layout)
    return {
        "height_bytes": layout.height_bytes,
        "ratio": layout.ratio,
        "proven": layout.proven,
        "seconds": taken,
        "check_seconds": time.perf_counter() - begun,
        "time_limit_seconds": seconds,
        "answers": [answers[0], *answers[-3:]] if answers else [],
    }


def instances(names: Sequence[str]) -> list[dict[str, Any]]:
    """Every packer on these instances, and `auto` within 0.1 s, and within a minute where it proved nothing."""
    stored: list[dict[str, Any]] = []
    for name in names:
        blocks = read_trace(next(DATA.glob(f"{name}.csv*")))
        results = {packer: packed(blocks, packer, TIME_LIMIT_SECONDS) for packer in PACKERS}
        first = packed(blocks, "auto", FIRST_ANSWER_SECONDS)
        long = None if results["auto"]["proven"] else packed(blocks, "auto", LONG_SECONDS)
        for packer, result in {
            **results,
            "auto, first answer": first,
            **({"auto, long": long} if long else {}),
        }.items():
            shown = result.get("refused") or f"{result['ratio']:.4f}  {result['seconds']:.3f} s"
            print(f"{name:12} {packer:18} {shown}", flush=True)
        stored.append(
            {
                "name": name,
                "blocks": len(blocks),
                "lower_bound_bytes": blocks.lower_bound_bytes,
                "packers": results,
                "first_answer": first,
                "long_answer": long,
            }
        )
    return stored


def scales(most_blocks: int) -> list[dict[str, Any]]:
    """`auto` on made traces."""
    stored: list[dict[str, Any]] = []
    for count, seconds in SCALES.items():
        if count > most_blocks:
            continue
        packed(made_trace(count, seed=99), "auto", seconds)  # what is not compiled yet is now
        results: list[dict[str, Any]] = []
        for seed in SEEDS:
            results.append({"seed": seed, **packed(made_trace(count, seed=seed), "auto", seconds)})
            print(
                f"{count:9,} blocks, seed {seed}: {results[-1]['ratio']:.4f}  {results[-1]['seconds']:.3f} s",
                flush=True,
            )
        stored.append(
            {
                "blocks": count,
                "time_limit_seconds": seconds,
                "mean_ratio": statistics.mean(result["ratio"] for result in results),
                "worst_ratio": max(result["ratio"] for result in results),
                "worst_seconds": max(result["seconds"] + result["check_seconds"] for result in results),
                "peak_process_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                "results": results,
            }
        )
    return stored


def compile_seconds() -> dict[str, float]:
    """Seconds that each packer's first call spends on compiling, in the order of the registry, each building on the
    last; after that the machine code is on disk."""
    with tempfile.TemporaryDirectory() as cache:
        folders = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        environment = {**os.environ, "NUMBA_CACHE_DIR": cache, "PYTHONPATH": folders}
        done = subprocess.run(
            [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=True
        )
    return json.loads(done.stdout)


def main() -> None:
    """Run all, print as it goes, and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="made traces of up to 10,000 blocks only")
    parser.add_argument("--instances", nargs="+", choices=INSTANCES, help="these alone, the rest as it is stored")
    words = parser.parse_args()
    if words.instances:
        for packer in PACKERS:
            packed(made_trace(500, seed=9), packer, 0.3)
        payload = load(result_path("packing", "cpu"))["payload"]
        known = {entry["name"]: entry for entry in [*payload["instances"], *instances(words.instances)]}
        payload["instances"] = [known[name] for name in INSTANCES if name in known]
        print("stored in", store("packing", payload))
        return
    compiling = compile_seconds()
    print("seconds of compilation:", ", ".join(f"{name} {seconds:.1f}" for name, seconds in compiling.items()))
    for packer in PACKERS:
        packed(made_trace(500, seed=9), packer, 0.3)
    payload = {
        "compile_seconds": compiling,
        "instances": instances(INSTANCES),
        "scales": scales(10_000 if words.quick else max(SCALES)),
        "literature": LITERATURE,
    }
    print("stored in", store("packing", payload))


if __name__ == "__main__":
    main()
