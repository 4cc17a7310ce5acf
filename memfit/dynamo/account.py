"""The account of a compiled model: what its steps take of their device, measured and held against the budget."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from memfit.dynamo.optimizers import Optimizers
from memfit.dynamo.outside import OTHER_DOOR, OutsideOfGraphs, holding_budget
from memfit.dynamo.window import LossWindows, Mark, Window, apart, paused
from memfit.errors import InfeasibleBudgetError, OverBudgetError
from memfit.memory.contract import (
    FIRM,
    MOST_CORRECTIONS,
    STEPS_IN_A_ROW,
    WINDOWS_BEFORE_LARGER,
    Aim,
    Contract,
    Refused,
    Standing,
    Unused,
    Warnings,
    WindowKind,
)
from memfit.memory.contract import Usage as Taken
from memfit.memory.host.store import HostStore
from memfit.memory.uncounted import Uncounted
from memfit.planning import Settings
from memfit.step.divided_updates import DividedUpdates
from memfit.system.budget import format_bytes
from memfit.system.recorder import allocated_bytes, empty_cache, held_bytes, page_bytes
from memfit.torch_private.autograd import at_end_of_backward
from memfit.torch_private.cuda import LastStream, prepare_allocator
from memfit.torch_private.tensors import StorageWeakRef

_log = logging.getLogger("memfit")

_UNUSED_SHARE = 1 / 16  # of the budget, in the allocator's pages, before a step has shown it
_UNUSED_SHARE_IN_SEGMENTS = 1 / 6  # where these cannot grow
_MOST_MEASURING = 16  # accounts that have a record open

_measuring: list[weakref.ref[Account]] = []  # these, the latest last


class Account:
    """Measures the steps of one model, from the call of the model to the end of the optimizer's update.

    If forward, loss and backward took more than the budget, later plans get as many bytes less, by the verdict of
    `memfit.memory.contract`, and more if there is room. An update or an evaluation that took more raises, because no
    plan makes it smaller, and so does a fourth step in a row. If the budget is soft, these are warnings.

    On CUDA the bytes count that torch's allocator holds. What a step over the budget has left in its cache is
    returned, and what other code has left, until two steps in a row have kept the budget; from then on it does not
    count. The allocator gets expandable segments, unless its settings say otherwise.

    Args:
        budget_bytes: for everything on the device.
        device: the model's.
        budget_is: `firm` or `soft`.

    Attributes:
        contract: the budget.
        unused_share: of the budget that torch's allocator is assumed to hold unused, before a step has shown it.
        standing: what steps have shown of it.
        optimizers: whose updates are measured.
        losses: what runs between the halves of graphs.
        outside: what was seen there.
        is_judging: whether verdicts are given, and plans are replaced.
        excess_bytes: by how much steps exceeded their plans.
        most_bytes: the most bytes on the device in any step that was measured, and while a graph was compiled.
        ran: calls of graphs, which `count` adds to.
        steps: that have begun.
        ended: called at the end of each backward pass with the most bytes on the device in its step.
    """

    def __init__(self, budget_bytes: int, device: torch.device, budget_is: str = FIRM) -> None:
        self.device = device
        self.unused_share = _unused_share(device)
        self.contract = Contract(
            budget_bytes,
            page_bytes=page_bytes(device),
            is_firm=budget_is == FIRM,
            most_corrections=MOST_CORRECTIONS,
        )
        self.standing = Standing(expected_error_bytes=int(self.unused_share * budget_bytes))
        self._warnings = Warnings()
        self._last_stream = LastStream(device)
        self._updates = 0  # since the last verdict that changed plans
        self.excess_bytes = budget_bytes - self.contract.aim_bytes(self.standing)
        self.most_bytes = 0
        self.ended: Callable[[int], None] | None = None
        self.ran = self.steps = self._ran_before = 0
        self._last_compiled = -WINDOWS_BEFORE_LARGER  # the step in which a graph was compiled last
        self._uncounted = Uncounted(device)
        self._divided = DividedUpdates(device, lambda: self.budget_bytes - self.live_bytes)
        self.optimizers = Optimizers(device, lambda: self.ran, self._end_update)
        self._unused = Unused()
        self.losses, self.outside = LossWindows(device), OutsideOfGraphs()
        self._hosts: dict[Any, HostStore] = {}  # by budget and directory
        self.is_judging = True
        self._open: Window | None = None
        self._is_in_step = False
        self._planned_from_now_bytes = 0
        self._live_bytes = 0  # the most in the record that was closed last
        self._left_bytes: int | None = None  # what torch's allocator held after the last step
        self._others_bytes = 0
        self._held_before_update_bytes = 0
        self._room_bytes = 0  # that the plans of the present step leave
        self._most_error_bytes = 0  # that a step took beyond what its plans were predicted to, without this room
        self._returns_cache = False  # before each update and each step

    @property
    def budget_bytes(self) -> int:
        """The bytes for everything on the device."""
        return self.contract.budget_bytes

    def host(self, settings: Settings) -> HostStore:
        """Return the store of all graphs with this host budget, and this directory of a CPU's copies."""
        where = settings.host_budget_bytes, settings.host_dir
        return self._hosts.setdefault(where, HostStore(self.device, *where))

    @property
    def live_bytes(self) -> int:
        """All bytes on the device now, with those that other streams keep from the current one."""
        return self._uncounted.live_bytes() + allocated_bytes(self.device) + self._last_stream.lost_bytes

    @property
    def is_amid_calls(self) -> bool:
        """Whether a graph was called on the device, of this or of another model, whose backward half has yet to run."""
        return any(each.losses.are_awaited and each.device == self.device for each in _all_measuring())

    def begin(self) -> None:
        """Begin to measure a step, unless the backward pass of the last call has yet to come."""
        if self._is_in_step:
            return
        taken = self._close()
        if taken:
            self._unused.evaluations_end(self._live_bytes)  # with what the loop made of them
        if self.is_judging and (self._live_bytes > self.budget_bytes or taken > max(self.budget_bytes, self._left())):
            self._returns_cache = self._returns_cache or self._live_bytes <= self.budget_bytes
            self._warnings.warn(self.contract.between_text(self._live_bytes, taken), "between", most=1)
            self._unused.more_bytes = self.budget_bytes  # no later one begins beside what a step has left
        self._follow_stream()
        others_bytes = max(0, held_bytes(self.device) - self._left())  # what other code has left unused
        # what steps of another plan took must not count once more
        is_new = self.standing.windows == 0 or self.steps == self._last_compiled
        is_unused = others_bytes and self.standing.kept_in_a_row < STEPS_IN_A_ROW
        if self._unused.step_begins(held_bytes(self.device), self.budget_bytes, self.budget_bytes):
            is_unused = True
        if self._returns_cache or is_new or is_unused:
            empty_cache(self.device)
            others_bytes = 0
        self._others_bytes = others_bytes
        self._make_way()
        self._open = Window(self.device)
        self._is_in_step, self.standing.is_least = True, False
        self._ran_before = self.ran
        self.steps += 1
        self._planned_from_now_bytes = 0

    def _follow_stream(self) -> None:
        """Plan for less on the first other stream: no step has shown what is unused in the segments of its own."""
        knew_others = self._last_stream.stranded_bytes > 0
        self._last_stream.follow()
        if self._last_stream.stranded_bytes and not knew_others:
            self.excess_bytes += int(self.unused_share * self.budget_bytes)

    def count(self, room_bytes: int, *, is_least: bool) -> None:
        """Count a call of a graph in the present step.

        Args:
            room_bytes: that its plan leaves of what it was made for.
            is_least: whether its plan is the one that takes the least. The step's is if those of all its graphs are.
        """
        is_first = self.ran == self._ran_before
        self.ran += 1
        self._room_bytes = max(0, room_bytes if is_first else min(room_bytes, self._room_bytes))
        self.standing.is_least = is_least and (is_first or self.standing.is_least)

    def begin_loss(self, kept: StorageWeakRef | None = None) -> Mark:
        """Begin to measure what runs between a graph's forward and its backward half.

        Args:
            kept: a tensor that is there until the backward half has run, or cannot run any more.
        """
        self._make_way()
        mark = Mark(after_forward_bytes=allocated_bytes(self.device), kept=kept)
        self.losses.begin(mark)
        return mark

    @contextmanager
    def running(self, *, is_least: bool) -> Iterator[None]:
        """Run a half of a graph in the block.

        Args:
            is_least: whether its plan takes the least. Otherwise it will be planned for what other graphs keep, and so
                does not count in what is outside of them.
        """
        here = (each.losses.open for each in _all_measuring() if each.device == self.device)
        windows = [window for window in here if window is not None]
        with nullcontext() if is_least else paused(windows):
            yield

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Measure apart what planning and compiling a graph in the block takes: no plan of it changes that."""
        self._last_compiled = self.steps
        with apart(self.device) as window:
            yield
        taken = self._total_bytes(window)
        self.most_bytes = max(self.most_bytes, taken)
        if taken > self.budget_bytes:
            self._warnings.warn(self.contract.measuring_text(taken), "compiling")

    @contextmanager
    def unjudged(self) -> Iterator[None]:
        """Give no verdicts in the block: it holds copies of the model's state, and runs eager steps between its own."""
        most_bytes = self.most_bytes
        self.is_judging, self.optimizers.may_step_alone = False, True
        try:
            yield
        finally:
            self._close()
            self.most_bytes = most_bytes
            self.is_judging, self.optimizers.may_step_alone = True, False

    def expect_end(self, more_bytes: int) -> None:
        """End the measurement of forward, loss and backward after the backward pass that runs now.

        Args:
            more_bytes: bytes outside of the caller's graph beyond those that it had planned for; it plans for them from
                now on.
        """
        self._planned_from_now_bytes += more_bytes
        at_end_of_backward(self._end_backward)

    def evaluate(self, run: Callable[[], Any]) -> Any:
        """Run a call without gradients, and return its result.

        Between a forward half and its backward half it belongs to the step, which is measured and planned with it: the
        forward of a custom `autograd.Function`, entropies for a log.

        Args:
            run: the call.

        Raises:
            OverBudgetError: it took more than the budget.
        """
        if self.is_amid_calls:
            self.ran += 1
            return run()
        if self._unused.evaluation_begins(held_bytes(self.device), allocated_bytes(self.device), self.budget_bytes):
            empty_cache(self.device)
        window = Window(self.device)
        try:
            returned = run()
        finally:
            window.close()
        self.ran += 1
        taken = self._total_bytes(window)
        if taken > self.budget_bytes:
            seen = Taken(taken_bytes=taken, live_bytes=taken, kind=WindowKind.EVALUATION)
            self.contract.refuse(OverBudgetError(self.contract.over_text(seen)))
        return returned

    def _end_backward(self) -> None:
        if not self._is_in_step:
            return
        self._is_in_step = False
        self.losses.drop()
        taken = self._close()
        self._left_bytes = held_bytes(self.device) - self._others_bytes
        is_first = self.standing.windows == 0 or self.optimizers.bytes_to_come() > 0
        if self._returns_cache or (self.device.type == "cuda" and is_first):
            empty_cache(self.device)  # what is left there may not be of use to the update
        self._held_before_update_bytes = held_bytes(self.device)
        self._watch()
        if taken and self.is_judging:
            self._judge(taken)
            if self.ended is not None:
                self.ended(taken)

    def _end_update(self) -> None:
        taken = self._close()
        self._watch()
        self._updates += 1
        self._left_bytes = held_bytes(self.device) - self._others_bytes
        fits = self._live_bytes <= self.budget_bytes
        if not self.is_judging or (fits and taken <= self._held_before_update_bytes):  # a backward pass has left that
            return
        if fits and taken > self.budget_bytes and not self._returns_cache:
            self._returns_cache = True
            _log.warning(
                "memfit: torch's allocator held %s during the update of the parameters, of which %s were in use, more "
                "than the budget of %s; from now on it returns what is unused before each update, which takes time",
                format_bytes(taken),
                format_bytes(self._live_bytes),
                format_bytes(self.budget_bytes),
            )
        elif taken > self.budget_bytes:
            self.contract.refuse(
                InfeasibleBudgetError(
                    f"the update of the parameters took {format_bytes(taken)} ({taken} bytes), more than the budget of "
                    f"{format_bytes(self.budget_bytes)}: parameters, gradients, the optimizer's state and what its "
                    "update needs are all there at once, and so is what other models have done since this one's "
                    "backward pass; no plan of forward and backward changes that; raise the budget, plan the other "
                    "models, too, or use memfit.fit on eager's kernels, which updates each parameter as soon as its "
                    "gradient is there",
                    least_budget_found_bytes=taken,
                    least_budget_bound_bytes=0,
                )
            )

    def _watch(self) -> None:
        """Measure what follows in the loop, such as the update, until the next step begins."""
        self._make_way()
        self._open = Window(self.device)

    def _judge(self, taken_bytes: int) -> None:
        """Let later plans get fewer bytes, or more, or refuse.

        Raises:
            BudgetNotHeldError: the budget is firm, and plans for less were over it as well.
        """
        usage = Taken(taken_bytes=taken_bytes, live_bytes=self._live_bytes)
        planned_bytes = self.budget_bytes - self.excess_bytes + self._planned_from_now_bytes
        error_bytes = taken_bytes - planned_bytes + self._room_bytes
        self._most_error_bytes = max(self._most_error_bytes, error_bytes)
        verdict = self.contract.judge(self.standing, usage, planned_bytes)
        if isinstance(verdict, Refused):
            what = f"{MOST_CORRECTIONS} steps before it were over it as well, and planned for less each time"
            what = "no plan of a graph takes less" if self.standing.is_least else what
            is_known = self.standing.is_least and self.ran - self._ran_before == 1
            to_come_bytes, share = self.optimizers.all_bytes_to_come(), self.unused_share
            least_bytes = holding_budget(self._live_bytes, share)  # which a process needs that starts with it
            seen_bytes = holding_budget(taken_bytes + to_come_bytes, share if to_come_bytes else 0.0)
            holding_bytes = max(least_bytes, seen_bytes) if is_known else None
            refusal = self.contract.refusal(verdict, what, f"try whether {OTHER_DOOR}", holding_bytes=holding_bytes)
            self.contract.refuse(refusal)
        elif isinstance(verdict, Aim):
            excess_bytes = max(0, self.budget_bytes - verdict.aim_bytes)
            if verdict.is_larger:  # a plan may fill what the ones so far have left
                excess_bytes = max(excess_bytes, self._most_error_bytes + self.contract.margin_bytes)
            # of micro-batches one is largest
            is_early = self.optimizers.followed and self._updates < WINDOWS_BEFORE_LARGER
            is_early = is_early or self.steps - self._last_compiled < WINDOWS_BEFORE_LARGER
            if verdict.is_larger and (is_early or excess_bytes >= self.excess_bytes):
                return
            self.excess_bytes = excess_bytes
            self.standing.replace_plan(is_least=False, is_most=False)
            self._updates = 0
            if not verdict.is_larger:
                self._warnings.warn(self.contract.over_text(usage), "over")

    def _make_way(self) -> None:
        """Give up the records of the account that has measured least lately: its backward or update may never come."""
        others = [each for each in _all_measuring() if each is not self]
        for oldest in others[: 1 - _MOST_MEASURING]:
            oldest._open = None
            oldest.losses.drop()
        _measuring[:] = map(weakref.ref, [*others[1 - _MOST_MEASURING :], self])

    def _close(self) -> int:
        """End the open window; return the most bytes on the device in it, 0 without one."""
        if self._open is None:
            return 0
        window, self._open = self._open, None
        window.close()
        self._live_bytes = self._uncounted.live_bytes() + window.live_bytes
        taken = self._total_bytes(window)
        self.most_bytes = max(self.most_bytes, taken)
        return taken

    def _left(self) -> int:
        return self._left_bytes or 0

    def _total_bytes(self, window: Window) -> int:
        return self._uncounted.live_bytes() + max(window.live_bytes, window.held_bytes - self._others_bytes)


def _unused_share(device: torch.device) -> float:
    """Return what torch's allocator is assumed to hold unused, having let its segments grow if they can."""
    if device.type != "cuda":
        return 0.0
    return _UNUSED_SHARE if prepare_allocator(device) else _UNUSED_SHARE_IN_SEGMENTS


def _all_measuring() -> list[Account]:
    return [account for account in (each() for each in _measuring) if account is not None]
