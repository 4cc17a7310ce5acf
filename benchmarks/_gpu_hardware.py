"""What the GPU itself does: clocks, rates of copies alone and together, ceilings of matrix products."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from _gpu_measure import timed

_SMI = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu,persistence_mode"
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING")
_REPEATS = 5
_LAUNCHES = 1000


def machine_now() -> dict[str, Any]:
    """Return the driver's version, the clocks and the allocator's settings, as far as the system says."""
    found: dict[str, Any] = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    try:
        command = ["nvidia-smi", f"--query-gpu={_SMI}", "--format=csv,noheader"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        found |= dict(zip(_SMI.split(","), (word.strip() for word in printed.splitlines()[0].split(",")), strict=True))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError) as error:
        found["nvidia-smi"] = f"not there: {type(error).__name__}"
    return found


def measure_hardware(*, copied_bytes: int, side: int) -> Iterator[dict[str, Any]]:
    """Yield what was measured: rates in bytes and operations per second, seconds of a launch.

    Args:
        copied_bytes: in each direction.
        side: of the square matrices.
    """
    found: dict[str, Any] = {"failures": [], "before": machine_now()}
    began_bytes = torch.cuda.mem_get_info()
    found["free_bytes"], found["whole_bytes"] = began_bytes
    found["copies"] = _copies(copied_bytes)
    yield found
    found["operations_per_second"] = _products(side)
    yield found
    found["launch_seconds"] = _launch_seconds()
    to_host, to_device, together, _ = found["copies"].values()
    products = ", ".join(f"{name} {rate / 1e12:.0f}" for name, rate in found["operations_per_second"].items())
    copies = f"{to_host / 1e9:.0f} out, {to_device / 1e9:.0f} back, {together / 1e9:.0f} each together"
    found["line"] = f"GB/s {copies}; TFLOP/s {products}"
    found["after"] = machine_now()  # the clocks while warm
    yield found


def _best(run: Callable[[], object]) -> float:
    run()
    return min(timed(run)[0] for _ in range(_REPEATS))


def _copies(size: int) -> dict[str, float]:
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def out() -> None:
        host[0].copy_(there[0], non_blocking=True)

    def back() -> None:
        there[1].copy_(host[1], non_blocking=True)

    def together() -> None:
        for stream, copy in zip(streams, (out, back), strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                copy()
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    return {
        "to_host_bytes_per_second": size / _best(out),
        "to_device_bytes_per_second": size / _best(back),
        "each_way_together_bytes_per_second": size / _best(together),
        "on_device_bytes_per_second": 2 * size / _best(lambda: there[0].copy_(there[1])),  # read and written
    }


def _products(side: int) -> dict[str, float]:
    """Rates of matrix products, twice the cube of the side for each."""
    found: dict[str, float] = {}
    before = torch.backends.cuda.matmul.allow_tf32
    for name, dtype, tf32 in (
        ("bf16", torch.bfloat16, False),
        ("fp16", torch.float16, False),
        ("tf32", torch.float32, True),
        ("fp32", torch.float32, False),
    ):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        one, other = (torch.randn(side, side, device="cuda", dtype=dtype) for _ in range(2))
        product = torch.empty_like(one)
        found[name] = 2 * side**3 / _best(partial(torch.mm, one, other, out=product))
    torch.backends.cuda.matmul.allow_tf32 = before
    return found


def _launch_seconds() -> float:
    """The seconds of a small kernel, many of them in a row: those of its launch."""
    small = torch.zeros(1, device="cuda")

    def launches() -> None:
        for _ in range(_LAUNCHES):
            small.add_(1)

    return _best(launches) / _LAUNCHES
