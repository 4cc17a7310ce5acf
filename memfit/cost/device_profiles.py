"""Profiles of known devices, each with the source of its figures. Imports no torch.

Rates are the makers' peak figures for dense matrices, as rooflines use them; no kernel reaches them. Link rates are
those of one direction of PCI Express by its standard, with 128 of 130 bits for data.
"""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path

from memfit.device import Device
from memfit.errors import InvalidDeviceError
from memfit.system.budget import Card
from memfit.system.files import decode, read_bytes

_ALIGNMENT_BYTES = 512  # c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize
_CONTEXT_BYTES = 800 << 20  # assumed: a context with a step's kernels takes 0.5 to 0.8 GiB (docs/measuring.md)
_LAUNCH_SECONDS = 5e-6  # assumed: a launch by the driver takes 2 to 3 us, eager's dispatch about as long
_LANES = 16
_TERA, _GIGA, _MEBI = 1e12, 1e9, 1 << 20
_PCIE_TRANSFERS_PER_SECOND = {3: 8e9, 4: 16e9, 5: 32e9}  # per lane, a bit each


def _link(generation: int) -> float:
    return _PCIE_TRANSFERS_PER_SECOND[generation] * _LANES * 128 / 130 / 8


def _gpu(
    name: str, mebibytes: int, gigabytes_per_second: float, pcie: int, teraflops: dict[str, float], source: str
) -> Device:
    """Return a profile; `pcie` is the generation of PCI Express, and `teraflops` are by dtype."""
    return Device(
        name=name,
        alignment_bytes=_ALIGNMENT_BYTES,
        memory_bytes=mebibytes * _MEBI,
        flops_per_second={dtype: rate * _TERA for dtype, rate in teraflops.items()},
        memory_bytes_per_second=gigabytes_per_second * _GIGA,
        to_host_bytes_per_second=_link(pcie),
        to_device_bytes_per_second=_link(pcie),
        launch_seconds=_LAUNCH_SECONDS,
        source=source,
    )


def _teraflops(float64: float, float32: float, tfloat32: float = 0.0, half: float = 0.0) -> dict[str, float]:
    """Return rates by dtype; `half` is that of bfloat16 and float16, and 0 stands for a dtype without a fast unit."""
    rates = {"float64": float64, "float32": float32, "tfloat32": tfloat32, "bfloat16": half, "float16": half}
    return {dtype: rate for dtype, rate in rates.items() if rate}


_SMI = "memory as nvidia-smi shows it"
_A100, _H100 = _teraflops(19.5, 19.5, 156, 312), _teraflops(67, 67, 494.7, 989.4)
_SXM = f"datasheet, SXM, half of the figures with sparsity; float64 on tensor cores; {_SMI}"
_T4_SOURCE = f"NVIDIA T4 datasheet; float64 at 1/32 of float32 (Turing whitepaper); {_SMI}; no bfloat16, no TF32"
_A10_SOURCE = f"NVIDIA A10 datasheet, without sparsity; float64 at 1/32 of float32 (GA102 whitepaper); {_SMI}"
_A100_SOURCE = "NVIDIA A100 {} datasheet{}, without sparsity; float64 on tensor cores"
_ADA_SOURCE = (
    "NVIDIA Ada GPU architecture whitepaper, appendix A, without sparsity, sums in float32; "
    f"float64 at 1/64 of float32; {_SMI}"
)
_TITAN_XP_SOURCE = (
    "NVIDIA TITAN Xp specifications: 3,840 cores, two operations each at 1,582 MHz, 547.7 GB/s; float64 "
    f"at 1/32 of float32 (GP102); {_SMI}; no fast float16"
)
_GTX_1080_TI_SOURCE = (
    "NVIDIA GeForce GTX 1080 Ti specifications: 3,584 cores, two operations each at 1,582 MHz, 484 GB/s; float64 at "
    f"1/32 of float32 (GP102); {_SMI}; no fast float16"
)
_PROFILES = (  # name, MiB, GB/s, PCI Express, teraflops, source
    _gpu("t4", 15360, 320, 3, {"float64": 0.254, "float32": 8.1, "float16": 65}, _T4_SOURCE),
    _gpu("a10", 23028, 600, 4, _teraflops(0.976, 31.2, 62.5, 125), _A10_SOURCE),
    _gpu("a100-40", 40960, 1555, 4, _A100, _A100_SOURCE.format("40GB", "")),
    _gpu("a100-80", 81920, 2039, 4, _A100, _A100_SOURCE.format("80GB", ", SXM")),
    _gpu("h100", 81559, 3350, 5, _H100, f"NVIDIA H100 {_SXM}"),
    _gpu("h200", 143771, 4800, 5, _H100, f"NVIDIA H200 {_SXM}"),
    _gpu("rtx4090", 24564, 1008, 4, _teraflops(1.29, 82.6, 82.6, 165.2), _ADA_SOURCE),
    _gpu("gtx1080ti", 11178, 484, 3, _teraflops(0.354, 11.34), _GTX_1080_TI_SOURCE),
    _gpu("titan-xp", 12196, 547.7, 3, _teraflops(0.38, 12.15), _TITAN_XP_SOURCE),
)
DEVICES: dict[str, Device] = {device.name: device for device in _PROFILES}
"""The built-in profiles by name. This machine's own CPU and GPUs are profiled by `memfit calibrate`."""

_OTHER_NAMES = {"a100": "a100-80", "h100-80": "h100", "4090": "rtx4090"}


def load_device(name_or_path: str | os.PathLike[str]) -> Device:
    """Return a built-in profile, or the one in a JSON file.

        >>> from memfit.cost.device_profiles import load_device
        >>> load_device("H100").memory_bytes_per_second / 1e12
        3.35

    Args:
        name_or_path: name of a profile, in which case, spaces, `-`, `_` and a final `GB` do not count (`RTX 4090`,
            `a100-40gb`), or path of a file with the fields of `Device`, as `memfit calibrate` writes it.

    Raises:
        InvalidDeviceError: no profile has that name; lists all of them.
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


def card_of_profile(device: Device) -> Card:
    """Return the memory of a device that is not here, of whose context only the size is assumed."""
    is_gpu = device.alignment_bytes == _ALIGNMENT_BYTES
    return Card(device.memory_bytes, _CONTEXT_BYTES if is_gpu and device.memory_bytes is not None else 0)


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum()).removesuffix("gb")
