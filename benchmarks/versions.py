"""The tests on another torch or Python, in an environment of its own; what passed and failed is stored by versions.

    make test-torch TORCH=2.15.0
    make test-torch TORCH=2.15.0 PYTHON=python3.13
    python benchmarks/versions.py 2.11.0 --python python3.12 --fast

The environment is `.venv-VERSIONS`, and is used again. Builds of torch for CUDA take several GB and run on a CPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = "bench,dev,dqn,transformers,accelerate,lightning"
INSIDE = "MEMFIT_VERSIONS_INSIDE"  # set in the environment that the tests run in


def environment(python: str, torch_version: str) -> Path:
    """Return the Python of an environment with this torch and what memfit's tests need, made if it is not there.

    Args:
        python: a command, such as `python3.13`.
        torch_version: such as 2.15.0. The other packages are those of `constraints.txt`.
    """
    asked = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    python_version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    folder = ROOT / f".venv-python{python_version}-torch{torch_version}"
    inside, done = folder / "bin" / "python", folder / ".installed"
    if not done.exists():
        print(f"installing torch {torch_version} for Python {python_version} into {folder.name}", flush=True)
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        others = folder / "constraints.txt"
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        others.write_text("\n".join(line for line in lines if not line.startswith("torch==")) + "\n")
        install = [inside, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", f"torch=={torch_version}"]
        subprocess.run([*install, "-c", others, "-e", f"{ROOT}[{EXTRAS}]"], check=True)
        subprocess.run([*install, "-c", others, "--no-deps", "pytorchcv"], check=True)
        done.touch()
    return inside


def run_tests(workers: int, marks: str, more: list[str]) -> int:
    """Run the tests in this environment, store what they gave, and return pytest's exit status.

    Args:
        workers: processes.
        marks: an expression of pytest's option -m.
        more: options and files for pytest; with any, nothing is stored.
    """
    command = [sys.executable, "-m", "pytest", "-n", str(workers), "--dist", "loadfile", "-m", marks]
    if more:
        return subprocess.run([*command, *more], cwd=ROOT, check=False).returncode
    apart = sorted(str(path) for path in (ROOT / "tests").glob("test_checkpoint*.py"))  # as `make test` runs them
    reports, status = [], 0
    for name, files in {"others": ["--ignore-glob", "*/test_checkpoint*.py"], "checkpoint": apart}.items():
        reports.append(Path(sys.prefix) / f"tests-{name}.xml")
        command_here = [*command, f"--junitxml={reports[-1]}", *files]
        status = subprocess.run(command_here, cwd=ROOT, check=False).returncode or status
    print("stored in", _store(reports, marks))
    return status


def _store(reports: list[Path], marks: str) -> Path:
    from _record import machine, store  # needs torch, which only this environment has

    suites = [suite for report in reports for suite in ElementTree.parse(report).getroot()]
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for suite in suites
        for case in suite
        if case.find("failure") is not None or case.find("error") is not None
    ]
    names = ("tests", "failures", "errors", "skipped")
    counts = {name: sum(int(suite.get(name, 0)) for suite in suites) for name in names}
    versions = machine()
    name = f"versions/python{versions['python'].rpartition('.')[0]}-torch{versions['torch'].partition('+')[0]}"
    seconds = round(sum(float(suite.get("time", 0)) for suite in suites))
    return store(name, counts | {"marks": marks, "seconds": seconds, "failed": failed})


def main() -> None:
    """Make the environment, and run the tests in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("torch", help="a version of torch, such as 2.15.0")
    parser.add_argument("--python", default=sys.executable, help="the Python that the environment is made of")
    parser.add_argument("--workers", type=int, default=2, help="processes that tests run in")
    parser.add_argument("--fast", action="store_true", help="leave out the tests marked slow")
    options, more = parser.parse_known_args()
    if INSIDE not in os.environ:
        inside = environment(options.python, options.torch)
        path = os.pathsep.join([str(inside.parent), os.environ.get("PATH", "")])
        entries = os.environ | {INSIDE: "1", "PATH": path, "PYTHONPATH": str(ROOT)}
        sys.exit(subprocess.run([inside, __file__, *sys.argv[1:]], env=entries, check=False).returncode)
    sys.exit(run_tests(options.workers, "not gpu and not slow" if options.fast else "not gpu and not short", more))


if __name__ == "__main__":
    main()
