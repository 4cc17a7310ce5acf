"""A step with graph breaks: the graphs around each break are planned, the rest runs as eager does."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any

import torch

from memfit.capture import TrainingStep
from memfit.capture.placement import step_device
from memfit.capture.step_check import require_training_context
from memfit.errors import (
    CaptureError,
    GraphBreakError,
    InvalidOptionError,
    MemfitError,
    NoPlanError,
    UnsupportedStepError,
)
from memfit.plan import Bounds, Plan
from memfit.planners.mirror import read_mirrors
from memfit.planners.registry import MIRROR_OPTION
from memfit.planning import FIRM, Settings
from memfit.runtime.arena.arena import Arena
from memfit.runtime.backward_updates import run_updating, updates_in_backward
from memfit.runtime.compile.settings import GraphSettings
from memfit.runtime.compiled_parts import PartGraph
from memfit.runtime.first_step import MOST_CORRECTIONS, STEPS_IN_A_ROW, not_held
from memfit.runtime.ledger import Ledger, StepSeen
from memfit.runtime.measure import measure_step, measured_eager_peak, resident_bytes, resident_storages
from memfit.runtime.measured import Measured
from memfit.runtime.prepare import MOST_OPS
from memfit.runtime.signature import batch_signature
from memfit.runtime.state import PythonState, StepState
from memfit.runtime.step_memory import Served, memory_for
from memfit.runtime.turns import turn_for
from memfit.runtime.uncopied import Uncopied
from memfit.runtime.verify import difference_of_eager, first_difference, require_same
from memfit.runtime.what_is_left import saying_what_is_left
from memfit.simulate.overlap import Transfers
from memfit.system.budget import format_bytes, parse_budget
from memfit.system.recorder import empty_cache
from memfit.torch_private.dynamo import compiled_around_breaks, divides_calls, is_compilers
from memfit.torch_private.modules import own_tensors

_log = logging.getLogger("memfit")
_MOST_AIMS = 4  # plans for less and less, while steps take more than the budget; then the leanest
_MOST_STEPS = 6  # until nothing is compiled any more; the first makes the optimizer's state, too
_MOST_UPDATED_STEPS = 4  # of these, with the values that the steps before left


class _OtherBitsError(UnsupportedStepError):
    """The graphs give other bits than eager."""


class PartlyPlannedStep(Uncopied):
    """A training step whose model breaks into several graphs; called like a `PlannedStep`.

    Each graph's forward and backward are planned, with all of the settings, inside the bytes that the others and the
    code between them leave (`memfit.runtime.ledger`). The loss outside of the model and the optimizer's update run as
    eager does. Each parameter is updated as soon as its gradient is there, where that gives eager's bits; elsewhere all
    gradients exist together at the end of backward.

    A step that takes another way through the graphs than any before (another branch, a batch of another shape) is
    followed by new plans.

    Args:
        step: the training step.
        settings: a budget, of which a percentage is a share of the measured peak of an eager step, and how plans are
            searched.
        broken: the error that names the graph break.

    Attributes:
        step: the TrainingStep that is carried out.
        settings: the budget, in bytes, and how plans are searched.
        line: the user's line that broke the graph.
        generators: torch's generators that model and loss hold.
        device: the device that the step runs on.

    Raises:
        InvalidOptionError: a mirror mark names nothing in any of the graphs, or the budget is hard.
        InfeasibleBudgetError, TimeLimitError: even the leanest plans that were found take more than the budget.
        UnsupportedStepError: there is no graph to plan.
        CaptureError: PyTorch cannot compile the graphs.
    """

    def __init__(self, step: TrainingStep, settings: Settings, broken: GraphBreakError) -> None:
        if settings.hard:
            raise InvalidOptionError(
                f"{broken.line}: the step depends on the value of a tensor, so that it runs as several graphs, and "
                "hard=True caps only steps that are one graph; leave it out, or move that line out of the model"
            )
        self.step = step
        self.line = broken.line
        self.device = step_device(step.model, step.batch)
        eager_bytes = 0 if settings.is_in_bytes else measured_eager_peak(step, self.device)
        self.settings = settings.within(parse_budget(settings.budget, eager_bytes))
        self._told_bytes = int(self.settings.budget)
        self._kept = self._corrections = 0  # steps in a row that kept the budget; corrections since there were two
        self._batches: set[Hashable] = set()  # the signatures of those that ran
        self._memory, settings = memory_for(settings, self.device, None, refused=f"{broken.line} breaks the step up")
        self._host_budget_bytes = settings.host_budget_bytes
        python = PythonState(step)
        self.generators = python.handed
        self._compile(nested=divides_calls())
        try:
            self._make_plans(python)
        except (CaptureError, _OtherBitsError) as error:
            if not self._is_nested:
                raise
            _log.info("memfit: the graphs are captured once more, each function by itself: %s", error)
            self._compile_by_function()
            self._make_plans(python)
        gradients = sum(p.nbytes for p in step.model.parameters() if p.requires_grad)
        together = f", and the gradients ({format_bytes(gradients)}) are held together to the end of backward"
        _log.warning(
            "memfit: %s: the step depends on the value of a tensor, so that %d graphs around that line are planned; "
            "what is outside of the model runs unplanned%s",
            self.line,
            len(self._ledger.parts),
            "" if updates_in_backward(step) else together,
        )

    def _compile(self, *, nested: bool) -> None:
        """Compile the model (see `compiled_around_breaks`), and forget all graphs so far."""
        step, self._is_nested = self.step, nested
        self._aim_bytes = int(self.settings.budget)  # less what steps took beyond what their plans say
        self._ledger = ledger = Ledger(self.device, self._memory, self._host_budget_bytes)
        residents = resident_storages(self, step.batch)
        options = GraphSettings(settings=self.settings, reserve_bytes=0, is_part=True)
        # The backend must not hold the step: Dynamo keeps it with the code of the model's class.
        self._graphs = graphs = list[PartGraph]()

        def part_graph(module: torch.fx.GraphModule, _inputs: Any) -> PartGraph:
            graphs.append(PartGraph(module, options, ledger, residents))
            return graphs[-1]

        self._model: Any = compiled_around_breaks(step.model, part_graph, nested=nested)

    def _compile_by_function(self) -> None:
        """Compile the model anew, each function by itself."""
        for part in self._ledger.used:
            for is_forward in (True, False):
                self._memory.forget((part, is_forward))
        self._compile(nested=False)

    def _make_plans(self, python: PythonState) -> None:
        """Plan the graphs; leave the step as it was.

        Raises:
            CaptureError, UnsupportedStepError: as the class; the first also of a compiler that fails.
        """
        step = self.step
        before = StepState.take(step, self.generators)
        try:
            with turn_for(step, self.device, "memfit.fit"):
                self._plan_parts(before, python)
        except MemfitError:
            raise
        except Exception as error:  # Dynamo, AOTAutograd and the user's code run here, and may raise anything
            raise CaptureError(
                f"{self.line}: the step depends on the value of a tensor, and the graphs around that line cannot be "
                f"planned: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            ) from error
        finally:
            before.put_back(step)
            python.put_back()
        if written := python.written():
            raise UnsupportedStepError(
                f"{self.line}: the step depends on the value of a tensor, and writes in place to {written[0]}, which "
                "is neither a parameter nor a buffer of the model; the steps that planning took have changed it, and "
                "cannot be undone: register it as a buffer, or write to it outside of the step"
            )
        self._require_eagers_bits()

    def _require_eagers_bits(self) -> None:
        """Refuse a step whose graphs give other bits than eager, as far as the device has room to look.

        PyTorch adds gradients of a parameter in another order than eager if several graphs use it, and tells the code
        that it compiles so (`torch.compiler.is_compiling`).
        """
        try:
            difference = first_difference(self, self.step.batch)
            if difference is None:
                return
            eager_difference = difference_of_eager(self, self.step.batch)
        except torch.OutOfMemoryError:
            _log.warning("memfit: the graphs around %s are not compared with eager: there is no room for it", self.line)
            return
        if eager_difference is not None:
            _log.warning("memfit: two eager steps differ in %s, so that nothing can be compared", eager_difference)
            return
        raise _OtherBitsError(
            f"{self.line}: the step depends on the value of a tensor, and the graphs that PyTorch compiles around that "
            f"line give other bits than eager, first in {difference}: a parameter that is used on both sides of the "
            "line, or code that asks whether it is compiled; move that line out of the model, or run without memfit"
        )

    @property
    def plan(self) -> Plan:
        """The plan with the highest peak among the graphs'."""
        return max(self.plans, key=lambda plan: plan.predicted.peak_bytes)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of all graphs."""
        return tuple(part.plan for part in self._ledger.parts)

    @property
    def bounds(self) -> Bounds:
        """The least budget that the leanest plans so far reach, and the least that any plans could."""
        return Bounds(
            least_budget_found_bytes=self._ledger.least_bytes, least_budget_bound_bytes=self._ledger.bound_bytes
        )

    @property
    def constants(self) -> tuple[torch.Tensor, ...]:
        """None: user code runs as it is, and what it closes over is not known."""
        return ()

    @property
    def transfers(self) -> Transfers:
        """None are noted: each graph has copies of its own."""
        return Transfers()

    @property
    def memory(self) -> Served:
        """As `PlannedStep.memory`; an arena serves what single halves of the graphs need."""
        return self._ledger.memory.served

    @property
    def held_bytes(self) -> int:
        """The bytes that are held between calls, beside the residents: the arena's."""
        return self._ledger.memory.held_bytes

    @property
    def arena(self) -> Arena | None:
        """The arena that serves what single halves of the graphs need, if the settings ask for one."""
        return self._ledger.memory.arena

    def __call__(self, batch: Any) -> torch.Tensor:
        """Run one step on `batch`; return the loss, detached.

        Raises:
            UnsupportedStepError: the call is inside torch.no_grad or torch.autocast, or another thread runs a planned
                step on the device.
            BudgetNotHeldError: as for `PlannedStep`.
        """
        with turn_for(self.step, self.device, "the planned step", self):
            return self._call(batch)

    def _call(self, batch: Any) -> torch.Tensor:
        require_training_context("the step was called", self.step)
        with saying_what_is_left(*own_tensors(self.step.model), self.step.optimizer):
            try:
                seen = self._run(batch)
            except Exception as error:
                if self._is_nested and is_compilers(error):
                    self._compile_by_function()
                    error.add_note("memfit: later calls of the step are compiled in a simpler way")
                raise
        if seen.is_new:
            self._plan_new_way(seen.peak_bytes)
        elif seen.peak_bytes is not None:
            self._judge(seen.peak_bytes)
        return seen.loss

    def wait_for_searches(self, timeout_seconds: float | None = None) -> bool:
        """Return True: no plan is searched behind a step."""
        del timeout_seconds
        return True

    def verify(self, batch: Any = None) -> None:
        """As `PlannedStep.verify`, from the present state alone."""
        with turn_for(self.step, self.device, "`verify`"):
            require_same(self, self.step.batch if batch is None else batch, is_recorded=False)

    def measure(self, batch: Any = None, *, repeats: int = 3) -> Measured:
        """As `PlannedStep.measure`."""
        with turn_for(self.step, self.device, "`measure`"):
            return measure_step(self, self.step.batch if batch is None else batch, repeats=repeats)

    def _run(self, batch: Any) -> StepSeen:
        ledger = self._ledger
        signature = batch_signature(batch)
        ledger.is_batch_known = signature in self._batches
        self._batches.add(signature)
        seen = ledger.run(
            lambda: run_updating(self.step, batch, self._model, ledger.is_read), resident_bytes(self, batch)
        )
        dropped = ledger.drop_oldest(MOST_OPS)
        if dropped:
            self._batches = {signature}  # what is compiled for the others again is no new size of theirs
            for graph in self._graphs:
                graph.drop(dropped)
        return seen

    def _plan_parts(self, before: StepState, python: PythonState) -> None:
        """Run the first steps with the leanest plans, share the budget, and run a step with the plans in use."""
        self._settled_peak(before, python)
        if not self._ledger.parts:
            raise UnsupportedStepError(
                f"{self.line}: the step depends on the value of a tensor, and no graph with a backward pass is left "
                "around that line, so that there is nothing to plan: run the step without memfit"
            )
        self._require_marks_used()
        budget_bytes = int(self.settings.budget)
        for _ in range(_MOST_AIMS):
            try:
                self._ledger.share(self._aim_bytes, self.line)
            except NoPlanError:
                break
            more_bytes = self._settled_peak(before, python) - budget_bytes
            if more_bytes <= 0:
                return
            self._aim_bytes -= more_bytes
        self._ledger.use_leanest()
        leanest_bytes = self._settled_peak(before, python)
        if leanest_bytes > budget_bytes:
            more_bytes = max(0, leanest_bytes - self._ledger.least_bytes)
            raise self._ledger.no_plan(budget_bytes, self.line, more_bytes)

    def _settled_peak(self, before: StepState, python: PythonState) -> int:
        """Run steps until one compiles nothing; return its peak in bytes.

        The first go on from each other's values, as in training: Dynamo takes a number for a constant until it has
        changed once. Where values decide sizes, they may never end to compile; the last have the values of before.

        Raises:
            CaptureError: each step compiles a graph anew.
        """
        for number in range(_MOST_STEPS):
            empty_cache(self.device)
            if number >= _MOST_UPDATED_STEPS:
                before.put_back_tensors(self.step)
            if self.step.optimizer is None:  # its gradients stay, and the next step is to make them again
                self.step.model.zero_grad(set_to_none=True)
            before.put_back_generators()
            python.put_back()
            peak_bytes = self._run(self.step.batch).peak_bytes
            if peak_bytes is not None:
                return peak_bytes
        raise CaptureError(
            f"{self.line}: the step depends on the value of a tensor, and PyTorch compiles the graphs around that line "
            f"anew in each of {_MOST_STEPS} steps: what it depends on besides changes from step to step"
        )

    def _plan_new_way(self, peak_bytes: int | None) -> None:
        """Plan again after the first whole step on a new way through the graphs; warn if it took too much."""
        budget_bytes = int(self.settings.budget)
        if peak_bytes is not None and peak_bytes > budget_bytes:
            _log.warning(
                "memfit: the first step on a new way through the graphs around %s took %s, more than the budget of %s; "
                "it is planned from now on",
                self.line,
                format_bytes(peak_bytes),
                format_bytes(budget_bytes),
            )
        self._share(peak_bytes)

    def _share(self, peak_bytes: int | None) -> None:
        """Plan the graphs for the bytes that are aimed at, after a step that took so many."""
        budget_bytes = int(self.settings.budget)
        try:
            self._ledger.share(self._aim_bytes, self.line)
        except NoPlanError as error:
            if self.settings.budget_is == FIRM and peak_bytes is not None and peak_bytes > budget_bytes:
                raise not_held(
                    peak_bytes, budget_bytes, f"the graphs around {self.line} have no leaner plans"
                ) from error
            _log.warning("memfit: from now on the plans may exceed the budget: %s", error)

    def _judge(self, peak_bytes: int) -> None:
        """Correct the plans after a step that took more than the budget; if that is soft, more than any before."""
        budget_bytes = int(self.settings.budget)
        if peak_bytes <= budget_bytes:
            self._kept += 1
            if self._kept == STEPS_IN_A_ROW:
                self._corrections = 0
            return
        self._kept = 0
        if self.settings.budget_is == FIRM and self._corrections >= MOST_CORRECTIONS:
            raise not_held(peak_bytes, budget_bytes, f"so did {MOST_CORRECTIONS} steps before it, with other plans")
        if self.settings.budget_is == FIRM or peak_bytes > self._told_bytes:
            self._correct(peak_bytes)

    def _correct(self, peak_bytes: int) -> None:
        """Plan for less after a step that took more than the budget, and warn of it."""
        budget_bytes = int(self.settings.budget)
        self._corrections += 1
        self._told_bytes = peak_bytes
        self._aim_bytes -= peak_bytes - budget_bytes
        _log.warning(
            "memfit: a step took %s, more than its budget of %s: what runs between the graphs around %s took more than "
            "in the steps before; the graphs are planned for less from now on",
            format_bytes(peak_bytes),
            format_bytes(budget_bytes),
            self.line,
        )
        self._share(peak_bytes)

    def _require_marks_used(self) -> None:
        for mark in read_mirrors(self.settings.options.get(MIRROR_OPTION, ())):
            if not any(mark.marked(plan.graph) for plan in self.plans):
                modules = {op.module: None for plan in self.plans for op in plan.graph.ops if op.module}
                raise InvalidOptionError(
                    f"mirror names {mark.where!r}, which is no module and no op of the "
                    f"{len(self._ledger.parts)} graphs around {self.line}, which have "
                    f"{', '.join(modules) or 'no modules'}"
                )
