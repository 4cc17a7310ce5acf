"""Machine code that comes with memfit: taken where it fits the sources and the types, and numba compiles else."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from memfit.system import shipped
from memfit.system.compiled import entry_point

ROOT = Path(__file__).parents[1]
C_CALLS = """
#include <stdint.h>
#include <string.h>
int memfit_0(const int64_t *a, int64_t *result) {  /* whole, real, (array of pairs, whole) */
    double real;
    memcpy(&real, a + 1, 8);
    const char *rows = (const char *) a[6];
    result[0] = a[0] + a[9];
    real *= rows[0] + rows[a[8]];
    memcpy(result + 1, &real, 8);
    return a[0] < 0;
}
"""
PAIR = np.dtype([("small", np.int8), ("large", np.int64)])


class Two(NamedTuple):
    rows: Any
    more: int


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A library of one function, described as the build does it."""
    (tmp_path / "calls.c").write_text(C_CALLS)
    command = ["cc", "-shared", "-fPIC", "-o", str(tmp_path / shipped.LIBRARY), str(tmp_path / "calls.c")]
    subprocess.run(command, check=True)
    rows = {
        "dtype": np.lib.format.dtype_to_descr(PAIR),
        "ndim": 1,
        "is_written": False,
        "is_aligned": False,
    }
    function = {
        "name": f"{__name__}.weighted",
        "symbol": "memfit_0",
        "arguments": ["whole", "real", {"parts": [rows, "whole"]}],
        "result": "qd",
        "is_tuple": True,
    }
    files = ["system/shipped.py"]
    description = {"sources": shipped.sources_digest(files), "files": files, "functions": [function]}
    (tmp_path / shipped.DESCRIPTION).write_text(json.dumps(description))
    (tmp_path.parent / "system").mkdir(exist_ok=True)
    shutil.copy(shipped.FOLDER / "shipped.py", tmp_path.parent / "system" / "shipped.py")
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    shipped.shipped_functions.cache_clear()
    yield tmp_path
    shipped.shipped_functions.cache_clear()


def weighted(whole: int, real: float, two: Two) -> tuple[int, float]:
    """The same in Python, but for a mark that tells which was called."""
    return whole + two.more, real * (two.rows[0].small + two.rows[1].small) + 1000


def arguments(dtype: Any = PAIR) -> tuple[int, float, Two]:
    rows = np.zeros(3, dtype)
    rows["small"] = [3, 4, 5]
    return 7, 0.5, Two(rows, 30)


@pytest.mark.usefixtures("folder")
def test_the_library_is_called_for_its_types() -> None:
    called = entry_point(weighted)
    assert called(*arguments()) == (37, 3.5)
    whole, real, two = arguments()
    two.rows["small"] = 1
    assert called(whole, real, two) == (37, 1.0), "the array has changed in place"
    assert called(np.int64(1), np.float64(2.0), two) == (31, 4.0)
    with pytest.raises(RuntimeError, match="status 1"):
        called(-1, real, two)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "other",
    [
        lambda whole, real, two: (float(whole), real, two),
        lambda whole, real, two: (whole, int(real), two),
        lambda whole, real, two: (whole, real, two._replace(rows=two.rows[::2])),
        lambda whole, real, two: (whole, real, two._replace(rows=two.rows.astype([("small", "i2"), ("large", "i8")]))),
        lambda whole, real, two: (whole, real, two._replace(more=1.5)),
    ],
)
def test_other_types_are_compiled(other: Any) -> None:
    given = other(*arguments())
    assert entry_point(weighted)(*given)[1] >= 1000


@pytest.mark.usefixtures("folder")
def test_a_number_that_does_not_fit_is_refused_by_the_library() -> None:
    whole, real, two = arguments()
    with pytest.raises(shipped.UnlikeShippedError):
        shipped.shipped_functions()[f"{__name__}.weighted"]((whole << 70, real, two))
    with pytest.raises(shipped.UnlikeShippedError):
        shipped.shipped_functions()[f"{__name__}.weighted"]((whole, real))


@pytest.mark.parametrize("damage", ["sources", "library", "description", "none"])
def test_without_a_library_of_these_sources_numba_compiles(
    folder: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    if damage == "sources":
        with (folder.parent / "system" / "shipped.py").open("a") as file:
            file.write("# changed")
    elif damage == "library":
        (folder / shipped.LIBRARY).write_bytes(b"no library")
    elif damage == "description":
        (folder / shipped.DESCRIPTION).write_text("{")
    else:
        (folder / shipped.DESCRIPTION).unlink()
    assert shipped.shipped_functions() == {}
    assert entry_point(weighted)(*arguments()) == (37, 1003.5)
    assert len(caplog.records) == (damage in ("library", "description"))


COMPARE = """
import sys
from memfit.compile_ahead import small_problem
from memfit.device import GENERIC
from memfit.packing import Blocks, PackingProblem, make_packer
from memfit.planners.registry import make_planner
from memfit.system import compiled, shipped
import msgspec, numpy as np

if sys.argv[1] == "numba":
    compiled.shipped_functions = dict
linked = msgspec.structs.replace(GENERIC, to_host_bytes_per_second=1e9, to_device_bytes_per_second=1e9)
for planner, host_bytes in (("search", 0), ("offload", 4 << 20)):
    result = make_planner(planner, iterations=3000).plan(small_problem(linked, host_bytes))
    print(result.status, result.plan.predicted, [str(each) for each in result.plan.schedule.instructions])
random = np.random.default_rng(0)
starts = random.integers(0, 60, 60)
blocks = Blocks(
    ids=np.arange(60), sizes_bytes=random.integers(1, 9, 60), starts=starts, ends=starts + random.integers(1, 20, 60)
)
for packer in ("best_fit", "exact"):
    layout = make_packer(packer).pack(PackingProblem(blocks=blocks, time_limit_seconds=120.0))
    print(packer, layout.height_bytes)
print("numba" in sys.modules, len(shipped.shipped_functions()) > 20, file=sys.stderr)
"""


@pytest.mark.slow
def test_the_library_of_a_wheel_plans_and_packs_as_numba_does(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "memfit", tmp_path / "memfit", ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, str(ROOT / "building" / "machine_code.py"), str(tmp_path / "memfit" / "system")]
    subprocess.run(build, check=True)
    printed = {}
    for searches, said in (("library", "False True\n"), ("numba", "True True\n")):
        command = [sys.executable, "-c", COMPARE, searches]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, env={"PATH": ""})
        printed[searches] = ran.stdout
        assert ran.stderr == said
    assert printed["library"] == printed["numba"]


def test_a_build_without_a_compiler_asks_for_no_more_than_setuptools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "building")
    backend: Any = pytest.importorskip("backend")
    assert any(each.startswith("numba") for each in backend.get_requires_for_build_wheel())
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert not any(each.startswith("numba") for each in backend.get_requires_for_build_wheel())
    assert backend.build_wheel is not None, "all else is of setuptools"


def test_a_build_that_cannot_compile_leaves_none_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `setup.py` finds it: no compiler, or one that fails, costs the library and nothing else."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "building").mkdir()
    for name in ("machine_code.py", "backend.py"):
        (tmp_path / "building" / name).write_text((ROOT / "building" / name).read_text())
    (tmp_path / "memfit" / "system").mkdir(parents=True)
    (tmp_path / "memfit" / "__init__.py").write_text("")
    (tmp_path / "memfit" / "system" / "__init__.py").write_text("")
    shutil.copy(ROOT / "memfit" / "system" / "version.py", tmp_path / "memfit" / "system" / "version.py")
    monkeypatch.chdir(tmp_path)
    built = subprocess.run([sys.executable, "setup.py", "-q", "build"], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert "numba compiles them at first use" in built.stdout + built.stderr
    assert list(tmp_path.glob("build/lib/memfit/system/*.py"))
    assert not list(tmp_path.rglob("searches.*"))
