"""torch's own CUDA build over a GPU that is not there: makes its environment, and runs a program in it.

Allocator, streams, autograd's threads and cuBLAS's workspaces are torch's. The driver is `_fake_gpu.cpp`: bytes,
addresses, streams and host time are real; kernels compute nothing, so that bits and times on the device are not. The
wheel of torch has 530 MB. The environment lies in $MEMFIT_CUDA_BUILD (`~/.cache/memfit-cuda-build`) and is kept. It
needs g++, binutils, and the headers and the runtime library of a CUDA toolkit (CUDA_HOME); all other packages are those
of the Python that runs this script.

    python benchmarks/cuda_build.py run script.py ARGUMENTS
    python benchmarks/cuda_build.py run -m pytest tests/cuda_build
    python benchmarks/cuda_build.py --torch 2.13.0 make
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
DRIVER = HERE / "_fake_gpu.cpp"
TORCH = "2.11.0"  # that of the GPUs which `make gpu` meets
PRELOADED = ("libcuda.so.1", "libnvidia-ml.so.1")  # the names by which torch looks for the driver
FROM_TOOLKIT = ("libcudart.so", "libcupti.so")
SYSTEM = re.compile(r"^(ld-linux.*|lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|gomp))\.so")
SITE = "MEMFIT_CUDA_BUILD_SITE"  # folder of packages that stands last on the path
NOT_HERE = 3  # exit status where something of the machine is missing


class MissingError(Exception):
    """Something that the machine must have is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """An environment with a CUDA build of torch.

    Attributes:
        folder: where all of it lies.
        cuda_home: of the toolkit.
    """

    folder: Path
    cuda_home: Path

    @property
    def python(self) -> Path:
        """Its Python."""
        return self.folder / "venv" / "bin" / "python"

    @property
    def packages(self) -> Path:
        """Where its torch is."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "venv" / "lib" / version / "site-packages"

    @property
    def driver(self) -> Path:
        """Folder of the driver as its source is now."""
        return self.folder / f"driver-{hashlib.sha256(DRIVER.read_bytes()).hexdigest()[:12]}"

    def environment(self, more: dict[str, str] | None = None) -> dict[str, str]:
        """Return the variables of a process that runs in it."""
        paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **os.environ,
            "LD_PRELOAD": ":".join(str(self.driver / name) for name in PRELOADED),
            "LD_LIBRARY_PATH": f"{self.folder / 'stubs'}:{self.driver}",
            "PYTHONPATH": os.pathsep.join(paths),
            "FAKE_HAS_MEMORY": os.environ.get("FAKE_HAS_MEMORY", "1"),
            "FAKE_GPU": str(self.driver / PRELOADED[0]),
            "MEMFIT_CACHE": str(self.folder / "cache"),
            "OMP_NUM_THREADS": "1",
            SITE: _site_of_this_python(),
            **(more or {}),
        }


def made(version: str = TORCH) -> Build:
    """Return the environment of a version of torch; make what of it is not there yet.

    Raises:
        MissingError: the machine lacks a compiler, or the toolkit.
    """
    cuda_home = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")
    if not (cuda_home / "include" / "cuda_runtime_api.h").exists():
        raise MissingError(f"the headers of CUDA: CUDA_HOME is {cuda_home}, which has no include/cuda_runtime_api.h")
    for program in ("g++", "nm", "readelf"):
        if shutil.which(program) is None:
            raise MissingError(f"{program}, which is not on the PATH")
    root = Path(os.environ.get("MEMFIT_CUDA_BUILD") or Path.home() / ".cache" / "memfit-cuda-build")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    build = Build(folder=root / f"torch-{version}-python-{python}", cuda_home=cuda_home)
    _install(build, version)
    _make_stubs(build)
    _compile_driver(build)
    return build


def _site_of_this_python() -> str:
    """Return the folder of this Python's packages."""
    return sysconfig.get_path("purelib")


def _install(build: Build, version: str) -> None:
    done = build.folder / "installed"
    if done.exists():
        return
    print(f"installing the CUDA build of torch {version} into {build.folder}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(build.folder / "venv")], check=True)
    pip = [str(build.python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, f"torch==={version}"], check=True)
    (metadata,) = build.packages.glob("torch-*.dist-info/METADATA")
    subprocess.run([*pip, *re.findall(r"Requires-Dist: (triton==[0-9.]+)", metadata.read_text())], check=True)
    line = f"import os, sys; sys.path.append(os.environ.get('{SITE}', ''))\n"
    (build.packages / "memfit_shared.pth").write_text(line)
    done.touch()


def _make_stubs(build: Build) -> None:
    """Make a library for each that torch needs and that is not here, with all of their functions in one.

    Each function returns 0, which is success in CUDA's libraries. The loader wants versions of the functions of some:
    they are in one of the others.
    """
    stubs = build.folder / "stubs"
    if stubs.exists():
        return
    own = sorted((build.packages / "torch" / "lib").glob("*.so*"))
    provided = {path.name for path in own}
    command = ["readelf", "-d", "-V", *map(str, own)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", printed))
    versioned = set(re.findall(r"File: (\S+)", printed))
    with tempfile.TemporaryDirectory(dir=build.folder) as scratch:
        folder = Path(scratch) / "stubs"
        folder.mkdir()
        lacking = sorted(name for name in needed - provided - set(PRELOADED) if not SYSTEM.match(name))
        empty: list[str] = []
        for name in lacking:
            if name.startswith(FROM_TOOLKIT):
                (folder / name).symlink_to(_from_toolkit(build.cuda_home, name))
            else:
                empty.append(name)
        functions = _undefined(own) - _defined([*own, *(path.resolve() for path in folder.iterdir())])
        bodies = "".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(functions))
        holder = min(set(empty) - versioned)
        compiler = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", "-x", "c", "-"]
        for name in empty:
            output = [f"-Wl,-soname,{name}", "-o", str(folder / name)]
            source = bodies if name == holder else ""
            subprocess.run([*compiler, *output], input=source, text=True, check=True)
        folder.rename(stubs)


def _from_toolkit(cuda_home: Path, name: str) -> Path:
    for folder in ("lib64", "lib", "extras/CUPTI/lib64"):
        if (cuda_home / folder / name).exists():
            return (cuda_home / folder / name).resolve()
    raise MissingError(f"{name}, which this torch needs, and which the toolkit in CUDA_HOME={cuda_home} has not")


def _symbols(libraries: Sequence[Path], which: str) -> set[str]:
    printed = subprocess.run(
        ["nm", "-D", "--without-symbol-versions", which, *map(str, libraries)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return {line.split()[-1] for line in printed.splitlines() if line and not line.endswith(":")}


def _undefined(libraries: Sequence[Path]) -> set[str]:
    """Return the functions of NVIDIA's libraries that torch calls."""
    names = _symbols(libraries, "--undefined-only")
    return {name for name in names if re.match(r"(cu|nv|nccl|pnccl)[A-Za-z]", name)}


def _defined(libraries: Sequence[Path]) -> set[str]:
    return _symbols(libraries, "--defined-only")


def _compile_driver(build: Build) -> None:
    if build.driver.exists():
        return
    with tempfile.TemporaryDirectory(dir=build.folder) as scratch:
        folder = Path(scratch) / "driver"
        folder.mkdir()
        compiler = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-I", str(build.cuda_home / "include")]
        for name in PRELOADED:
            output = [f"-Wl,-soname,{name}", "-o", str(folder / name)]
            subprocess.run([*compiler, str(DRIVER), *output], check=True)
        folder.rename(build.driver)


def main() -> int:
    """Make the environment, or run a program in this process's place in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default=TORCH, help="version (default: %(default)s)")
    parser.add_argument("command", choices=["make", "run"], help="only make it, and print where its Python is; or run")
    words = sys.argv[1:]
    end = words.index("run") + 1 if "run" in words else len(words)
    options, arguments = parser.parse_args(words[:end]), words[end:]
    try:
        build = made(options.torch)
    except MissingError as error:
        print(f"torch's CUDA build without a GPU cannot be made here. Missing: {error}", file=sys.stderr)
        return NOT_HERE
    if options.command == "make":
        print(build.python)
        return 0
    python = str(build.python)
    return os.execve(python, [python, *arguments], build.environment())


if __name__ == "__main__":
    sys.exit(main())
