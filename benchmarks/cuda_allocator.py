"""The model of torch's CUDA caching allocator against the allocator itself: equal after every event, or it fails.

The allocator is that of a CUDA build of torch, over a GPU that is not there (`cuda_build.py`); no driver is needed.

    python benchmarks/cuda_allocator.py
    python benchmarks/cuda_reserved.py --save /tmp/plans
    python benchmarks/cuda_allocator.py --torch 2.13.0 --plans /tmp/plans
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from _cuda_traces import CAPACITY_BYTES, Trace, random_trace
from _record import FOLDER, store
from cuda_build import TORCH, Build, made

from memfit.plan import Plan
from memfit.simulate.allocator_trace import replay
from memfit.simulate.cuda_allocator import AllocatorSettings
from memfit.simulate.reserved import STEPS, schedule_events
from memfit.system.files import write_atomically

MOST_SPLIT_BYTES = 32 << 20
SETTINGS = {"default": (False, None), "expandable": (True, None), "max_split": (False, MOST_SPLIT_BYTES)}
GOLDEN_TRACES = 12  # of each setting


def switches(settings: AllocatorSettings) -> str:
    """Return what PYTORCH_CUDA_ALLOC_CONF says for the settings of a trace."""
    words = [f"expandable_segments:{settings.expandable_segments}"]
    if settings.max_split_bytes is not None:
        words.append(f"max_split_size_mb:{settings.max_split_bytes >> 20}")
    return ",".join(words)


def described(trace: Trace) -> dict[str, Any]:
    """Return a trace as `_cuda_allocator_runner.py` takes it."""
    settings = trace.settings
    return {
        "events": trace.events,
        "capacity_bytes": settings.capacity_bytes,
        "allowed_bytes": settings.allowed_bytes,
    }


def run_on_torch(build: Build, traces: Sequence[Trace]) -> dict[str, Any]:
    """Run traces with the same switches on torch's allocator; return its version and the counters."""
    environment = build.environment({"PYTORCH_CUDA_ALLOC_CONF": switches(traces[0].settings), "FAKE_HAS_MEMORY": "0"})
    done = subprocess.run(
        [str(build.python), str(FOLDER / "_cuda_allocator_runner.py")],
        input=json.dumps({"traces": [described(trace) for trace in traces]}),
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def first_difference(trace: Trace, result: dict[str, Any]) -> str | None:
    """Return where the model and torch's allocator first differ, or None."""
    model = replay(trace.events, trace.settings)
    rows = zip(model.allocated_bytes.tolist(), model.reserved_bytes.tolist(), model.segments.tolist(), strict=True)
    for position, (ours, theirs) in enumerate(zip(rows, result["rows"], strict=True)):
        if ours != tuple(theirs):
            return f"{trace.name}, event {position} {trace.events[position]}: model {ours}, torch {tuple(theirs)}"
    if list(model.refused) != result["refused"]:
        return f"{trace.name}: the model refused {model.refused}, torch {result['refused']}"
    return None


def plan_traces(folder: Path, settings: AllocatorSettings) -> list[Trace]:
    """Return the events of each plan in a folder, over three steps: on a device without end, and under its budget."""
    traces: list[Trace] = []
    for path in sorted(folder.glob("*.plan.json*")):
        plan = Plan.load(path)
        events, _ = schedule_events(plan.graph, plan.schedule, steps=STEPS)
        name = path.name.split(".")[0]
        capped = replace(settings, allowed_bytes=max(plan.budget_bytes, plan.predicted.peak_bytes))
        traces += [Trace(name=name, events=events, settings=each) for each in (settings, capped)]
    return traces


def write_golden(path: Path, build: Build) -> None:
    """Store short traces of each setting with torch's counters, for the test that runs without a CUDA build."""
    kept: list[dict[str, Any]] = []
    version = ""
    for expandable, most_split in SETTINGS.values():
        drawn = [random_trace(seed, expandable=expandable, max_split_bytes=most_split) for seed in range(60)]
        traces = sorted(drawn, key=lambda trace: len(trace.events))[:GOLDEN_TRACES]
        for is_capped in (False, True):
            group = [trace for trace in traces if (trace.settings.allowed_bytes is not None) == is_capped]
            answer = run_on_torch(build, group)
            version = answer["torch"]
            kept += [
                {"settings": asdict(trace.settings), "events": trace.events, **result}
                for trace, result in zip(group, answer["results"], strict=True)
            ]
    document = json.dumps({"torch": version, "traces": kept}).encode()
    write_atomically(path, document)  # compressed, by its name


def compare(build: Build, name: str, traces: Sequence[Trace]) -> dict[str, Any]:
    """Compare the model with torch on traces with the same switches; those under a cap have a process of their own."""
    begun = time.perf_counter()
    capped = [trace for trace in traces if trace.settings.allowed_bytes is not None]
    free = [trace for trace in traces if trace.settings.allowed_bytes is None]
    differences: list[str] = []
    refused = 0
    version = ""
    for group in (free, capped):
        if not group:
            continue
        answer = run_on_torch(build, group)
        version = answer["torch"]
        refused += sum(len(result["refused"]) for result in answer["results"])
        found = [first_difference(*pair) for pair in zip(group, answer["results"], strict=True)]
        differences += [each for each in found if each is not None]
    events = sum(len(trace.events) for trace in traces)
    print(
        f"{name}: {len(traces)} traces, {events} events, {refused} refused, {len(differences)} differ, "
        f"torch {version}, {time.perf_counter() - begun:.0f} s",
        flush=True,
    )
    for difference in differences[:5]:
        print(f"  {difference}")
    return {
        "traces": len(traces),
        "events": events,
        "refused": refused,
        "differ": len(differences),
        "first": differences[:5],
        "torch": version,
    }


def main() -> None:
    """Compare, print, and store; exit with 1 where anything differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--torch", default=TORCH, help="version (default: %(default)s)")
    parser.add_argument("--traces", type=int, default=1000, help="random traces for each setting")
    parser.add_argument("--plans", type=Path, help="folder of plans, whose events are compared too")
    parser.add_argument("--golden", type=Path, help="only write the traces that the tests compare with")
    parser.add_argument("--dry-run", action="store_true", help="store nothing")
    options = parser.parse_args()
    build = made(options.torch)
    results: dict[str, Any] = {}
    if options.golden is not None:
        write_golden(options.golden, build)
        return
    for name, (expandable, most_split) in SETTINGS.items():
        traces = [
            random_trace(seed, expandable=expandable, max_split_bytes=most_split) for seed in range(options.traces)
        ]
        results[name] = compare(build, name, traces)
        if options.plans is not None and most_split is None:
            settings = AllocatorSettings(expandable_segments=expandable, capacity_bytes=CAPACITY_BYTES)
            traces = plan_traces(options.plans, settings)
            results[f"{name}, plans"] = compare(build, f"{name}, plans", traces)
        if not options.dry_run:
            store("cuda_allocator", {"results": results})
    if any(result["differ"] for result in results.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
