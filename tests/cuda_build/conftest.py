"""Tests on a CUDA build of torch over a GPU that is not there: `make test-cuda`; elsewhere they are not collected.

Each case is a fork of the test's process, which has imported everything and has not touched CUDA.
"""

from __future__ import annotations

import gc
import os
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
IS_THERE = "FAKE_GPU" in os.environ
collect_ignore_glob = [] if IS_THERE else ["*"]
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks")]

GRAPHS = HERE.parent / "data" / "graphs"
CASE_SECONDS = 240.0
# `lookup` stands for the look-up of the backend, after which a step without a graph is an error
NOT_LOADED = ("memfit.integrations", "memfit.__main__", "memfit.dynamo.lookup")

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a driver that was started cannot be used in a fork

Answers = dict[str, Any] | Iterator[dict[str, Any]]
InChild = Callable[..., dict[str, Any]]


def pytest_sessionstart() -> None:
    """Import and load what each child would; numba's code, too."""
    if not IS_THERE:
        return
    with warnings.catch_warnings(action="ignore"):
        _load()
    gc.collect()
    gc.freeze()


def _load() -> None:
    import torch
    import torch._inductor.compile_fx
    from _gpu_driver import let_launches_take_equal_times

    import memfit
    from memfit.device import GENERIC
    from memfit.graph import Graph
    from memfit.planning import Settings, make_plan

    for module in pkgutil.walk_packages(memfit.__path__, "memfit."):
        if not module.name.startswith(NOT_LOADED):
            import_module(module.name)
    graph = Graph.load(min(GRAPHS.glob("*.graph.json*"), key=lambda path: path.stat().st_size))
    make_plan(graph, GENERIC, Settings(budget="90%", planner="search", options={"iterations": 2}))
    let_launches_take_equal_times()
    torch.backends.cudnn.enabled = False  # its stand-in has no version
    assert not torch.cuda.is_initialized()


@pytest.fixture
def in_child() -> InChild:
    """Return a function that runs another one in a fork, with its arguments, and returns what that one answered.

    Each has a cache of its own: what other cases measured and planned does not change a plan.
    """
    from _process import fresh_cache, in_forked_child

    def run(
        measure: Callable[..., Answers], *arguments: Any, environment: dict[str, str] | None = None, **named: Any
    ) -> dict[str, Any]:
        def measured() -> Answers:
            warnings.simplefilter("default")  # pytest makes errors of them, and torch warns as it compiles
            os.environ.update(environment or {})
            return measure(*arguments, **named)

        with fresh_cache():
            return in_forked_child(measured, timeout_seconds=CASE_SECONDS)

    return run
