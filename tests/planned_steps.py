"""Small steps on which every planner of the papers must give the same bits: a CNN, a U-Net, a transformer, an LSTM."""

from __future__ import annotations

from steps import make_pair

from memfit import PlannedStep, TrainingStep
from memfit.doors.step import fit_step
from memfit.errors import InfeasibleBudgetError
from memfit.planning import Settings
from memfit.workloads import build

NAMES = ("cnn", "unet", "transformer", "lstm")
_PAIRS = {"cnn": "conv", "transformer": "language", "lstm": "recurrent"}
_ROOM = 1.02  # op times are measured anew, and a planner that goes by them may need a little more


def small_step(name: str) -> TrainingStep:
    """Return the step; dropout in the CNN and in the transformer draws from the generator."""
    if name == "unet":
        return build("unet", batch=2, size=32, width=4, levels=3)
    return make_pair(_PAIRS[name])[0]


def run_at_least_memory(name: str, planner: str, *, room: float = _ROOM, **options: object) -> PlannedStep:
    """Return the step planned at `room` times the least budget that `planner` reaches, verified against eager."""
    planned = plan_at_least_memory(small_step(name), planner, room=room, **options)
    planned.verify()
    return planned


def plan_at_least_memory(step: TrainingStep, planner: str, *, room: float = _ROOM, **options: object) -> PlannedStep:
    """Return `step` planned at `room` times the least budget that `planner` reaches."""
    try:
        fit_step(step, Settings(budget=1, planner=planner, options=options))
    except InfeasibleBudgetError as error:
        assert error.least_budget_found_bytes is not None
        budget = int(error.least_budget_found_bytes * room)
    planned = fit_step(step, Settings(budget=budget, planner=planner, options=options))
    assert isinstance(planned, PlannedStep)
    return planned


def computed_ops(planned: PlannedStep) -> int:
    """Return how many ops a step's plan computes, recomputations included."""
    return sum(line.startswith("compute") for line in planned.plan.schedule.lines())
