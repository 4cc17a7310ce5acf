"""Planner `vdnn`: offload the inputs of layers while the layers run (Rhu et al. 2016)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from memfit.graph import Op
from memfit.papers.options import refuse
from memfit.papers.planners.copies import CopyPlanner, backward_start, choose, mark_copied, op_at_stops
from memfit.papers.planners.layers import is_convolution, layer_of_backward
from memfit.plan import Problem
from memfit.planners.engine.offloading.intervals import OffloadIntervals, find_offload_intervals, with_offloads
from memfit.planners.engine.results import keeping_schedule
from memfit.schedule import Schedule

_POLICIES: dict[str, tuple[Callable[[Op], bool], ...]] = {
    "all": (lambda _: True,),
    "conv": (is_convolution,),
    "dyn": (lambda _: False, is_convolution, lambda _: True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VDNN(CopyPlanner):
    """Copy the input X of each layer to the host while the layer's forward runs, and fetch it ahead in backward.

    Compute waits for the copy before the next layer, and X is released there. While the backward of layer n runs, the X
    of one layer is fetched: of the first one before n whose X is on the host, looking back as far as the first
    convolution that has none to fetch. Policy `all` offloads every X, `conv` those that convolutions read. Policy `dyn`
    takes the first that fits of no offloading, `conv` and `all`.

    Where the paper leaves a choice, or its framework differs:
    - A layer is a forward op (see `memfit.papers.planners.layers`). Its X is what it reads as the last forward op
      and a backward op reads again; residents and results that no forward op reads are none. If it has several, they
      are copied and fetched together.
    - An X that was not fetched ahead is fetched before its first reader, which waits for it.
    - Compute waits for a copy back when an op reads X, and not at the end of the layer in which the copy began: a
      schedule has no other wait for it.
    - If the host has no room for all, the first layers have precedence.
    - Kernels are given: there is no choice between algorithms of a convolution.

    Source: Rhu et al. 2016, "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network
    Design".
    """

    name: ClassVar[str] = "vdnn"
    source: ClassVar[str] = "Rhu et al. 2016"

    policy: str = field(
        default="dyn", metadata={"help": "all: every layer's input; conv: of convolutions; dyn: the first that fits"}
    )

    def schedules(self, problem: Problem) -> Iterator[Schedule]:
        """Yield the schedules of the policy; without a host or a link, the one that keeps everything."""
        if self.policy not in _POLICIES:
            refuse(self, "policy", f"one of {', '.join(_POLICIES)}")
        schedule = keeping_schedule(problem)
        if not problem.may_copy:
            yield schedule
            return
        for offloads in _POLICIES[self.policy]:
            yield _offloading(problem, find_offload_intervals(problem, schedule), offloads)


def _offloading(problem: Problem, found: OffloadIntervals, offloads: Callable[[Op], bool]) -> Schedule:
    """Return the schedule that offloads the inputs of the layers for which `offloads` says so."""
    rows, ops, op_at = found.intervals, problem.graph.ops, op_at_stops(found)
    split = backward_start(problem, found)
    inputs: dict[int, list[int]] = {}  # layer -> intervals of its X
    for number, row in enumerate(rows):
        layer = op_at[int(row["start"])]
        if layer is None or not row["start"] < split <= row["end"] or op_at[int(row["end"])] is None:
            continue
        if row["storage"] not in ops[layer].writes and offloads(ops[layer]):
            inputs.setdefault(layer, []).append(number)
    # The copy runs beside the layer, unless the layer changes its input.
    begun = np.maximum(rows["made"], rows["start"] - 1)
    chosen = set(choose(problem, found, [number for layer in sorted(inputs) for number in inputs[layer]], begun))
    inputs = {layer: kept for layer, numbers in inputs.items() if (kept := [n for n in numbers if n in chosen])}
    rows["left"] = rows["start"] + 1
    mark_copied(found)
    _fetch(problem, found, inputs)
    return with_offloads(found, begun)


def _fetch(problem: Problem, found: OffloadIntervals, inputs: dict[int, list[int]]) -> None:
    """Write when each input returns: beside the backward of a later layer, or right before its reader."""
    rows, op_at, layer_of = found.intervals, op_at_stops(found), layer_of_backward(problem.graph)
    rows["returned"] = rows["end"]
    waiting, begun = dict(inputs), set[int]()
    for stop in range(backward_start(problem, found), len(found.stops)):
        for layer, numbers in list(waiting.items()):
            if any(rows["end"][number] <= stop for number in numbers):
                del waiting[layer]
        op = op_at[stop]
        layer = None if op is None else layer_of.get(op)
        if layer is None or layer in begun:
            continue
        begun.add(layer)
        ahead = _before(problem, layer, waiting)
        if ahead is not None:
            rows["returned"][waiting.pop(ahead)] = stop


def _before(problem: Problem, layer: int, waiting: dict[int, list[int]]) -> int | None:
    """Return the layer whose input is fetched beside the backward of `layer`, if any."""
    for earlier in range(layer - 1, -1, -1):
        if earlier in waiting:
            return earlier
        if is_convolution(problem.graph.ops[earlier]):
            return None
    return None
