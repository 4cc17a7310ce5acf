"""Capture of a whole step: forward, loss, backward and update run once on fake tensors, and every call is written down.

Autograd itself runs, so what is recorded are the very kernels, in the very order, that eager PyTorch would call.
Parameters, buffers and batch are fakes meanwhile: no memory is used, no generator advances, nothing of the user's
changes.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from memfit.binding import Origin, Value
from memfit.capture.borrowed import Attributes, Place, host_randomness_refused, replaced, swapped
from memfit.capture.build import Captured, build
from memfit.capture.functionalize import corrected
from memfit.capture.generators import all_states, set_state
from memfit.capture.optimizer import ParameterUpdate, WholeUpdate, require_supported, update_cost, updates_one_by_one
from memfit.capture.placement import step_device
from memfit.capture.step_check import check_not_distributed
from memfit.capture.torch_private import (
    DATA_DEPENDENT_ERRORS,
    FakeTensorMode,
    TorchDispatchMode,
    backward_node,
    checkpoints_inlined,
    gradient_hooks,
    has_accumulation_hooks,
    is_fake,
    next_sequence_number,
    tree_map,
)
from memfit.capture.trace import Trace, TracedCall
from memfit.capture.training_step import TrainingStep, plain
from memfit.errors import (
    CaptureError,
    GraphBreakError,
    InvalidOptionError,
    MemfitError,
    UnsupportedStepError,
)
from memfit.graph import Phase, Role


def capture_whole_step(step: TrainingStep, batch: Any = None) -> Captured:
    """Return the graph of one step on `batch` (the step's own where it is None), and its binding.

    Gradients already in `.grad` are residents that the step adds to. Without an optimizer the gradients are outputs
    named `grad:<parameter>`; the loss is the output `loss`.

    Raises:
        CaptureError: the step looks at a tensor's value, or its model raises; names the user's line.
        InvalidDeviceError: the batch is on another device than the model.
        UnsupportedStepError: LBFGS, collectives.
    """
    batch = step.batch if batch is None else batch
    attributes = Attributes(step.model)
    try:
        with host_randomness_refused():
            first = _WholeStepCapture(step, batch)
            captured = first.run()
            _require_unread(step, batch, first.trace, attributes)
    finally:
        attributes.put_back()
    return captured


def _require_unread(step: TrainingStep, batch: Any, trace: Trace, attributes: Attributes) -> None:
    """Refuse a step that reads what it has set in its model: a second capture, made where it set anything, differs.

    Raises:
        UnsupportedStepError: names the attributes.
    """
    names = sorted(attributes.changes())
    if not names:
        return
    second = _WholeStepCapture(step, batch)
    try:
        second.run()
        same = second.trace.forward_is_as(trace)
    except Exception:  # noqa: BLE001 - a fake of the first capture is of no use in the second, whatever that raises
        same = False
    if not same:
        raise UnsupportedStepError(
            f"the step sets {', '.join(map(repr, names[:3]))}{' and more' if len(names) > 3 else ''} in its model and "
            "reads it in the next step, but a planned step runs no Python: keep what goes from step to step in a "
            "buffer (register_buffer before memfit.fit) or in the batch; what is made once, let one eager forward make"
        )


class _Recorder(TorchDispatchMode):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        returned = corrected(func, args, func(*args, **kwargs))
        if torch.Tag.inplace_view not in func.tags:
            self.trace.add_call(func, args, kwargs, returned)
        return returned


class _WholeStepCapture:
    def __init__(self, step: TrainingStep, batch: Any) -> None:
        self.step = step
        self.batch = batch
        self.device = step_device(step.model, batch)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.trace = Trace(device=self.device, scope=self._scope)
        self.outputs: dict[str, Value] = {}
        self._modules = {module: name for name, module in step.model.named_modules()}
        self._module_stack: list[str] = []
        self._module_of_node: dict[int, str] = {}
        self._raised_in = ""
        self._names = {parameter: name for name, parameter in step.model.named_parameters()}
        self._fakes: dict[torch.Tensor, torch.Tensor] = {}

    def run(self) -> Captured:
        step = self.step
        check_not_distributed(step.model, "the step")
        if step.optimizer is not None:
            require_supported(step.optimizer)
        elif step.clip_norm is not None:
            raise InvalidOptionError(
                "clip_norm needs an optimizer; without one, clip the gradients in `.grad` yourself"
            )
        if step.scaler is not None:  # its scale is made at its first use, and must be a real tensor
            step.scaler.scale(torch.zeros((), device=self.device))
        fake_batch = self._enter_batch()
        self._make_fakes()
        generator_states = all_states()
        try:
            with (
                swapped(step.model, self._fakes) as places,
                self._module_names(),
                checkpoints_inlined(),
                torch.enable_grad(),
            ):
                self._enter_parameters()
                updates = self._enter_optimizer()
                with self.mode, _Recorder(self.trace):
                    self._forward_and_backward(fake_batch, updates)
                    self._require_gradients_found()
                    self._write_replaced(places)
                self._collect_gradients(updates)
        except DATA_DEPENDENT_ERRORS as error:
            line = user_line(error)
            raise GraphBreakError(
                f"{line}: the step looks at the value of a tensor ({type(error).__name__}: {error}), so it "
                "cannot be one graph; with a budget in bytes memfit plans the graphs around that line",
                line=line,
            ) from error
        except MemfitError:
            raise
        except Exception as error:
            where = f" in module {self._raised_in}" if self._raised_in else ""
            raise CaptureError(f"{user_line(error)}: the step raised{where} {type(error).__name__}: {error}") from error
        finally:
            for device, state in generator_states.items():
                set_state(device, state)
        name = step.name or type(step.model).__name__
        return build(self.trace, name=name, outputs=self.outputs, source=f"whole step, torch {torch.__version__}")

    def _enter_batch(self) -> Any:
        position = iter(range(1 << 30))

        def enter(leaf: Any) -> Any:
            number = next(position)
            if not isinstance(leaf, torch.Tensor):
                return plain(leaf)
            fake = leaf if is_fake(leaf) else self._fake_input(leaf)
            self.trace.add_resident(fake, role=Role.INPUT, origin=Origin.INPUT, key=number, name=f"batch_{number}")
            return fake

        return tree_map(enter, self.batch)

    def _fake_input(self, leaf: torch.Tensor) -> torch.Tensor:
        """A fake with a storage of its own: a batch may be cut out of a larger tensor, at another place each step."""
        with self.mode:
            fake = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        return fake.requires_grad_(leaf.requires_grad)

    def _make_fakes(self) -> None:
        for tensor in (*self.step.model.parameters(), *self.step.model.buffers()):
            fake = self.mode.from_tensor(tensor)
            if has_accumulation_hooks(tensor):
                raise UnsupportedStepError(
                    f"parameter {self._names.get(tensor, '')!r} has a hook that runs when its gradient is there "
                    "(register_post_accumulate_grad_hook), which a planned step would not run: remove it; memfit "
                    "itself updates each parameter as soon as its gradient is there, where it is given the optimizer"
                )
            for hook in gradient_hooks(tensor):
                fake.register_hook(hook)
            fake.grad = None if tensor.grad is None else self.mode.from_tensor(tensor.grad)
            self._fakes[tensor] = fake

    def _enter_parameters(self) -> None:
        """Enter the fakes as residents: every name of a tied parameter, so that each finds its tensor at run time."""
        for parameter, name in self._names.items():
            fake = self._fakes[parameter]
            self.trace.add_resident(fake, role=Role.PARAMETER, origin=Origin.PARAMETER, key=name, name=name)
            if fake.grad is not None:
                self.trace.add_resident(
                    fake.grad, role=Role.GRADIENT, origin=Origin.GRADIENT, key=name, name=f"{name}.grad"
                )
        for name, buffer in self.step.model.named_buffers():
            # named_buffers sees the fakes, which are swapped in
            self.trace.add_resident(buffer, role=Role.STATE, origin=Origin.BUFFER, key=name, name=name)

    def _enter_optimizer(self) -> dict[torch.Tensor, _Update]:
        """Enter the optimizer's state as residents; return what each parameter's update takes."""
        optimizer = self.step.optimizer
        updates: dict[torch.Tensor, _Update] = {}
        if optimizer is None:
            return updates
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if not parameter.requires_grad or parameter not in self._fakes:
                    continue
                fake = self._fakes[parameter]
                cost = update_cost(optimizer, parameter, fake, group, self.mode)
                states: list[int] = []
                for key, tensor in cost.state.items():
                    name = f"{self._names[parameter]}.{key}"
                    value = self.trace.add_resident(
                        tensor, role=Role.STATE, origin=Origin.STATE, key=name, name=f"optimizer:{name}"
                    )
                    states.append(value.storage)
                updates[fake] = _Update(parameter, number, tuple(states), cost.workspace_bytes)
        return updates

    def _forward_and_backward(self, batch: Any, updates: dict[torch.Tensor, _Update]) -> None:
        if updates and updates_one_by_one(self.step):
            for fake in updates:
                fake.register_post_accumulate_grad_hook(lambda done: self._update_one(done, updates[done]))
        loss = self.step.compute_loss(self.step.model, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(type(loss))
            raise CaptureError(f"loss returned {found}, expected a scalar tensor that depends on the parameters")
        self.trace.write_back()
        self.outputs["loss"] = self.trace.value(loss)
        self.trace.storages[self.outputs["loss"].storage].role = Role.OUTPUT
        self.step.scaled(loss).backward()

    def _require_gradients_found(self) -> None:
        """Refuse a gradient of a tensor that is not the model's: nothing would update it, and nobody would see it.

        Raises:
            UnsupportedStepError: gives the tensor's shape.
        """
        for resident in self.trace.residents:
            tensor = resident.constant
            if isinstance(tensor, torch.Tensor) and tensor.is_leaf and is_fake(tensor.grad):
                tensor.grad = None
                raise UnsupportedStepError(
                    f"the loss has a gradient for a tensor of shape {tuple(tensor.shape)} that is no parameter of the "
                    "model, so that a planned step would not train it; make it one (of a module that holds model and "
                    "loss, say), or set requires_grad_(False) on it"
                )

    def _write_replaced(self, places: list[Place]) -> None:
        """A buffer that the step replaced gets the new values in place, which is what the next step reads."""
        with torch.no_grad():
            for place, tensor in replaced(places, self._fakes):
                self._fakes[place.tensor].copy_(tensor)

    def _update_one(self, fake: torch.Tensor, update: _Update) -> None:
        assert fake.grad is not None and self.step.optimizer is not None
        gradient = self.trace.value(fake.grad)
        target = ParameterUpdate(self.step.optimizer, update.parameter, update.group, update.workspace_bytes)
        self._add_update(target, (gradient,), (fake,), (update,))
        fake.grad = None

    def _add_update(
        self, target: Any, gradients: tuple[Value, ...], fakes: tuple[torch.Tensor, ...], updates: tuple[_Update, ...]
    ) -> None:
        parameters = [self.trace.value(fake).storage for fake in fakes]
        states = [storage for update in updates for storage in update.states]
        names = {self._names[update.parameter].rpartition(".")[0] for update in updates}
        resident = {value.storage for value in gradients if self.trace.storages[value.storage].resident}
        self.trace.calls.append(
            TracedCall(
                name="optimizer_update",
                target=target,
                args=gradients,
                kwargs={},
                results=(None,),
                reads=tuple(dict.fromkeys(value.storage for value in gradients if value.storage not in resident)),
                writes=(),
                mutates=tuple(dict.fromkeys([*parameters, *states, *resident])),
                phase=Phase.UPDATE,
                module=names.pop() if len(names) == 1 else "",
                workspace_bytes=target.workspace_bytes,
            )
        )

    def _collect_gradients(self, updates: dict[torch.Tensor, _Update]) -> None:
        """What is left in `.grad`: for one update of all parameters at once, or for the user."""
        waiting = [fake for fake in updates if fake.grad is not None]
        if waiting:
            gradients = tuple(self.trace.value(fake.grad) for fake in waiting if fake.grad is not None)
            own = tuple(updates[fake] for fake in waiting)
            workspace = sum(update.workspace_bytes for update in own)
            target = WholeUpdate(self.step, [update.parameter for update in own], workspace)
            self._add_update(target, gradients, tuple(waiting), own)
        for parameter, name in self._names.items():
            fake = self._fakes[parameter]
            if fake.grad is not None and fake not in updates:
                value = self.trace.value(fake.grad)
                self.outputs[f"grad:{name}"] = value
                self.trace.storages[value.storage].role = Role.GRADIENT

    def _scope(self) -> tuple[Phase, str]:
        node = backward_node()
        if node is not None:
            return Phase.BACKWARD, self._module_of_node.get(node[1], "")
        module = self._module_stack[-1] if self._module_stack else ""
        # The node of the op at hand was made just before the op was dispatched here.
        self._module_of_node.setdefault(next_sequence_number() - 1, module)
        return Phase.FORWARD, module

    @contextmanager
    def _module_names(self) -> Iterator[None]:
        def enter(module: torch.nn.Module, _inputs: Any) -> None:
            outer = self._module_stack[-1] if self._module_stack else ""
            self._module_stack.append(self._modules.get(module, outer))

        def leave(module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            name = self._module_stack.pop()
            raised = output is None and sys.exc_info()[0] is not None
            if raised and name and not self._raised_in:  # the innermost comes first
                self._raised_in = f"{name!r} ({type(module).__name__})"

        handles = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Update:
    __slots__ = ("group", "parameter", "states", "workspace_bytes")

    def __init__(self, parameter: torch.Tensor, group: int, states: tuple[int, ...], workspace_bytes: int) -> None:
        self.parameter = parameter
        self.group = group
        self.states = states
        self.workspace_bytes = workspace_bytes


def user_line(error: BaseException) -> str:
    """Return `file:line` of the innermost frame of an error that is neither torch's nor memfit's."""
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*own, "<"))]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "the training step"
