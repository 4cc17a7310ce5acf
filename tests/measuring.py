"""Graphs made by hand, finished and measured as captured ones are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memfit.binding import Binding
from memfit.capture import Captured
from memfit.capture.finish import finish_as_observed
from memfit.cost import single_op
from memfit.cost.link import Amounts
from memfit.cost.measurement import measure
from memfit.cost.observe import observe
from memfit.graph import Graph

# Of so little data the rates are not right, but the way to them is the same.
QUICK = Amounts(
    smallest_product=16,
    largest_product=64,
    copy_bytes=1 << 16,
    disk_copy_bytes=1 << 16,
    turn_seconds=0.0,
    sum_bytes=1 << 14,
)


def finished(graph: Graph, binding: Binding, **how: Any) -> Captured:
    """Observe the ops (`how` goes to `observe`) and return the finished capture."""
    return finish_as_observed(Captured(graph=graph, binding=binding), observe(graph, binding, **how))


def measured(graph: Graph, binding: Binding, **how: Any) -> Graph:
    """Return the finished graph with seconds and workspaces."""
    captured = finished(graph, binding, **how)
    return measure(captured.graph, captured.binding, captured.observed)


def set_free_bytes(monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    """Let the device have this much memory free while ops are observed."""

    def free_bytes(_device: torch.device) -> int:
        return size_bytes

    monkeypatch.setattr(single_op, "free_bytes", free_bytes)
