"""Timing on a GPU that is not here: what runs between the events, and what a step's ops take of it."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from steps import make_pair

from memfit.capture import capture
from memfit.capture.finish import finish
from memfit.cost import gpu_timing
from memfit.cost.gpu_timing import kernel_seconds, on_two_timelines
from memfit.cost.measurement import measure

PAIRS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=30)


def test_the_cache_is_overwritten_before_the_first_event(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("event")

        def synchronize(self) -> None:
            order.append("wait")

        def elapsed_time(self, _end: Any) -> float:
            return 2.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    monkeypatch.setattr(gpu_timing, "overwrite_cache", lambda _device: order.append("flush"))
    monkeypatch.setattr(gpu_timing, "bring_clocks_up", lambda _device: order.append("warm"))
    assert kernel_seconds(lambda: order.append("run"), torch.device("cuda")) == 0.0025
    assert order == ["warm", "flush", "event", "run", "event", "wait"]


def test_the_cache_is_overwritten_with_no_more_than_half_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = torch.empty

    def noted(size: int, **how: Any) -> torch.Tensor:
        made.append(size)
        return real(size, **how)

    monkeypatch.setattr(torch, "empty", noted)
    monkeypatch.setattr(gpu_timing, "free_bytes", lambda _device: 1000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(L2_cache_size=400))
    gpu_timing.overwrite_cache(torch.device("cpu"))
    monkeypatch.setattr(gpu_timing, "free_bytes", lambda _device: 10_000)
    gpu_timing.overwrite_cache(torch.device("cpu"))
    assert made == [500, 800]


@given(PAIRS)
def test_a_steps_ops_take_together_what_the_device_takes(pairs: list[tuple[int, int]]) -> None:
    kernels, dispatches = [float(kernel) for kernel, _ in pairs], [float(dispatch) for _, dispatch in pairs]
    seconds = on_two_timelines(kernels, dispatches)
    assert all(each >= kernel for each, kernel in zip(seconds, kernels, strict=True))
    assert max(sum(kernels), sum(dispatches)) <= sum(seconds) <= sum(kernels) + sum(dispatches)
    if dispatches[0] == 0 and all(d <= k for k, d in zip(kernels, dispatches[1:], strict=False)):
        assert seconds == kernels, "launches are hidden"


def test_a_launch_bound_step_is_predicted_as_one() -> None:
    captured = finish(capture(make_pair("conv")[0]))

    def seconds_with(kernel: float, dispatch: float) -> float:
        observed = [
            None if seen is None else msgspec.structs.replace(seen, seconds=kernel, dispatch_seconds=dispatch)
            for seen in captured.observed
        ]
        return sum(op.seconds for op in measure(captured.graph, captured.binding, observed).ops)

    count = len(captured.observed)
    assert all(seen is not None for seen in captured.observed)
    assert seconds_with(1e-6, 8e-6) == pytest.approx(count * 8e-6 + 1e-6)
    assert seconds_with(1e-3, 8e-6) == pytest.approx(count * 1e-3 + 8e-6)
