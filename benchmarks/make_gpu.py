"""What `make gpu` calls: finds a Python that has torch, gives it what else memfit needs, and runs gpu.py with it.

Needs nothing but Python. The machine with the GPU may have a torch of its own and no network: a Python that has torch
is used as it is. What it lacks is installed beside it, into `build/gpu`, from the folder `wheels/` where that is there
(`make wheels` fills it on a machine with a network), else from the network. Without a GPU it says so at once, exits 0.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
WHEELS = ROOT / "wheels"
SITE = ROOT / "build" / "gpu"
# What memfit imports -> packages that bring it; of what ortools needs, those whose versions it is narrow about.
NEEDED = {
    "numba": ("numba", "llvmlite"),
    "msgspec": ("msgspec",),
    "pytorchcv": ("pytorchcv",),
    "ortools": ("ortools", "protobuf", "immutabledict", "absl-py"),
    "pytest": ("pytest", "pluggy", "iniconfig", "packaging"),
    "hypothesis": ("hypothesis", "sortedcontainers"),
}
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
INSTALL_SECONDS = 120


def has_gpu() -> bool:
    """Whether the CUDA driver is here and finds a device; torch would take seconds to say it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def lacking(python: str, modules: Sequence[str]) -> list[str]:
    """Return which of the modules a Python cannot find."""
    code = "import importlib.util as u, sys; print(*(name for name in sys.argv[1:] if u.find_spec(name) is None))"
    done = subprocess.run([python, "-c", code, *modules], capture_output=True, text=True, check=True)
    return done.stdout.split()


def python_with_torch() -> str:
    """Return a Python that has torch: this one, the one on the PATH, or else `.venv`'s, made anew."""
    for python in (sys.executable, shutil.which("python3"), shutil.which("python")):
        if python is not None and not lacking(python, ["torch"]):
            return python
    subprocess.run(["make", "--silent", "--no-print-directory", ".venv/.installed"], cwd=ROOT, check=True)
    return str(ROOT / ".venv" / "bin" / "python")


def install(python: str, modules: Sequence[str]) -> bool:
    """Bring the modules into SITE, from `wheels/` or the network; whether Python finds them there."""
    wheels = [str(wheel) for wheel in sorted(WHEELS.glob("*.whl"))]
    packages = [package for module in modules for package in NEEDED[module]]
    source = ["--no-index", *wheels] if wheels else ["-c", str(ROOT / "constraints.txt"), "--retries", "0", *packages]
    how = ["--quiet", "--no-deps", "--no-compile", "--upgrade", "--target", str(SITE)]
    try:
        subprocess.run(
            [python, "-m", "pip", "--disable-pip-version-check", "install", *how, *source],
            timeout=INSTALL_SECONDS,
            stdout=sys.stderr,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return not lacking(python, modules)


def note_entry_points(python: str) -> None:
    """Let `torch.compile(backend="memfit")` find the backend, as where memfit is installed."""
    code = "from setuptools import setup; setup()"
    SITE.mkdir(parents=True, exist_ok=True)
    command = [python, "-c", code, "--quiet", "egg_info", "--egg-base", str(SITE)]
    subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)


def download(version: str) -> int:
    """Fill `wheels/` for a machine with this version of Python and without a network; return pip's exit status."""
    packages = [package for packages in NEEDED.values() for package in packages if package not in ("numba", "llvmlite")]
    platforms = [word for platform in PLATFORMS for word in ("--platform", f"{platform}_x86_64")]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    target = ["--only-binary=:all:", "--python-version", version, "--implementation", "cp", *platforms]
    return subprocess.run(
        [*command, *target, "-c", str(ROOT / "constraints.txt"), "-d", str(WHEELS), *packages], check=False
    ).returncode


def main() -> int:
    """Run gpu.py in this process's place, or say why not."""
    if sys.argv[1:2] == ["--wheels"]:
        return download(sys.argv[2])
    if not has_gpu():
        print("no CUDA device here: nothing to measure (the driver, libcuda.so.1, finds none)")
        return 0
    paths = [str(ROOT), str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    python = python_with_torch()
    modules = lacking(python, list(NEEDED))
    if modules and not install(python, modules):
        print(
            f"{python} lacks {', '.join(modules)}, which memfit needs, and they could not be installed; run `make "
            "wheels` on a machine with a network, and bring the folder wheels/ along",
            file=sys.stderr,
        )
        return 2
    note_entry_points(python)
    return os.execv(python, [python, str(ROOT / "benchmarks" / "gpu.py"), *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
