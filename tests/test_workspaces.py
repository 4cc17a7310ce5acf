"""Workspaces of calls, as libraries take them for tensors of these strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memfit.cost.result_check import result_bytes
from memfit.cost.workspaces import Workspaces
from memfit.system.recorder import record
from memfit.torch_private.tensors import FakeTensorMode

CPU = torch.device("cpu")
BACKWARD = torch.ops.aten.convolution_backward.default


def arguments(layout: torch.memory_format) -> tuple[Any, ...]:
    """Return those of the backward pass of a convolution."""
    images = torch.ones(2, 64, 9, 9).to(memory_format=layout)
    weights = torch.ones(64, 64, 3, 3).to(memory_format=layout)
    return images, images, weights, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_workspace_is_that_of_the_layout(layout: torch.memory_format) -> None:
    given = arguments(layout)
    with record(CPU) as usage:
        returned = BACKWARD(*given)
    expected = usage.peak_bytes - result_bytes(returned, given, {}, CPU)
    with FakeTensorMode():
        fakes = arguments(layout)
        found = Workspaces(CPU).bytes_of(BACKWARD, fakes, {})
    assert found == expected > 0


def test_a_call_is_measured_once_and_draws_nothing_of_the_users() -> None:
    workspaces = Workspaces(CPU)
    with FakeTensorMode():
        fake = torch.ones(1000)
    before = torch.get_rng_state()
    assert workspaces.bytes_of(torch.ops.aten.native_dropout.default, (fake, 0.5, True), {}) >= 0
    assert torch.equal(before, torch.get_rng_state())
    calls: list[Any] = []

    def taking(*given: Any) -> torch.Tensor:
        calls.append(given)
        return torch.zeros(1000).sum()

    taking.is_view, taking.namespace = False, "test"  # as an overload has them
    expected_bytes = workspaces.bytes_of(taking, (fake, 1.0), {})
    assert expected_bytes >= 4000
    for number in (1.0, 2.0):
        assert workspaces.bytes_of(taking, (fake, number), {}) == expected_bytes
    assert len(calls) == 2


def test_what_cannot_be_run_and_what_runs_nothing_take_nothing() -> None:
    workspaces = Workspaces(CPU)
    with FakeTensorMode():
        fake = torch.ones(3, 4)
    assert workspaces.bytes_of(torch.ops.aten.mm.default, (fake, fake), {}) == 0  # of shapes that do not fit
    assert workspaces.bytes_of(torch.ops.aten.t.default, (fake,), {}) == 0
    assert workspaces.bytes_of(torch.ops.aten.zeros.default, ([3],), {}) == 0
