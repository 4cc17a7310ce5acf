"""Recording of a step: its Python code runs once, on fakes, and each call is entered into a trace."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.binding import Origin, Value
from memfit.capture.build import Captured, build
from memfit.capture.call_recorder import CallRecorder
from memfit.capture.draws import seeding_refused
from memfit.capture.fake_attributes import FakeAttributes
from memfit.capture.fully_sharded import FullySharded
from memfit.capture.function_step import require_state_like
from memfit.capture.generators import states_kept
from memfit.capture.gradient_use import GradientUse
from memfit.capture.lines import calling_line, user_line
from memfit.capture.looks import Look
from memfit.capture.model_tables import (
    entries_of_model,
    memory_kept_real,
    require_none_made,
    swapped,
    with_a_momentum,
    write_replaced,
)
from memfit.capture.module_scopes import ModuleScopes
from memfit.capture.optimizer import require_supported
from memfit.capture.placement import step_device
from memfit.capture.shards import Shards
from memfit.capture.step_check import check_not_distributed
from memfit.capture.stream import Stream
from memfit.capture.symbols import Symbols
from memfit.capture.trace import Trace
from memfit.capture.training_step import TrainingStep, plain
from memfit.capture.under_modes import UnderModes, gradients_that_differ
from memfit.capture.values_read import ValuesRead
from memfit.cost.observations import Corrections
from memfit.errors import (
    CaptureError,
    GraphBreakError,
    InvalidOptionError,
    MemfitError,
    NoGraphError,
    UnsupportedStepError,
    capture_error,
)
from memfit.graph import Role
from memfit.memory.place import lazy_view
from memfit.torch_private.absent import has_no_memory
from memfit.torch_private.autocast import autocast_watched
from memfit.torch_private.compiled_regions import CompiledRegions
from memfit.torch_private.modules import gradient_hooks, leaf_hooks
from memfit.torch_private.tensors import (
    FakeTensorMode,
    failing_fakes_unlogged,
    is_data_dependent,
    is_fake,
    storage_key,
    tree_flatten,
    tree_map,
)
from memfit.torch_private.tracing import Regions, answered_as_eager, checkpoints_inlined

_log = logging.getLogger("memfit")
STATE = "state:"  # begins the names of the outputs of a function of a state
_AROUND = "memfit.fit and `memfit fit` run such a step under memfit.checkpoint"
_OUTSIDE = "take that decision outside of the function, between two calls"


def _refuse_compiled() -> Callable[[], None]:
    raise NoGraphError(
        f"{calling_line()}: the step calls code that torch.compile has compiled, and a planned step would run it in "
        "eager, with other last bits",
        "plan it without: TORCH_COMPILE_DISABLE=1 in the environment",
    )


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


class StepRecording:
    """One run of a step on fakes.

    Attributes:
        values: the tensors beside the model whose values the step's code has read.

    Args:
        step: the training step.
        batch: that it runs on.
        corrections: what real kernels return in the place of their fakes' results.
        inlines: whether regions of `torch.utils.checkpoint` run inline.
        symbols: of the sizes that change; None where all are numbers.
    """

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
        self._scopes = ModuleScopes(step.model)
        self.trace = Trace(
            device=self.device,
            scope=self._scopes.scope,
            step_count=self._scopes.step_count,
            corrections=corrections or {},
        )
        self.stream = Stream(corrections=corrections or {})
        self.outputs: dict[str, Value] = {}
        self.values = ValuesRead()
        self._under_modes = UnderModes()
        self._recorder = CallRecorder(
            self.trace,
            self.stream,
            mode=self.mode,
            leaves=tree_flatten(batch)[0],
            symbols=symbols,
            under_modes=self._under_modes,
            counts_as_asked=not step.has_backward,
        )
        self._names = {parameter: name for name, parameter in step.model.named_parameters()}
        self._fakes: dict[torch.Tensor, torch.Tensor] = {}  # of what forward and backward work with
        self._own: dict[torch.Tensor, torch.Tensor] = {}  # those among them that are not gathered
        self._memory: dict[torch.Tensor, torch.Tensor] = {}
        self._attributes: dict[torch.Tensor, FakeAttributes] = {}
        sharded = step.across if isinstance(step.across, FullySharded) else None
        self._shards = (
            None if sharded is None else Shards(sharded, self.trace, self.mode, lambda: self._scopes.scope()[0])
        )
        self._hooks: list[Any] = []
        self._gradients = GradientUse(
            step, self.trace, mode=self.mode, names=self._names, fakes=self._fakes, shards=self._shards
        )

    def run(self) -> Captured:
        """Return the graph of the step, and its binding."""
        return replace(self.record().captured(), stream=self.stream)

    def record(self) -> Recorded:
        """Run the step on fakes, and return what was recorded."""
        self._require_supported()
        fake_batch = self._enter_batch()
        self._make_fakes()
        with states_kept():
            try:
                checkpoints = self._run(fake_batch)
            except MemfitError:
                raise
            except Exception as error:  # the user's code runs here, and may raise anything
                raise self._described(error) from error
            finally:
                for tensor, attributes in self._attributes.items():
                    attributes.move_to(tensor)
                for hook in self._hooks:  # the collector does not see them: the model would stay alive with its fakes
                    hook.remove()
        return Recorded(
            trace=self.trace,
            name=self.step.name or type(self.step.model).__name__,
            outputs=self.outputs,
            checkpoints=checkpoints,
            looks=tuple(self._recorder.looks),
        )

    def _require_supported(self) -> None:
        step = self.step
        gradients_that_differ()  # which is found out outside of any mode
        check_not_distributed(step.model, "the step", step.across)
        if step.optimizer is not None:
            require_supported(step.optimizer)
        elif step.clip_norm is not None:
            raise InvalidOptionError(
                "clip_norm needs an optimizer; without one, clip the gradients in `.grad` yourself"
            )
        if step.scaler is not None:  # its scale is made at its first use, and must be a real tensor
            step.scaler.scale(torch.zeros((), device=self.device))

    def _run(self, fake_batch: Any) -> int:
        """Run the step on fakes; return how many checkpoints of the user's it has."""
        step, recorder = self.step, self._recorder
        known = entries_of_model(step.model)
        seeding = seeding_refused() if self.inlines else nullcontext()
        with (
            swapped(step.model, self._own) as places,
            nullcontext() if self._shards is None else self._shards.shown(),
            with_a_momentum(step.model) as self._scopes.cumulative,
            self._scopes.noted(),
            checkpoints_inlined() if self.inlines else nullcontext(Regions()) as self._regions,
            failing_fakes_unlogged(),
            memory_kept_real(),
            autocast_watched() as self.trace.has_autocast,
            torch.set_grad_enabled(step.has_backward),
            CompiledRegions(_refuse_compiled),
        ):
            self._enter_parameters()
            self._gradients.enter_states()
            with seeding, self.mode, answered_as_eager(recorder.one_hot), recorder, self.values:
                if step.has_backward:
                    self._forward_and_backward(fake_batch)
                else:
                    self._next_state(fake_batch)
                recorder.records_stream = False
                self._require_gradients_found()
                require_none_made(step.model, known)
                write_replaced(places, self._own, self._memory, self.trace, self._gradients)
            self._gradients.collect(self.outputs)
            self.values.require_unwritten(self._is_written)
            self._under_modes.require_read(self.trace.calls, {value.storage for value in self.outputs.values()})
        return self._regions.count

    def _is_written(self, tensor: torch.Tensor) -> bool:
        """Return whether a call writes to a tensor over which the step closes."""
        fake = self._recorder.fake_of_storage.get(storage_key(tensor))
        return fake is not None and self.trace.is_mutated(self.trace.value(fake).storage)

    def _described(self, error: Exception) -> MemfitError:
        """Return the error for one that the user's code raised on fakes."""
        line, kind = user_line(error), type(error).__name__
        if is_data_dependent(error):
            return GraphBreakError(
                f"{line}: the step depends on the value of a tensor ({kind}: {error}), so it cannot be one graph; "
                f"{_AROUND if self.step.has_backward else _OUTSIDE}",
                line=line,
            )
        where = f" in module {self._scopes.raised_in}" if self._scopes.raised_in else ""
        return capture_error(f"{line}: the step raised{where} {kind}: {error}", error)

    def _enter_batch(self) -> Any:
        """Enter each tensor of the batch, one that stands at several places as the first of them."""
        position = iter(range(1 << 30))
        entered: dict[int, torch.Tensor] = {}

        def enter(leaf: Any) -> Any:
            number = next(position)
            if not isinstance(leaf, torch.Tensor):
                return plain(leaf)
            if id(leaf) in entered:
                return entered[id(leaf)]
            own = is_fake(leaf) and not has_no_memory(leaf)
            fake = entered[id(leaf)] = leaf if own else self._fake_input(leaf, number)
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
            fake = lazy_view(fake, conjugated=leaf.is_conj(), negated=leaf.is_neg())
        return fake.requires_grad_(leaf.requires_grad)

    def _make_fakes(self) -> None:
        for tensor in (*self.step.model.parameters(), *self.step.model.buffers()):
            if leaf_hooks(tensor)[1]:
                raise NoGraphError(
                    f"parameter {self._names.get(tensor, '')!r} has a hook that runs when its gradient is there "
                    "(register_post_accumulate_grad_hook), which a planned step would not run",
                    "remove it; memfit itself updates each parameter as soon as its gradient is there, where it is "
                    "given the optimizer",
                )
            if self._shards is not None and tensor in self._shards.fakes:
                self._fakes[tensor] = self._shards.fakes[tensor]
                continue
            fake = self._own[tensor] = self.mode.from_tensor(tensor)
            for hook in gradient_hooks(tensor).values():
                self._hooks.append(fake.register_hook(hook))
            # as no view: `module.double()` gives a view that is a gradient another dtype than its base has
            fake.grad = None if tensor.grad is None else self.mode.from_tensor(tensor.grad.data)
            self._fakes[tensor] = fake
            if fake is not tensor:
                self._attributes[tensor] = FakeAttributes(tensor, fake)
            self._recorder.fake_of_storage.setdefault(storage_key(tensor), fake)

    def _enter_parameters(self) -> None:
        """Enter the fakes as residents, a tied parameter under each of its names: the runtime finds all of them."""
        self._memory = {tensor: fake.detach() for tensor, fake in self._own.items()}
        if self._shards is not None:
            self._shards.enter()
        for parameter, name in self._names.items():
            if parameter not in self._own:
                continue
            fake = self._own[parameter]
            self.trace.add_resident(fake, role=Role.PARAMETER, origin=Origin.PARAMETER, key=name, name=name)
            if fake.grad is not None:
                self.trace.add_resident(
                    fake.grad, role=Role.GRADIENT, origin=Origin.GRADIENT, key=name, name=f"{name}.grad"
                )
        for name, buffer in self.step.model.named_buffers():
            # named_buffers sees the fakes, which are swapped in
            self.trace.add_resident(buffer, role=Role.STATE, origin=Origin.BUFFER, key=name, name=name)

    def _forward_and_backward(self, batch: Any) -> None:
        loss = self.step.compute_loss(self.step.model, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(type(loss))
            raise CaptureError(f"loss returned {found}, expected a scalar tensor that depends on the parameters")
        self.trace.write_back()
        self.outputs["loss"] = self.trace.value(loss)
        self.trace.storages[self.outputs["loss"].storage].role = Role.OUTPUT
        self._say_what_is_summed_otherwise(self._regions.summed_otherwise(loss))
        self._hooks += self._gradients.hooks()
        torch.autograd.backward(self.step.scaled(loss))  # a tensor's method would run without the mode that sees reads
        self._gradients.enter_waiting()

    def _say_what_is_summed_otherwise(self, leaves: Sequence[torch.Tensor]) -> None:
        found = set(map(id, leaves))
        names = [name for tensor, name in self._names.items() if id(self._fakes.get(tensor)) in found]
        if names:
            _log.warning(
                "memfit: %s%s in and outside of a region of torch.utils.checkpoint with use_reentrant=True, which adds "
                "to its gradient in a backward pass of its own: last bits may differ from eager's, whose sum has "
                "another order; use_reentrant=False has the planned step's",
                names[0],
                " is used" if len(names) == 1 else f" and {len(names) - 1} more parameters are used",
            )

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
