"""Inductor's kernels within a budget: the schedule of a plan becomes the two halves that Inductor compiles.

What Inductor takes is seen in the code that it generates, before any of it is built or runs
(`memfit.kernels.rehearse`). If its own halves fit, they are used; else its lean halves if they do, in which the
backward half computes anew all that takes no kernel of its own there. Else the halves are made from a plan of the lean
halves together, which counts chains of ops that Inductor makes one kernel of as one op: plans are made for more or
fewer bytes, until their code takes nearly what is left of the budget, and never more. Lean or planned, they then race
in the first steps against the largest halves that torch's own activation memory budget makes, that keep less, and fit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch.fx import GraphModule

from memfit.capture import Captured, with_real_results
from memfit.capture.joint import capture_joint, is_tangent
from memfit.cost.observations import Corrections
from memfit.cost.workspaces import Workspaces
from memfit.errors import MemfitError, NoPlanError, TimeLimitError, UnsupportedStepError
from memfit.graph import Graph
from memfit.kernels.absent_gradients import with_zeros_for_absent
from memfit.kernels.chains import with_chains
from memfit.kernels.joint_graphs import (
    is_fusible,
    leave_out_overwritten,
    refuse_unplannable,
    saved_bytes,
    survey,
)
from memfit.kernels.node_halves import copying_of, node_halves, rejoined
from memfit.kernels.race import Clock, Compiled, Race
from memfit.kernels.rehearse import rehearse
from memfit.memory.fit_by import Fitted, SamePlanError, Sizes, fit_by
from memfit.memory.host.store import HostStore, Reserved
from memfit.plan import Plan
from memfit.schedule import Code
from memfit.system.budget import format_bytes
from memfit.torch_private.inductor import LEAN, InductorHalf, ModulePair, compiled_by_inductor
from memfit.torch_private.tensors import fake_mode_of, real_tensors, tensors_in

_log = logging.getLogger("memfit")
_NEAR = 0.03  # of the budget: what is expected to take as much more may still fit
_MOST_TORCHS = 2  # compilations of torch's halves
_MOST_COMPILATIONS = 4  # of the halves of plans
Half = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """What the caller knows.

    Attributes:
        with_costs: returns a capture with the costs of its ops.
        left_bytes: returns what the budget leaves for a graph.
        between_bytes: returns the most that is outside of the graph between its halves.
        plan: returns a plan of a graph within some bytes; without bytes, one that leaves the graph as it is.
        run: runs a half, given the compiled half, its arguments, and whether it is the backward half.
        held_bytes: returns by how much more is live when the backward half begins than when the forward half has
            ended, as steps have shown it; None before the first.
        headroom_bytes: of the budget besides `left_bytes`, for temporary allocations between steps. Inductor's own
            halves may take it, and those from a plan half of it.
        decided: called with what has won the race, if there is one.
        host: has room for copies to the host.
    """

    with_costs: Callable[[Captured], Captured]
    left_bytes: Callable[[Graph], int]
    between_bytes: Callable[[], int]
    plan: Callable[[Graph, int | None], Plan]
    run: Callable[[Half, list[Any], bool], Any]
    held_bytes: Callable[[], int | None]
    headroom_bytes: int
    decided: Callable[[Compiled], None]
    host: HostStore

    def fits(self, own: Compiled) -> bool:
        """Return whether halves of Inductor's own fit."""
        return own.peak_bytes <= own.left_bytes + self.headroom_bytes


def compile_within(
    module: GraphModule,
    inputs: Sequence[Any],
    *,
    device: torch.device,
    planning: Planning,
    unplanned: dict[float | None, Any],
) -> Compiled | Callable[..., Any]:
    """Return a graph of Dynamo's compiled by Inductor, whose generated code takes no more than is left of the budget.

    A graph without a backward half has no plan: its function is returned.

    Args:
        module: the graph; it is not changed.
        inputs: with concrete sizes.
        device: of the graph.
        planning: what the caller knows.
        unplanned: the graph's code at these sizes from earlier that no plan divides, by its share of the activations.
            None of its backward passes has yet to come; new code is added.

    Raises:
        InfeasibleBudgetError, TimeLimitError: no plan was found.
        UnsupportedStepError: Inductor cannot compile it, or there is an op that memfit cannot plan.
    """
    attempt = partial(_Attempt, module=module, inputs=inputs, device=device, planning=planning)

    def as_it_is(share: float | None) -> _Attempt:
        if share in unplanned:
            unplanned[share].plan_anew(planning)
        else:
            unplanned[share] = attempt(share=share)
        return unplanned[share]

    own = as_it_is(None)
    if own.plan is None:
        return own.function
    compiled = own.compiled()
    entrants = [compiled] if planning.fits(compiled) else _entrants(planning, as_it_is, attempt)
    with _as_memfits_errors():
        for entrant in entrants:
            for half in entrant.halves:
                half.build()
    if len(entrants) == 1:
        return entrants[0]
    return replace(
        entrants[0],
        function=Race(entrants, planning.decided),
        peak_bytes=max(entrant.peak_bytes for entrant in entrants),
        peak_with=lambda between, held: max(entrant.peak_with(between, held) for entrant in entrants),
    )


def _entrants(
    planning: Planning, as_it_is: Callable[[float | None], _Attempt], attempt: Callable[..., _Attempt]
) -> list[Compiled]:
    """Return code that fits where Inductor's own does not: its lean code or that of a plan, and of torch's own halves.

    Under deterministic algorithms there is one, torch's only where no other fits: which is faster may change from run
    to run.

    Raises:
        InfeasibleBudgetError, TimeLimitError: there is none.
    """
    leanest = as_it_is(LEAN)
    lean = leanest.compiled()
    found, least_bytes = (lean if planning.fits(lean) else None), lean.peak_bytes
    if found is None:
        fitted = _planned(planning, lean, attempt)
        found, least_bytes = (fitted.made if fitted.fits else None), min(least_bytes, fitted.sizes.taken_bytes)
    if found is not None and torch.are_deterministic_algorithms_enabled():
        return [found]
    lean_bytes = leanest.saved_bytes[LEAN]
    most_bytes = (1 + _NEAR) * (lean.left_bytes + planning.headroom_bytes) - lean.peak_bytes + lean_bytes
    shares = {size: share for share, size in leanest.saved_bytes.items() if size < min(lean_bytes, most_bytes)}
    for size in sorted(shares, reverse=True)[:_MOST_TORCHS]:
        try:
            torchs = as_it_is(shares[size]).compiled()
        except MemfitError as error:  # other code may do all the same
            _log.info("memfit: torch's halves for %s of the activations are left out: %s", shares[size], error)
            continue
        if planning.fits(torchs):
            return [torchs] if found is None else [found, torchs]
    if found is None:
        raise TimeLimitError(
            f"the code that Inductor generates takes {format_bytes(least_bytes)} ({least_bytes} bytes), and nothing "
            'proves that it must: raise the budget, make the batch smaller, or try kernels="eager", which runs a plan '
            "as it stands",
            least_budget_found_bytes=least_bytes,
            least_budget_bound_bytes=0,
        )
    return [found]


def _planned(planning: Planning, lean: Compiled, attempt: Callable[..., _Attempt]) -> Fitted[Compiled]:
    """Return the code of the largest plan of the lean halves that fits."""
    known = set[str]()
    spare_bytes = planning.headroom_bytes // 2

    def sizes_of(compiled: Compiled) -> Sizes:
        return Sizes(
            planned_bytes=compiled.plan.predicted.peak_bytes,
            taken_bytes=compiled.peak_bytes,
            budget_bytes=compiled.left_bytes + spare_bytes,
            is_most=compiled.plan.overhead <= 0,
        )

    return fit_by(
        lambda aim_bytes: attempt(share=LEAN, aim_bytes=aim_bytes, known=known).compiled(),
        sizes_of,
        lean.left_bytes + spare_bytes,
        most_plans=_MOST_COMPILATIONS,
        closely=True,
    )


@dataclass(kw_only=True)
class _Attempt:
    """One compilation of a graph.

    Args:
        module, inputs, device, planning: as for `compile_within`.
        share: of the activations, within which torch divides the joint graph; `LEAN`, or None for its default.
        aim_bytes: the bytes that those halves are planned for, taken together; None leaves them as they are.
        known: schedules that are compiled already, to which that of this one is added.

    Attributes:
        function: the compiled function.
        saved_bytes: by share of the activations, what torch's halves keep between them; of lean halves as they are.

    Raises:
        SamePlanError: the schedule is known.
    """

    module: InitVar[GraphModule]
    inputs: InitVar[Sequence[Any]]
    device: torch.device
    planning: Planning
    share: float | None = None
    aim_bytes: int | None = None
    known: set[str] = field(default_factory=set[str])
    saved_bytes: dict[float, int] = field(default_factory=dict[float, int])
    function: Callable[..., Any] = field(init=False)
    plan: Plan | None = None
    reserved: Reserved | None = None  # on the host; operators in the code find it as long as it is there
    left_bytes: int = 0
    _graph: Graph | None = None
    _forward_outputs: int = 0
    _clock: Clock = field(init=False)
    _halves: dict[bool, InductorHalf] = field(default_factory=dict[bool, InductorHalf])

    def __post_init__(self, module: GraphModule, inputs: Sequence[Any]) -> None:
        self._clock = Clock(self.device)
        with _as_memfits_errors():
            self.function = compiled_by_inductor(
                module, inputs, partition=self._partition, around=self._around, keeps_order=self._keeps_order
            )

    def plan_anew(self, planning: Planning) -> None:
        """Let code that no plan divides be the caller's of now.

        Args:
            planning: what the caller knows by now.
        """
        self.planning = planning
        self._clock = Clock(self.device)
        if self._graph is not None:
            self._plan(self._graph)

    def compiled(self) -> Compiled:
        """Return the compiled function with what is known of it."""
        assert self.plan is not None
        peak_with = self._peak()
        peak_bytes = peak_with(self.planning.between_bytes(), self.planning.held_bytes())
        share = "own" if self.share is None else "lean" if self.share == LEAN else f"{self.share:.0%}"
        whose = f"Inductor's {share} code"
        if self.aim_bytes is not None:
            whose = f"code planned for {format_bytes(self.aim_bytes)}"
        _log.info("memfit: %s takes %s of %s", whose, format_bytes(peak_bytes), format_bytes(self.left_bytes))
        return Compiled(
            function=self.function,
            plan=self.plan,
            left_bytes=self.left_bytes,
            peak_bytes=peak_bytes,
            peak_with=peak_with,
            is_own=self.share is None and self.aim_bytes is None,
            halves=tuple(self._halves.values()),
            clock=self._clock,
        )

    def _peak(self) -> Callable[[int, int | None], int]:
        """Return `Compiled.peak_with` of the generated code; of the plan where that cannot be rehearsed."""
        plan, forward, backward = self.plan, self._halves[False], self._halves[True]
        assert plan is not None
        if forward.rehearsed is None or backward.rehearsed is None:
            return lambda between, _: plan.predicted.peak_bytes + max(0, between - plan.bytes_outside)
        placeholders = backward.module.graph.find_nodes(op="placeholder")
        tangents = [a for a, node in zip(backward.arguments, placeholders, strict=True) if is_tangent(node)]
        halves = rehearse(
            forward.rehearsed,
            backward.rehearsed,
            primals=forward.arguments,
            tangents=tangents,
            outputs=self._forward_outputs,
            mode=fake_mode_of(tensors_in(forward.arguments)[0]),
            device=self.device,
            workspaces=_workspaces(self.device, torch.get_num_threads()),
        )
        assumed = plan.bytes_outside + halves.tangent_bytes
        return lambda between, held: halves.peak_bytes(between, assumed if held is None else held)

    def _keeps_order(self) -> bool:
        """Return whether the order of the plan counts; otherwise Inductor has its own."""
        return self.plan is not None and self.aim_bytes is not None

    def _partition(
        self, joint: GraphModule, forward_outputs: int, as_inductor: Callable[[float | None], ModulePair]
    ) -> ModulePair:
        refuse_unplannable(joint)
        divided = None
        if self.share is not None:
            divided = as_inductor(self.share)
            if self.share == LEAN and self.aim_bytes is None:
                known = {self.share: saved_bytes(divided[0], forward_outputs)}
                self.saved_bytes = known | survey(as_inductor, forward_outputs)
            joint = rejoined(joint, divided, forward_outputs)
        if self.aim_bytes is not None:
            leave_out_overwritten(joint)
        self._forward_outputs = forward_outputs

        def captured(corrections: Corrections) -> Captured:
            capture = capture_joint(
                joint,
                forward_outputs=forward_outputs,
                name=f"graph of {len(joint.graph.find_nodes(op='placeholder'))} inputs",
                device=self.device,
                corrections=corrections,
                replays_draws=False,
            )
            with real_tensors():
                return self.planning.with_costs(capture.captured)

        capture = with_real_results(captured)
        fusible = [
            not op.computed_once and is_fusible(nodes)
            for op, nodes in zip(capture.graph.ops, capture.sources, strict=True)
        ]
        graph, members, left = with_chains(capture.graph, fusible)
        self._graph = graph
        plan = self._plan(graph)
        if self.aim_bytes is None:
            return divided or as_inductor(None)
        if plan.schedule.text() in self.known:
            raise SamePlanError
        self.known.add(plan.schedule.text())
        sources = [[node for op in chain for node in capture.sources[op]] for chain in members]
        copying = None
        if (plan.schedule.codes == Code.OFFLOAD).any():
            self.reserved, copying = copying_of(capture, graph, left, plan.schedule, self.planning.host)
        return node_halves(joint, sources, plan.schedule, forward_outputs, copying)

    def _plan(self, graph: Graph) -> Plan:
        self.left_bytes = self.planning.left_bytes(graph)
        with real_tensors():
            self.plan = self._planned(graph)
        return self.plan

    def _planned(self, graph: Graph) -> Plan:
        """Return the plan for the bytes that were aimed at, or the leanest plan: its code may take less."""
        try:
            return self.planning.plan(graph, self.aim_bytes)
        except NoPlanError as error:
            if error.least_budget_found_bytes is None or graph.resident_bytes > self.left_bytes:
                raise
            return self.planning.plan(graph, error.least_budget_found_bytes)

    def _around(self, half: InductorHalf, call: Half) -> Half:
        is_backward = half.is_backward
        self._halves[is_backward] = half

        if is_backward:
            call = with_zeros_for_absent(half.module, call)

        def run(arguments: list[Any]) -> Any:  # for the caller of now
            timed, run_half = self._clock.timed, self.planning.run
            return timed(lambda: run_half(call, arguments, is_backward), is_backward=is_backward)

        return run


@cache
def _workspaces(device: torch.device, _threads: int) -> Workspaces:
    return Workspaces(device)


@contextmanager
def _as_memfits_errors() -> Iterator[None]:
    """Raise whatever Inductor raises as an error of memfit's."""
    try:
        yield
    except MemfitError:
        raise
    except Exception as error:
        reason = (str(error).strip() or "no message").splitlines()[0]
        raise UnsupportedStepError(
            f"Inductor could not compile the graph: {type(error).__name__}: {reason}; "
            'its kernels need a C++ compiler on a CPU and Triton on a GPU, and kernels="eager" needs neither'
        ) from error
