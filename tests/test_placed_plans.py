"""Plans that fit as torch's CUDA allocator places their bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import pytest
import torch

from memfit.capture import capture
from memfit.cost.device_profiles import load_device
from memfit.cost.rooflines import roofline
from memfit.errors import NoPlanError
from memfit.graph import Graph
from memfit.memory.placed_plans import allocator_settings, plan_within, taken_bytes
from memfit.plan import Plan
from memfit.planning import Settings, make_plan
from memfit.simulate.cuda_allocator import AllocatorSettings
from memfit.workloads import build

MIB = 1 << 20
H100 = load_device("h100")


def make(settings: Settings) -> Plan:
    """Plan a U-Net for an H100."""
    return make_plan(_graph(), H100, settings)


@cache
def _graph() -> Graph:
    captured = capture(build("unet", batch=4, size=256))
    return roofline(captured.graph, captured.binding, H100)


SEARCHED = Settings(budget="60%", planner="search", options={"iterations": 300, "threads": 1}, reads_kept_plans=False)


def taken(allocator: AllocatorSettings) -> Callable[[Plan], int]:
    return lambda plan: taken_bytes(plan, None, allocator)


@pytest.mark.slow
@pytest.mark.parametrize("expandable", [False, True])
def test_a_plan_is_made_for_less_until_the_allocator_takes_no_more_than_the_budget(expandable: bool) -> None:
    allocator = AllocatorSettings(expandable_segments=expandable)
    plain = make(SEARCHED)
    placed = plan_within(make, SEARCHED, taken(allocator))
    assert taken(allocator)(plain) > plain.budget_bytes
    assert taken(allocator)(placed) <= plain.budget_bytes
    assert placed.budget_bytes == plain.budget_bytes
    assert placed.predicted.peak_bytes < plain.predicted.peak_bytes
    assert placed.bounds == plain.bounds


def test_a_plan_that_fits_is_the_only_one() -> None:
    plans: list[Plan] = []

    def counted(settings: Settings) -> Plan:
        plans.append(make(settings))
        return plans[-1]

    generous = Settings(budget=1 << 40, planner="none")
    assert plan_within(counted, generous, taken(AllocatorSettings())) is plans[0]
    assert len(plans) == 1


def test_the_plan_that_takes_the_fewest_bytes_is_taken_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    plain = make(SEARCHED)

    def once(settings: Settings) -> Plan:
        if settings is SEARCHED:
            return plain
        raise NoPlanError("too little", least_budget_found_bytes=None, least_budget_bound_bytes=0)

    with caplog.at_level(logging.WARNING, "memfit"):
        assert plan_within(once, SEARCHED, taken(AllocatorSettings())) is plain
    assert "as its bytes are placed the plan is predicted to take" in caplog.text
    assert "more than the budget" in caplog.text


def test_settings_are_read_from_their_text() -> None:
    text = "backend:native, expandable_segments:True,max_split_size_mb:64,garbage_collection_threshold:0.8"
    assert AllocatorSettings.parse(text, capacity_bytes=5) == AllocatorSettings(
        expandable_segments=True, max_split_bytes=64 * MIB, capacity_bytes=5
    )
    assert AllocatorSettings.parse("") == AllocatorSettings()
    assert allocator_settings(torch.device("cpu")) is None
