"""The search for objects that are alive finds frozen ones: memfit's own thaws them, that of the tests leaves them."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator

import pytest
import torch
from frozen import FROZEN

import memfit
from memfit.capture import draws
from memfit.checkpointing.step import CheckpointedStep

GENERATOR = random.Random(0)
WEIGHT = torch.zeros(3)


@pytest.fixture
def _freezes_again() -> Iterator[None]:
    yield
    FROZEN.freeze()


def test_the_tests_search_finds_frozen_tensors_and_generators_and_thaws_nothing() -> None:
    count = gc.get_freeze_count()
    found = {id(thing) for thing in draws.alive_objects()}
    assert {id(GENERATOR), id(WEIGHT)} <= found
    assert 0 < gc.get_freeze_count() <= count


@pytest.mark.usefixtures("_freezes_again")
def test_memfits_search_thaws_what_is_frozen() -> None:
    assert gc.get_freeze_count() > 0
    found = {id(thing) for thing in FROZEN.search_and_thaw()}
    assert {id(GENERATOR), id(WEIGHT), id(FROZEN)} <= found
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("_freezes_again")
def test_collections_inside_of_memfits_eager_leave_out_older_objects() -> None:
    """It collects garbage where there is no room, which would look through all objects of the process each time."""
    FROZEN.thaw()
    count = len(gc.get_objects())
    with memfit.eager(torch.nn.Linear(2, 2), budget="1GiB"):
        assert len(gc.get_objects()) < count // 10
    assert gc.get_freeze_count() == 0


def test_a_step_that_draws_from_a_frozen_generator_is_seen() -> None:
    def loss(model: torch.nn.Module, values: torch.Tensor) -> torch.Tensor:
        return model(values).mean() * GENERATOR.random()

    step = memfit.fit(torch.nn.Linear(2, 2), loss, torch.ones(2, 2), budget="1MiB", planner="none")
    assert isinstance(step, CheckpointedStep)
    assert "an instance of random.Random" in step.why
