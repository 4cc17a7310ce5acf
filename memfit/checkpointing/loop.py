"""The loop of measures around a training loop: windows, plans, corrections."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memfit.checkpointing.blocks import Named
from memfit.checkpointing.choices import FULL, NONE
from memfit.checkpointing.installed import Installed
from memfit.checkpointing.planning import CHAINED, LeanPass, Planned, Planner
from memfit.checkpointing.policy import Policy, rules_for
from memfit.checkpointing.recording import LeanRecorder
from memfit.checkpointing.reporting import WindowSeen
from memfit.checkpointing.seen import CallSeen
from memfit.checkpointing.shapes import Race, Shape, bucket_of
from memfit.checkpointing.steering import Pass, Steering, rulings_of
from memfit.checkpointing.uncounted import Uncounted
from memfit.checkpointing.whole import MOST_COMPILATIONS, compiled_calls_in
from memfit.checkpointing.windows import History, Meter
from memfit.errors import UnsupportedStepError
from memfit.memory.contract import (
    MOST_PLANS,
    WINDOWS_BEFORE_LARGER,
    Aim,
    Contract,
    Held,
    Refused,
    Standing,
    Usage,
    WindowKind,
)
from memfit.system.recorder import allocated_bytes, empty_cache, held_bytes, record
from memfit.torch_private.autograd import at_end_of_backward
from memfit.torch_private.modules import module_hooks, uncompiled
from memfit.torch_private.tensors import tensors_in

_log = logging.getLogger("memfit")

_MOST_LEAN_PASSES = 64  # without an optimizer's step, before a plan is made all the same
_MOST_WARNINGS = 3  # of one kind
_HOPELESS = 2.0  # a plan that is predicted to take so many times the seconds is not tried
_RIVALS_SLACK = 7  # what no window has shown leaves 1/2**7
_COMPILERS_SLACK = 4  # 1/2**4 of the budget is left to what the compiler keeps more than eager mode
_SLACK = 9  # a plan leaves 1/2**9 of the budget to what grows between steps
_NOT_SEEN = (
    "an optimizer has stepped, and no call of the model was seen: give memfit.checkpoint what the loop calls, such as "
    "the module that torch.compile returned"
)
_NOT_STEERED = (
    "a backward pass comes from a call of the model in eval mode, which memfit.checkpoint does not steer; call "
    "model.train(), and set single modules to eval() after it"
)


class Loop:
    """Measures the passes of a model, and plans them within a budget.

    Args:
        called: what the loop calls; the hooks are on it, or on what is in it if torch.compile made it.
        blocks: that are steered, and computed again in lean passes.
        rest: modules beside them that are steered, and not computed again in lean passes.
        contract: the budget.
        device: of the model.
        may_chain: whether inputs of blocks may be computed again.
        given: a policy in the place of plans: elements of the batch -> name of a module -> rule.
    """

    def __init__(
        self,
        called: torch.nn.Module,
        blocks: Sequence[Named],
        rest: Sequence[Named],
        contract: Contract | None,
        device: torch.device,
        *,
        may_chain: bool,
        given: Policy | None = None,
    ) -> None:
        model = uncompiled(called)
        self.model, self.contract, self.device = model, contract, device
        self.blocks = [name for name, _ in blocks]
        self._rest = [name for name, _ in rest]
        self.steering = Steering(device)
        self.shapes: dict[tuple[int, WindowKind], Shape] = {}
        self.history = History()
        self._whole = compiled_calls_in(called, blocks)
        self._compilations = 0
        self._is_first_compiled = False
        self._may_chain, self._given = may_chain and not self._whole, given
        self._parameters: list[torch.nn.Parameter] = []
        self._uncounted = Uncounted(device)
        self._uncounted_bytes = self._uncounted.live_bytes()
        self._meter = Meter(device)
        self._numel, self._kind = 0, WindowKind.FIRST
        self._shape: Shape | None = None
        self._predicted_bytes: int | None = None
        self._awaits_backward = False
        self._updates_to_come = 1 + _has_ranks()  # DistributedDataParallel divides its buckets anew in the second step
        self._lean_passes = 0
        self._steered: set[str] = set()  # modules that a plan was made for
        self._warned: Counter[str] = Counter()
        self.frozen: Shape | None = None
        with record(device):  # from here on all is counted
            pass
        self.installed = Installed(model, blocks, rest, self.steering)
        self._model_hooks = self._hooks_on(model)
        self._hooks: list[Any] = [
            register_optimizer_step_pre_hook(Hook(self._before_step)),
            register_optimizer_step_post_hook(Hook(self._stepped)),
        ]

    def _hooks_on(self, model: torch.nn.Module) -> list[Any]:
        return [
            model.register_forward_pre_hook(Hook(self.begin), with_kwargs=True, prepend=True),
            model.register_forward_hook(Hook(self.returned)),
        ]

    def expect_no_optimizer(self) -> None:
        """Plan from the second pass on, although no optimizer will step."""
        self._updates_to_come = 0

    # -- windows

    def begin(self, _model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a window with a call of the model, unless the backward pass of the last call has yet to come."""
        if torch.compiler.is_compiling() or self.frozen is not None:
            return
        is_training = torch.is_grad_enabled() and self.model.training
        if is_training and self._awaits_backward and self._kind is not WindowKind.EVALUATION:
            return
        self.end()
        self._numel = sum(tensor.numel() for tensor in tensors_in((args, kwargs)))
        if self.device.type == "cuda" and self._is_over(held_bytes(self.device)):
            empty_cache(self.device)
        if not is_training:
            self._kind, self._shape, self.steering.present = WindowKind.EVALUATION, None, None
        else:
            self._kind = self._kind_now()
            self._shape = self._shape_now()
            self._compile_if_settled(self._shape)
            self.steering.present = self._pass(self._shape)
        self._meter.open()

    def returned(self, _model: torch.nn.Module, _args: Any, output: Any) -> None:
        """Look for the beginning of the backward pass, which first reaches what the model has returned."""
        if not torch.is_grad_enabled() or self.frozen is not None:
            return
        if self.steering.present is None:
            self._watch_evaluation(output)
            return
        if self.steering.present.recorder is not None:
            self.steering.present.recorder.has_returned = True
        grown = next((tensor for tensor in tensors_in(output) if tensor.requires_grad), None)
        if grown is not None:
            self._awaits_backward = True
            grown.register_hook(self._backward_begins)

    def _watch_evaluation(self, output: Any) -> None:
        """Warn if a call in eval mode is trained on, which is not steered."""
        grown = next((tensor for tensor in tensors_in(output) if tensor.requires_grad), None)
        if grown is not None and not self.model.training and not self._warned["eval mode"]:
            grown.register_hook(lambda _: self._warn(_NOT_STEERED, "eval mode"))

    def _backward_begins(self, _gradient: torch.Tensor) -> None:
        self._awaits_backward = False
        present = self.steering.present
        if present is not None and present.recorder is not None:
            at_end_of_backward(present.recorder.end_of_backward)
        elif present is not None:
            at_end_of_backward(self._meter.end_of_backward)

    def end(self) -> None:
        """End the window that is open, and judge it.

        Raises:
            BudgetNotHeldError: the budget is firm, and the plan that takes the least took more.
        """
        self._awaits_backward = False
        if not self._meter.is_open:
            return
        present, self.steering.present = self.steering.present, None
        recorder = present.recorder if present is not None else None
        lean = recorder.end() if recorder is not None else None
        usage = self._meter.close(self._kind, self._uncounted_bytes)
        if recorder is not None and lean is not None:
            self._learn(recorder, lean, usage)
        shape = self._shape
        seen = WindowSeen(
            numel=self._numel,
            kind=self._kind,
            plan=shape.standing.plans if shape is not None and self._predicted_bytes is not None else 0,
            taken_bytes=usage.taken_bytes,
            predicted_bytes=self._predicted_bytes,
        )
        self.history.add(seen, is_over=self._is_over(usage.taken_bytes))
        self._judge(shape, usage)

    def _judge(self, shape: Shape | None, usage: Usage) -> None:
        contract, predicted_bytes = self.contract, self._predicted_bytes
        self._predicted_bytes = None
        if contract is None:
            return
        if self._is_first_compiled and shape is not None:  # the compiler itself takes memory, and compiles once
            self._is_first_compiled = False
            return
        if shape is None or predicted_bytes is None:
            self._warn(contract.over_text(usage) if usage.kind is WindowKind.EVALUATION else None, "evaluation")
            return
        verdict = contract.judge(shape.standing, usage, predicted_bytes)
        if isinstance(verdict, Aim) and self._compilations >= MOST_COMPILATIONS:
            over_bytes = usage.taken_bytes - contract.budget_bytes
            verdict = Held(0) if verdict.is_larger else Refused(usage.taken_bytes, over_bytes)
        if isinstance(verdict, Held):
            self._race(shape, contract)
            return
        if isinstance(verdict, Aim):
            shape.wants_plan, shape.aim_bytes = True, verdict.aim_bytes
        if isinstance(verdict, Refused):
            assert shape.planned is not None
            why = f"it keeps as little as can be; the most is taken in {shape.planned.peak_is_in}"
            if not shape.standing.is_least:
                why = f"the model was compiled {self._compilations} times, each for less"
            error = contract.refusal(verdict, why)
            if contract.is_firm and not shape.is_refused:
                shape.is_refused = True
                raise error
            self._warn(str(error), "refused")
        elif not verdict.is_larger:
            self._warn(contract.over_text(usage), "over")

    def _race(self, shape: Shape, contract: Contract) -> None:
        """Measure the present plan, if a dispatch mode is on in it, against the best one without."""
        if self._whole:  # a compiler takes the mode's decisions into its graph
            return
        seconds = self._meter.seconds() if shape.race is not None or shape.planned_has_mode else None
        if seconds is None or shape.planner is None or shape.planned is None:
            return
        if shape.race is None:
            more_bytes = shape.planned.more_bytes
            limit_bytes = min(contract.aim_bytes(shape.standing), contract.budget_bytes)
            limit_bytes -= max(contract.margin_bytes, contract.budget_bytes >> _RIVALS_SLACK)
            rival = shape.planner.plan(limit_bytes, more_bytes, with_modes=False)
            shape.race = Race((shape.planned, rival))
            shape.race.is_over = rival.is_least or rival.seconds > _HOPELESS * shape.planned.seconds
        if not shape.race.is_over:
            shape.next_plan = shape.race.note(seconds)

    def _warn(self, text: str | None, kind: str) -> None:
        if text is None or self._warned[kind] >= _MOST_WARNINGS:
            return
        self._warned[kind] += 1
        last = "; later ones are counted in report()" if self._warned[kind] == _MOST_WARNINGS else ""
        _log.warning("memfit: %s%s", text, last)

    def _is_over(self, size_bytes: int) -> bool:
        return self.contract is not None and self.contract.is_resolved and size_bytes > self.contract.budget_bytes

    def _before_step(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        recorder = self.steering.present.recorder if self.steering.present is not None else None
        if recorder is not None:
            recorder.before_update()

    def _stepped(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        recorder = self.steering.present.recorder if self.steering.present is not None else None
        if recorder is not None:
            recorder.after_update()
        if not self._updates_to_come:
            return
        if not self._meter.is_open and not self.history.count:
            self._warn(None if self._warned["not seen"] else _NOT_SEEN, "not seen")
            return
        own = set(map(id, self.model.parameters()))
        self._updates_to_come -= any(id(p) in own for group in optimizer.param_groups for p in group["params"])

    def _kind_now(self) -> WindowKind:
        if not self._parameters or next(self.model.parameters()) is not self._parameters[0]:  # sharding replaces them
            self._parameters = list(self.model.parameters())
        has_gradients = any(parameter.grad is not None for parameter in self._parameters)
        return WindowKind.LATER if has_gradients else WindowKind.FIRST

    # -- plans

    def _compile_if_settled(self, shape: Shape) -> None:
        """Let the calls of a model that is compiled as a whole run compiled, once a plan has held for some windows."""
        before = shape.standing
        has_held = before.windows >= WINDOWS_BEFORE_LARGER and (
            before.is_least or not self._is_over(before.worst_bytes)
        )
        if not self._whole or self._compilations or not has_held:
            return
        self._remove(self._model_hooks)
        self.steering.is_frozen = True
        for call in self._whole:
            call.is_on = True
            if uncompiled(call.module) is self.model:
                call.around = self.begin, self.returned
        if all(call.around is None for call in self._whole):
            self._model_hooks += self._hooks_on(self.model)
        self._compilations = 1
        self._is_first_compiled = True
        assert self.contract is not None
        shape.wants_plan = not before.is_least
        shape.aim_bytes = self.contract.budget_bytes - (self.contract.budget_bytes >> _COMPILERS_SLACK)
        shape.standing = Standing(is_least=before.is_least, is_most=before.is_most, plans=1)

    def _shape_now(self) -> Shape:
        key = bucket_of(self._numel), self._kind
        found = self.shapes.get(key)
        if found is None or self._numel > found.numel:
            found = self.shapes[key] = Shape(numel=self._numel, kind=self._kind)
        return found

    def _pass(self, shape: Shape) -> Pass:
        """Return what is done in the pass that begins."""
        now_bytes = allocated_bytes(self.device)
        if shape.planner is None:
            self._lean_passes += 1
            self._uncounted_bytes = self._uncounted.live_bytes()
            self.installed.go_outside()
            self.installed.show_inside(None)
            own = [*self.model.parameters(), *self.model.buffers()]
            recorder = LeanRecorder(self.device, now_bytes, self._uncounted_bytes, own)
            return Pass(rulings=dict.fromkeys(self.blocks + self._rest_to_begin_with(shape), FULL), recorder=recorder)
        if self._given is None and self._updates_to_come and self._lean_passes < _MOST_LEAN_PASSES:
            self._lean_passes += 1
            again = [call.block for call in self._calls(shape) if not call.must_stay]
            return Pass(rulings=dict.fromkeys(again, FULL))
        self._plan_if_needed(shape, now_bytes)
        self.installed.show_inside(self._steered)
        assert shape.planned is not None
        self._predicted_bytes = shape.planned.predicted_bytes + now_bytes - shape.start_bytes
        return Pass(rulings=shape.rulings, has_chains=CHAINED in shape.rulings.values())

    def _rest_to_begin_with(self, shape: Shape) -> list[str]:
        """Return what beside the blocks a given policy computes again: it can be, or no policy would say so."""
        if self._given is None:
            return []
        rules = rules_for(self._given, shape.numel, shape.kind)
        return [name for name in self._rest if rules.get(name, NONE) != NONE]

    def _learn(self, recorder: LeanRecorder, lean: LeanPass, usage: Usage) -> None:
        shape = self._shape
        assert shape is not None
        shape.unused_share = 1 - usage.live_bytes / max(1, usage.taken_bytes)
        if not recorder.is_complete:
            return
        shape.lean, shape.overloads = lean, recorder.overloads
        shape.planner = Planner(lean, may_chain=self._may_chain)

    def _plan_if_needed(self, shape: Shape, now_bytes: int) -> None:
        planner, lean, contract = shape.planner, shape.lean, self.contract
        assert planner is not None and lean is not None
        more_bytes = now_bytes - lean.start_bytes
        if self._given is not None:
            if shape.planned is None:
                rules = rules_for(self._given, shape.numel, shape.kind)
                self._take(shape, planner.of_rules(rules, more_bytes), now_bytes)
            return
        assert contract is not None
        if not contract.is_resolved:
            contract.resolve(planner.everything_kept(more_bytes).predicted_bytes)
        shape.standing.expected_error_bytes = int(contract.budget_bytes * shape.unused_share)
        if shape.next_plan is not None:
            self._take(shape, shape.next_plan, now_bytes)
            return
        aim_bytes = contract.aim_bytes(shape.standing) if shape.aim_bytes is None else shape.aim_bytes
        grown = now_bytes - shape.start_bytes
        has_grown = shape.planned is not None and shape.planned.predicted_bytes + grown > aim_bytes and grown > 0
        if shape.wants_plan or (has_grown and not shape.standing.is_least):
            limit_bytes = aim_bytes - (contract.budget_bytes >> _SLACK)
            with_modes = shape.race is None or not shape.race.is_over or shape.planned_has_mode
            planned = planner.plan(limit_bytes, more_bytes, with_modes=with_modes)
            is_held = not self._is_over(shape.standing.worst_bytes)
            if shape.planned is not None and planned.rules == shape.planned.rules and is_held:  # it is the largest
                shape.wants_plan, shape.aim_bytes, shape.standing.plans = False, None, MOST_PLANS
                return
            self._take(shape, planned, now_bytes)
            if self._compilations and not self._is_first_compiled:
                self._compilations += 1
                self._is_first_compiled = True

    def _take(self, shape: Shape, planned: Planned, now_bytes: int) -> None:
        shape.planned, shape.start_bytes = planned, now_bytes
        shape.wants_plan, shape.aim_bytes, shape.next_plan = False, None, None
        shape.rulings = rulings_of(planned.rules, self._calls(shape), shape.overloads)
        self._steered |= shape.rulings.keys()
        shape.standing.replace_plan(is_least=planned.is_least, is_most=planned.is_most)
        if self.device.type == "cuda":  # memory in pieces that fitted the last plan would be held beside this one's
            empty_cache(self.device)

    def _calls(self, shape: Shape) -> list[CallSeen]:
        assert shape.lean is not None
        return shape.lean.calls

    # -- the end

    def freeze(self) -> None:
        """Keep the policy of the largest batch for all later passes, and measure no more."""
        self.end()
        planned = [shape for shape in self.shapes.values() if shape.planned is not None]
        if not planned:
            raise UnsupportedStepError("no pass was planned yet: freeze after two steps with the optimizer's update")
        self.frozen = max(planned, key=lambda shape: shape.numel)
        self._remove_hooks()
        self.steering.is_frozen = True
        for call in self._whole:
            call.is_on, call.around = True, None
        self.steering.present = Pass(rulings=self.frozen.rulings, has_chains=CHAINED in self.frozen.rulings.values())

    def close(self, *, is_judged: bool = True) -> None:
        """Leave the model as it was.

        Args:
            is_judged: whether the window that is open is ended and judged; after an error it holds no whole step.
        """
        try:
            if is_judged:
                self.end()
        finally:
            self._remove_hooks()
            for call in self._whole:
                call.remove()
            self.installed.remove()
            self.steering.present = None

    def _remove_hooks(self) -> None:
        self._remove(self._model_hooks)
        self._remove(self._hooks)

    def _remove(self, hooks: list[Any]) -> None:
        for hook in hooks:
            hook.remove()
        hooks.clear()


def loops_of(model: torch.nn.Module) -> list[Loop]:
    """Return the loops whose hooks are on a model."""
    hooks = module_hooks(model)[0].values()
    owners = [getattr(hook.call, "__self__", None) for hook in hooks if isinstance(hook, Hook)]
    return [owner for owner in owners if isinstance(owner, Loop)]


def _has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class Hook:
    """A hook on the model, which a copy of the model does not have.

    Args:
        call: what it calls.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *given: Any) -> Any:
        return self.call(*given)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _nothing

    def __reduce__(self) -> Any:
        return getattr, (_Nothing, "nothing")


class _Nothing:
    @staticmethod
    def nothing(*_: Any) -> None:
        return None


_nothing = _Nothing.nothing
