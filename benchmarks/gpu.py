"""On a GPU: the figures by which memfit is judged, most valuable first, in ten minutes at most; for `make gpu`.

`_gpu_rows.py` lists what is measured. This process imports everything, without touching CUDA, and forks a child for
each model. `gpu.json` is written under $OUT, or under `benchmarks/results/<gpu>/` where OUT is not set, after each
child, so that whoever stops it has what there was. What is slow to make (times of ops, Inductor's code, compiled
libraries) is packed beside it, and unpacked by the next run. Exits 1 if anything failed, was cut off or not begun: a
step that reserved more than its budget, a retry of the allocator, bits that differ, a child that broke off.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --first          # the tests marked `gpu`, and rows 0 and 1: 90 seconds
    python benchmarks/gpu.py --rows 2 4 7     # only these
    python benchmarks/gpu.py --rehearsal      # over a CUDA build of torch without a GPU: see `make gpu-rehearsal`
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

START = time.monotonic()  # importing torch counts
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a driver that was started cannot be used in a fork

from _gpu_carried import compile_ahead, pack, unpack, use_caches  # noqa: E402
from _process import in_forked_child  # noqa: E402
from make_gpu import has_gpu  # noqa: E402

MINUTES = 9.25  # of the ten that a command on a lent machine may take
FIRST_ROWS = (0, 1)
CARRIED = Path(__file__).parents[1] / "build" / "carried"
REHEARSED_BYTES = 80 << 30  # of the device that is not there: an H100's
REHEARSAL_PATIENCE = 12.0  # its host has few cores, which others use too
REHEARSAL_MINUTES = 90.0
NO_DEVICE = "no CUDA device here: nothing to measure (the driver, libcuda.so.1, finds none)"
NOT_FAKE = "--rehearsal runs over the CUDA build of torch without a GPU: run `make gpu-rehearsal`"


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="how long all of it may take")
    parser.add_argument("--rows", nargs="+", type=int, default=[], help="only these rows")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="children whose name has such a word")
    parser.add_argument("--first", action="store_true", help="the tests marked gpu, and rows 0 and 1")
    parser.add_argument("--rehearsal", action="store_true", help="over a GPU that is not there, which computes nothing")
    parser.add_argument("--carry", type=Path, help=f"folder of archives of an earlier run (default: {CARRIED})")
    return parser.parse_args()


def imagine_a_gpu() -> None:
    """Set up the driver that computes nothing, which is preloaded: memory of the host lies behind its addresses."""
    preloaded = ctypes.CDLL(None)
    try:
        ctypes.c_int.in_dll(preloaded, "fake_has_memory").value = 1
        ctypes.c_uint64.in_dll(preloaded, "fake_capacity_bytes").value = REHEARSED_BYTES
    except ValueError:
        sys.exit(NOT_FAKE)
    import torch
    from _gpu_driver import let_launches_take_equal_times

    let_launches_take_equal_times()
    torch.backends.cudnn.enabled = False  # the build has no cuDNN


def measure(options: argparse.Namespace, caches: Path, compiling: subprocess.Popen[bytes]) -> int:
    """Run the queue, storing after each child; return the exit status."""
    import _gpu_queue as queue
    import torch
    import torch._inductor.compile_fx  # for all children
    from _gpu_machine import machine_of_child, payload_path, read_stored, write
    from _gpu_rows import CHILDREN, ROWS

    assert not torch.cuda.is_initialized(), "a fork cannot use CUDA after that"
    stop = START + 60 * (options.minutes or (REHEARSAL_MINUTES if options.rehearsal else MINUTES))
    machine = machine_of_child()
    if "error" in machine:
        print(f"CUDA does not start: {machine['error']}")
        return 1
    path = payload_path(machine["folder"], rehearsal=options.rehearsal)
    # a rehearsal begins as the first run does, so that its bytes are the same in each
    carried = unpack(caches, [options.carry] if options.carry else [] if options.rehearsal else [CARRIED, path.parent])
    rows = FIRST_ROWS if options.first else options.rows
    chosen = [
        child
        for child in CHILDREN
        if (not rows or set(rows) & set(child.rows))
        and (not options.only or any(word in child.name for word in options.only))
    ]
    stored = read_stored(path, machine["folder"], rehearsal=options.rehearsal)
    records = dict[str, Any]()
    payload: dict[str, Any] = {
        "titles": ROWS,
        "rehearsal": options.rehearsal,
        "carried": carried,
        "tests": stored.get("tests"),
    }
    print(f"      ready after {time.monotonic() - START:.0f} s", flush=True)
    patience = REHEARSAL_PATIENCE if options.rehearsal else queue.MOST_TIMES
    ready = once_compiled(chosen, compiling)
    for child, record in queue.run_queue(ready, stop, rehearsal=options.rehearsal, patience=patience):
        records[child.name] = record
        print(queue.line_of(child, record), flush=True)
        payload |= {"children": queue.merged(stored, records), "failures": queue.failures_in(payload, records)}
        write(path, payload, machine)
    if options.first and not options.rehearsal:
        payload["tests"] = queue.run_tests(min(queue.TESTS_SECONDS, stop - time.monotonic()))
        payload["failures"] = queue.failures_in(payload, records)
        print(f"tests {payload['tests']['status']}", flush=True)
        write(path, payload, machine)
    print("".join(f"{line}\n" for line in pack(caches, path.parent)), end="")
    for row, (wall, host) in queue.seconds_by_row(chosen, records).items():
        print(f"row {row}: {wall:.0f} s, {host:.0f} s of the CPU")
    print(f"stored in {path}; {time.monotonic() - START:.0f} s in all")
    for line in payload["failures"]:
        print(f"FAILED {line}")
    return 1 if payload["failures"] else 0


def once_compiled(children: Iterable[Any], compiling: subprocess.Popen[bytes]) -> Iterator[Any]:
    """Yield the children; those that plan wait until numba is done."""
    for child in children:
        if min(child.rows) > 0:
            compiling.wait()
        yield child


def main() -> int:
    """Run tests and rows; return the exit status."""
    options = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that children end with this process
    with tempfile.TemporaryDirectory(prefix="memfit-gpu-", ignore_cleanup_errors=True) as folder:
        use_caches(Path(folder))
        if options.rehearsal:
            imagine_a_gpu()
        elif not in_forked_child(lambda: {"is_there": has_gpu()}, timeout_seconds=60.0).get("is_there"):
            print(NO_DEVICE)
            return 0
        compiling = compile_ahead()
        try:
            return measure(options, Path(folder), compiling)
        finally:
            compiling.kill()
            compiling.wait()


if __name__ == "__main__":
    sys.exit(main())
