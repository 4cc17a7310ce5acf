"""The points of the live-memory chart: a run in bins, each with the exact values of its largest instruction."""

from __future__ import annotations

from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from memfit.graph import Phase
from memfit.report.live import Layer, Run
from memfit.schedule import Code

MOST_POINTS = 1500  # a chart is about 1,000 pixels wide
_MOST_STRETCHES = 2000  # in a strip; closer ones are drawn as one


class ChartPoints(TypedDict):
    """Live bytes of one run as columns. A point is valid from its `seconds` (or `step`) to those of the next one.

    Attributes:
        seconds, step: where each bin begins, in time and in computations so far.
        total, layers: bytes at the largest instruction of each bin.
        ops, recomputed: the op that runs there, and whether it is recomputed there.
        binned: instructions in each bin.
        peak: the number of the point with the peak.
        end: of the step, in seconds and in computations.
        phases: spans (name, first second, last second, first step, last step).
        strips: name -> stretches (first second, last second, first step, last step).
    """

    seconds: list[float]
    step: list[int]
    total: list[int]
    layers: dict[str, list[int]]
    ops: list[int | None]
    recomputed: list[bool]
    binned: list[int]
    peak: int
    end: tuple[float, int]
    phases: list[tuple[str, float, float, int, int]]
    strips: dict[str, list[tuple[float, float, float, float]]]


def chart_points(run: Run, outside_bytes: int = 0, most_points: int = MOST_POINTS) -> ChartPoints:
    """Return the run's live bytes at `most_points` instructions or fewer: at the largest of each bin.

    Args:
        run: a schedule, simulated.
        outside_bytes: on the device for the whole step beside the graph; counted in every total.
        most_points: 1 or more.
    """
    computed = np.concatenate(([0], np.cumsum(run.schedule.codes == Code.COMPUTE)))
    # Only these instructions add bytes: the peak of any stretch is at one of them.
    growing = np.flatnonzero(np.isin(run.schedule.codes, (Code.COMPUTE, Code.PREFETCH, Code.BOUNDARY)))
    totals = run.timeline.device_bytes + outside_bytes
    width = -(-len(growing) // most_points) or 1
    bins = [growing[first : first + width] for first in range(0, len(growing), width)]
    largest = np.array([members[np.argmax(totals[members])] for members in bins], np.int64)
    firsts = np.array([members[0] for members in bins], np.int64)
    layers = {layer: column + (outside_bytes if layer == Layer.OUTSIDE else 0) for layer, column in run.layers.items()}
    ops = [run.op_at(position) for position in largest.tolist()]
    return ChartPoints(
        seconds=run.clock_seconds[firsts].round(9).tolist(),
        step=computed[firsts].tolist(),
        total=totals[largest].tolist(),
        layers={layer.value: column[largest].tolist() for layer, column in layers.items() if column[largest].any()},
        ops=ops,
        recomputed=[
            op is not None and position in run.computations[op][1:]
            for op, position in zip(ops, largest.tolist(), strict=True)
        ],
        binned=[len(members) for members in bins],
        peak=int(np.argmax(totals[largest])) if len(bins) else 0,
        end=(run.timeline.makespan_seconds, int(computed[-1])),
        phases=_phases(run, computed),
        strips=_strips(run, computed),
    )


def _phases(run: Run, computed: NDArray[np.int64]) -> list[tuple[str, float, float, int, int]]:
    """Return the spans of forward, backward and update, by the first computations of ops."""
    first: dict[Phase, int] = {}
    last_backward = -1
    for position, op in sorted((positions[0], op) for op, positions in enumerate(run.computations) if positions):
        phase = run.graph.ops[op].phase
        first.setdefault(phase, position)
        last_backward = position if phase == Phase.BACKWARD else last_backward
    if first.get(Phase.UPDATE, last_backward) < last_backward:
        mixed = min(first[Phase.BACKWARD], first[Phase.UPDATE])
        return _spans(run, computed, [("forward", 0), ("backward and update", mixed)])
    later = [(phase.value, first[phase]) for phase in (Phase.BACKWARD, Phase.UPDATE) if phase in first]
    return _spans(run, computed, [("forward", 0), *later])


def _spans(
    run: Run, computed: NDArray[np.int64], starts: list[tuple[str, int]]
) -> list[tuple[str, float, float, int, int]]:
    ends = [position for _, position in starts[1:]] + [len(run.schedule)]
    clock = run.clock_seconds
    spans = [
        (name, float(clock[first]), float(clock[last]), int(computed[first]), int(computed[last]))
        for (name, first), last in zip(starts, ends, strict=True)
    ]
    return [span for span in spans if span[3] < span[4]]


def _strips(run: Run, computed: NDArray[np.int64]) -> dict[str, list[tuple[float, float, float, float]]]:
    """Return the stretches of recomputations, copies and collectives."""
    recomputations = sorted(position for positions in run.computations for position in positions[1:])
    chosen = {
        "recomputed": recomputations,
        "to host": np.flatnonzero(run.schedule.codes == Code.OFFLOAD).tolist(),
        "from host": np.flatnonzero(run.schedule.codes == Code.PREFETCH).tolist(),
        "between ranks": [p for op in run.graph.ops if op.group is not None for p in run.computations[op.id]],
    }
    starts, ends = run.timeline.start_seconds, run.timeline.end_seconds
    strips: dict[str, list[tuple[float, float, float, float]]] = {}
    for name, positions in chosen.items():
        stretches = [(float(starts[p]), float(ends[p]), float(computed[p]), float(computed[p + 1])) for p in positions]
        if stretches:
            strips[name] = _merged(stretches, run.timeline.makespan_seconds, int(computed[-1]))
    return strips


def _merged(
    stretches: list[tuple[float, float, float, float]], seconds: float, steps: int
) -> list[tuple[float, float, float, float]]:
    """Return the stretches, joined where the space between two is too small to be seen."""
    merged = [stretches[0]]
    for first, last, first_step, last_step in stretches[1:]:
        previous = merged[-1]
        near = (first - previous[1]) * _MOST_STRETCHES <= seconds
        if near and (first_step - previous[3]) * _MOST_STRETCHES <= steps:
            merged[-1] = (previous[0], last, previous[2], last_step)
        else:
            merged.append((first, last, first_step, last_step))
    return merged
