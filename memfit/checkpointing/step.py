"""A training step that is no graph, within its budget by torch's own checkpoints: what `fit` makes of such a step."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch

from memfit.capture import TrainingStep
from memfit.capture.model_tables import require_no_module_made
from memfit.capture.placement import step_device
from memfit.capture.step_check import require_training_context
from memfit.capture.training_step import states_of
from memfit.checkpointing.blocks import NO_BLOCKS, find_all
from memfit.checkpointing.explaining import Explanation
from memfit.checkpointing.handle import Checkpointed
from memfit.checkpointing.judging import TRY_EAGER_MODE
from memfit.checkpointing.loop import Loop
from memfit.checkpointing.reporting import Report
from memfit.checkpointing.snapshots import is_awaited
from memfit.errors import (
    BudgetNotHeldError,
    CaptureError,
    InfeasibleBudgetError,
    InvalidOptionError,
    NoGraphError,
    UnsupportedStepError,
)
from memfit.memory.contract import FIRM, Contract
from memfit.memory.snapshot import generators_of, left_as_it_was
from memfit.memory.uncounted import Beside
from memfit.memory.what_is_left import saying_what_is_left
from memfit.planners.registry import MIRROR_OPTION
from memfit.planning import Settings
from memfit.step.backward_updates import run_updating, updates_in_backward
from memfit.step.measure import in_bytes, resident_bytes
from memfit.step.step import Step
from memfit.step.turns import turn_for
from memfit.step.verify import difference_of_eager, first_difference
from memfit.system.budget import format_bytes
from memfit.system.recorder import page_bytes
from memfit.torch_private.modules import own_tensors, uncompiled
from memfit.torch_private.tensors import bytes_in, tensors_in

_log = logging.getLogger("memfit")

_SETTLING_STEPS = 5  # two are lean, the third one is planned, and the fourth one corrected
_OF_GRAPHS = ("plan", "plans", "captured", "source", "bounds")


class CheckpointedStep(Step):
    """A training step that is no graph, as its Python code depends on a tensor's value, say; called as a `PlannedStep`.

    All of it runs as eager does, under `memfit.checkpoint`: whole blocks or parts of them are recomputed. Each
    parameter is updated as soon as its gradient is there, where that gives eager's bits. Checkpoints are there in calls
    of the step alone.

    Args:
        step: the training step.
        settings: a budget, of which a percentage is a share of the measured peak of an eager step.
        broken: why it is no graph.

    Attributes:
        why: it is no graph.
        line: the user's line that depends on a tensor's value, if that is why.
        plan_seconds: that the first plans took, with the steps that they were made from.

    Raises:
        InfeasibleBudgetError: the plan that takes the least takes more than the budget.
        InvalidOptionError: what only a graph can have is asked for: a hard budget, an arena, mirror marks.
        UnsupportedStepError: the loss calls parts of the model by themselves.
    """

    _is_recorded = False

    def __init__(self, step: TrainingStep, settings: Settings, broken: CaptureError | NoGraphError) -> None:
        self.step, self.why, self.line = step, broken.why, broken.line
        self.device = step_device(step.model, step.batch)
        self._refuse_for_graphs(settings)
        self.settings = in_bytes(settings, step, self.device)
        self._updates_in_backward = updates_in_backward(step)
        model = uncompiled(step.model)
        contract = Contract(self.budget_bytes, page_bytes=page_bytes(self.device), is_firm=settings.budget_is == FIRM)
        self._loop = Loop(
            step.model,
            partial(find_all, model, None),
            contract,
            self.device,
            may_chain=True,
            host_budget_bytes=settings.host_budget_bytes,
            host_dir=settings.host_dir,
        )
        self._leave = weakref.finalize(self, self._loop.close, is_judged=False)
        self._leave.atexit = False
        self._loop.is_paused = True
        self._loop.expect_no_optimizer()
        self._generators = generators_of(step)
        self._beside = Beside(self.device, step.model, step.optimizer) if settings.is_in_bytes else None
        self._most_state_bytes = 0
        began = time.perf_counter()
        try:
            with turn_for(step, self.device, "memfit.fit"):
                self._settle()
                with self._unjudged():
                    self._require_eagers_bits()
        except BaseException:
            self.close()
            raise
        self.plan_seconds = time.perf_counter() - began
        _log.warning(
            "memfit: %s: it is no graph, and runs under memfit.checkpoint, which recomputes blocks: step.report() "
            "says which",
            self.why,
        )

    def _refuse_for_graphs(self, settings: Settings) -> None:
        given = {
            "hard=True": settings.hard,
            "cuda_graph=True": settings.cuda_graph,
            "arena=True": settings.arena,
            "options={'mirror': ...}": MIRROR_OPTION in settings.options,
        }
        for text, is_given in given.items():
            if is_given:
                raise InvalidOptionError(
                    f"{self.why}: it is no graph and runs under memfit.checkpoint, and {text} is for graphs; leave it "
                    "out, or move that out of the model"
                )

    def __getattr__(self, name: str) -> NoReturn:
        what = " the step is no graph, and has no plan of its storages; use step.report(), step.explain()"
        raise AttributeError(
            f"{type(self).__name__} has no attribute {name!r}" + (f": {self.why}:{what}" if name in _OF_GRAPHS else "")
        )

    def _settle(self) -> None:
        """Run the step on its batch until a plan has held; all is put back.

        Raises:
            InfeasibleBudgetError: no plan holds.
        """
        self._loop.warnings.are_on, had_updates = False, self._updates_in_backward
        modules = {*self.step.model.modules()}
        with left_as_it_was(self.step, self.generators):
            try:
                for number in range(_SETTLING_STEPS):
                    if number == 1:  # the first step makes the optimizer's state, which later ones find
                        self._loop.plans.shapes.clear()
                    self._run_steered(self.step.batch)
                    if self.step.optimizer is None:  # its gradients stay, and the next step is to make them again
                        self.step.model.zero_grad(set_to_none=True)
            except UnsupportedStepError:
                if not self._updates_in_backward:
                    raise
                self._updates_in_backward = False  # a block is recomputed for each of two backward passes
            except BudgetNotHeldError as error:
                least_bytes = self.budget_bytes + error.over_bytes
                otherwise = f", or {TRY_EAGER_MODE}" if self._loop.plans.blocks else f"; {NO_BLOCKS}"
                raise InfeasibleBudgetError(
                    f"{self.why}: it is no graph, and runs under memfit.checkpoint, which needs at least "
                    f"{format_bytes(least_bytes)} ({least_bytes} bytes), more than the budget of "
                    f"{format_bytes(self.budget_bytes)}: raise the budget to {least_bytes} bytes for steps like "
                    f"this, or make the batch smaller{otherwise}",
                    least_budget_found_bytes=least_bytes,
                    least_budget_bound_bytes=0,
                ) from error
            finally:
                self._loop.warnings.are_on = True
            require_no_module_made(self.step.model, modules)
            self._most_state_bytes = self._state_bytes()
        if had_updates and not self._updates_in_backward:
            self._settle()
            return
        if not self._loop.history.count:
            raise UnsupportedStepError(
                f"{self.why}: it is no graph, and the loss does not call the model itself, so that memfit.checkpoint "
                "does not see where a step begins; call model(...) in the loss, or use "
                "memfit.eager"
            )

    def _require_eagers_bits(self) -> None:
        """Update after backward if updates in it give other bits; refuse the step if that does not help.

        Raises:
            UnsupportedStepError: the bits are not those of eager.
        """
        try:
            difference = first_difference(self, self.step.batch)
            if difference is not None and self._updates_in_backward:
                self._updates_in_backward = False
                difference = first_difference(self, self.step.batch)
            if difference is None:
                return
            eager_difference = difference_of_eager(self, self.step.batch)
        except torch.OutOfMemoryError:
            _log.warning("memfit: %s: the step is not compared with eager: there is no room for it", self.why)
            return
        if eager_difference is None:
            raise UnsupportedStepError(
                f"{self.why}: it is no graph, and recomputing its blocks gives other bits than eager, first in "
                f"{difference}; use memfit.eager"
            )
        if self.device.type == "cpu" and eager_difference.startswith("the loss"):  # no kernel there differs so
            raise UnsupportedStepError(
                f"{self.why}: it is no graph, and two eager steps from the same state differ in {eager_difference}: "
                "the step counts, reads a clock, or keeps in Python what cannot be put back; pass it in the batch, "
                "keep it in a buffer, or call memfit.checkpoint in your loop"
            )
        _log.warning("memfit: two eager steps differ in %s, so that nothing can be compared", eager_difference)

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """Torch's generators that model, loss and optimizer hold."""
        return self._generators

    def _run(self, batch: Any) -> torch.Tensor:
        require_training_context("the step was called", self.step)
        object.__setattr__(self.step, "batch", batch)  # the example would live on the device beside it
        with saying_what_is_left(*own_tensors(self.step.model), self.step.optimizer):
            return self._run_steered(batch)

    def _run_steered(self, batch: Any) -> torch.Tensor:
        if self.device.type == "cpu":  # a GPU is shared with all that the process has on it
            own_bytes = resident_bytes(self, batch)
            self._loop.other_bytes = max(0, self._loop.live_bytes() - own_bytes)
            if self._beside is not None and (latest := self._loop.history.latest):
                self._beside.look(own_bytes, latest[-1].taken_bytes, self.budget_bytes)
        self._loop.bytes_to_come = max(0, self._most_state_bytes - self._state_bytes())
        self._loop.is_paused = False
        try:
            loss = (
                run_updating(self.step, batch, is_awaited) if self._updates_in_backward else self.step.run_eager(batch)
            )
            self._loop.end()
        except BaseException:
            self._loop.discard()
            raise
        finally:
            self._loop.is_paused = True
        return loss

    def _state_bytes(self) -> int:
        """Return the bytes of the optimizer's state on the device."""
        tensors = tensors_in(states_of(self.step.optimizer))
        return bytes_in([tensor for tensor in tensors if tensor.device.type == self.device.type])

    @contextmanager
    def _unjudged(self) -> Generator[None]:
        """Let the plan stay in this block: copies of the state are on a CPU, too."""
        self._loop.is_judging = False
        try:
            yield
        finally:
            self._loop.is_judging = True

    def report(self) -> Report:
        """Return the bytes that steps took, and the rules in force, as the handle of `memfit.checkpoint` does."""
        return Checkpointed(self._loop).report()

    def explain(self) -> list[Explanation]:
        """Return the largest parts of the peak, and the price of other budgets: see `memfit.checkpoint`."""
        return Checkpointed(self._loop).explain()

    def policy(self) -> dict[str, dict[str, Any]]:
        """Return the present policy as plain data, as the handle of `memfit.checkpoint` does."""
        return Checkpointed(self._loop).policy()

    def close(self) -> None:
        """End the budget, and leave the model as it was before; a step that nobody holds any more does so by itself."""
        self._leave()
