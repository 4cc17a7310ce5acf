"""Held model: a model in a library's loop, held to a budget by the door of memfit that can do it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from memfit.capture.step_check import is_over_ranks
from memfit.checkpointing.handle import Checkpointed
from memfit.checkpointing.reporting import Report
from memfit.doors.compile import LEAVES_WHOLE, hand_over
from memfit.dynamo.model import PlannedCalls, compile_in_place, release
from memfit.eager_mode.eager import Eager, eager
from memfit.eager_mode.eager import Report as EagerReport
from memfit.errors import BudgetNotHeldError, InvalidOptionError, UnsupportedStepError
from memfit.plan import Plan
from memfit.torch_private.modules import eager_call, is_compiled, own_call
from memfit.torch_private.ranks import inside_ddp

AUTO, COMPILE, CHECKPOINT, EAGER = "auto", "compile", "checkpoint", "eager"
GOES_ON = "memfit: %s: %s; eager mode, which frees single tensors, goes on"
DDP = "several processes train the model (DDP)"
_log = logging.getLogger("memfit")
_OPTIONS = {
    CHECKPOINT: ("blocks", "budget_is", "chunk_loss", "host_budget"),
    EAGER: ("chunk_loss", "host_budget", "host_dir"),
}


class Reporting:
    """What a callback of a library's loop reports of the model that it holds."""

    _held: HeldModel

    @property
    def held(self) -> HeldModel:
        """The model, and what holds it."""
        return self._held

    @property
    def plans(self) -> list[Plan]:
        """The plans in use of `memfit.compile`, one for each graph and tuple of sizes."""
        return self._held.plans

    @property
    def most_bytes(self) -> int:
        """The most bytes on the device in any step that was measured: forward, loss, backward and update."""
        return self._held.most_bytes

    def report(self) -> Report | EagerReport | None:
        """Return the report of `memfit.checkpoint` or `memfit.eager`; None if `memfit.compile` holds the model."""
        return self._held.report()


class HeldModel:
    """A model in a library's loop, held to a budget.

    Args:
        budget: the bytes for everything on the device.
        door: `compile`: `memfit.compile` plans its calls; `checkpoint`: `memfit.checkpoint` steers torch's checkpoints
            in them; `eager`: `memfit.eager` is on while it trains; `auto`: compile where it can, else checkpoint, and
            eager where a step has taken more than the budget with all checkpoints.
        options: of the door; with `auto` those of compile and of checkpoint, each of which takes its own.
        where: begins the message of an error.

    Attributes:
        budget: as given.
        model: that is held now; None if none is.
        holds_evaluations: whether an evaluation without training is held, too: by compile alone.

    Raises:
        InvalidOptionError: no such door, or an option that it does not have.
    """

    def __init__(self, budget: str | int, door: str, options: Mapping[str, Any], where: str) -> None:
        doors = (AUTO, COMPILE, *_OPTIONS)
        if door not in doors:
            raise InvalidOptionError(f"{where}: door={door!r}, expected one of {', '.join(map(repr, doors))}")
        foreign = [name for name in options if door in _OPTIONS and name not in _OPTIONS[door]]
        if foreign:
            raise InvalidOptionError(
                f"{where}: door={door!r} has no option {foreign[0]!r}; it has {', '.join(_OPTIONS[door])}; the options "
                "of memfit.compile are for door='compile'"
            )
        self.budget, self._door, self._options, self._where = budget, door, dict(options), where
        self.model: torch.nn.Module | None = None
        self.holds_evaluations = door in (AUTO, COMPILE)
        self._by: PlannedCalls | Checkpointed | Eager | None = None
        self._counter: Any = None
        self._has_end = True
        self._counted = 0

    @property
    def plans(self) -> list[Plan]:
        """The plans of `compile`, one for each graph and tuple of sizes."""
        return self._by.plans if isinstance(self._by, PlannedCalls) else []

    @property
    def most_bytes(self) -> int:
        """The most bytes on the device in any step that was measured: forward, loss, backward and update."""
        if isinstance(self._by, PlannedCalls):
            return self._by.account.most_bytes
        report = self.report()
        return 0 if report is None else report.most_bytes if isinstance(report, Report) else report.peak_bytes

    @property
    def ran(self) -> int:
        """The calls of the model that were planned or steered."""
        if isinstance(self._by, PlannedCalls):
            return self._by.account.ran
        return self._counted + (self._by.calls if isinstance(self._by, Checkpointed) else 0)

    def report(self) -> Report | EagerReport | None:
        """Return the report of `checkpoint` or `eager`; None of `compile`, which has plans, and before a training."""
        return None if self._by is None or isinstance(self._by, PlannedCalls) else self._by.report()

    def require_allowed(self, why_not_compile: str) -> None:
        """Raise UnsupportedStepError if the door is compile, and there is a reason why it may not hold the model."""
        if self._door == COMPILE and why_not_compile:
            raise UnsupportedStepError(
                f"{self._where}: {why_not_compile}, where memfit.checkpoint holds the budget; give door='checkpoint'"
            )

    def hold(
        self,
        model: torch.nn.Module,
        *,
        why_not_compile: str = "",
        over_ranks: str = "",
        is_training: bool = True,
        has_end: bool = True,
        **given: Any,
    ) -> None:
        """Hold this model from now on, and no other one.

        Args:
            model: if it is trained now, on its device.
            why_not_compile: why compile may not hold it, so that `auto` takes checkpoint at once; empty if it may.
            over_ranks: how several processes train it, for which `auto` takes checkpoint at once, and so does compile
                but under DDP; empty if they do not.
            is_training: whether a training begins; without one only compile holds a model.
            has_end: whether `end_training` will be called; without an end, `auto` takes no eager mode.
            given: options of compile by the library's settings; the user's go first.

        Raises:
            UnsupportedStepError: the door is compile, which may not hold it.
            MemfitError: as the door.
        """
        why_not_compile = why_not_compile or (LEAVES_WHOLE if self._options.get("chunk_loss") else "")
        if is_compiled(model) and not isinstance(own_call(model), PlannedCalls):
            why_not_compile = why_not_compile or "the model is compiled already"
        self.require_allowed(why_not_compile)
        if self._door == COMPILE:
            wrapped, model = model, inside_ddp(model)
            is_ddp = model is not wrapped or over_ranks == DDP
            over_ranks = is_over_ranks(model) or ("" if is_ddp else over_ranks)
        why_not_compile = why_not_compile or over_ranks
        compiles = self._door in (AUTO, COMPILE) and not why_not_compile
        if model is self.model and (own_call(model) is self._by or not isinstance(self._by, PlannedCalls)):
            return
        self.let_go()
        self.holds_evaluations, self._has_end = compiles, has_end
        if not (compiles or is_training):
            return
        self.model = model
        if compiles:
            options = {**given, **self._options, "budget": self.budget}
            options.pop("blocks", None)
            otherwise = self._fall_back if self._door == AUTO else None
            release(model)  # of a run that was broken off
            self._by = compile_in_place(model, options, self._where, otherwise=otherwise)
        elif self._door == EAGER:
            self._enter(model, self.budget)
        else:
            self._steer(model, why_not_compile)

    def _steer(self, model: torch.nn.Module, why: str) -> None:
        self._by = hand_over(model, {"budget": self.budget, **self._options}, why, self._where)
        if self._door == AUTO and self._has_end and not any(map(is_compiled, model.modules())):
            self._counter = model.register_forward_pre_hook(self._judge, prepend=True)

    def _judge(self, model: torch.nn.Module, *_: Any) -> None:
        """Judge the step before a call, and go on in eager mode where checkpoints take too much."""
        held = self._by
        if not isinstance(held, Checkpointed) or not (why := held.why_leave() or held.why_begin_elsewhere()):
            return
        budget_bytes, self._counted = held.report().budget_bytes, self.ran + 1
        assert budget_bytes is not None
        held.close()
        self._counter.remove()
        _log.warning(GOES_ON, type(model).__name__, why)
        self._enter(model, budget_bytes)

    def _enter(self, model: torch.nn.Module, budget: str | int) -> None:
        self._count(model)
        options = {name: value for name, value in self._options.items() if name in _OPTIONS[EAGER]}
        self._by = eager(model, budget=budget, **options)
        self._by.__enter__()

    def _fall_back(self, why: str) -> Callable[..., Any]:
        """Let checkpoint hold the model, since compile cannot; return what runs its calls."""
        model = self.model
        assert model is not None
        release(model)
        self._counted = self.ran
        self._steer(model, why)
        return eager_call(model)

    def _count(self, model: torch.nn.Module) -> None:
        def count(*_: Any) -> None:
            self._counted += 1

        self._counter = model.register_forward_pre_hook(count)

    def follow(self, *optimizers: torch.optim.Optimizer) -> None:
        """Let compile count the state that these optimizers will make, and hold their updates to the budget."""
        if isinstance(self._by, PlannedCalls):
            self._by.account.optimizers.follow(*optimizers)

    def end_training(self) -> None:
        """End a training: compile holds later evaluations, too; the other doors leave the model as it was."""
        if isinstance(self._by, PlannedCalls):
            self._by.account.optimizers.follow()
        else:
            self.let_go()

    def let_go(self) -> None:
        """Leave the model as it was. A last step that took more than the budget gives a warning."""
        model, self.model = self.model, None
        if self._counter is not None:
            self._counter.remove()
            self._counter = None
        if model is None:
            return
        if isinstance(self._by, PlannedCalls):
            if own_call(model) is self._by:
                release(model)
        elif isinstance(self._by, Checkpointed):
            try:
                self._by.close()
            except BudgetNotHeldError as refusal:  # the training is over, and complete or broken off by another error
                _log.warning("memfit: %s", refusal)
        elif self._by is not None:
            self._by.__exit__(None, None, None)
