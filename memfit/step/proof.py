"""The proof that a planned step keeps its budget: what its calls take of the device, and corrections of its plans.

A plan is proved when two steps in a row were within the budget. Until then a step counts with all that torch's
allocator takes from the device, blocks without a storage included.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.errors import InfeasibleBudgetError, TimeLimitError
from memfit.memory.contract import MOST_CORRECTIONS, STEPS_IN_A_ROW, Aim, Contract, Held, Refused, Usage
from memfit.memory.hard_cap import capped
from memfit.memory.step_memory import StepMemory
from memfit.memory.uncounted import Beside
from memfit.step.distributed.ranks import Ranks
from memfit.step.variants import Variant
from memfit.system.budget import format_bytes
from memfit.system.recorder import empty_cache, held_bytes, record, records_at_once, watch

_log = logging.getLogger(__name__)
_CORRECTED = (InfeasibleBudgetError, TimeLimitError)  # raised where no plan takes less


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A plan of which a step took more than the budget.

    Attributes:
        budget_bytes: the budget.
        predicted_bytes: that the plan was predicted to take.
        measured_bytes: the bytes that the step took, with all that was there before it.
        aim_bytes: the budget of the plan that replaces it, as `Contract` gives it. None where no plan fits that, so
            that the plan stays.
    """

    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int
    aim_bytes: int | None

    @property
    def sentence(self) -> str:
        """The correction as a sentence."""
        words = str(self)
        return f"{words[0].upper()}{words[1:]}."

    def __str__(self) -> str:
        took = (
            f"a step took {format_bytes(self.measured_bytes)}, more than its budget of "
            f"{format_bytes(self.budget_bytes)} and the {format_bytes(self.predicted_bytes)} that were predicted"
        )
        if self.aim_bytes is None:
            return f"{took}; a plan that allows for it was not found"
        return f"{took}; later steps run a plan made for {format_bytes(self.aim_bytes)}"


class Proof:
    """Holds what the calls of one step take against its budget, and has its plans corrected.

    Args:
        contract: the budget.
        device: of the step.
        memory: of its calls.
        ranks: that it runs on.
        plan_within: replaces a variant's program by one that is planned for so many bytes.
        beside: the step, on its device; None where the budget is a share of what the step takes itself.

    Attributes:
        corrections: the plans of which a step took more than the budget, and what replaced them.
        is_capped: whether calls are capped at the budget.
        taken_bytes: what the latest call that was measured took; 0 before.
    """

    def __init__(
        self,
        contract: Contract,
        device: torch.device,
        memory: StepMemory,
        ranks: Ranks,
        plan_within: Callable[[Variant, int], None],
        beside: Beside | None,
        *,
        is_capped: bool,
    ) -> None:
        self.corrections: list[Correction] = []
        self.is_capped = is_capped
        self.taken_bytes = 0
        self._contract, self._device, self._memory, self._ranks = contract, device, memory, ranks
        self._plan_within, self._beside = plan_within, beside
        self._meter = Meter(device)

    @property
    def budget_bytes(self) -> int:
        """What a call may take."""
        return self._contract.budget_bytes

    def allow(self, budget_bytes: int) -> None:
        """Hold steps to a budget that is larger: a percentage is a share of each variant's own peak."""
        if budget_bytes > self._contract.budget_bytes:
            self._contract = self._contract.of_budget(budget_bytes)

    def leave_stranded(self, variant: Variant) -> None:
        """Plan for less, if there is such a plan, where what stays on another stream would not fit beside the plan."""
        left_bytes = self._contract.budget_bytes - self._memory.stranded_bytes
        if variant.program.peak_bytes > left_bytes:
            with suppress(*_CORRECTED):  # the step shows what it takes
                self._plan_within(variant, max(1, left_bytes))

    def run(
        self,
        variant: Variant,
        key: Hashable,
        run: Callable[[], Any],
        resident_bytes: Callable[[], int],
        beside_bytes: int,
    ) -> Any:
        """Run a call, and return what it returns; if it took more than the budget, plan its variant for less.

        Args:
            variant: of the call.
            key: of its memory.
            run: runs it.
            resident_bytes: returns what is on the device before the call. It is asked once for a key, before the
                call, which may make state that the recorder counts.
            beside_bytes: beside that: an arena, and workspaces that libraries keep.

        Raises:
            BudgetNotHeldError: the budget is firm, and no plan keeps it.
        """
        is_proved = key in variant.proved
        is_measured = not is_proved or self.is_capped or records_at_once(self._device)
        if key not in variant.resident_bytes:
            variant.resident_bytes[key] = resident_bytes()
        returned, measured_bytes = None, 0
        if is_measured:
            bytes_before = variant.resident_bytes[key] + beside_bytes
            budget_bytes = self._contract.budget_bytes
            if self._beside is not None:
                self._beside.look(bytes_before, variant.program.peak_bytes, budget_bytes)
            with capped(self._device, budget_bytes, bytes_before) if self.is_capped else nullcontext():
                returned, measured_bytes = self._meter.run(run, bytes_before, is_proved=is_proved)
        else:
            returned = run()
        measured_bytes = self._ranks.most_bytes(measured_bytes)
        self.taken_bytes = measured_bytes or self.taken_bytes
        if measured_bytes > self._contract.budget_bytes or (is_measured and self._memory.is_settled):
            self._judge(variant, key, measured_bytes)
        elif is_measured:
            del variant.resident_bytes[key]
        return returned

    def _judge(self, variant: Variant, key: Hashable, measured_bytes: int) -> None:
        """Hold a step against the budget; plan the variant for less if it took more."""
        program, standing = variant.program, variant.standing
        if key != variant.judged_key:
            variant.judged_key, standing.kept_in_a_row = key, 0
        usage = Usage(taken_bytes=measured_bytes, live_bytes=measured_bytes)
        verdict = self._contract.judge(standing, usage, program.peak_bytes)
        if isinstance(verdict, Held) or (isinstance(verdict, Aim) and verdict.is_larger):
            if standing.kept_in_a_row == STEPS_IN_A_ROW:
                variant.proved.add(key)
                variant.given_up = ""
            return
        variant.proved.discard(key)
        if self._contract.is_firm or measured_bytes > variant.told_bytes:
            correction = Correction(
                budget_bytes=self._contract.budget_bytes,
                predicted_bytes=program.peak_bytes,
                measured_bytes=measured_bytes,
                aim_bytes=max(1, verdict.aim_bytes) if isinstance(verdict, Aim) else None,
            )
            self._correct(variant, correction)

    def _correct(self, variant: Variant, correction: Correction) -> None:
        """Replace a variant's program by one that allows for what its plan mispredicted, if there is one."""
        if correction.measured_bytes <= correction.predicted_bytes:
            return self._give_up(variant, correction, "no plan that was found takes less as its bytes are placed")
        if correction.aim_bytes is None:
            return self._give_up(variant, correction, variant.given_up or f"so did {MOST_CORRECTIONS} plans before it")
        try:
            self._plan_within(variant, correction.aim_bytes)
        except _CORRECTED as error:
            return self._give_up(variant, correction, str(error).partition(";")[0])
        self.corrections.append(correction)
        return _log.warning("%s", correction)

    def _give_up(self, variant: Variant, correction: Correction, why: str) -> None:
        """Say that a step takes more than the budget, whatever its plan: as an error if the budget is firm."""
        variant.standing.corrections, variant.given_up = MOST_CORRECTIONS, why
        if correction.measured_bytes > variant.told_bytes:
            self.corrections.append(replace(correction, aim_bytes=None))
            variant.told_bytes = correction.measured_bytes
        if self._contract.is_firm:
            over_bytes = correction.measured_bytes - correction.budget_bytes
            raise self._contract.refusal(Refused(correction.measured_bytes, over_bytes), why)
        _log.warning("%s: %s", self.corrections[-1], why)


class Meter:
    """Measures the steps of a planned step on its device.

    Args:
        device: a CPU or CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._left_bytes: int | None = None  # what the allocator held after the last step that was to prove a plan

    def run(self, run: Callable[[], torch.Tensor], bytes_before: int, *, is_proved: bool) -> tuple[torch.Tensor, int]:
        """Run a step; return its loss and the bytes that it took of the device.

        While its plan has to be proved, the bytes that CUDA's caching allocator holds count, with the blocks that no
        storage fitted into. Those that other code has left unused since the last such step are returned before; those
        of the last step stay, because a second step may take more than a first, whose blocks it splits. Of a later step
        only what was allocated counts. With an arena the whole arena counts.

        Args:
            run: runs the step.
            bytes_before: the bytes of the step that are on the device already: residents, an arena, and workspaces that
                libraries keep.
            is_proved: whether the plan was seen to keep its budget.
        """
        if is_proved:
            with watch(self._device) as usage:
                loss = run()
            return loss, bytes_before + usage.peak_bytes
        if self._left_bytes is None or held_bytes(self._device) > self._left_bytes:
            empty_cache(self._device)
        if self._left_bytes is None:
            gc.collect()
        with _older_garbage_stays(), record(self._device) as usage:
            loss = run()
        self._left_bytes = held_bytes(self._device)
        return loss, bytes_before + usage.taken_bytes


@contextmanager
def _older_garbage_stays() -> Iterator[None]:
    """Let Python free no garbage inside the block that is older: it would hide as many bytes of the peak.

    A full collection before it would do so, too, but takes a quarter of a second where much is imported.
    """
    gc.collect(1)
    *young, oldest = gc.get_threshold()
    gc.set_threshold(*young, 1 << 30)
    try:
        yield
    finally:
        gc.set_threshold(*young, oldest)
