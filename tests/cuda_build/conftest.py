"""Tests on a CUDA build of torch over a GPU that is not there: `make test-cuda`; elsewhere they are not collected.

Each case is a fork of the test's process, which has imported everything and has not touched CUDA.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
IS_THERE = "FAKE_GPU" in os.environ
collect_ignore_glob = [] if IS_THERE else ["*"]
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks")]

CASE_SECONDS = 120.0

Answers = dict[str, Any] | Iterator[dict[str, Any]]
InChild = Callable[..., dict[str, Any]]


def pytest_sessionstart() -> None:
    """Import what each child would import."""
    if not IS_THERE:
        return
    import torch

    import memfit

    assert memfit.fit and memfit.compile and memfit.eager  # each imports its door
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
            os.environ.update(environment or {})
            return measure(*arguments, **named)

        with fresh_cache():
            return in_forked_child(measured, timeout_seconds=CASE_SECONDS)

    return run
