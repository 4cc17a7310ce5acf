"""How a planned step gets its programs: captured, compared with eager, planned, and planned again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

from memfit.capture import Captured, TrainingStep, with_real_results
from memfit.capture.compare import Comparisons
from memfit.capture.guarded_table import Difference
from memfit.capture.later_sizes import CapturedSizes
from memfit.capture.step_check import require_training_context
from memfit.capture.stream import Stream
from memfit.cost.calibration import local_device
from memfit.cost.observations import Corrections
from memfit.errors import InvalidOptionError
from memfit.memory.contract import Contract
from memfit.memory.host.store import HostStore
from memfit.memory.step_memory import StepMemory
from memfit.memory.what_is_left import saying_what_is_left
from memfit.near_plans import PROVISIONAL
from memfit.plan import Plan
from memfit.planning import DEFAULT_PLANNER, Settings
from memfit.step.chunked import make_function_program
from memfit.step.cuda_graph import StepGraphs
from memfit.step.distributed.ranks import Ranks
from memfit.step.eager_peak import with_eager_peak
from memfit.step.near_sizes import NearSizes
from memfit.step.prepare import ANEW, AS_IT_IS
from memfit.step.signature import batch_signature
from memfit.step.state_forms import make_program_of_forms
from memfit.step.step_program import StepProgram, adds_to_gradients, make_step_program, set_gradients
from memfit.step.variants import Variant, Variants
from memfit.system.recorder import empty_cache, watch
from memfit.torch_private.tensors import tree_flatten, tree_unflatten

_log = logging.getLogger("memfit")


class Programs:
    """The programs of one step.

    Args:
        step: the step.
        settings: by which the step is planned.
        ranks: that train together.
        store: for what programs offload.
        memory: of the step's calls.
        graphs: of the step, if it has CUDA graphs.
        beside_bytes: returns what is on the device before a step on a batch.

    Attributes:
        settings: by which the step is planned. The budget is in bytes once there is a program: a share of another
            batch's peak would be another budget.
        variants: the programs that are kept.
        sizes: the sizes that are known.
        capture_seconds: that the first capture took.
    """

    def __init__(
        self,
        step: TrainingStep,
        settings: Settings,
        *,
        ranks: Ranks,
        store: HostStore,
        memory: StepMemory,
        graphs: StepGraphs | None,
        beside_bytes: Callable[[Any], int],
    ) -> None:
        self.settings = self._first_settings = settings
        self.variants = Variants()
        self.sizes = NearSizes()
        self.capture_seconds = 0.0
        self._step, self._ranks, self._store = step, ranks, store
        self._memory, self._graphs, self._beside_bytes = memory, graphs, beside_bytes
        self._captures = CapturedSizes(step)
        self._comparisons, self._told_bytes = Comparisons(), 0
        self._first_adds: bool | None = None

    @property
    def first(self) -> StepProgram:
        """The program for the batch that the step was made with."""
        return next(iter(self.variants)).program

    def find(self, batch: Any) -> Variant:
        """Return the variant whose guards hold, with its best program; capture and plan one if there is none.

        Args:
            batch: of the next call.

        Raises:
            InvalidOptionError: no batch.
            MemfitError: as `memfit.fit`.
        """
        variant: Variant | None = None
        difference: Difference | None = None

        def find() -> int | None:
            nonlocal variant, difference
            if batch is None and self._step.batch is not None:
                raise InvalidOptionError(
                    "the step was called with None, expected a batch like the one that it was made with"
                )
            signature = self._signature(batch)
            if self._step.has_backward:
                object.__setattr__(self._step, "batch", batch)
            variant, difference = self.variants.find(signature, batch)
            if variant is None:
                require_training_context("the step was called", self._step)
            return None if variant is None else variant.number

        if not self._ranks.found(find, batch):
            if difference is not None:
                self.variants.notify(difference)
            self._memory.vacate()  # ops are measured beside what is held
            with watch(self._store.device) as usage:
                added = self.add(batch)
            taken_bytes, contract = (
                self._beside_bytes(batch) + usage.peak_bytes,
                Contract(added.program.plan.budget_bytes),
            )
            if taken_bytes > max(contract.budget_bytes, self._told_bytes):
                self._told_bytes = taken_bytes
                _log.warning("memfit: %s", contract.measuring_text(taken_bytes))
            return added
        assert variant is not None
        better = self.sizes.better(variant.key, variant.program.plan)
        if better is not None:  # was found behind the steps
            captured, settings = variant.program.prepared.captured, self.settings.within(better.budget_bytes)
            program = make_step_program(self._step, captured, settings, better, self._store, AS_IT_IS)
            self._replace(variant, program)
        return variant

    def run(self, variant: Variant, batch: Any) -> Any:
        """Run a variant's program, or replay its CUDA graph; return the loss, or a function's next state.

        Args:
            variant: found for this batch; its guards hold.
            batch: of the call; a CUDA graph has it already.
        """
        step, parameters = self._step, variant.guards.parameters
        outputs = None if self._graphs is None else self._graphs.outputs()
        if outputs is None:
            written = parameters.values(), variant.guards.tensors.now, step.optimizer
            with saying_what_is_left(*written), self._memory.call(variant.key), self._ranks.running():
                outputs = variant.program.run(batch)
        variant.guards.take_left()
        if not step.has_backward:
            return tree_unflatten(list(outputs.values()), tree_flatten(batch[0])[1])
        set_gradients(outputs, parameters)
        if step.optimizer is not None:
            # A scheduler warns if the optimizer's own `step` was not called; the program updates each parameter itself.
            step.optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
        loss = outputs["loss"]
        # torch's losses leave the mean in memory of all that it is of; a loop keeps the loss while the next step runs
        return loss.clone() if loss.untyped_storage().nbytes() > loss.nbytes else loss

    def add(self, batch: Any, plan: Plan | None = None) -> Variant:
        """Add a program of the step as it is now, on batches like this one; return its variant.

        Args:
            batch: an example.
            plan: made before; None searches one.

        Raises:
            MemfitError: as `memfit.fit`.
        """
        with self.sizes.behind.paused():
            program = self._ranks.together("preparing the step", lambda: self._made(batch, plan))
            self._ranks.require_same_plan(program.plan)
        signature = self._signature(batch)
        if self._first_adds is None:
            self._first_adds = adds_to_gradients(program.prepared.captured)
            self.settings = self.settings.within(program.plan.budget_bytes)
        variant, dropped = self.variants.add(signature, program)
        for old in dropped:
            self._forget(old)
        self._remember(variant)
        return variant

    def plan_within(self, variant: Variant, budget_bytes: int) -> None:
        """Replace a variant's program by one that allows for what its plan mispredicted.

        Its capture is used: the step has left gradients by now, and a new one would add to them.

        Args:
            variant: of which a step took more than its budget.
            budget_bytes: to plan for.

        Raises:
            InfeasibleBudgetError, TimeLimitError: no plan fits.
        """
        captured, settings = variant.program.prepared.captured, self.settings.within(budget_bytes)
        is_own = variant.program.plan.planner not in PROVISIONAL
        planning = self._ranks.planning(AS_IT_IS if is_own else self.sizes.planning(captured, settings))
        make = partial(make_step_program, self._step, captured, settings, None, self._store, planning)
        self._replace(variant, self._ranks.together("correcting the plan", make))

    def _replace(self, variant: Variant, program: StepProgram) -> None:
        """Give a variant another program, whose steps may take other memory."""
        self._forget(variant)
        empty_cache(self._store.device)
        variant.program = program
        variant.standing.replace_plan(is_least=False, is_most=False)
        self._remember(variant)

    def _remember(self, variant: Variant) -> None:
        if not variant.program.kept:  # whose ops are not those of the captures of other sizes
            self.sizes.add(variant.key, variant.program.prepared, self.settings)

    def _forget(self, variant: Variant) -> None:
        """Drop what is known of a variant's program: the memory of its steps, and its plan."""
        self._memory.forget(variant.key)
        if self._graphs is not None:
            self._graphs.forget(variant.program)
        variant.forget_steps()
        self.sizes.forget(variant.key)

    def _signature(self, batch: Any) -> Hashable:
        return batch_signature(batch), self._ranks.key()

    def _made(self, batch: Any, plan: Plan | None) -> StepProgram:
        streams: list[Stream | None] = []

        def make(corrections: Corrections) -> StepProgram:
            self.settings.on_stage("capturing the step")
            started = time.perf_counter()
            captured = self._captures.capture(batch, corrections)
            assert captured.guards is not None
            captured.guards.arm()
            streams.append(captured.stream)
            captured = replace(captured, stream=None)  # long, and of no use once it is compared
            settings = self._settings_for(captured)
            if plan is None:
                device = settings.device or local_device(self._store.device)
                settings = with_eager_peak(settings, self._step, captured, device)
            if self._first_adds is None:
                self.capture_seconds += time.perf_counter() - started
            if not self._step.has_backward:
                return make_function_program(self._step, captured, settings, plan, self._store)
            planning = self._ranks.planning(ANEW if plan is not None else self.sizes.planning(captured, settings))
            if not self._may_keep_on_host(settings):
                return make_step_program(self._step, captured, settings, plan, self._store, planning)
            return make_program_of_forms(self._step, captured, settings, plan, self._store, planning)

        program = with_real_results(make)
        program.arguments(batch)  # or the comparison would write to memory that two of them share
        self.settings.on_stage("comparing with eager's calls")
        workspace_bytes = max((op.workspace_bytes or 0 for op in program.plan.graph.ops), default=0)
        limit_bytes = max(0, program.plan.budget_bytes - self._beside_bytes(batch) - workspace_bytes)
        self._comparisons.require_as_eager(self._step, batch, streams[-1], limit_bytes=limit_bytes)
        return program

    def _may_keep_on_host(self, settings: Settings) -> bool:
        is_alone = self._step.optimizer is not None and self._step.across is None
        return is_alone and settings.host_budget_bytes > 0 and settings.planner == DEFAULT_PLANNER

    def _settings_for(self, captured: Captured) -> Settings:
        """Return the settings: a budget in percent is a share of each of the two peaks of accumulation."""
        is_other = self._step.optimizer is None and adds_to_gradients(captured) != self._first_adds
        return self._first_settings if is_other else self.settings
