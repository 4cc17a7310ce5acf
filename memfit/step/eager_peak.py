"""The peak of a step as the user wrote it, which percentages of a budget refer to."""

from __future__ import annotations

import logging
from functools import partial

from memfit.capture.build import Captured
from memfit.capture.finish import finish, with_real_results
from memfit.capture.training_step import TrainingStep
from memfit.capture.whole_step import capture_with_checkpoints
from memfit.cost.measurement import measure
from memfit.cost.observations import Corrections
from memfit.device import Device
from memfit.errors import MemfitError
from memfit.graph import Graph
from memfit.planners.engine.results import unplanned_peak_bytes
from memfit.planning import Settings

_log = logging.getLogger(__name__)


def with_eager_peak(
    settings: Settings, step: TrainingStep, captured: Captured, device: Device, *, is_here: bool = True
) -> Settings:
    """Return settings whose percentages are of the step's own peak, its regions of `torch.utils.checkpoint` included.

    The step is captured once more, with these regions as eager runs them. A step without them, or a budget in bytes,
    leaves the settings as they are.

    Args:
        settings: the budget, and how a plan is searched.
        step: the user's step.
        captured: its capture.
        device: what the plan is for.
        is_here: whether the step's ops can be measured on it.
    """
    if settings.is_in_bytes or captured.checkpoints == 0:
        return settings
    try:
        graph = with_real_results(partial(_measured, step)) if is_here else capture_with_checkpoints(step).graph
    except MemfitError as error:
        _log.warning("100%% is the peak without the %d checkpointed regions: %s", captured.checkpoints, error)
        return settings
    return settings.of_whole(unplanned_peak_bytes(graph, device))


def _measured(step: TrainingStep, corrections: Corrections) -> Graph:
    captured = finish(capture_with_checkpoints(step, corrections))
    return measure(captured.graph, captured.binding, captured.observed)
