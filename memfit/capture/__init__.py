"""Capture: from torch to a Graph. The only room that reads torch.fx, AOTAutograd and dispatch traces.

    captured = capture(step)      # the whole step: forward, loss, backward, update, on fake tensors
    captured = finish(captured)   # real bytes and in-place reuse, as observed on the device at hand
    captured.graph                # for planners; its structure is final
    captured.binding              # the calls, for cost and runtime

`memfit.capture.joint` captures the joint graph that AOTAutograd gives to a torch.compile backend.
"""

from __future__ import annotations

from memfit.capture.build import Captured
from memfit.capture.finish import finish, with_real_results
from memfit.capture.guards import Guards
from memfit.capture.training_step import TrainingStep
from memfit.capture.whole_step import capture_whole_step as capture

__all__ = ["Captured", "Guards", "TrainingStep", "capture", "finish", "with_real_results"]
