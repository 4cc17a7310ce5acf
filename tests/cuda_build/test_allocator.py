"""The model of torch's caching allocator has the counters of the allocator itself after every event."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from conftest import InChild

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
