"""The models that a script trains under `memfit run`: found as they are called, and held to a budget."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memfit.capture.optimizer import alive_optimizers, changes_parameters
from memfit.capture.training_step import parameters_of
from memfit.checkpointing.blocks import Piece, find_blocks
from memfit.checkpointing.handle import Checkpointed, loops_of
from memfit.checkpointing.loop import Loop
from memfit.checkpointing.reporting import Report
from memfit.checkpointing.windows import History
from memfit.cost.calibration import card_of
from memfit.doors.checkpoint import checkpoint
from memfit.dynamo.model import PlannedCalls
from memfit.eager_mode.eager import Eager, eager
from memfit.eager_mode.eager import Report as EagerReport
from memfit.errors import MemfitError, UnsupportedStepError
from memfit.integrations.held import AUTO, EAGER, GOES_ON
from memfit.memory.contract import FIRM, Contract, Usage, Warnings, WindowKind
from memfit.report.run_page import HeldShown
from memfit.step.hooks import remove_all
from memfit.system.budget import on_card
from memfit.system.recorder import allocated_bytes, watch
from memfit.torch_private.autograd import has_modes
from memfit.torch_private.dynamo import is_compiled_soundly
from memfit.torch_private.modules import CallsSeen, is_compiled, own_call, uncompiled

_log = logging.getLogger("memfit")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldReport:
    """What was held of one model.

    Attributes:
        name: of its class.
        report: of the door; None of a model that is gone, of which `history` is left.
        history: of its windows; None in eager mode.
        why: eager mode was taken; empty if it was asked for, or not taken.
    """

    name: str
    report: Report | EagerReport | None
    history: History | None
    why: str = ""

    def shown(self) -> HeldShown:
        """Return it as the page of `memfit run` shows it."""
        lines = str(self.report).splitlines() if self.report is not None else ["The script is done with this model."]
        if isinstance(self.report, EagerReport):
            return HeldShown(
                name=self.name,
                by=f"memfit.eager{f', since {self.why}' if self.why else ''}",
                budget_bytes=self.report.budget_bytes,
                steps=self.report.passes,
                over=int(self.report.peak_bytes > self.report.budget_bytes),
                most_bytes=self.report.peak_bytes,
                windows=(),
                lines=lines,
            )
        assert self.history is not None
        return HeldShown(
            name=self.name,
            by="memfit.checkpoint",
            budget_bytes=None if self.report is None else self.report.budget_bytes,
            steps=self.history.count,
            over=self.history.over,
            most_bytes=self.history.most_bytes,
            windows=[window.taken_bytes for window in self.history.latest],
            lines=lines,
        )


@dataclass(slots=True)
class _Steered:
    models: list[weakref.ref[torch.nn.Module]]
    may_leave: bool  # whether eager mode may take over
    may_join: bool  # whether a plan may be made with other models
    loop: weakref.ref[Loop]  # the models have it: those that the script is done with are not kept alive
    history: History
    name: str

    def is_of(self, module: torch.nn.Module) -> bool:
        """Return whether a module is one of the models."""
        return any(module is model() for model in self.models)

    def close(self) -> HeldReport:
        """Leave the model as it was, and return what was held."""
        loop, report = self.loop(), None
        if loop is not None:
            report = Checkpointed(loop).report()
            loop.close(is_judged=False)
        return HeldReport(name=self.name, report=report, history=self.history)


@dataclass(slots=True)
class _InEagerMode:
    name: str
    block: Eager
    why: str


@dataclass(slots=True)
class Running:
    """Holds whatever a script trains within a budget, each model from its first call in training on.

    A model is the outermost module that is called with gradients and has parameters that need some. It is held by
    `memfit.checkpoint`, from within this first call. What checkpoints cannot hold is held in eager mode, which is then
    on for all that comes: a model without blocks, one in eval mode, one of several modules that one optimizer updates
    together, and all that is trained, once a step has taken more than the budget with all checkpoints.
    Calls without gradients before that are measured, and told where they take more. Models that were called before any
    of them was planned share one plan from the second step on.

    Args:
        budget: as text or in bytes.
        door: `auto`, `checkpoint` or `eager`.
        host_budget: see the doors.
        budget_is: see the doors; eager mode is always firm.
        chunk_loss: see the doors.

    Attributes:
        has_left: whether a model was left alone, for which the script itself uses memfit.
    """

    budget: str | int
    door: str = AUTO
    host_budget: str | int | None = None
    budget_is: str = FIRM
    chunk_loss: bool = False
    _known: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet, init=False)
    _roots: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet, init=False)
    _updated: weakref.WeakSet[torch.optim.Optimizer] = field(default_factory=weakref.WeakSet, init=False)
    _steered: list[_Steered] = field(default_factory=list[_Steered], init=False)
    _done: list[HeldReport] = field(default_factory=list[HeldReport], init=False)
    _eager: _InEagerMode | None = field(default=None, init=False)
    _hooks: list[Any] = field(default_factory=list[Any], init=False)
    _warnings: Warnings = field(default_factory=Warnings, init=False)
    _is_evaluating: bool = field(default=False, init=False)
    has_left: bool = field(default=False, init=False)

    def begin(self) -> None:
        """Look at the calls of all modules from now on, and count bytes where they will be counted."""
        if torch.cuda.device_count() == 0:
            allocated_bytes("cpu")  # what comes from here on
        self._hooks.append(CallsSeen(self._look))
        self._hooks.append(register_optimizer_step_pre_hook(self._require_seen))

    def _look(self, module: torch.nn.Module) -> Callable[[], None] | None:
        """Look at a call that begins: hold the model, or measure the call."""
        held = next((each for each in self._steered if each.is_of(module)), None)
        if held is not None:
            if not self._joins() and held.may_leave:
                self._judge(held)
        elif torch.is_grad_enabled():
            if self._is_trained(module):
                self._hold(module)
        elif self._is_evaluated_before(module):
            return self._measured(module)
        return None

    def _is_trained(self, module: torch.nn.Module) -> bool:
        """Return whether a call with gradients that begins is the first one of a model in training."""
        if module in self._known or torch.jit.is_tracing() or has_modes():
            return False
        is_read = isinstance(module, ParametrizationList)  # of a parameter that is computed from others
        if is_read or self._is_of_root(module):
            self._known.update(module.modules())
            return False
        return any(each.requires_grad and each.device.type != "meta" for each in module.parameters())

    def _is_of_root(self, module: torch.nn.Module) -> bool:
        """Return whether a module is a layer of a model, or is made of its layers: by memfit, or as `forward` runs."""
        own = {id(each) for root in self._roots for each in (*root.modules(), *root.parameters())}
        return id(module) in own or (bool(own) and own.issuperset(map(id, module.parameters())))

    def _is_evaluated_before(self, module: torch.nn.Module) -> bool:
        """Return whether a call without gradients begins before anything was trained."""
        if self._is_evaluating or self._steered or self._eager is not None or torch.jit.is_tracing() or has_modes():
            return False
        return any(each.device.type != "meta" for each in module.parameters())

    def _measured(self, module: torch.nn.Module) -> Callable[[], None]:
        """Measure a call that begins, and return what says at its end if it has taken more than the budget.

        Nothing could be planned there.
        """
        device = next(each.device for each in module.parameters())
        contract = Contract(on_card(self.budget, lambda: card_of(device)))
        if not contract.is_resolved:  # a share of a peak that is not known yet
            return lambda: None
        self._is_evaluating = True
        before_bytes, watched = allocated_bytes(device), watch(device)
        seen = watched.__enter__()

        def returned() -> None:
            self._is_evaluating = False
            watched.__exit__(None, None, None)
            taken = Usage(
                taken_bytes=before_bytes + seen.peak_bytes, live_bytes=seen.peak_bytes, kind=WindowKind.EVALUATION
            )
            if taken.taken_bytes > contract.budget_bytes:
                self._warnings.warn(f"{type(module).__name__}: {contract.over_text(taken)}", "evaluation", most=1)

        return returned

    def _hold(self, module: torch.nn.Module) -> None:
        self._roots.add(module)
        self._known.update(module.modules())
        if any(map(_is_memfits, module.modules())):
            self.has_left = True
            _log.warning("memfit: %s is left alone: the script itself uses memfit for it", type(module).__name__)
            return
        why = self._why_eager(module) if self.door == AUTO and not self._steered else ""
        if why or self.door == EAGER:
            self._enter(module, why, self.budget)
        else:
            self._steer(module)

    def _steer(self, *models: torch.nn.Module) -> None:
        if self._steered:
            gc.collect()  # models that the script is done with
        options: dict[str, Any] = {"host_budget": self.host_budget, "budget_is": self.budget_is}
        checkpoint(models[0] if len(models) == 1 else models, self.budget, **options, chunk_loss=self.chunk_loss)
        (loop,) = loops_of(uncompiled(models[0]))
        is_eager = not any(is_compiled(each) for model in models for each in model.modules())
        self._steered.append(
            _Steered(
                [weakref.ref(model) for model in models],
                may_leave=self.door == AUTO and self.budget_is == FIRM and is_eager,
                may_join=is_eager and not self.chunk_loss,
                loop=weakref.ref(loop),
                history=loop.history,
                name=" and ".join(type(model).__name__ for model in models),
            )
        )

    def _joins(self) -> bool:
        """Let one plan hold the models of a loop from its second step on; return whether it does from now on.

        Those are the ones that were called before any of them was planned. Where ranks follow one policy, as blocks run
        collectives, models are left apart: another rank might not join its own.
        """
        joined = [each for each in self._steered if each.may_join and (loop := each.loop()) and not loop.plans.has_any]
        if len(joined) < 2:
            return False
        models = [model for each in joined for ref in each.models if (model := ref()) is not None]
        devices = {parameter.device for model in models for parameter in model.parameters()}
        loops = [loop for each in self._steered if (loop := each.loop()) is not None]
        if len(devices) > 1 or any(loop.is_between() for loop in loops):
            return False
        for each in joined:
            if not each.history.over and (loop := each.loop()) is not None:
                loop.end()
        if any(each.history.over for each in joined):  # one of them cannot be held, and is judged by itself
            return False
        if any(loop.plans.has_collectives for loop in loops):
            return False
        for each in joined:
            each.close()
        self._steered = [each for each in self._steered if each not in joined]
        self._steer(*models)
        return True

    def _judge(self, held: _Steered) -> None:
        """Judge the step before a call of a model, and go on in eager mode where checkpoints take too much.

        Where blocks run collectives, other ranks might not: checkpoints then say so.
        """
        loops = [loop for each in self._steered if (loop := each.loop()) is not None]
        own, module = held.loop(), held.models[0]()
        if own is None or module is None or any(loop.is_between() for loop in loops):
            return
        handle = Checkpointed(own)
        why = "" if any(loop.plans.has_collectives for loop in loops) else handle.why_leave()
        if not own.plans.has_collectives and len(self._steered) == 1:
            why = why or handle.why_begin_elsewhere()
        if why and own.contract is not None:
            self._done += [each.close() for each in self._steered]
            self._steered.clear()
            _log.warning(GOES_ON, held.name, why)
            self._enter(module, why, own.contract.budget_bytes)

    def _enter(self, module: torch.nn.Module, why: str, budget: str | int) -> None:
        remove_all(self._hooks)
        block = eager(module, budget=budget, host_budget=self.host_budget or 0, chunk_loss=self.chunk_loss)
        block.__enter__()
        self._eager = _InEagerMode(type(module).__name__, block, why)

    def _why_eager(self, module: torch.nn.Module) -> str:
        """Return why `memfit.checkpoint` cannot hold a model that is called; empty if it can."""
        if not module.training:
            return "it is called in eval mode"
        blocks = find_blocks(uncompiled(module))
        if not blocks:
            return "it has no blocks"
        if any(isinstance(block, Piece) and vars(block)["whole"][0] is module for _, block in blocks):
            return "it is one sequence of single layers"
        own = set(map(id, module.parameters()))
        for optimizer in alive_optimizers():
            updated = set(map(id, parameters_of(optimizer)))
            if own & updated and not updated <= own:
                return "its optimizer updates other modules, too"
        return ""

    def _require_seen(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Refuse the first update of parameters that no call of a module was seen to use."""
        if optimizer in self._updated or has_modes() or not changes_parameters(optimizer):  # fakes are tried
            return
        self._updated.add(optimizer)
        given = [each for each in parameters_of(optimizer) if each.grad is not None]
        own = {id(each) for root in self._roots for each in root.parameters()}
        if any(isinstance(each, torch.nn.Parameter) for each in given) and not any(id(each) in own for each in given):
            raise UnsupportedStepError(
                f"memfit run: {type(optimizer).__name__} updates parameters that no call of a module was seen to use, "
                "so that the budget was not enforced. Either they belong to no module, or the module is called inside "
                "of a compiled function: compile the model, torch.compile(model), and not the function that calls it; "
                "or use memfit.fit for the step"
            )

    def end(self, error: BaseException | None = None) -> list[HeldReport]:
        """Leave all models as they were, and return what was held.

        Args:
            error: that ended the script; its last steps are then not judged.

        Raises:
            MemfitError: the last step of a script that ended well took too much.
        """
        remove_all(self._hooks)
        steered, self._steered = self._steered, []
        held, self._eager = self._eager, None
        refused: list[MemfitError] = []
        found, self._done = self._done, []
        for each in steered:
            loop = each.loop()
            try:
                if loop is not None and error is None:
                    loop.end()
            except MemfitError as refusal:
                refused.append(refusal)
            found.append(each.close())
        if held is not None:
            held.block.__exit__(None if error is None else type(error), error, None)
            found.append(HeldReport(name=held.name, report=held.block.report(), history=None, why=held.why))
        if refused:
            raise refused[0]
        return found


def _is_memfits(module: torch.nn.Module) -> bool:
    return bool(loops_of(module)) or isinstance(own_call(module), PlannedCalls) or is_compiled_soundly(module)
