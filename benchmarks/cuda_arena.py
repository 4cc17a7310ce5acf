"""The arena in front of torch's own allocator, on CUDA builds of torch over a GPU that is not there; or it fails.

Random steps on several streams: no two live tensors may overlap, torch's statistics hold, and nothing is left at the
end. What else the allocator does (caps, pools, snapshots) is tried while a step runs. Planned steps: each reserves
exactly the bytes that were predicted, the first one too, and each request has its place. (`cuda_build.py`: kernels do
nothing.)

    python benchmarks/cuda_arena.py 2.11.0 2.13.0
"""

from __future__ import annotations

import argparse
import json
import subprocess
from typing import Any

from _record import FOLDER, store
from cuda_build import TORCH, Build, made

SETTINGS = {"default": "", "expandable": "expandable_segments:True", "max_split": "max_split_size_mb:32"}
SERVED = {"arena": "", "expandable segments": "expandable_segments:True", "torch's allocator": ""}
MIB = 1 << 20
MODEL = {"width": 512, "depth": 6, "rows": 4096, "steps": 4, "hard": False}
PLANNED: dict[str, dict[str, Any]] = {
    "AdamW": MODEL | {"updates": True, "budget": 520 * MIB},
    "AdamW, capped": MODEL | {"updates": True, "budget": 520 * MIB, "hard": True},
    "gradients kept": MODEL | {"updates": False, "budget": 460 * MIB},
}
SECONDS = 900


def run(build: Build, job: dict[str, Any], settings: str) -> dict[str, Any]:
    """Run one job in a CUDA build of torch; return its answer."""
    environment = build.environment({"PYTORCH_CUDA_ALLOC_CONF": settings})
    done = subprocess.run(
        [str(build.python), str(FOLDER / "_cuda_arena_runner.py")],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=SECONDS,
    )
    if done.returncode:
        raise SystemExit(f"{build.python}, {job}, {settings!r}: {done.stderr[-4000:]}")
    return json.loads(done.stdout)


def failures_of(name: str, found: dict[str, Any], served: str) -> list[str]:
    """Return what a planned step did that it must not."""
    failed: list[str] = []
    if served != "arena":
        return failed
    for number, step in enumerate(found["steps"]):
        if step["not_served"] or not step["served"]:
            failed.append(f"{name}, step {number}: {step['served']} requests served, {step['not_served']} not")
        if step["reserved_bytes"] != found["predicted_bytes"]:
            failed.append(f"{name}, step {number}: reserved {step['reserved_bytes']}, not {found['predicted_bytes']}")
        if step["reserved_bytes"] > found["budget_bytes"]:
            failed.append(f"{name}, step {number}: reserved {step['reserved_bytes']} of {found['budget_bytes']}")
    if found["in_front"] or found["served_by"] != "arena":
        failed.append(f"{name}: served by {found['served_by']}, in front afterwards: {found['in_front']}")
    return failed


def tried(build: Build, seeds: int) -> tuple[dict[str, Any], list[str]]:
    """Run all jobs on one build of torch; return their results, and the failures."""
    found: dict[str, Any] = {"life": {}, "planned": {}}
    failed: list[str] = []
    for name, settings in SETTINGS.items():
        answer = run(build, {"kind": "life", "seeds": list(range(seeds))}, settings)
        found["life"][name] = answer["counts"]
        found["torch"] = answer["torch"]
        print(f"{answer['torch']}, {name}: {answer['counts']}", flush=True)
    found["beside"] = run(build, {"kind": "beside"}, "")["beside"]
    failed += [f"{name}: {outcome}" for name, outcome in found["beside"].items() if outcome != "works"]
    for name, job in PLANNED.items():
        for served, settings in SERVED.items() if not job["hard"] else [("arena", "")]:
            answer = run(build, {"kind": "planned", "served": served, **job}, settings)
            found["planned"][f"{name}, {served}"] = answer
            failed += failures_of(name, answer, served)
            reserved = [step["reserved_bytes"] / MIB for step in answer["steps"]]
            print(f"{answer['torch']}, {name}, {served}: {reserved} MiB, {answer['predicted_bytes'] / MIB} predicted")
    return found, failed


def main() -> None:
    """Try each build, store, and exit with 1 where anything failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("torch", nargs="*", default=[TORCH], help="versions (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="random steps for each setting")
    parser.add_argument("--dry-run", action="store_true", help="store nothing")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    failed: list[str] = []
    for version in options.torch:
        found, wrong = tried(made(version), options.steps)
        results[found["torch"]] = found
        failed += [f"torch {found['torch']}: {each}" for each in wrong]
        if not options.dry_run:
            store("cuda_arena", {"results": results, "failed": failed})
    for line in failed:
        print(f"FAILED {line}")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
