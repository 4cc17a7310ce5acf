"""The first use of memfit where little can be written or compiled: which commands work, and what they say meanwhile.

Each case has its own copy of the package, without machine code, and an empty cache. Commands run as a user without an
entry in the system's table of users, who owns nothing, unless the case says otherwise (that needs root). `said` counts
the lines on standard error but those of progress.

    python benchmarks/first_use.py
    python benchmarks/first_use.py --python /path/to/python3.13 read-only no-home
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _record import store

import memfit

NOBODY = 12345  # no user of this id exists
MOST_SECONDS = 900
_PROGRESS = re.compile(r"^memfit: [^\n]*: (\d+%, )?\d+ s\b[^\n]*\n", re.MULTILINE)
_OWN = """
import torch, memfit
def step():
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 4))
    batch = torch.randn(512, 64), torch.randint(0, 4, (512,))
    return memfit.TrainingStep(model=model, loss=torch.nn.CrossEntropyLoss(), batch=batch)
"""
_LLAMA = """
import torch, transformers, memfit
def step():
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=128)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    tokens = torch.randint(0, 128, (4, 16))
    loss = lambda model, batch: model(input_ids=batch, labels=batch).loss
    return memfit.TrainingStep(model=model, loss=loss, batch=tokens)
"""
_TRAIN = """
import torch
blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)]
model = torch.nn.Sequential(*blocks)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.randn(128, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained")
"""
_FIT = ("--budget", "80%", "--time-limit", "1", "--json")
COMMANDS = {
    "version": ("--version",),
    "doctor": ("doctor", "--json"),
    "fit": ("fit", "own.py:step", *_FIT),
    "fit again": ("fit", "own.py:step", *_FIT),
    "pack": ("pack", "trace.csv", "--time-limit", "2", "--json"),
    "run": ("run", "--budget", "1GiB", "train.py"),
}
LLAMA = {"fit a Llama": ("fit", "llama.py:step", *_FIT)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One place to use memfit in.

    Attributes:
        variables: of the environment; None removes one, and `{folder}` stands for the case's own folder.
        is_read_only: whether no file of the system can be written at all.
        may_write: whether the user owns the case's folder.
        with_libraries: whether transformers stands beside memfit in a folder that is no site-packages.
    """

    variables: dict[str, str | None] = field(default_factory=dict)
    is_read_only: bool = False
    may_write: bool = False
    with_libraries: bool = False


CASES = {
    "plain": Case(variables={"HOME": "{folder}"}, may_write=True),
    # torch itself needs a folder for temporary files
    "read-only": Case(variables={"HOME": "{folder}", "TMPDIR": "/dev/shm"}, is_read_only=True),
    "read-only packages": Case(variables={"HOME": "{folder}"}),
    "no-home": Case(variables={"HOME": None}),
    "no-compiler": Case(variables={"HOME": "{folder}", "PATH": "/nowhere", "CXX": None}, may_write=True),
    "folder of a .pth": Case(variables={"HOME": "{folder}"}, may_write=True, with_libraries=True),
}


def try_case(name: str, python: str, installed: str) -> list[dict[str, Any]]:
    """Run each command in one case, and return what came out."""
    case = CASES[name]
    with tempfile.TemporaryDirectory(prefix="memfit-first-") as made:
        folder = Path(made)
        folder.chmod(0o755)
        packages = folder / "packages"
        shutil.copytree(Path(memfit.__file__).parent, packages / "memfit", ignore=shutil.ignore_patterns("__pycache__"))
        (packages / "memfit-0.dist-info").mkdir()
        (packages / "memfit-0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: memfit\nVersion: 0\n")
        if case.with_libraries:
            _link_libraries(packages)
        for file, text in (("own.py", _OWN), ("llama.py", _LLAMA), ("train.py", _TRAIN), ("trace.csv", _trace())):
            (folder / file).write_text(text)
        if case.may_write:
            for path in (folder, packages, *(each for each in packages.rglob("*") if not each.is_symlink())):
                os.chown(path, NOBODY, NOBODY)
        rows = []
        for what, words in (COMMANDS | (LLAMA if case.with_libraries else {})).items():
            ran = _ran(case, folder, [python, "-m", "memfit", *words], installed)
            rows.append({"case": name, "command": what} | ran)
            row = rows[-1]
            print(f"{name:18} {what:12} {row['status']:4} {row['seconds']:7.1f} s  {row['said']} lines", flush=True)
            for line in row["lines"][:3]:
                print(f"    {line[:400]}")
        return rows


def _ran(case: Case, folder: Path, command: list[str], installed: str) -> dict[str, Any]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MEMFIT", "NUMBA", "PYTHON"))}
    variables = kept | {
        "PYTHONPATH": f"{folder / 'packages'}{os.pathsep}{installed}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    for name, value in case.variables.items():
        variables.pop(name, None)
        if value is not None:
            variables[name] = value.format(folder=folder)
    as_user: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    if case.is_read_only:  # in a namespace of its own, in which everything is mounted so
        inner = "mount --bind / / && mount -o remount,bind,ro / && exec setpriv --reuid {0} --regid {0} --clear-groups "
        quoted = " ".join(f"'{word}'" for word in command)
        command = ["unshare", "--mount", "bash", "-c", f"{inner.format(NOBODY)} -- {quoted}"]
        as_user = {}
    began = time.perf_counter()
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=MOST_SECONDS, check=False, **as_user
    )
    lines = _PROGRESS.sub("", done.stderr).splitlines()
    seconds = round(time.perf_counter() - began, 1)
    return {"status": done.returncode, "seconds": seconds, "said": len(lines), "lines": lines[-5:]}


def _link_libraries(packages: Path) -> None:
    """Put transformers beside memfit, as an installer puts it into a folder that a .pth file names."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    found = Path(spec.origin).parent
    (packages / "transformers").symlink_to(found)
    for info in found.parent.glob("transformers-*.dist-info"):
        (packages / info.name).symlink_to(info)


def _trace() -> str:
    rows = [f"{number},{number % 17},{number % 17 + 1 + number % 5},{64 * (1 + number % 7)}" for number in range(60)]
    return "\n".join(["id,lower,upper,size", *rows]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], default=[])
    parser.add_argument("--python", default=sys.executable, help="other users may run it")
    parser.add_argument("--installed", default=sysconfig.get_path("purelib"), help="all that memfit depends on")
    chosen = parser.parse_args()
    code = "import platform; print(platform.python_version())"
    version = subprocess.run([chosen.python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    rows: list[dict[str, Any]] = []
    for name in chosen.cases or CASES:
        rows += try_case(name, chosen.python, chosen.installed)
        works = all(row["status"] == 0 for row in rows)
        stored = store(f"first_use/python{version}", {"python": version, "rows": rows, "works": works})
    print(f"stored in {stored}")


if __name__ == "__main__":
    main()
