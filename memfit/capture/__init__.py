"""Capture: from torch to a Graph. The only room that reads torch.fx, AOTAutograd and dispatch traces.

    captured = capture(step)      # the whole step: forward, loss, backward, update
    captured.graph                # what planners see
    captured.binding              # what cost and runtime need to call the ops

`memfit.capture.joint` makes the same from the joint graph that AOTAutograd hands to a torch.compile backend.
"""

from __future__ import annotations

from memfit.capture.build import Captured
from memfit.capture.training_step import TrainingStep
from memfit.capture.whole_step import capture_whole_step as capture

__all__ = ["Captured", "TrainingStep", "capture"]
