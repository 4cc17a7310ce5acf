"""The loop of measures around a training loop: windows, plans, corrections."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memfit.capture.optimizer import changes_parameters
from memfit.capture.step_check import refuse_gathered_over_updates
from memfit.checkpointing.blocks import Named
from memfit.checkpointing.choices import FULL
from memfit.checkpointing.compiled_calls import CompiledCalls
from memfit.checkpointing.installed import Installed, refuse_others
from memfit.checkpointing.judging import Judge
from memfit.checkpointing.lean_offload import LeanOffload, lean_offload
from memfit.checkpointing.passes import Pass
from memfit.checkpointing.plans import Plans
from memfit.checkpointing.policy import Policy
from memfit.checkpointing.recording import LeanRecorder
from memfit.checkpointing.reporting import WindowSeen
from memfit.checkpointing.seen import CallSeen
from memfit.checkpointing.shapes import Shape
from memfit.checkpointing.steering import Steering
from memfit.checkpointing.windows import Awaiting, History, Meter, Updates, watch_evaluation
from memfit.errors import UnsupportedStepError
from memfit.memory.contract import Contract, WindowKind
from memfit.memory.host.room import Host
from memfit.step.divided_updates import DividedUpdates
from memfit.step.hooks import WeakHook, hooks_around, remove_all
from memfit.system.recorder import allocated_bytes
from memfit.torch_private.autograd import at_end_of_backward, in_backward
from memfit.torch_private.cuda import note_resets_of_peaks
from memfit.torch_private.modules import has_lazy_parameters, uncompiled
from memfit.torch_private.ranks import has_ranks
from memfit.torch_private.tensors import tensors_reached

_MOST_OF_OTHERS = 4  # updates of other models, such as a critic, before the first call of this one is missed
_NOT_SEEN = (
    "an optimizer has stepped, and no call of the model was seen: give memfit.checkpoint what the loop calls, such as "
    "the module that torch.compile returned; where a function is compiled that calls the model, compile the model"
)
_OTHER_MODULES = (
    "modules of the model were replaced, added or taken out since memfit.checkpoint, which goes on with those that it "
    "knows; call close() of the handle, and memfit.checkpoint again"
)


class Loop:
    """Measures the passes of a model, and plans them within a budget.

    Args:
        called: the module that the loop calls, or the modules, as a ModuleList; the hooks are on it, or on the module
            inside if torch.compile made it.
        find: returns the blocks that are steered, and recomputed in lean passes; and modules beside them that are
            steered, and not recomputed in lean passes. It is called again where modules were replaced.
        contract: the budget.
        device: of the model.
        may_chain: whether inputs of blocks may be recomputed.
        host_budget_bytes: that inputs of blocks may take on the host.
        host_dir: for the file of a model on a CPU; by default the system's temporary directory.
        given: a policy in the place of plans: elements of the batch -> name of a module -> rule.
        hooks: that are removed with it.

    Attributes:
        is_paused: whether calls of the model run as without it.
        is_judging: whether windows are judged, and plans follow what is live; not so beside copies of the state.
        warnings: of it.
        other_bytes: that are live on the device, and do not count against the budget.
        bytes_to_come: of the optimizer's state, in the pass that is to begin.
        calls: of the model so far.
    """

    def __init__(
        self,
        called: torch.nn.Module,
        find: Callable[[], tuple[Sequence[Named], Sequence[Named]]],
        contract: Contract | None,
        device: torch.device,
        *,
        may_chain: bool,
        host_budget_bytes: int = 0,
        host_dir: Path | None = None,
        given: Policy | None = None,
        hooks: Sequence[Any] = (),
    ) -> None:
        model = uncompiled(called)
        self.model, self.contract, self.device, self._find = model, contract, device, find
        blocks, rest = find()
        self._rest = [name for name, _ in rest]
        self.steering, self.history = Steering(device, self._enter), History()
        refuse_others(model)
        self._compiled = CompiledCalls(called, blocks)
        if host_budget_bytes:
            self._compiled.refuse_host_budget()
            self.steering.host = Host(device, host_budget_bytes, host_dir)
        chains, names, host = may_chain and not self._compiled, [name for name, _ in blocks], self.steering.host
        self.plans = Plans(contract, given, self._compiled, device, may_chain=chains, blocks=names, host=host)
        self._meter = Meter(device)
        self._judge = Judge(contract, self.plans, self._compiled, self._meter)
        self.warnings, self.steering.looking = self._judge.warnings, self._judge.talks.looking
        self._numel, self._kind = 0, WindowKind.FIRST
        self._shape = self.frozen = cast("Shape | None", None)
        self._predicted_bytes: int | None = None
        self._awaited = Awaiting(self._backward_begins)
        # the first one makes the optimizer's state; DistributedDataParallel divides its buckets anew in the second step
        self._updates = Updates(model, 1 + has_ranks())
        self.is_paused, self.is_judging = False, True
        self.other_bytes = self.bytes_to_come = self.calls = 0
        if contract is not None:
            note_resets_of_peaks()
        self.installed = Installed(model, blocks, rest, self.steering)
        self._is_lazy = has_lazy_parameters(model)
        self._divided = DividedUpdates(device, self._left_bytes)
        self._model_hooks = hooks_around(model, self.begin, self.returned)
        self._hooks: list[Any] = [
            *hooks,
            register_optimizer_step_pre_hook(WeakHook(self._before_step)),
            register_optimizer_step_post_hook(WeakHook(self._stepped)),
        ]

    def expect_no_optimizer(self) -> None:
        """Plan from the second pass on, although no optimizer will step."""
        self._updates.to_come = 0

    def live_bytes(self) -> int:
        """Return all bytes that are live on the device."""
        return allocated_bytes(self.device) + self._meter.uncounted.live_bytes()

    def _left_bytes(self) -> float | None:
        """Return what the budget leaves beside what is live; None as long as it is not known."""
        if self.contract is None or not self.contract.is_resolved:
            return None if self.contract else math.inf
        return self.contract.budget_bytes - self.live_bytes() + self.other_bytes

    # -- windows

    def begin(self, called: torch.nn.Module, args: Any, kwargs: Any = None) -> None:  # none: removed in this call
        """Begin a window with a call of the model, unless it is part of the one that is open.

        Args:
            called: the model, or one of the models.
            args, kwargs: that it is called with; their tensors are the batch, whose size chooses the plan.
        """
        if self.frozen is not None or self.is_paused:
            return
        self.calls += 1
        self._awaited.is_in_call = True
        if not self.is_between():
            self._begin((args, kwargs), is_training=torch.is_grad_enabled() and self.model.training)
        if (present := self.steering.present) is not None and present.offload is not None:
            present.offload.enter(called)

    def is_between(self) -> bool:
        """Return whether a call now is part of the window that is open: the backward pass of an earlier one is to come.

        A pipeline's schedule runs backward passes between: its window ends when none of its calls awaits one. A call
        without gradients in between, of a reference model that is the model without its adapters, is part of it.
        """
        may_be = self.model.training or not torch.is_grad_enabled()
        return may_be and bool(self._awaited) and self._kind is not WindowKind.EVALUATION

    def _enter(self, given: Any) -> Callable[[Any], None] | None:
        """Begin a window with the call of a block, where the loop calls a method or a part of the model.

        Args:
            given: all arguments of the call.

        Returns:
            What is called with the block's output; None in a call of the model.
        """
        is_off = self.is_paused or self.frozen is not None or bool(self._compiled)
        if self._awaited.is_in_call or is_off or in_backward():
            return None
        if not torch.is_grad_enabled():
            if self._meter.is_open and not self._awaited and self._kind is not WindowKind.EVALUATION:
                self._begin(given, is_training=False)
            return None
        if not self.model.training:
            return None
        if self._awaited.is_spent or not self._meter.is_open or self._kind is WindowKind.EVALUATION:
            self._begin(given, is_training=True)
            self._awaited.enter()
        return self._left if self._awaited.has_entered else None

    def _left(self, output: Any) -> None:
        if (recorder := self.steering.recorder) is not None:
            recorder.has_returned = True
        self._awaited.expect(output, of_entry=True)

    def _begin(self, given: Any, *, is_training: bool) -> None:
        self.end()
        self._is_lazy = self._is_lazy and has_lazy_parameters(self.model)
        if self._is_lazy:  # its first call makes the parameters: it runs as it is
            return
        if self.installed.is_outdated:
            self._install_again()
        self._numel = sum(tensor.numel() for tensor in tensors_reached(given))
        self._meter.last_stream.follow()
        if not is_training:
            self._kind, self._shape, self.steering.present = WindowKind.EVALUATION, None, None
        else:
            self._kind = self._updates.kind()
            form = self._updates.form(given)
            now_bytes = allocated_bytes(self.device) + self._meter.last_stream.lost_bytes
            now_bytes += self.bytes_to_come - self.other_bytes
            agreed = self._judge.agree(self._numel, self._kind, form, now_bytes)
            self._numel, self._kind = agreed.numel, agreed.kind
            self._shape = self.plans.shape_of(self._numel, self._kind, agreed.form)
            self._compile_if_settled(self._shape)
            self.steering.present = self._pass(self._shape, agreed.now_bytes, may_wait=agreed.may_wait)
        self._judge.return_unused(self.steering.present, self._numel, self._predicted_bytes, self.other_bytes)
        self._meter.open()

    def _install_again(self) -> None:
        """Steer the modules that there are now: some were replaced, added, or taken out."""
        if self._compiled or self._judge.is_shared:
            self.warnings.warn(_OTHER_MODULES, "other modules", most=1)
            return
        self.installed.remove()
        blocks, rest = self._find()
        self._rest = [name for name, _ in rest]
        self.plans.forget([name for name, _ in blocks])
        self.installed = Installed(self.model, blocks, rest, self.steering)

    def returned(self, _model: torch.nn.Module, _args: Any, output: Any) -> None:
        """Look for the beginning of the backward pass, which first reaches what the model has returned.

        Args:
            output: of the model's call; tensors at any depth of it count.
        """
        self._awaited.is_in_call = False
        if not torch.is_grad_enabled() or self.frozen is not None or self.is_paused:
            return
        if self.steering.present is None:
            watch_evaluation(self.model, output, self.warnings)
            return
        self.steering.present.returned()
        self._awaited.expect(output)

    def _backward_begins(self) -> None:
        present = self.steering.present
        if present is not None:
            present.link = None
        if present is not None and present.recorder is not None:
            at_end_of_backward(present.recorder.end_of_backward)
        elif present is not None:
            present.fetch()
            at_end_of_backward(self._meter.end_of_backward)

    def end(self) -> None:
        """End the window that is open, and judge it.

        Raises:
            BudgetNotHeldError: the budget is firm, and the plan that takes the least took more.
        """
        self._awaited.forget()
        if not self._meter.is_open:
            return
        recorder, present, self.steering.present = self.steering.recorder, self.steering.present, None
        lean = recorder.end() if recorder is not None else None
        usage = self._meter.close(self._kind, self.other_bytes)
        if recorder is not None and recorder.is_incomplete:
            lean = None
        groups = recorder.groups if recorder is not None and lean is not None else ()
        if not self._judge.begins_to_share(groups) and recorder is not None and lean is not None:
            assert self._shape is not None
            self.plans.learn(self._shape, recorder, lean, usage)
        shape, predicted_bytes, self._predicted_bytes = self._shape, self._predicted_bytes, None
        if not self.is_judging:
            return
        if present is not None and shape is not None and not self._judge.is_shared:
            self.plans.compare(shape, present)
        seen = WindowSeen(
            numel=self._numel,
            kind=self._kind,
            plan=shape.standing.plans if shape is not None and predicted_bytes is not None else 0,
            taken_bytes=usage.taken_bytes,
            predicted_bytes=predicted_bytes,
        )
        self.history.add(seen, is_over=self._judge.is_over(usage.taken_bytes))
        self._judge.judge(shape, usage, predicted_bytes)

    def discard(self) -> None:
        """End the window that is open, of a step that failed, and learn nothing from it."""
        self._awaited.forget()
        recorder, self.steering.present = self.steering.recorder, None
        if self._meter.is_open:
            if recorder is not None:
                recorder.end()
            self._meter.close(self._kind)

    def _before_step(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._meter.before_update()

    def _stepped(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self.is_paused:
            return
        created_bytes = self._meter.after_update()
        if (recorder := self.steering.recorder) is not None:
            recorder.created_bytes += created_bytes
            undivided_bytes = self.live_bytes() - self.other_bytes + self._divided.more_bytes
            recorder.lean.undivided_bytes = max(recorder.lean.undivided_bytes, undivided_bytes)
        count = self._updates.count()
        if not self._updates.to_come and not self._awaited:
            return
        if not self._meter.is_open and not self.history.count:
            if (count >= _MOST_OF_OTHERS or self._updates.are_of(optimizer)) and changes_parameters(optimizer):
                self.warnings.warn(_NOT_SEEN, "not seen", most=1)
            return
        if self._updates.are_of(optimizer):
            self._awaited.clear()  # of calls that are not trained on
            self._updates.to_come = max(0, self._updates.to_come - 1)
            refuse_gathered_over_updates(self.model, "memfit.checkpoint")

    # -- plans

    def _compile_if_settled(self, shape: Shape) -> None:
        """Let the calls of a model that is compiled as a whole run compiled, once a plan has held for some windows."""
        if not self._compiled or self._compiled.compilations or not self.plans.has_settled(shape):
            return
        if self._compiled.why_not:
            self.warnings.warn(self._compiled.why_not, "compiled", most=1)
            return
        remove_all(self._model_hooks)
        self.steering.is_frozen = True
        if not self._compiled.switch_on(self.begin, self.returned):
            self._model_hooks += hooks_around(self.model, self.begin, self.returned)
        self._compiled.note_compilation()
        self.plans.leave_to_compiler(shape)

    def _pass(self, shape: Shape, now_bytes: int, *, may_wait: bool) -> Pass:
        """Return what is done in the pass that begins."""
        self.installed.take_over()
        if shape.planner is None or shape.wants_lean:
            self.installed.go_outside()
            self.installed.show_inside(None)
            uncounted_bytes = self._meter.uncounted.live_bytes() - self.other_bytes
            recorder = LeanRecorder(self.device, now_bytes - self.bytes_to_come, uncounted_bytes, self.model)
            again = [*self.plans.blocks, *self.plans.of_rest_again(self._rest, shape)]
            offload = self._offload(recorder.lean.calls, recorder.left)
            return Pass(rulings=dict.fromkeys(again, FULL), recorder=recorder, offload=offload)
        lean = shape.lean
        assert lean is not None
        if self.plans.given is None and self._updates.to_come and may_wait:
            may_again = [call.block for call in lean.calls if not call.must_stay]
            rulings = dict.fromkeys([*self.plans.blocks, *may_again], FULL)
            return Pass(rulings=rulings, offload=self._offload(lean.calls))
        if self.is_judging or shape.planned is None:
            self.plans.renew(shape, now_bytes)
        self.installed.show_inside(self.plans.steered)
        assert shape.planned is not None
        level_bytes = shape.planned.predicted_bytes + now_bytes - shape.start_bytes
        self._predicted_bytes = level_bytes - self._judge.shift_bytes
        is_fixed = shape.is_shared or self.plans.given is not None
        planned = None if is_fixed else lean.given_by_block()
        return Pass(rulings=shape.rulings, has_chains=shape.has_chains, planned=planned)

    def _offload(self, calls: Sequence[CallSeen], *left: Callable[..., None]) -> LeanOffload | None:
        contract = None if self._compiled or self.plans.given is not None else self.contract
        return lean_offload(
            contract, self.model, self.device, lambda: self.live_bytes() - self.other_bytes, calls, *left
        )

    def freeze(self) -> None:
        """Keep the policy of the largest batch for all later passes, and measure no more."""
        self.end()
        planned = [shape for shape in self.plans.shapes.values() if shape.planned is not None]
        if not planned:
            raise UnsupportedStepError("no pass was planned yet: freeze after two steps with the optimizer's update")
        self.frozen = max(planned, key=lambda shape: shape.numel)
        remove_all(self._model_hooks, self._hooks)
        self.steering.is_frozen = True
        self._compiled.freeze()
        self.steering.present = Pass(rulings=self.frozen.rulings, has_chains=self.frozen.has_chains)

    def close(self, *, is_judged: bool = True) -> None:
        """Leave the model as it was.

        Args:
            is_judged: whether the window that is open is ended and judged; after an error it holds no whole step.
        """
        try:
            if is_judged:
                self.end()
            else:
                self.discard()
        finally:
            remove_all(self._model_hooks, self._hooks)
            self._divided.remove()
            self._judge.close()
            self._compiled.remove()
            self.installed.remove()
            if self.steering.host is not None:
                self.steering.host.close()
            self.steering.present, self.is_paused = None, True  # code of the user's may hold stand-ins
