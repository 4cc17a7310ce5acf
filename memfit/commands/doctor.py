"""`memfit doctor`: versions, devices, caches, and what is off and why; to paste into a report of a fault."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from memfit.commands.answer import Answer, rows_table
from memfit.commands.work import working
from memfit.report.formatting import count_text
from memfit.system.budget import format_bytes
from memfit.system.files import cache_folder
from memfit.system.native import NativeLibrary, NativeLibraryError
from memfit.system.shipped import FOLDER, shipped_functions
from memfit.system.shipped import LIBRARY as SHIPPED
from memfit.system.version import __version__

EXAMPLES = """
Examples:

memfit doctor

memfit doctor --json
"""

_PACKAGES = ("torch", "numpy", "numba", "ortools", "msgspec", "rich", "typer")
_OPTIONAL = ("transformers", "accelerate", "lightning", "pytorch-lightning", "peft", "trl", "deepspeed", "safetensors")
_VARIABLES = (
    *("MEMFIT_CACHE", "NUMBA_CACHE_DIR", "NUMBA_DISABLE_JIT", "CC", "CXX", "CUDA_HOME", "CUDA_PATH"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
    *("CUDA_VISIBLE_DEVICES", "WORLD_SIZE", "RANK", "LOCAL_RANK", "TMPDIR", "BROWSER_PATH"),
)
_WITHOUT_RECORDER = (
    "on a CPU memfit.fit takes its peaks from torch's profiler, and memfit.checkpoint, memfit.eager and memfit run are "
    "refused"
)
_FEW_FREE_BYTES = 1 << 30  # on the disk of the cache


def doctor() -> Answer:
    """Show versions, devices, memory, links, caches, and the parts of memfit that do not work here, with remedies."""
    with working() as work:
        work.stage("looking at the devices")
        devices = _devices()
        work.stage("compiling what counts memory, once for this machine")
        libraries = dict(_libraries(devices))
    cache = _cache()
    keys: dict[str, Any] = {
        "system": {"python": platform.python_version(), "platform": platform.platform()},
        "packages": {name: _version(name) for name in _PACKAGES},
        "optional_packages": {name: version for name in _OPTIONAL if (version := _version(name))},
        "devices": devices,
        "libraries": libraries,
        "cache": cache,
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "off": _off(devices, libraries, cache),
    }
    return Answer(keys=keys, parts=_parts(keys))


def _version(package: str) -> str | None:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    return str(getattr(sys.modules.get(package), "__version__", version))  # torch's own names its build: 2.15.0+cu132


def _devices() -> list[dict[str, Any]]:
    if _version("torch") is None:
        return []
    from memfit.cost.devices_here import devices_here

    return devices_here()


def _libraries(devices: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the name of each compiled library that a device here takes, and its file, or why there is none."""
    yield "searches", str(FOLDER / SHIPPED) if shipped_functions() else "compiled by numba at first use"
    if not devices:
        return
    from memfit.memory.arena.library import LIBRARIES
    from memfit.system.instruments import LIBRARY

    yield "recorder", _found(LIBRARY)
    for kind in dict.fromkeys(device["device"].partition(":")[0] for device in devices):
        yield f"arena on {kind}", _found(LIBRARIES[kind])


def _found(library: NativeLibrary) -> str:
    try:
        return str(library.file())
    except NativeLibraryError as error:
        return f"off: {error}"


def _cache() -> dict[str, Any]:
    """Return the folder of the cache, the bytes that it holds, and the free bytes of its disk."""
    folder = cache_folder()
    there = next(each for each in (folder, *folder.parents) if each.is_dir())
    files = [path for path in folder.rglob("*") if path.is_file()] if there == folder else []
    return {
        "folder": str(folder),
        "is_writable": _can_be_written(there),
        "is_lasting": not folder.name.startswith("memfit-"),  # as those for temporary files are called
        "plans": sum(path.is_relative_to(folder / "plans") for path in files),
        "bytes": sum(path.stat().st_size for path in files),
        "free_bytes": shutil.disk_usage(there).free,
    }


def _can_be_written(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _off(devices: Sequence[dict[str, Any]], libraries: dict[str, str], cache: dict[str, Any]) -> list[str]:
    """Return a sentence for each part of memfit that is off here, with the remedy."""
    found = [] if devices else ["torch is not installed: graph files can be planned, and nothing can run"]
    for name, file in libraries.items():
        if file.startswith("off: "):
            instead = _WITHOUT_RECORDER if name == "recorder" else "steps run without it"
            found.append(f"{name}: {file.removeprefix('off: ')}; {instead}; install g++, or name a compiler in CXX")
    for device in devices:
        if not device["is_calibrated"]:
            found.append(
                f"{device['device']} is not calibrated, so that no roofline of it can be planned for: "
                f"memfit calibrate --device {device['device']}"
            )
        if (device.get("load") or 0) > device.get("processors", 1):
            found.append(f"the processors are busy (load {device['load']:.1f}): times measured now are not to be kept")
    if not cache["is_writable"]:
        found.append("the cache cannot be written: each process measures, plans and compiles anew; set MEMFIT_CACHE")
    elif not cache["is_lasting"]:
        found.append("the cache is in the folder for temporary files: set MEMFIT_CACHE to a folder that stays")
    if cache["free_bytes"] < _FEW_FREE_BYTES:
        found.append(f"the cache's disk has {format_bytes(cache['free_bytes'])} free")
    return found


def _parts(keys: dict[str, Any]) -> tuple[RenderableType, ...]:
    cache = keys["cache"]
    rows: dict[str, str] = {
        "memfit": __version__,
        **keys["system"],
        **{name: version or "not installed" for name, version in keys["packages"].items()},
        **keys["optional_packages"],
        **{device["device"]: _device_text(device) for device in keys["devices"]},
        **keys["libraries"],
        "cache": f"{cache['folder']}: {count_text(cache['plans'], 'plan')}, {format_bytes(cache['bytes'])} in all, "
        f"{format_bytes(cache['free_bytes'])} free",
        **keys["variables"],
    }
    off = [Text(f"off: {each}") for each in keys["off"]] or [Text("nothing is off")]
    return (rows_table(rows), Text(), *off)


def _device_text(device: dict[str, Any]) -> str:
    parts = [device["hardware"], format_bytes(device["memory_bytes"])]
    if device["free_bytes"] is not None:
        parts.append(f"{format_bytes(device['free_bytes'])} free")
    if device["device"] == "cpu":
        parts.append(f"{device['threads']} of {device['processors']} processors")
    else:
        parts.append(f"CUDA {device['cuda']}, capability {device['capability']}, allocator {device['allocator']}")
        parts += [settings] if (settings := device["allocator_settings"]) else []
    parts += [f"{rate / 1e9:.3g} GB/s {name.partition('_bytes')[0]}" for name, rate in device["link"].items()]
    parts.append("calibrated" if device["is_calibrated"] else "not calibrated")
    parts.append(f"{count_text(device['measured_ops'], 'op')} measured")
    return ", ".join(parts)
