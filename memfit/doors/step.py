"""A TrainingStep planned by Settings: the door that `fit`, `fit_function` and the commands share."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from memfit.capture import TrainingStep
from memfit.capture.placement import step_device
from memfit.checkpointing.step import CheckpointedStep
from memfit.compile_ahead import compile_simulator
from memfit.cost.calibration import card_of
from memfit.errors import BY_CHECKPOINT, CaptureError, GraphBreakError, MemfitError, NoGraphError, UnsupportedStepError
from memfit.plan import Plan
from memfit.planning import Settings
from memfit.step.planned_step import PlannedStep
from memfit.system.instruments import LIBRARY
from memfit.system.recorder import empty_cache


def fit_step(
    step: TrainingStep, settings: Settings, *, plan: Plan | Path | str | None = None, verify: bool = False
) -> PlannedStep | CheckpointedStep:
    """Plan a TrainingStep by Settings, as `fit` does.

    Args:
        step: the step.
        settings: the budget, and how plans are searched.
        plan: a plan made before (or its file), used instead of searching.
        verify: compare one planned with one eager step, and raise at the first tensor that differs.

    Raises:
        MemfitError: as `fit`.
    """
    settings = settings.on_card(lambda: card_of(step_device(step.model, step.batch)))
    given = plan if plan is None or isinstance(plan, Plan) else Plan.load(plan)
    if step_device(step.model, step.batch).type == "cpu" and LIBRARY.build_beside():  # by another program, meanwhile
        settings.on_stage("compiling what counts memory, once for this machine")
        compile_simulator()
    try:
        planned = PlannedStep(step, settings, given)
    except (CaptureError, NoGraphError) as broken:
        is_without_graph = isinstance(broken, GraphBreakError | NoGraphError)  # or the step's code itself raised
        if given is not None or not step.has_backward or (step.across is not None and not is_without_graph):
            raise
        if step.across is not None:
            raise UnsupportedStepError(f"{broken}; across ranks {BY_CHECKPOINT}") from broken
        planned = _checkpointed(step, settings, broken)
    if isinstance(planned, CheckpointedStep):
        gc.collect()  # cycles of the capture that was given up hold the example batch
    if verify:
        settings.on_stage("verifying against eager")
        planned.verify()
    if settings.hard and isinstance(planned, PlannedStep):
        settings.on_stage("running steps until two in a row keep the budget")
        planned.prove()
    empty_cache(planned.device)  # of what capture and measuring left: it would count as taken by the first step
    return planned


def _checkpointed(step: TrainingStep, settings: Settings, broken: CaptureError | NoGraphError) -> CheckpointedStep:
    """Return a step that is no graph under checkpoints; what eager cannot run either is refused as it was captured."""
    try:
        return CheckpointedStep(step, settings, broken)
    except (MemfitError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if isinstance(broken, GraphBreakError | NoGraphError):  # the step's code itself raised nothing
            raise
        raise broken from error
