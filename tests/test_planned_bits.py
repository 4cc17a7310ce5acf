"""Every planner there is, on a CNN, a U-Net, a transformer with dropout and an LSTM: the step gives eager's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chains import counted
from planned_steps import NAMES, computed_ops, run_at_least_memory, small_step

import memfit
from memfit.planners import PLANNERS
from memfit.planning import Settings
from memfit.runtime.fitting import fit_step

_MOVES = 50_000  # so that the plan does not depend on how busy the machine is
_SEARCHED_ROOM = 1.2  # so few moves may not find the least memory twice
_MARKED = {"cnn": "stem", "unet": "downs", "transformer": "encoder", "lstm": "cell"}
# Of themselves, or without a host to copy to.
_COMPUTES_ONCE = {(planner, name) for planner in ("none", "mirror", "vdnn", "tflms", "autoswap") for name in NAMES}
# On this small network nothing that is cheap is worth dropping: activations are written over.
_COMPUTES_ONCE.add(("drop_cheap", "cnn"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("planner", PLANNERS)
def test_plans_at_the_least_memory_run_with_the_same_bits(planner: str, name: str) -> None:
    few = counted(planner, _MOVES, episodes=8)
    searched: dict[str, Any] = {"room": _SEARCHED_ROOM, **few} if "iterations" in few else few
    planned = run_at_least_memory(name, planner, **searched)
    assert (computed_ops(planned) == len(planned.plan.graph.ops)) == ((planner, name) in _COMPUTES_ONCE)


class Noisy(torch.nn.Module):
    """Draws with torch.rand, whose call names its device."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(64)) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x * weight) * torch.rand(x.shape, device=x.device)
        return x


def test_noise_drawn_on_a_named_device_is_drawn_again_with_the_same_bits() -> None:
    model, batch = Noisy(), torch.randn(512, 64)
    mark = memfit.mirror(model, 2, of=model)
    planned = memfit.fit(
        model,
        lambda net, rows: net(rows).square().mean(),
        batch,
        budget="1GiB",
        planner="mirror",
        options={"mirror": mark},
    )
    again = planned.plan.schedule.lines()
    draws = [op.id for op in planned.plan.graph.ops if op.target == "aten.rand.default"]
    assert len(draws) == 4 and any(again.count(f"compute {op}") > 1 for op in draws)
    planned.verify()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("planner", ["mirror", "sublinear", "division_tree", "search"])
def test_marked_modules_are_computed_again_with_the_same_bits(planner: str, name: str) -> None:
    step = small_step(name)
    mark = memfit.mirror(step.model.get_submodule(_MARKED[name]), 2, of=step.model)
    options = {"mirror": mark, **counted(planner, _MOVES)}
    planned = fit_step(step, Settings(budget="1GiB", planner=planner, options=options))
    again = [line for line in planned.plan.schedule.lines() if line.startswith("compute")]
    marked = mark.counts(planned.plan.graph)
    assert any(again.count(f"compute {op}") > 1 for op in marked)
    planned.verify()
