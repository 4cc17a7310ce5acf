"""Storing what a benchmark printed, with the machine that printed it; and timing two things against each other."""

from __future__ import annotations

import datetime
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from memfit.system.files import decode, read_bytes, write_atomically

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"


def machine_name(device: torch.device | str = "cpu") -> str:
    """Return the folder name of this machine's results: `cpu-2core`, or the GPU's name for a CUDA device."""
    device = torch.device(device)
    if device.type == "cuda":
        return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")
    return f"cpu-{_cores()}core"


def machine(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Describe this machine, its software and the state of the checkout."""
    device = torch.device(device)
    described: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": _cores(),
        "torch_threads": torch.get_num_threads(),
        "ram_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described |= {"gpu": properties.name, "gpu_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return described


def result_path(name: str, device: torch.device | str = "cpu", folder: Path | None = None) -> Path:
    """Return where `store` puts the result `name`: `benchmarks/results/<machine>/<name>.json`."""
    return (folder or RESULTS / machine_name(device)) / f"{name}.json"


def store(name: str, payload: Any, *, device: torch.device | str = "cpu", folder: Path | None = None) -> Path:
    """Write `{"name", "machine", "payload"}` atomically and return the path.

    Args:
        name: the file's name without `.json`.
        payload: anything JSON can hold.
        device: the device that was measured.
        folder: where to write; `benchmarks/results/<machine>` if None.
    """
    path = result_path(name, device, folder)
    write_document(path, name, payload, machine(device))
    return path


def write_document(path: Path, name: str, payload: Any, found: dict[str, Any]) -> None:
    """Write a result with the machine that it was found on, as `store` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"name": name, "machine": found, "payload": payload}
    write_atomically(path, msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def load(path: Path) -> dict[str, Any]:
    """Read a file that `store` wrote."""
    return decode(read_bytes(path), dict[str, Any], path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interleaved:
    """Times of two things that ran in turns, one pair a repeat."""

    a_seconds: tuple[float, ...]
    b_seconds: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """a's time over b's, of each pair, sorted."""
        return sorted(a / b for a, b in zip(self.a_seconds, self.b_seconds, strict=True))

    @property
    def ratio(self) -> float:
        """The median of the pairs' ratios."""
        return statistics.median(self.ratios)

    def summary(self) -> dict[str, Any]:
        """Return what belongs in a stored result: the ratio, its extremes, the least time of each."""
        return {
            "time_ratio": self.ratio,
            "time_ratio_range": [self.ratios[0], self.ratios[-1]],
            "seconds": min(self.a_seconds),
            "eager_seconds": min(self.b_seconds),
            "repeats": len(self.ratios),
        }


def interleaved_ratio(
    a: Callable[[], object], b: Callable[[], object], repeats: int = 5, *, device: torch.device | str = "cpu"
) -> Interleaved:
    """Time `a` against `b` in turns (a b, b a, a b ...), so that a machine that slows down slows both."""
    a_seconds, b_seconds = interleaved_seconds([a, b], repeats, device=device)
    return Interleaved(a_seconds=a_seconds, b_seconds=b_seconds)


def interleaved_seconds(
    runs: Sequence[Callable[[], object]], repeats: int = 5, *, device: torch.device | str = "cpu"
) -> list[tuple[float, ...]]:
    """Time several things in turns, in one order and then in the other; return each one's seconds.

    Args:
        runs: what to time; each runs once untimed before.
        repeats: how often each is timed; odd gives a true median.
        device: what has to be idle before the clock is read.
    """
    wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    for run in runs:
        run()
    seconds: list[list[float]] = [[] for _ in runs]
    for repeat in range(repeats):
        order = range(len(runs)) if repeat % 2 == 0 else reversed(range(len(runs)))
        for which in order:
            wait()
            start = time.perf_counter()
            runs[which]()
            wait()
            seconds[which].append(time.perf_counter() - start)
    return [tuple(each) for each in seconds]


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def commit() -> str:
    """Return the commit of the checkout, `+` added where tracked files differ from it; `unknown` outside a checkout."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], cwd=FOLDER, capture_output=True, text=True, check=False)

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        if head.returncode:
            return "unknown"
        # the results this run writes are no change of the code that gives them
        return head.stdout.strip() + ("+" if git("diff", "--quiet", "HEAD", "--", "..", ":!results").returncode else "")
    except FileNotFoundError:
        return "unknown"
