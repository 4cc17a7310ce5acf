"""`import memfit` loads the standard library alone; planning from files never loads torch."""

from __future__ import annotations

import subprocess
import sys

import pytest


def _run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()


def test_import_loads_no_package_of_others() -> None:
    loaded = "{name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names"
    assert _run(f"import sys; before = set(sys.modules); import memfit; print({loaded})") == "{'memfit'}"


@pytest.mark.parametrize(
    "statement",
    [
        "import memfit",
        "import memfit; memfit.Graph, memfit.Plan, memfit.Problem, memfit.MemfitError, memfit.check",
        "import memfit.simulate, memfit.planners, memfit.report, memfit.workloads",
        "import memfit.cli",
        "import memfit.integrations",
    ],
)
def test_brings_no_torch(statement: str) -> None:
    heavy = "[m for m in sys.modules if m in ('torch', 'transformers', 'pytorchcv', 'ortools')]"
    assert _run(f"import sys; {statement}; print({heavy})") == "[]"


def test_every_public_name_is_there() -> None:
    import memfit

    assert all(getattr(memfit, name).__doc__ for name in memfit.__all__)
    assert set(memfit._HOME) == set(memfit.__all__), "nothing is public that is not listed"


def test_an_unknown_name_says_what_there_is() -> None:
    import memfit

    with pytest.raises(AttributeError, match=r"has no attribute 'Schedul'; it has .*TrainingStep"):
        memfit.Schedul  # noqa: B018 - the access is what raises
