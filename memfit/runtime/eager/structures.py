"""Structures of passes that come again: planned in the background, and recognised while a pass runs."""

from __future__ import annotations

import threading
from collections import deque

import msgspec
import torch

from memfit.device import Device
from memfit.errors import MemfitError
from memfit.plan import Progress
from memfit.planners import make_planner
from memfit.planning import Settings, make_problem
from memfit.runtime.eager.host import Host
from memfit.runtime.eager.pass_graph import Decisions, decisions_of, graph_of
from memfit.runtime.eager.trace import Trace
from memfit.system.at_exit import wait_at_exit
from memfit.system.recorder import CPU_ALIGNMENT_BYTES, CUDA_ALIGNMENT_BYTES

MOST_CALLS = 20_000  # of a pass that is planned
_MOST_STRUCTURES = 64  # that are remembered
_RECENT = 8  # passes: a structure that came in one of them is expected to come again
_TRIES = 3  # passes by plan before they are compared with those by policy
_NO_WORSE = 1.1  # times the policy's seconds of calls made again; what other processes do shows in such short times
_TIME_LIMIT_SECONDS = 5.0
_PAID_SECONDS = 1.0  # calls made again in passes of a structure before a search begins, which takes about as long
_STOP_SECONDS = 2.0  # that are waited for a thread to end
_SHARE = 0.98  # of what is left for a pass is planned for: variables hold contents longer than the graph says


class Structure:
    """The calls of a pass, as the numbers of their needs.

    Attributes:
        numbers: of the calls, in order.
        passes: how often it came.
        last_pass: when it came last.
        decisions: of a plan.
        is_settled: whether no other plan is made: there is one, or none that helps.
        is_tight: whether calls were made again in it the last time.
        again_seconds: that calls made again have taken in all its passes.
        next: the structure of the pass that followed the last time.
    """

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self.numbers = numbers
        self.passes = self.last_pass = 0
        self.decisions: Decisions | None = None
        self.is_settled = self.is_tight = False
        self.again_seconds = 0.0
        self.next: Structure | None = None
        self._by_policy: deque[float] = deque(maxlen=_TRIES)
        self._by_plan: deque[float] = deque(maxlen=_TRIES)

    def ran(self, again_seconds: float, *, by_plan: bool) -> None:
        """Note what the calls made again took in a pass; a plan that takes longer than the policy is dropped."""
        self.is_tight = again_seconds > 0
        self.again_seconds += again_seconds
        (self._by_plan if by_plan else self._by_policy).append(again_seconds)
        is_tried = by_plan and len(self._by_plan) == _TRIES and len(self._by_policy) > 0
        if is_tried and min(self._by_plan) > _NO_WORSE * min(self._by_policy):
            self.decisions = None


class Structures:
    """The structures that came lately, and their plans.

    Args:
        device: that the passes run on.
        budget_bytes: of the plans.
        host: where contents are copied to; None if that is nowhere.
    """

    def __init__(self, device: torch.device, budget_bytes: int, host: Host | None) -> None:
        alignment_bytes = CUDA_ALIGNMENT_BYTES if device.type == "cuda" else CPU_ALIGNMENT_BYTES
        rates = {} if host is None else msgspec.structs.asdict(host.rates)
        self._device = Device(name=f"eager {device.type}", alignment_bytes=alignment_bytes, **rates)
        self._budget_bytes, self._host_budget_bytes = budget_bytes, 0 if host is None else host.budget_bytes
        self._known: dict[tuple[int, ...], Structure] = {}
        self._last: Structure | None = None
        self._passes = 0
        self._planned: tuple[Structure, threading.Thread] | None = None
        self._is_stopped = False

    @property
    def has_plans(self) -> bool:
        """Whether any structure can be followed."""
        return any(structure.decisions is not None for structure in self._known.values())

    @property
    def wants_trace(self) -> bool:
        """Whether a pass is to be written down: one that came twice, and lately, has paid for a plan and has none."""
        return self._planned is None and any(map(self._wants_plan, self._known.values()))

    def expected(self) -> Structure | None:
        """Return the structure that the next pass has most likely, if it has a plan."""
        after = self._last.next if self._last is not None else None
        if after is not None:
            return after if after.decisions is not None else None
        planned = [structure for structure in self._known.values() if structure.decisions is not None]
        return max(planned, key=lambda structure: structure.last_pass, default=None)

    def beginning_with(self, numbers: list[int]) -> Structure | None:
        """Return a structure with a plan whose first calls are these."""
        begun = tuple(numbers)
        for structure in self._known.values():
            if structure.decisions is not None and structure.numbers[: len(begun)] == begun:
                return structure
        return None

    def ended(self, numbers: list[int], again_seconds: float, *, by_plan: bool, trace: Trace | None) -> None:
        """Note the calls of a whole pass.

        Args:
            numbers: of the needs of its calls.
            again_seconds: that the calls took that were made again.
            by_plan: whether it followed a plan to the end.
            trace: of the pass, if it was written down.
        """
        self._passes += 1
        if self._planned is not None and not self._planned[1].is_alive():
            self._planned = None
        key = tuple(numbers)
        structure = self._known.pop(key, None) or Structure(key)
        self._known[key] = structure  # the last one that came stands last
        if len(self._known) > _MOST_STRUCTURES:
            del self._known[next(iter(self._known))]
        structure.passes += 1
        structure.last_pass = self._passes
        structure.ran(again_seconds, by_plan=by_plan)
        if self._last is not None:
            self._last.next = structure
        self._last = structure
        if trace is not None and self._planned is None and self._wants_plan(structure):
            self._plan(structure, trace)

    def stop(self) -> None:
        """End the planning that runs; a thread that is compiling ends later, and its plan is not used."""
        self._is_stopped = True
        if self._planned is not None:
            self._planned[1].join(_STOP_SECONDS)
            self._planned = None

    def _wants_plan(self, structure: Structure) -> bool:
        is_recent = structure.passes >= 2 and self._passes - structure.last_pass < _RECENT
        is_paid = structure.again_seconds >= _PAID_SECONDS
        return is_recent and is_paid and structure.is_tight and not structure.is_settled

    def _plan(self, structure: Structure, trace: Trace) -> None:
        structure.is_settled = True
        thread = threading.Thread(target=self._search, args=(structure, trace), name="memfit-eager", daemon=True)
        self._planned = (structure, thread)
        thread.start()
        wait_at_exit(thread)

    def _search(self, structure: Structure, trace: Trace) -> None:
        try:
            made = graph_of(trace, self._device)
            settings = Settings(
                budget=made.bytes_outside + int(_SHARE * (self._budget_bytes - made.bytes_outside)),
                host_budget_bytes=self._host_budget_bytes,
                planner="offload",  # which is the search where there is no link
                options={"threads": 1, "without": "peak_reducing_order"},  # the loop's order stays as it is
                time_limit_seconds=_TIME_LIMIT_SECONDS,
                progress=self._go_on,
            )
            problem = make_problem(made.graph, self._device, settings, made.bytes_outside)
            # measured seconds differ each time: a plan that is kept on disk would never be found again
            plan = make_planner(settings.planner, **settings.options).plan(problem).plan
            if plan is not None and not self._is_stopped:
                structure.decisions = decisions_of(made, plan.schedule)
        except (MemfitError, KeyboardInterrupt):
            return  # the policy goes on

    def _go_on(self, _progress: Progress) -> None:
        if self._is_stopped:
            raise KeyboardInterrupt  # upon which a planner returns at once
