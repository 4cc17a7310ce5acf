"""Where the seconds of a first fit go: networks of two and seven layers, and ResNet-50, from cold and warm caches.

Cold is a machine on which memfit never ran: no measured costs, no plans, no compiled search. Warm is the same program
run again. Each fit has a process of its own. Stages are those that a fit reports; `compile` is what numba compiles
in this process, whichever stage waits for it, and is part of the others. Each is measured with the searches that numba
compiles at first use, as from the sources, and with those that a wheel brings; so is a first `memfit pack`, by what its
layout is above the bound.

    python benchmarks/first_fit.py
    python benchmarks/first_fit.py mlp
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _process import answer_if_child, in_fresh_process

CASES = {"mlp": ("100%",), "deep_mlp": ("70%",), "resnet50": ("50%",)}
TRACE = "tests/data/packing/E.1048576.csv"
TIME_LIMIT_SECONDS = 5.0
CHILD_SECONDS = 600


def fit_once(case: str, budget: str) -> dict[str, Any]:
    """Fit once and return the seconds of each stage; called in a process of its own."""
    began = time.perf_counter()
    import torch

    stages = {"import torch": time.perf_counter() - began}
    stages["import memfit"] = -time.perf_counter()
    import memfit
    from memfit.doors.step import fit_step
    from memfit.planning import Settings
    from memfit.system.load import Load

    stages["import memfit"] += time.perf_counter()
    compiling = _compile_seconds()
    step = _step(case)
    open_stage = ["first"]
    stages["first"] = -time.perf_counter()

    def on_stage(name: str) -> None:
        stages[open_stage[0]] += time.perf_counter()
        open_stage[0] = name
        stages[name] = stages.get(name, 0.0) - time.perf_counter()

    load, started = Load(), time.perf_counter()
    planned = fit_step(step, Settings(budget=budget, time_limit_seconds=TIME_LIMIT_SECONDS, on_stage=on_stage))
    stages[open_stage[0]] += time.perf_counter()
    fit_seconds = time.perf_counter() - started
    others = load.others()
    started = time.perf_counter()
    planned(step.batch)
    assert isinstance(planned, memfit.PlannedStep)
    return {
        "case": case,
        "budget": budget,
        "fit_seconds": round(fit_seconds, 3),
        "first_step_seconds": round(time.perf_counter() - started, 3),
        "compile_seconds": round(sum(compiling), 3),
        "stages": {name: round(seconds, 3) for name, seconds in stages.items()},
        "load": round(others, 2),
        "threads": torch.get_num_threads(),
    }


def _step(case: str) -> Any:
    import torch

    import memfit
    from memfit.workloads import build

    if not case.endswith("mlp"):
        return build(case)
    hidden = 1 if case == "mlp" else 6
    widths = [256, *[512] * hidden]
    layers = [
        torch.nn.Sequential(torch.nn.Linear(one, two), torch.nn.ReLU()) for one, two in itertools.pairwise(widths)
    ]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(512, 10))
    batch = (torch.randn(8192, 256), torch.randint(0, 10, (8192,)))
    optimizer = torch.optim.AdamW(model.parameters())
    return memfit.TrainingStep(model=model, loss=torch.nn.CrossEntropyLoss(), batch=batch, optimizer=optimizer)


def _compile_seconds() -> list[float]:
    """Return a list to which numba's compilations add their seconds, the outermost ones alone."""
    from memfit.system.shipped import shipped_functions

    seconds: list[float] = []
    if shipped_functions():
        return seconds
    from numba.core import event

    class Listener(event.Listener):
        depth, began = 0, 0.0

        def on_start(self, _event: Any) -> None:
            if self.depth == 0:
                self.began = time.perf_counter()
            self.depth += 1

        def on_end(self, _event: Any) -> None:
            self.depth -= 1
            if self.depth == 0:
                seconds.append(time.perf_counter() - self.began)

    event.register("numba:compile", Listener())
    return seconds


def measure(case: str, budget: str, searches: str, package: Path) -> list[dict[str, Any]]:
    """Fit in a fresh process from cold caches, and then in another one from the warm ones."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="memfit-cold-") as folder:
        there = _cold(folder, package)
        for caches in ("cold", "warm"):
            request = {"case": case, "budget": budget}
            row: dict[str, Any] = {"searches": searches, "caches": caches} | in_fresh_process(
                __file__, request, timeout_seconds=CHILD_SECONDS, environment=there
            )
            rows.append(row)
            stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in row.get("stages", {}).items())
            print(f"{searches:8} {case:9} {budget:5} {caches}: {row.get('fit_seconds')} s; {stages}", flush=True)
            print(f"         compiling {row.get('compile_seconds')} s {row.get('error', '')}", flush=True)
    return rows


def measure_pack(searches: str, package: Path) -> list[dict[str, Any]]:
    """Pack a trace twice from cold caches."""
    trace = Path(__file__).parents[1] / TRACE
    command = [sys.executable, "-m", "memfit", "pack", str(trace), "--json", "--time-limit", str(TIME_LIMIT_SECONDS)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="memfit-cold-") as folder:
        variables = os.environ | _cold(folder, package)
        for caches in ("cold", "warm"):
            began = time.perf_counter()
            done = subprocess.run(command, env=variables, capture_output=True, check=True, cwd=folder)
            seconds, found = time.perf_counter() - began, json.loads(done.stdout)
            rows.append({"searches": searches, "caches": caches, "seconds": round(seconds, 2), "ratio": found["ratio"]})
            print(f"{searches:8} pack      {caches}: {seconds:.2f} s, {found['ratio']:.4f} of the bound", flush=True)
    return rows


def _cold(folder: str, package: Path) -> dict[str, str]:
    return {"MEMFIT_CACHE": f"{folder}/memfit", "NUMBA_CACHE_DIR": f"{folder}/numba", "PYTHONPATH": str(package)}


def main() -> None:
    """Measure, print and store."""
    from _record import store

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all, and stored, if none is named")
    options = parser.parse_args()
    fits: list[dict[str, Any]] = []
    packs: list[dict[str, Any]] = []
    root = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory(prefix="memfit-wheel-") as made:
        shutil.copytree(root / "memfit", f"{made}/memfit", ignore=shutil.ignore_patterns("__pycache__"))
        began = time.perf_counter()
        build = [sys.executable, str(root / "building" / "machine_code.py"), f"{made}/memfit/system"]
        subprocess.run(build, check=True)
        build_seconds = round(time.perf_counter() - began, 1)
        for searches, package in (("library", Path(made)), ("numba", root)):
            packs += measure_pack(searches, package)
            for case in options.cases or CASES:
                fits += [row for budget in CASES[case] for row in measure(case, budget, searches, package)]
    payload = {"time_limit_seconds": TIME_LIMIT_SECONDS, "build_seconds": build_seconds, "fits": fits, "packs": packs}
    if not options.cases:
        print("stored in", store("first_fit", payload))


if __name__ == "__main__" and not answer_if_child(fit_once):
    main()
