"""Profiles of known devices, each with where its figures are from. Imports no torch.

Rates are the makers' peak figures for dense matrices: what a roofline starts from, and what no kernel reaches. Link
rates are those of one direction of PCI Express as its standard gives them, 128 of 130 bits being data.
"""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path

from memfit.device import Device
from memfit.errors import InvalidDeviceError
from memfit.files import decode, read_bytes

_ALIGNMENT_BYTES = 512  # c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize
_LAUNCH_SECONDS = 5e-6  # assumed: a launch by the driver takes 2 to 3 us, eager's dispatch about as much again
_LANES = 16
_TERA, _GIGA, _MEBI = 1e12, 1e9, 1 << 20
_PCIE_TRANSFERS_PER_SECOND = {3: 8e9, 4: 16e9, 5: 32e9}  # per lane, a bit each


def _link(generation: int) -> float:
    return _PCIE_TRANSFERS_PER_SECOND[generation] * _LANES * 128 / 130 / 8


def _gpu(
    name: str,
    *,
    memory_mebibytes: int,
    memory_gigabytes_per_second: float,
    teraflops: dict[str, float],
    pcie: int,
    source: str,
) -> Device:
    return Device(
        name=name,
        alignment_bytes=_ALIGNMENT_BYTES,
        memory_bytes=memory_mebibytes * _MEBI,
        flops_per_second={dtype: rate * _TERA for dtype, rate in teraflops.items()},
        memory_bytes_per_second=memory_gigabytes_per_second * _GIGA,
        to_host_bytes_per_second=_link(pcie),
        to_device_bytes_per_second=_link(pcie),
        launch_seconds=_LAUNCH_SECONDS,
        source=source,
    )


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _gpu(
            "t4",
            memory_mebibytes=15360,
            memory_gigabytes_per_second=320,
            teraflops={"float64": 0.254, "float32": 8.1, "float16": 65},
            pcie=3,
            source="NVIDIA T4 datasheet; float64 at 1/32 of float32 (Turing whitepaper); "
            "memory as nvidia-smi shows it; no bfloat16, no TF32",
        ),
        _gpu(
            "a10",
            memory_mebibytes=23028,
            memory_gigabytes_per_second=600,
            teraflops={"float64": 0.976, "float32": 31.2, "tfloat32": 62.5, "bfloat16": 125, "float16": 125},
            pcie=4,
            source="NVIDIA A10 datasheet, without sparsity; float64 at 1/32 of float32 (GA102 whitepaper); "
            "memory as nvidia-smi shows it",
        ),
        _gpu(
            "a100-40",
            memory_mebibytes=40960,
            memory_gigabytes_per_second=1555,
            teraflops={"float64": 19.5, "float32": 19.5, "tfloat32": 156, "bfloat16": 312, "float16": 312},
            pcie=4,
            source="NVIDIA A100 40GB datasheet, without sparsity; float64 on tensor cores",
        ),
        _gpu(
            "a100-80",
            memory_mebibytes=81920,
            memory_gigabytes_per_second=2039,
            teraflops={"float64": 19.5, "float32": 19.5, "tfloat32": 156, "bfloat16": 312, "float16": 312},
            pcie=4,
            source="NVIDIA A100 80GB datasheet, SXM, without sparsity; float64 on tensor cores",
        ),
        _gpu(
            "h100",
            memory_mebibytes=81559,
            memory_gigabytes_per_second=3350,
            teraflops={"float64": 67, "float32": 67, "tfloat32": 494.7, "bfloat16": 989.4, "float16": 989.4},
            pcie=5,
            source="NVIDIA H100 datasheet, SXM, half of the figures with sparsity; float64 on tensor cores; "
            "memory as nvidia-smi shows it",
        ),
        _gpu(
            "h200",
            memory_mebibytes=143771,
            memory_gigabytes_per_second=4800,
            teraflops={"float64": 67, "float32": 67, "tfloat32": 494.7, "bfloat16": 989.4, "float16": 989.4},
            pcie=5,
            source="NVIDIA H200 datasheet, SXM, half of the figures with sparsity; float64 on tensor cores; "
            "memory as nvidia-smi shows it",
        ),
        _gpu(
            "rtx4090",
            memory_mebibytes=24564,
            memory_gigabytes_per_second=1008,
            teraflops={"float64": 1.29, "float32": 82.6, "tfloat32": 82.6, "bfloat16": 165.2, "float16": 165.2},
            pcie=4,
            source="NVIDIA Ada GPU architecture whitepaper, appendix A, without sparsity, sums in float32; "
            "float64 at 1/64 of float32; memory as nvidia-smi shows it",
        ),
        _gpu(
            "titan-xp",
            memory_mebibytes=12196,
            memory_gigabytes_per_second=547.7,
            teraflops={"float64": 0.38, "float32": 12.15},
            pcie=3,
            source="NVIDIA TITAN Xp specifications: 3,840 cores, two operations each at 1,582 MHz, 547.7 GB/s; float64 "
            "at 1/32 of float32 (GP102); memory as nvidia-smi shows it; no fast float16",
        ),
    )
}
"""The built-in profiles by name. This machine's own CPU and GPUs are profiled by `memfit calibrate`."""

_OTHER_NAMES = {"a100": "a100-80", "h100-80": "h100", "4090": "rtx4090"}


def load_device(name_or_path: str | os.PathLike[str]) -> Device:
    """Return the built-in profile of that name, or the one in a JSON file.

        >>> from memfit.device_profiles import load_device
        >>> load_device("H100").memory_bytes_per_second / 1e12
        3.35

    Case, spaces, `-`, `_` and a final `GB` do not count: `RTX 4090` and `a100-40gb` are found. A file holds the fields
    of `Device`, as `memfit calibrate` keeps them.

    Raises:
        InvalidDeviceError: no profile of that name; lists those that there are.
        InvalidFileError: the file cannot be read, or is not a device profile.
    """
    text = os.fspath(name_or_path)
    path = Path(text)
    if text.endswith(".json") or path.parent != Path() or path.is_file():
        return decode(read_bytes(path), Device, path)
    names = {_plain(name): name for name in DEVICES} | {_plain(other): name for other, name in _OTHER_NAMES.items()}
    if _plain(text) in names:
        return DEVICES[names[_plain(text)]]
    near = get_close_matches(_plain(text), names, n=1)
    hint = f"; did you mean {names[near[0]]!r}?" if near else ""
    raise InvalidDeviceError(
        f"no device profile is called {text!r}; there are {', '.join(DEVICES)}, or give a profile's file{hint}"
    )


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum()).removesuffix("gb")
