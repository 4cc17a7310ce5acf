"""The model of torch's caching allocator has the counters of the allocator itself, which a loop may set back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from _measure import MIB
from conftest import InChild

import memfit
from memfit.errors import InvalidDeviceError
from memfit.torch_private.cuda import allocator_settings_text

TRACES = 25


def _replayed(traces: list[dict[str, Any]]) -> dict[str, Any]:
    from _cuda_allocator_runner import Device

    device = Device()
    return {"results": [device.replay(trace) for trace in traces]}


@pytest.mark.parametrize("settings", ["default", "expandable", "max_split"])
@pytest.mark.parametrize("is_capped", [False, True])
def test_counters_are_torchs(settings: str, is_capped: bool, in_child: InChild) -> None:
    from _cuda_traces import random_trace
    from cuda_allocator import SETTINGS, described, first_difference, switches

    expandable, most_split_bytes = SETTINGS[settings]
    drawn = [random_trace(seed, expandable=expandable, max_split_bytes=most_split_bytes) for seed in range(2 * TRACES)]
    traces = [trace for trace in drawn if (trace.settings.allowed_bytes is not None) == is_capped]
    assert traces, asdict(drawn[0].settings)
    environment = {"PYTORCH_CUDA_ALLOC_CONF": switches(traces[0].settings)}
    found = in_child(_replayed, [described(trace) for trace in traces], environment=environment)
    assert "error" not in found, found["error"]
    differences = [first_difference(*pair) for pair in zip(traces, found["results"], strict=True)]
    assert not any(differences), next(filter(None, differences))


def _most_bytes(reset: Callable[[], object]) -> dict[str, Any]:
    """Train in a loop that sets torch's peaks back after each step; return the most that it and memfit have seen.

    The cache is emptied first, so that nothing but the peak tells what the step has taken.
    """
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    own_bytes = 0
    with memfit.checkpoint(model, "1GiB") as handle:
        for _ in range(4):
            model(torch.randn(1024, 1024, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            own_bytes = max(own_bytes, torch.cuda.max_memory_reserved())
            torch.cuda.empty_cache()
            reset()
        handle.end_step()
        return {"most_bytes": handle.report().most_bytes, "own_bytes": own_bytes}


RESETS: dict[str, Callable[[], object]] = {
    "left alone": lambda: None,
    "cuda": torch.cuda.reset_peak_memory_stats,
    "accelerator": torch.accelerator.reset_peak_memory_stats,
}


@pytest.mark.parametrize("name", RESETS)
def test_peaks_that_a_loop_sets_back_are_seen(name: str, in_child: InChild) -> None:
    found = in_child(_most_bytes, RESETS[name])
    assert found["most_bytes"] >= found["own_bytes"] > 128 * MIB, found


CACHES_NOTHING = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def _refused(open_door: Callable[[torch.nn.Module], Any]) -> dict[str, Any]:
    model = torch.nn.Linear(1024, 1024).cuda()
    before = allocator_settings_text()
    with pytest.raises(InvalidDeviceError) as raised:
        open_door(model)
    return {"refused": str(raised.value), "settings": [before, allocator_settings_text()]}


def _fit(model: torch.nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(8, 1024, device="cuda")
    memfit.fit(model, lambda model, batch: model(batch).sum(), batch, optimizer=optimizer, budget="1GiB")


OPENED: dict[str, Callable[[torch.nn.Module], Any]] = {
    "checkpoint": lambda model: memfit.checkpoint(model, "1GiB"),
    "eager": lambda model: memfit.eager(model, budget="1GiB").__enter__(),
    "compile": lambda model: memfit.compile(model, budget="1GiB")(torch.randn(8, 1024, device="cuda")),
    "fit": _fit,
}


@pytest.mark.parametrize("door", OPENED)
def test_an_allocator_that_counts_nothing_is_refused(door: str, in_child: InChild) -> None:
    found = in_child(_refused, OPENED[door], environment=CACHES_NOTHING)
    assert "error" not in found, found["error"]
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" in found["refused"]
    assert found["settings"][0] == found["settings"][1]


POOLED = """
from conftest import _load
_load()
from _gpu_doors import GPT, Case, measure_case
from _process import in_forked_child
for door in ("checkpoint", "eager"):
    case = Case(name=door, door=door, model="gpt2", options=GPT, share=0.75)
    found = in_forked_child(lambda: measure_case(case), timeout_seconds=120)
    assert "error" not in found, found["error"]
    assert len(found["steps"]) == 10 and not found["failures"], found
    print(door, found["line"])
"""


def test_budgets_are_held_in_cudas_own_pool() -> None:
    """torch reads which allocator it uses as it is loaded: this takes a process of its own."""
    environment = os.environ | {
        "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    assert subprocess.run([sys.executable, "-c", POOLED], env=environment, check=False).returncode == 0
