"""The examples of the integrations run where nothing is installed but memfit and the one extra that they name."""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "integrations.md"
OTHERS = {  # what must not be there, so that the environment is known to be a bare one
    "transformers": ("pytorch_lightning", "pytest", "peft"),
    "accelerate": ("transformers", "pytorch_lightning", "pytest"),
    "lightning": ("transformers", "accelerate", "pytest"),
}
SECONDS = 300
KEPT = ("PATH", "MEMFIT_CACHE")  # the recorder is built once for all tests


def installed_with(name: str, extras: frozenset[str] = frozenset()) -> dict[str, Distribution]:
    """Return the distributions that pip installs for a requirement, by the metadata of those that are here."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    open_ends = [(name, extras)]
    while open_ends:
        name, extras = open_ends.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        found[name] = distribution(name)
        for line in found[name].requires or ():
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in (*extras, "")):
                open_ends.append((re.sub(r"[-_.]+", "-", needed.name).lower(), frozenset(needed.extras)))
    return found


def make_environment(folder: Path, extra: str) -> Path:
    """Make an environment of links to the distributions of `memfit[extra]`; return its Python."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    here = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    for each in installed_with("memfit", frozenset({extra})).values():
        for file in {Path(str(file)).parts[0] for file in each.files or ()} - {"..", "__pycache__"}:
            target, link = Path(str(each.locate_file(file))).resolve(), here / file
            if not link.exists():
                link.symlink_to(target)
    return python


def example_of(library: str) -> str:
    """Return the block of the page below the heading of a library."""
    below = PAGE.read_text(encoding="utf-8").split(f"\n## {library.title()}\n")[1]
    found = re.search(r"^```python\n(.*?)^```", below, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.slow
@pytest.mark.parametrize("extra", sorted(OTHERS))
def test_an_example_needs_no_more_than_its_extra(extra: str, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "environment", extra)
    absent = f"import importlib.util as u; print([n for n in {OTHERS[extra]!r} if u.find_spec(n)])"

    def run(code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(python), "-c", code],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)} | {name: os.environ[name] for name in KEPT},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )

    assert run(absent).stdout.strip() == "[]"
    done = run(example_of(extra))
    assert done.returncode == 0, done.stderr
