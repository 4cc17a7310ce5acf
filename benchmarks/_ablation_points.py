"""The points of the ablation: graphs with their budgets, and traces of blocks to pack."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from _made_traces import made_trace
from _measure import EIGHT
from _process import fresh_cache
from _training_chains import training_chain
from plan_shared_graphs import GB, GIB, GRAPHS

from memfit.capture import capture
from memfit.capture.finish import finish_as_observed
from memfit.cost.measurement import measure
from memfit.cost.observe import observe
from memfit.device import GENERIC, Device
from memfit.graph import Graph
from memfit.packing import Blocks
from memfit.packing.exact.exact import MOST_BLOCKS
from memfit.packing.from_schedule import blocks_of
from memfit.packing.trace_file import read_trace
from memfit.plan import Problem
from memfit.planners.engine.bounds.bounds import least_budget_bound
from memfit.planners.engine.results import unplanned_peak_bytes, unplanned_schedule
from memfit.simulate.in_place import in_place
from memfit.workloads import build

TRACES = GRAPHS.parent / "packing"
WORKLOAD_DEVICE = Device(name="cpu", alignment_bytes=64, source="c10's alignment on a CPU, no host link")
SHARED_BUDGETS = {
    "monet_unet_11_checkmate": (5 * GIB, 6 * GIB, 7 * GIB),
    "monet_resnet50_184_checkmate": (5 * GIB, 6 * GIB, 7 * GIB),
    "dtr_inceptionv4_64_functional": (4 * GB, 6 * GB, 8 * GB),
    "dtr_tv_densenet121_84_functional": (4 * GB, 6 * GB, 8 * GB),
}
WORKLOAD_SHARE = 0.6  # of the unplanned peak; workloads whose proved least is above it take `FAR` instead
CHAIN_LAYERS = (9, 13, 17, 21)  # of training chains of 20 to 50 ops
LONG_TIMES, TIMED_SECONDS = 5, 2.0
NEAR, FAR = 0.1, 0.25  # of the way from the proved least budget to the unplanned peak
FEW = ("A", "B", "C", "D", "E", "K")  # instances of up to 600 blocks
OPEN = ("D", "E", "K")  # those that take long
INSTANCES = (*FEW, "resnet50")
MANY = ("lstm",)
MADE_BLOCKS = (1_000, 10_000, 30_000)
UNPLANNED = ("densenet121", "lstm")  # workloads whose unplanned steps are packed


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPoint:
    """A graph within one of its budgets: bytes, or `share` or `near` for a workload.

    A number in place of a graph's name is the seed of a training chain of up to 64 ops, planned at half of the way
    from its proved least budget to its unplanned peak. A search has `times` the usual moves, or else so many processor
    `seconds`.
    """

    graph: str | int
    budget: int | str
    times: int = 1
    seconds: float | None = None

    @property
    def name(self) -> str:
        """The point's name in stored results."""
        budget = self.budget if isinstance(self.budget, str) else f"{self.budget / 1e9:.2f} GB"
        graph = f"chain {self.graph}" if isinstance(self.graph, int) else self.graph
        longer = f", {self.seconds:g} s" if self.seconds else f", {self.times} times" if self.times > 1 else ""
        return f"{graph}, {budget}{longer}"

    @property
    def is_small(self) -> bool:
        """Whether planner `auto` tries to prove an optimum in one order of ops."""
        return isinstance(self.graph, int)

    def problem(self, folder: Path, **how: Any) -> Problem:
        """Return the planning problem; `folder` holds the graphs of the workloads, `how` is the rest of the problem."""
        if isinstance(self.graph, int):
            graph, device = training_chain(CHAIN_LAYERS[self.graph], self.graph), GENERIC
        elif self.graph in EIGHT:
            graph, device = _graph_at(folder / f"{self.graph}.graph.json.gz"), WORKLOAD_DEVICE
        else:
            graph, device = _graph_at(GRAPHS / f"{self.graph}.graph.json.gz"), GENERIC
        return Problem(graph=graph, device=device, budget_bytes=self.budget_bytes(graph, device), **how)

    def budget_bytes(self, graph: Graph, device: Device) -> int:
        """Return the bytes of the budget."""
        if isinstance(self.budget, int):
            return self.budget
        if self.graph not in _RANGES:
            peak_bytes = unplanned_peak_bytes(graph, device)
            least_bytes, _ = least_budget_bound(Problem(graph=graph, device=device, budget_bytes=peak_bytes))
            _RANGES[self.graph] = least_bytes, peak_bytes
        return _budget(self.budget, *_RANGES[self.graph])


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPoint:
    """A trace of blocks: an instance, the unplanned step of a workload, or a number of made blocks."""

    trace: str | int
    is_long: bool = False

    @property
    def size(self) -> str:
        """How many blocks there are: few, up to 600; many, too many for branch and bound; or some."""
        if isinstance(self.trace, int):
            return "many" if self.trace > MOST_BLOCKS else "some"
        return "few" if self.trace in FEW else "many" if self.trace in MANY else "some"

    @property
    def name(self) -> str:
        """The point's name in stored results."""
        if isinstance(self.trace, int):
            return f"{self.trace:,} made blocks"
        name = f"unplanned {self.trace}" if self.trace in UNPLANNED else f"trace {self.trace}"
        return f"{name}, long" if self.is_long else name

    @cache  # noqa: B019
    def blocks(self, folder: Path) -> Blocks:
        """Return the blocks to pack; `folder` holds the graphs of the workloads."""
        if isinstance(self.trace, int):
            return made_trace(self.trace, seed=0)
        if self.trace in UNPLANNED:
            graph = _graph_at(folder / f"{self.trace}.graph.json.gz")
            problem = Problem(graph=graph, device=WORKLOAD_DEVICE, budget_bytes=1 << 62)
            return blocks_of(graph, in_place(graph, unplanned_schedule(problem)), WORKLOAD_DEVICE).blocks
        files = (TRACES / f"{self.trace}.csv", TRACES / f"{self.trace}.1048576.csv")
        return read_trace(next(file for file in files if file.exists()))


def plan_points() -> list[PlanPoint]:
    """Return the points of the searches: three budgets of each shared graph, two of each workload."""
    shared = [PlanPoint(graph=graph, budget=budget) for graph, budgets in SHARED_BUDGETS.items() for budget in budgets]
    return shared + [PlanPoint(graph=name, budget=budget) for name in EIGHT for budget in ("share", "near")]


def long_points() -> list[PlanPoint]:
    """Return points that longer searches get further at, with several times the moves."""
    shared = [
        ("monet_unet_11_checkmate", 5 * GIB),
        ("monet_unet_11_checkmate", 6 * GIB),
        ("monet_resnet50_184_checkmate", 5 * GIB),
        ("dtr_tv_densenet121_84_functional", 4 * GB),
    ]
    chosen = [*shared, ("unet", "near"), ("resnet50", "near")]
    return [PlanPoint(graph=graph, budget=budget, times=LONG_TIMES) for graph, budget in chosen]


def timed_points() -> list[PlanPoint]:
    """Return points of equal processor seconds: the tightest budget of each graph but the longest one."""
    points = [
        PlanPoint(graph=graph, budget=budgets[0], seconds=TIMED_SECONDS) for graph, budgets in SHARED_BUDGETS.items()
    ]
    names = [name for name in EIGHT if name not in ("lstm", "vgg16")]
    return points + [PlanPoint(graph=name, budget="share", seconds=TIMED_SECONDS) for name in names]


def small_points() -> list[PlanPoint]:
    """Return graphs on which planner `auto` looks for a proof in one order of ops."""
    return [PlanPoint(graph=number, budget="half") for number in range(len(CHAIN_LAYERS))]


def pack_points() -> list[PackPoint]:
    """Return the traces."""
    points = [PackPoint(trace=trace) for trace in (*INSTANCES, *UNPLANNED, *MADE_BLOCKS)]
    return points + [PackPoint(trace=trace, is_long=True) for trace in OPEN]


def capture_missing(folder: Path, names: Collection[object], say: Callable[[str], None]) -> None:
    """Capture the workloads among `names` that `folder` lacks; one thread's processor seconds time their ops."""
    missing = [name for name in EIGHT if name in names and not (folder / f"{name}.graph.json.gz").exists()]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the processor seconds of one thread are those of the op, whatever else the machine does
    for name in missing:
        say(f"capturing {name}")
        captured = capture(build(name))
        with fresh_cache():
            observed = observe(captured.graph, captured.binding, clock=time.thread_time)
        finished = finish_as_observed(captured, observed)
        graph = measure(finished.graph, finished.binding, finished.observed)
        graph.save(folder / f"{name}.graph.json.gz")
    torch.set_num_threads(threads)


_RANGES: dict[str | int, tuple[int, int]] = {}
"""Least budget and unplanned peak, by graph: the search for the first takes a while on long graphs."""


def _budget(kind: str, least_bytes: int, peak_bytes: int) -> int:
    """Return the bytes of a kind of budget."""
    room_bytes = peak_bytes - least_bytes
    if kind == "near":
        return least_bytes + int(NEAR * room_bytes)
    if kind == "half":
        return least_bytes + room_bytes // 2
    share_bytes = int(WORKLOAD_SHARE * peak_bytes)
    return share_bytes if share_bytes > least_bytes + NEAR * room_bytes else least_bytes + int(FAR * room_bytes)


@cache
def _graph_at(path: Path) -> Graph:
    return Graph.load(path)
