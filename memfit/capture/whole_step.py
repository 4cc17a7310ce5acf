"""Capture of a whole step: forward, loss, backward and update run once on fake tensors, and every call is recorded.

Autograd itself runs, so the recorded kernels and their order are those of eager PyTorch. Parameters, buffers and batch
are fakes meanwhile: no memory is used, no generator advances, and no tensor of the user's changes.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from memfit.binding import Origin, Value, values_in
from memfit.capture.build import Captured, build
from memfit.capture.copies import ATOMS, MISSING, is_same
from memfit.capture.draws import host_draws_refused, seeding_refused
from memfit.capture.function_step import require_state_like
from memfit.capture.functionalize import RequireTrue, as_the_real_kernel, corrected, is_pure
from memfit.capture.generators import all_states, set_state, without_generator
from memfit.capture.guards import Guards
from memfit.capture.looks import Look, look_at
from memfit.capture.optimizer import (
    ParameterUpdate,
    UpdateCosts,
    WholeUpdate,
    is_of_torch,
    overlap,
    require_supported,
    updates_many_at_once,
    updates_one_by_one,
)
from memfit.capture.placement import step_device
from memfit.capture.reads import Reads
from memfit.capture.reductions import Reductions
from memfit.capture.side_effects import Place, replaced, swapped, with_a_momentum
from memfit.capture.step_check import check_not_distributed, require_training_context
from memfit.capture.stream import Stream
from memfit.capture.symbols import Symbols, at_hand
from memfit.capture.trace import Trace, TracedCall
from memfit.capture.training_step import TrainingStep, plain
from memfit.capture.under_modes import UnderModes, gradients_that_differ, is_looked_at
from memfit.cost.observations import Corrections
from memfit.errors import (
    CaptureError,
    GraphBreakError,
    InvalidOptionError,
    MemfitError,
    UnsupportedStepError,
)
from memfit.graph import Phase, Role
from memfit.torch_private import (
    DATA_DEPENDENT_ERRORS,
    READS_A_NUMBER,
    FakeTensorMode,
    TorchDispatchMode,
    answered_as_eager,
    as_fake,
    autocast_watched,
    backward_node,
    checkpoints_inlined,
    failing_fakes_unlogged,
    gradient_hooks,
    has_accumulation_hooks,
    is_data_dependent,
    is_fake,
    known_value,
    next_sequence_number,
    only_mode,
    storage_key,
    symbolic_kernels,
    tensors_in,
    tree_flatten,
    tree_map,
)

_aten = torch.ops.aten
_ASKS_FOR_DEVICE = torch.ops.prim.device.default
_META = torch.device("meta")
_CONSTRAINTS = str(Path(torch.__file__).parent / "distributions" / "constraints.py")
STATE = "state:"  # begins the names of the outputs of a function of a state
_UPDATE = "optimizer_update"  # the name of its calls
_AROUND = "memfit.fit and `memfit fit` plan the graphs around that line"
_OUTSIDE = "take that decision outside of the function, between two calls"
_CHECK_FRAMES = 8  # from a reading of a value out to the constraint that asked for it


def capture_whole_step(step: TrainingStep, batch: Any = None, corrections: Corrections | None = None) -> Captured:
    """Return the graph of one step, and its binding.

    Gradients already in `.grad` are residents that the step adds to. Without an optimizer the gradients are outputs
    named `grad:<parameter>`; the loss is the output `loss`.

    Args:
        step: the training step.
        batch: the batch to capture it on; None stands for the step's own.
        corrections: what real kernels return in the place of their fakes' results (see `with_real_results`).

    Raises:
        GraphBreakError: the step depends on a tensor's value; names the user's line.
        CaptureError: the step's code raises; names the user's line.
        InvalidDeviceError: the batch is on another device than the model.
        UnsupportedStepError: LBFGS, collectives.
    """
    batch = step.batch if batch is None else batch
    require_training_context("the step was captured", step)
    reads = Reads(step)
    try:
        with host_draws_refused(lambda: _WholeStepCapture(step, batch, corrections).run()):
            first = _WholeStepCapture(step, batch, corrections)
            with reads.tracked():
                captured = first.run()
            _require_unread(step, batch, first.trace, reads)
    finally:
        reads.put_back()
    return replace(captured, guards=Guards(step, reads))


def capture_with_checkpoints(step: TrainingStep, corrections: Corrections | None = None) -> Captured:
    """Return the graph of one step as eager runs it: regions of `torch.utils.checkpoint` are computed twice.

    Args:
        step: a training step that `capture_whole_step` has captured, on its own batch.
        corrections: as for `capture_whole_step`.

    Raises:
        MemfitError: as `capture_whole_step`.
    """
    reads = Reads(step)
    try:
        with reads.tracked():
            return _WholeStepCapture(step, step.batch, corrections, inlines=False).run()
    finally:
        reads.put_back()


def record_at_all_sizes(step: TrainingStep, batch: Any, symbols: Symbols) -> tuple[Recorded, Guards]:
    """Return what a step does on batches of many sizes, with symbols in it, and what it took from Python.

    Args:
        step: a training step that `capture_whole_step` has captured, and that needed no corrections.
        batch: an example; its sizes that change are symbols, in the order of its leaves.
        symbols: of those sizes.

    Raises:
        Exception: torch cannot run the step on symbols.
    """
    reads = Reads(step)
    try:
        with reads.tracked(), symbols.noting():
            recorded = _WholeStepCapture(step, batch, symbols=symbols).record()
    finally:
        reads.put_back()
    return recorded, Guards(step, reads)


def _require_unread(step: TrainingStep, batch: Any, trace: Trace, reads: Reads) -> None:
    """Refuse a step that reads what it has itself set in the step before, unless the next step's ops are the same.

    They are the same in all later steps if a second capture, which starts with what the first one set, makes the same
    calls and leaves the same values.

    Raises:
        UnsupportedStepError: names what the step sets.
    """
    carried = reads.carried()
    if not carried:
        return
    second = _WholeStepCapture(step, batch, trace.corrections)
    try:
        second.run()
        same = second.trace.forward_is_as(trace)
    except MemfitError:  # what the step raised, for example for a fake of the first capture among its attributes
        same = False
    later = reads.carried()
    moving = [
        name
        for name, value in carried.items()
        if isinstance(value, ATOMS) and not is_same(value, later.get(name, MISSING))
    ]
    if same and not moving:
        reads.accept_present()
        return
    names = sorted(name.removeprefix("model.") for name in (moving if same else carried))
    where = " in its model" if all(name.startswith("model.") for name in carried) else ""
    raise UnsupportedStepError(
        f"the step sets {', '.join(map(repr, names[:3]))}{' and more' if len(names) > 3 else ''}{where} and "
        "reads it in the next step, but a planned step runs no Python: keep what later steps read in a "
        "buffer (register_buffer before memfit.fit) or in the batch; if it is made only "
        "once, run one eager forward first"
    )


class _Recorder(TorchDispatchMode):
    """Enters each call into the trace and the stream. Real tensors, over which the step closes, become fakes."""

    def __init__(self, capture: _WholeStepCapture) -> None:
        super().__init__()
        self.capture = capture
        self.trace = capture.trace
        self.records_stream = capture.symbols is None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ASKS_FOR_DEVICE:  # most of all calls, and none of the step's
            return func(*args)
        kwargs = kwargs or {}
        if func is not _aten.lift_fresh.default:  # its argument is a tensor that the step has just made
            args, kwargs = tree_map(self._faked, (args, kwargs))
        if func is _aten._to_copy.default and kwargs.get("device") == _META and args[0].device != _META:
            # Forward-mode derivatives that are known to be zero have the device of the fakes' own metadata.
            kwargs = {**kwargs, "device": args[0].device}
        if is_looked_at(func):
            self.capture.under_modes.look_at(func, args, len(self.trace.calls), calling_line())
        if func is READS_A_NUMBER and not known_value(args[0]):
            returned = self._number(func, args)
        else:
            returned = self._run(func, args, kwargs)
            if torch.Tag.inplace_view not in func.tags:
                returned = self.trace.add_call(func, args, kwargs, returned)
        if self.records_stream:
            self.capture.stream.add(func, args, kwargs, returned)
        return returned

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.capture.symbols is not None:
            with symbolic_kernels() if not func.is_view else nullcontext():
                return corrected(func, args, func(*args, **without_generator(kwargs)))
        try:
            return corrected(func, args, func(*args, **without_generator(kwargs)))
        except DATA_DEPENDENT_ERRORS:
            raise
        except Exception:  # fake kernels raise all kinds of errors
            if not is_pure(func) or not tensors_in((args, kwargs)):
                raise
            return as_the_real_kernel(func, args, kwargs)

    def _number(self, func: Any, args: tuple[Any, ...]) -> Any:
        if self._is_checked(args[0]):
            self.trace.add_check("check", RequireTrue(line=calling_line()), [self.trace.value(args[0])])
            return True
        return self._looked_at(func, args)

    def _is_checked(self, tensor: torch.Tensor) -> bool:
        """Return whether a value is read to check arguments of a distribution: what is false there raises an error."""
        call = self.trace.maker_of(tensor)
        if call is None:
            return False
        if call.target is _aten._is_all_true.default:
            return True
        return call.name == "all" and any(
            frame.filename == _CONSTRAINTS for frame in traceback.extract_stack(limit=_CHECK_FRAMES)
        )

    def _faked(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or is_fake(leaf) or leaf.layout is not torch.strided:
            return leaf
        key = storage_key(leaf)
        whole = self.capture.fake_of_storage.get(key)  # a parameter's too, that the step's code holds itself
        if whole is None:
            fake = self.capture.fake_of_storage[key] = as_fake(self.capture.mode, leaf)
            self.trace.stands_for[storage_key(fake)] = leaf
            self.capture.stream.contents[self.capture.stream.key(fake)] = leaf
            return fake
        with torch.no_grad(), only_mode(self.capture.mode):
            return torch.as_strided(whole.view(leaf.dtype), leaf.shape, leaf.stride(), leaf.storage_offset())

    def _looked_at(self, func: Any, args: Any) -> Any:
        (tensor,) = args
        symbols = self.capture.symbols
        concrete = at_hand if symbols is not None else _as_it_is
        look = look_at(tensor, self.trace, self.capture.leaves, concrete) if tensor.dtype == torch.bool else None
        if look is None:
            return func(*args)  # raises one of DATA_DEPENDENT_ERRORS
        if look.residents:  # another batch, or a tensor changed between steps, may answer otherwise
            self.capture.looks.append(look)
        return look.answer


def _as_it_is(look: Look) -> Look:
    return look


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A step as it was recorded.

    Attributes:
        trace: its calls.
        name: of the step.
        outputs: the Values that it returns, by name.
        checkpoints, looks: as `Captured` has them.
    """

    trace: Trace
    name: str
    outputs: dict[str, Value]
    checkpoints: int
    looks: tuple[Look, ...]

    def captured(self) -> Captured:
        """Return the graph of the step, and its binding.

        Raises:
            UnsupportedStepError: collectives.
        """
        source = f"whole step, torch {torch.__version__}"
        captured = build(self.trace, name=self.name, outputs=self.outputs, source=source)
        return replace(captured, checkpoints=self.checkpoints, looks=self.looks)


class _Update(NamedTuple):
    """How the optimizer updates a parameter: by its group's number, with the storages of its state."""

    parameter: torch.nn.Parameter
    group: int
    states: tuple[int, ...]
    workspace_bytes: int


_BATCH_SHARE = 0.01  # of the bytes of all gradients: those that wait to be used together


def _bytes_of(fakes: Iterable[torch.Tensor]) -> int:
    return sum(fake.nbytes for fake in fakes)


class _WholeStepCapture:
    def __init__(
        self,
        step: TrainingStep,
        batch: Any,
        corrections: Corrections | None = None,
        *,
        inlines: bool = True,
        symbols: Symbols | None = None,
    ) -> None:
        self.step = step
        self.inlines = inlines
        self.symbols = symbols
        self.batch = batch
        self.device = step_device(step.model, batch)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True) if symbols is None else symbols.mode
        self.trace = Trace(
            device=self.device, scope=self._scope, step_count=self._step_count, corrections=corrections or {}
        )
        self.stream = Stream()
        self._ready: dict[int, dict[torch.Tensor, _Update]] = {}  # by group: those whose gradients wait for an update
        self.leaves = tree_flatten(batch)[0]
        self.looks: list[Look] = []
        self.under_modes = UnderModes()
        self.fake_of_storage: dict[int, torch.Tensor] = {}
        self.outputs: dict[str, Value] = {}
        self._modules = {module: name for name, module in step.model.named_modules()}
        self._module_stack: list[str] = []
        self._module_of_node: dict[int, str] = {}
        self._cumulative: dict[str, torch.Tensor] = {}
        self._raised_in = ""
        self._names = {parameter: name for name, parameter in step.model.named_parameters()}
        self._fakes: dict[torch.Tensor, torch.Tensor] = {}
        self._hooks: list[Any] = []
        across = step.across if step.across is not None and step.across.reduces else None
        self._reductions = None if across is None else Reductions(self.trace, self.mode, across)

    def run(self) -> Captured:
        """Return the graph of the step, and its binding."""
        return replace(self.record().captured(), stream=self.stream)

    def record(self) -> Recorded:
        """Run the step on fakes, and return what was recorded."""
        step = self.step
        gradients_that_differ()  # which is found out outside of any mode
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
                with_a_momentum(step.model) as self._cumulative,
                self._module_names(),
                checkpoints_inlined() if self.inlines else nullcontext(lambda: 0) as checkpoints,
                failing_fakes_unlogged(),
                autocast_watched() as self.trace.has_autocast,
                torch.set_grad_enabled(step.has_backward),
            ):
                self._enter_parameters()
                updates = self._enter_optimizer()
                recorder = _Recorder(self)
                with seeding_refused() if self.inlines else nullcontext(), self.mode, answered_as_eager(), recorder:
                    if step.has_backward:
                        self._forward_and_backward(fake_batch, updates)
                    else:
                        self._next_state(fake_batch)
                    recorder.records_stream = False
                    self._require_gradients_found()
                    self._write_replaced(places)
                self._collect_gradients(updates)
                self.under_modes.require_read(self.trace.calls, {value.storage for value in self.outputs.values()})
        except MemfitError:
            raise
        except Exception as error:  # the user's code runs here, and may raise anything
            line = user_line(error)
            if is_data_dependent(error):
                raise GraphBreakError(
                    f"{line}: the step depends on the value of a tensor ({type(error).__name__}: {error}), so it "
                    f"cannot be one graph; {_AROUND if step.has_backward else _OUTSIDE}",
                    line=line,
                ) from error
            where = f" in module {self._raised_in}" if self._raised_in else ""
            raise CaptureError(f"{line}: the step raised{where} {type(error).__name__}: {error}") from error
        finally:
            for device, state in generator_states.items():
                set_state(device, state)
            for hook in self._hooks:  # the collector does not see them: the model would stay alive with its fakes
                hook.remove()
        return Recorded(
            trace=self.trace,
            name=step.name or type(step.model).__name__,
            outputs=self.outputs,
            checkpoints=checkpoints(),
            looks=tuple(self.looks),
        )

    def _enter_batch(self) -> Any:
        position = iter(range(1 << 30))

        def enter(leaf: Any) -> Any:
            number = next(position)
            if not isinstance(leaf, torch.Tensor):
                return plain(leaf)
            fake = leaf if is_fake(leaf) else self._fake_input(leaf, number)
            self.trace.add_resident(fake, role=Role.INPUT, origin=Origin.INPUT, key=number, name=f"batch_{number}")
            return fake

        return tree_map(enter, self.batch)

    def _fake_input(self, leaf: torch.Tensor, number: int) -> torch.Tensor:
        """Return a fake with a storage of its own: batches may be slices of a larger tensor, different in each step."""
        with self.mode:
            if self.symbols is not None and leaf.is_contiguous():
                fake = torch.empty(self.symbols.shapes[number], dtype=leaf.dtype, device=leaf.device)
            else:
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
            for hook in gradient_hooks(tensor).values():
                self._hooks.append(fake.register_hook(hook))
            # as no view: `module.double()` gives a view that is a gradient another dtype than its base has
            fake.grad = None if tensor.grad is None else self.mode.from_tensor(tensor.grad.data)
            self._fakes[tensor] = fake
            self.fake_of_storage.setdefault(storage_key(tensor), fake)

    def _enter_parameters(self) -> None:
        """Enter the fakes as residents, a tied parameter under each of its names: the runtime finds all of them."""
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
        """Enter the optimizer's state as residents, and return the update of each parameter's fake."""
        optimizer = self.step.optimizer
        updates: dict[torch.Tensor, _Update] = {}
        if optimizer is None:
            return updates
        costs = UpdateCosts(optimizer, self.mode)
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if not parameter.requires_grad or parameter not in self._fakes:
                    continue
                fake = self._fakes[parameter]
                cost = costs.of(parameter, fake, number)
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
        loss = self.step.compute_loss(self.step.model, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(type(loss))
            raise CaptureError(f"loss returned {found}, expected a scalar tensor that depends on the parameters")
        self.trace.write_back()
        self.outputs["loss"] = self.trace.value(loss)
        self.trace.storages[self.outputs["loss"].storage].role = Role.OUTPUT
        if self._reductions is not None:
            for parameter, name in self._names.items():
                if parameter.requires_grad:
                    self._hooks.append(
                        self._fakes[parameter].register_post_accumulate_grad_hook(partial(self._reductions.add, name))
                    )
        elif self._updates_at_once(updates):
            for fake in updates:
                self._hooks.append(
                    fake.register_post_accumulate_grad_hook(lambda done: self._update_when_ready(done, updates))
                )
        self.step.scaled(loss).backward()
        for number in tuple(self._ready):
            self._update_ready(number)

    def _next_state(self, batch: Any) -> None:
        """Run a function of a state, without gradients; the leaves of the next state are the outputs."""
        after = self.step.compute_loss(self.step.model, batch)
        require_state_like(batch[0], after)
        self.trace.write_back()
        for number, leaf in enumerate(tree_flatten(after)[0]):
            value = self.outputs[f"{STATE}{number}"] = self.trace.value(leaf)
            if not self.trace.storages[value.storage].resident:
                self.trace.storages[value.storage].role = Role.OUTPUT

    def _require_gradients_found(self) -> None:
        """Refuse a gradient of a tensor that is not the model's: the planned step would not compute it.

        Raises:
            UnsupportedStepError: gives the tensor's shape.
        """
        constants = [resident.constant for resident in self.trace.residents]
        for tensor in (*constants, *self._names):
            if isinstance(tensor, torch.Tensor) and tensor.is_leaf and is_fake(tensor.grad):
                tensor.grad = None
                raise UnsupportedStepError(
                    f"the loss has a gradient for a tensor of shape {tuple(tensor.shape)} that is no parameter of the "
                    "model, or that the step does not take from the model, so that a planned step would not train it; "
                    "make it one (of a module that holds model and loss, say), or set requires_grad_(False) on it"
                )

    def _write_replaced(self, places: list[Place]) -> None:
        """Write the values of each replaced buffer into the buffer, from which the next step reads them."""
        with torch.no_grad():
            for place, tensor in replaced(places, self._fakes):
                self._fakes[place.tensor].copy_(tensor)

    def _updates_at_once(self, updates: dict[torch.Tensor, _Update]) -> bool:
        return bool(updates) and updates_one_by_one(self.step) and not overlap(tuple(updates))

    def _update_when_ready(self, fake: torch.Tensor, updates: dict[torch.Tensor, _Update]) -> None:
        """Enter the update of a parameter whose gradient is there, with others of its group if that takes less time.

        The gradients of a batch wait for one another, and take memory meanwhile: a hundredth of all gradients at most.
        """
        assert self.step.optimizer is not None
        number = updates[fake].group
        ready = self._ready.setdefault(number, {})
        ready[fake] = updates[fake]
        is_batched = updates_many_at_once(self.step.optimizer.param_groups[number], fake.device)
        if not is_batched or _bytes_of(ready) > _BATCH_SHARE * _bytes_of(updates):
            self._update_ready(number)

    def _update_ready(self, number: int) -> None:
        """Enter one update of all parameters of a group whose gradients wait."""
        assert self.step.optimizer is not None
        ready = self._ready.pop(number, {})
        gradients = tuple(self.trace.gradient(fake.grad) for fake in ready if fake.grad is not None)
        workspace_bytes = sum(update.workspace_bytes for update in ready.values())
        parameters = [update.parameter for update in ready.values()]
        target = ParameterUpdate(self.step.optimizer, parameters, number, workspace_bytes)
        self.trace.calls.append(self._update_call(target, gradients, tuple(ready), tuple(ready.values())))
        for fake in ready:
            fake.grad = None

    def _one_update(self, update: _Update, fake: torch.Tensor, gradient: Value | tuple[Value, Value]) -> TracedCall:
        assert self.step.optimizer is not None
        target = ParameterUpdate(self.step.optimizer, [update.parameter], update.group, update.workspace_bytes)
        return self._update_call(target, (gradient,), (fake,), (update,))

    def _update_call(
        self,
        target: Any,
        gradients: tuple[Value | tuple[Value, Value], ...],
        fakes: tuple[torch.Tensor, ...],
        updates: tuple[_Update, ...],
    ) -> TracedCall:
        parameters = [self.trace.value(fake).storage for fake in fakes]
        states = [storage for update in updates for storage in update.states]
        names = {self._names[update.parameter].rpartition(".")[0] for update in updates}
        read = dict.fromkeys(value.storage for value in values_in(gradients))
        resident = {storage for storage in read if self.trace.storages[storage].resident}
        return TracedCall(
            name=_UPDATE,
            target=target,
            args=gradients,
            kwargs={},
            results=(None,),
            reads=tuple(storage for storage in read if storage not in resident),
            writes=(),
            mutates=tuple(dict.fromkeys([*parameters, *states, *resident])),
            phase=Phase.UPDATE,
            module=names.pop() if len(names) == 1 else "",
            workspace_bytes=target.workspace_bytes,
        )

    def _collect_gradients(self, updates: dict[torch.Tensor, _Update]) -> None:
        """Enter one update of all gradients that are left in `.grad`, or make them outputs for the user."""
        averaged = self._reduce(updates)
        waiting = [fake for fake in updates if fake.grad is not None]
        if waiting and self.step.optimizer is not None:
            gradients = tuple(
                averaged.get(fake) or self.trace.gradient(fake.grad) for fake in waiting if fake.grad is not None
            )
            own = tuple(updates[fake] for fake in waiting)
            # torch's optimizers may update many parameters at once, others are assumed to loop over them
            join = sum if is_of_torch(self.step.optimizer) else max
            workspace = join(update.workspace_bytes for update in own)
            target = WholeUpdate(self.step, [update.parameter for update in own], workspace)
            self.trace.calls.append(self._update_call(target, gradients, tuple(waiting), own))
        self._forget_states_never_made(updates)
        for parameter, name in self._names.items():
            fake = self._fakes[parameter]
            if fake.grad is not None and fake not in updates:
                value = self.outputs[f"grad:{name}"] = averaged.get(fake) or self.trace.value(fake.grad)
                self.trace.storages[value.storage].role = Role.GRADIENT

    def _reduce(self, updates: dict[torch.Tensor, _Update]) -> dict[torch.Tensor, Value]:
        """Enter the calls that average gradients over ranks, with the updates of parameters that need no others."""
        if self._reductions is None:
            return {}

        is_at_once = self._updates_at_once(updates)

        def update(fake: torch.Tensor, gradient: Value) -> TracedCall | None:
            return self._one_update(updates[fake], fake, gradient) if is_at_once and fake in updates else None

        return self._reductions.enter(update, is_at_once=is_at_once)

    def _forget_states_never_made(self, updates: dict[torch.Tensor, _Update]) -> None:
        """Leave out the states of parameters that get no gradient, unless the optimizer has made them before."""
        assert self.step.optimizer is not None or not updates
        made = {storage for call in self.trace.calls if call.name == _UPDATE for storage in call.mutates}
        for update in updates.values():
            if made.isdisjoint(update.states) and not self.step.optimizer.state.get(update.parameter):
                for storage in update.states:
                    self.trace.storages[storage].resident = False
        self.trace.residents[:] = [r for r in self.trace.residents if self.trace.storages[r.value.storage].resident]

    def _scope(self) -> tuple[Phase, str]:
        node = backward_node()
        if node is not None:
            return Phase.BACKWARD, self._module_of_node.get(node[1], "")
        module = self._module_stack[-1] if self._module_stack else ""
        # Autograd makes an op's node just before it dispatches the op here.
        self._module_of_node.setdefault(next_sequence_number() - 1, module)
        return Phase.FORWARD, module

    def _step_count(self) -> torch.Tensor | None:
        return self._cumulative.get(self._module_stack[-1]) if self._module_stack else None

    @contextmanager
    def _module_names(self) -> Iterator[None]:
        def enter(module: torch.nn.Module, _inputs: Any) -> None:
            outer = self._module_stack[-1] if self._module_stack else ""
            self._module_stack.append(self._modules.get(module, outer))

        def leave(module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            name = self._module_stack.pop()
            raised = output is None and sys.exc_info()[0] is not None
            if raised and name and not self._raised_in:  # the hook of the innermost module runs first
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


def user_line(error: BaseException) -> str:
    """Return `file:line` of the innermost frame of an error that is neither torch's nor memfit's."""
    return _innermost(traceback.extract_tb(error.__traceback__))


def calling_line() -> str:
    """Return `file:line` of the innermost frame of the present call that is neither torch's nor memfit's."""
    return _innermost(traceback.extract_stack())


def _innermost(stack: traceback.StackSummary) -> str:
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
    frames = [f for f in stack if not f.filename.startswith((*own, "<"))]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "the training step"
