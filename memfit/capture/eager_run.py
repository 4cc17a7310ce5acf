"""One run of a step as eager runs it, compared call by call with what was captured.

The forward pass runs on the real tensors. What autograd saves is replaced by its metadata, so that no activation lives
longer than in inference; backward then runs on fakes, through the graph that the real forward pass has made. All that
the run changes is put back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.capture.batch_norms import updated_places
from memfit.capture.corrected_fakes import as_corrected, real_results
from memfit.capture.generators import states_kept
from memfit.capture.live_bytes import LiveBytes
from memfit.capture.model_tables import memory_put_back, swapped, with_a_momentum
from memfit.capture.placement import on_its_own, step_device
from memfit.capture.reads import Reads
from memfit.capture.stand_ins import stand_ins_shown
from memfit.capture.stream import LIFT, Difference, Dispatched, Stream, tensors_of
from memfit.capture.traced import mutated_tensors, on_its_device
from memfit.capture.training_step import TrainingStep
from memfit.errors import MemfitError, NoGraphError
from memfit.memory.place import Place, bytes_of, lazy_view
from memfit.system.budget import format_bytes
from memfit.system.recorder import allocated_bytes, empty_cache, held_bytes
from memfit.torch_private.autograd import (
    TorchDispatchMode,
    only_mode,
    saved_leaves_themselves,
    saved_with,
    views_replayed,
)
from memfit.torch_private.tensors import (
    FakeTensorMode,
    as_fake,
    is_fake,
    is_plain_dense,
    is_zero_tensor,
    real_tensors,
    storage_key,
    tensors_in,
    tree_flatten,
    tree_map,
)
from memfit.torch_private.tracing import checkpoints_inlined

_NO_HOOKS = "support saved tensor hooks"  # in torch's error for torch.func.grad inside of such hooks
_aten = torch.ops.aten
_ZEROS = _aten._efficientzerotensor.default
_MARK = 0x6D656D666974  # a seed that no step sets


class _Parted(BaseException):
    """The run dispatches another call than expected; no handler of the user's code may catch it."""

    def __init__(self, difference: Difference) -> None:
        super().__init__()
        self.difference = difference


class _OverLimit(BaseException):
    """The forward pass needs more bytes than it may take; no handler of the user's code may catch it."""


class NotComparableError(Exception):
    """The run could not be carried out; the message says why."""


def run_as_eager(
    step: TrainingStep, batch: Any, *, expected: Stream | None = None, limit_bytes: int | None = None
) -> tuple[Stream, Difference | None]:
    """Run forward and backward of a step, and compare the calls; the step's state is put back.

    Args:
        step: the training step, whose tensors are real.
        batch: of the run.
        expected: the stream of an earlier run; None compares nothing.
        limit_bytes: how many bytes the results of the forward pass may take together; None is no limit.

    Returns:
        the stream, and the first difference; the stream ends there.

    Raises:
        NotComparableError: the forward pass needs more than the limit, or the run raised an error.
    """
    try:
        return _EagerRun(step, batch, expected, limit_bytes).run()
    except NotComparableError as error:
        if _NO_HOOKS not in str(error):
            raise
    # torch.func differentiates inside the step: autograd keeps real tensors, within the same limit
    return _EagerRun(step, batch, expected, limit_bytes, replaces_saved=False).run()


@dataclass(frozen=True, slots=True)
class _Saved:
    """Metadata of a tensor that autograd saves; its place has the key of its storage."""

    place: Place
    device: torch.device


@dataclass
class _Kept:
    """Copies of the storages that the run writes to and did not make, by their keys."""

    storages: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict[int, tuple[torch.Tensor, torch.Tensor]]
    )

    @property
    def bytes(self) -> int:
        """The bytes of all copies."""
        return sum(copy.nbytes for _, copy in self.storages.values())

    def storage(self, tensor: torch.Tensor) -> None:
        with real_tensors():
            whole = bytes_of(tensor)
            self.storages[storage_key(tensor)] = whole, whole.clone()

    def __enter__(self) -> None:
        """Do nothing: storages are copied before they are written to."""

    def __exit__(self, *_error: object) -> None:
        """Write the copies back."""
        with real_tensors():
            for whole, copy in reversed(self.storages.values()):  # two may be of the same memory
                whole.copy_(copy)


class _Watch(TorchDispatchMode):
    """Compares each call with the expected one, and copies what the run is about to write to."""

    def __init__(
        self,
        stream: Stream,
        expected: Stream | None,
        kept: _Kept,
        limit_bytes: int | None,
        mode: FakeTensorMode,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.stream = stream
        self.expected = expected
        self.kept = kept
        self.limit_bytes = limit_bytes  # of the forward pass
        self.live = LiveBytes()
        self.mode = mode
        self.is_backward = False
        self.device = device
        if limit_bytes is not None and device.type == "cuda":  # whose allocator keeps what is free
            self.most_held_bytes = allocated_bytes(device) + limit_bytes
        self.unused = set() if expected is None else expected.generators()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        on_fakes = self.is_backward or any(map(is_fake, tensors_in((args, kwargs))))  # in a backward pass of the user's
        if on_fakes and func is not LIFT:  # whose argument the step has just made of a number
            args, kwargs = tree_map(self._faked, (args, kwargs))
            kwargs = on_its_device(func, args, kwargs)
        self._check_generator(kwargs.get("generator"))
        for tensor in _written(func, args, kwargs):
            if is_fake(tensor) or tensor.layout is not torch.strided or storage_key(tensor) in self.kept.storages:
                continue
            if self.stream.is_outside(tensor):
                self.kept.storage(tensor)
                self.stream.look_at(tensor)
        if self.expected is None:
            returned = self._run(func, args, kwargs, None, on_fakes=on_fakes)
            self.stream.add(func, args, kwargs, returned)
            return returned
        place = len(self.stream.calls)
        planned = self.expected.calls[place] if place < len(self.expected.calls) else None
        returned = self._run(func, args, kwargs, planned, on_fakes=on_fakes)
        call = self.stream.add(func, args, kwargs, returned)
        if call is not None and (planned is None or not call.is_as(planned)):
            raise _Parted(Difference(expected=planned, found=call))
        return returned

    def _run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], planned: Dispatched | None, *, on_fakes: bool
    ) -> Any:
        if on_fakes:
            return self._run_on_fakes(func, args, kwargs)
        if self.limit_bytes is None:
            return func(*args, **kwargs)
        needed_bytes = planned.new_bytes if planned is not None and planned.target == str(func) else 0
        if self.live.live_bytes + self.kept.bytes + needed_bytes > self.limit_bytes or self._is_full(needed_bytes):
            raise _OverLimit
        return self.live.__torch_dispatch__(func, (), args, kwargs)

    def _run_on_fakes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _ZEROS or (func.is_view and is_zero_tensor(args[0])):
            with real_tensors():  # they have no memory, and as fakes some of their views lose their device
                return func(*args, **kwargs)
        returned = func(*args, **kwargs)
        if self.expected is None or not self.expected.corrections:
            return returned
        real = real_results(self.expected.corrections, func, args, kwargs)
        return as_corrected(returned, real, lambda leaf: not is_fake(leaf))

    def _is_full(self, needed_bytes: int) -> bool:
        """Return whether the device's allocator may not take so many bytes more, having returned what is unused."""
        if self.device.type != "cuda" or held_bytes(self.device) + needed_bytes <= self.most_held_bytes:
            return False
        empty_cache(self.device)
        return held_bytes(self.device) + needed_bytes > self.most_held_bytes

    def _faked(self, leaf: Any) -> Any:
        """Return the fake that stands for a real tensor in backward: a leaf, or what autograd saved as it is."""
        if not isinstance(leaf, torch.Tensor) or is_fake(leaf) or leaf.layout is not torch.strided:
            return leaf
        if is_zero_tensor(leaf):
            return leaf
        fake, key = as_fake(self.mode, leaf), self.stream.key(leaf)
        self.stream.stand_for(fake, key)
        if self.stream.is_outside(leaf):
            self.stream.contents.setdefault(key, leaf)
        return fake

    def _check_generator(self, generator: Any) -> None:
        """Refuse a step that sets the state of a generator, which the run has marked, before it draws from it."""
        if generator not in self.unused:
            return
        self.unused.discard(generator)
        if not torch.equal(generator.get_state(), _mark(generator)):
            raise NoGraphError(
                f"{self.stream.here()}: the step sets the seed or the state of a torch.Generator that it draws from, "
                "and a planned step would not",
                "seed it outside of the step",
            )


def _mark(generator: torch.Generator) -> torch.Tensor:
    return torch.Generator(device=generator.device).manual_seed(_MARK).get_state()


class _EagerRun:
    def __init__(
        self,
        step: TrainingStep,
        batch: Any,
        expected: Stream | None,
        limit_bytes: int | None,
        *,
        replaces_saved: bool = True,
    ) -> None:
        self.step = step
        self.batch = batch
        self.expected = expected
        self.limit_bytes = limit_bytes
        self.replaces_saved = replaces_saved
        own = tensors_of([list(step.model.parameters()), list(step.model.buffers()), batch])
        self.stream = Stream(own=own)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.kept = _Kept()
        device = step_device(step.model, batch)
        self.watch = _Watch(self.stream, expected, self.kept, limit_bytes, self.mode, device)

    def run(self) -> tuple[Stream, Difference | None]:
        difference, reads = None, Reads(self.step)
        try:
            with (
                states_kept(self.watch.unused),
                self.kept,
                reads,
                reads.tracked(),
                self._gradients_put_back(),
                swapped(self.step.model, {}),  # which puts its tables back
                memory_put_back(self.step.model),
                stand_ins_shown(self.step.across, self._own),
                with_a_momentum(self.step.model),  # as capture does: the count of steps is a number of no call then
                checkpoints_inlined(),
            ):
                for generator in self.watch.unused:
                    generator.set_state(_mark(generator))
                self._forward_and_backward()
                place = len(self.stream.calls)
                if self.expected is not None and place < len(self.expected.calls):
                    difference = Difference(expected=self.expected.calls[place], found=None)
        except _Parted as parted:
            difference = parted.difference
        except _OverLimit:
            raise NotComparableError(
                f"its forward pass alone takes more than the {format_bytes(self.limit_bytes or 0)} that the budget "
                "leaves beside parameters and batch; verify=True compares whole steps"
            ) from None
        except MemfitError:
            raise
        except Exception as error:  # the user's code runs here, and may raise anything
            raise NotComparableError(f"eager's run raised {type(error).__name__}: {error}") from error
        return self.stream, difference

    def _forward_and_backward(self) -> None:
        seen = set(tensors_of([list(self.step.model.parameters()), list(self.step.model.buffers())]))
        entered: dict[int, torch.Tensor] = {}
        batch = tree_map(lambda leaf: self._entered(leaf, seen, entered), self.batch)
        hooks = saved_with(self._pack, self._unpack)
        if not self.step.has_backward:
            with torch.no_grad(), views_replayed(), self.watch:
                self.step.compute_loss(self.step.model, batch)
            return
        with torch.enable_grad(), views_replayed(), hooks if self.replaces_saved else nullcontext():
            with self.watch:
                loss = self.step.compute_loss(self.step.model, batch)
                scaled = self.step.scaled(loss)
            self.watch.is_backward = True
            del loss, batch
            with self.mode, self.watch, saved_leaves_themselves():
                scaled.backward()

    def _own(self, tensor: torch.Tensor) -> None:
        """Let the content of a tensor be none that is compared."""
        self.stream.own |= {storage_key(tensor)}

    def _entered(self, leaf: Any, seen: set[int], entered: dict[int, torch.Tensor]) -> Any:
        """Return a leaf of the batch as capture enters it: each on a storage of its own, with no gradient of before."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in entered:
            entered[id(leaf)] = self._alone(leaf, seen)
        return entered[id(leaf)]

    def _alone(self, leaf: torch.Tensor, seen: set[int]) -> torch.Tensor:
        if is_plain_dense(leaf):
            leaf = on_its_own(leaf)
        key = storage_key(leaf)
        if key in seen or leaf.requires_grad:
            own = _copy(leaf.detach()) if key in seen else leaf.detach()
            leaf = own.requires_grad_(leaf.requires_grad)
        seen.add(key)
        self._own(leaf)
        return leaf

    def _pack(self, tensor: torch.Tensor) -> Any:
        if is_fake(tensor) or is_zero_tensor(tensor):  # which have no memory
            return tensor
        return _Saved(Place.of(tensor, self.stream.key(tensor)), tensor.device)

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _Saved):
            return saved
        with only_mode(self.mode):
            whole = torch.empty(saved.place.reach_bytes, dtype=torch.uint8, device=saved.device)
            fake = saved.place.on(whole)
        self.stream.stand_for(fake, saved.place.storage)
        return fake

    @contextmanager
    def _gradients_put_back(self) -> Iterator[None]:
        """Let backward add to fakes of the gradients that are there."""
        gradients = [(parameter, parameter.grad) for parameter in self.step.model.parameters()]
        for parameter, gradient in gradients:
            if gradient is not None:
                parameter.grad = self.mode.from_tensor(gradient)
        try:
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that is as lazily conjugated and negated as a tensor."""
    lazy = {"conjugated": tensor.is_conj(), "negated": tensor.is_neg()}
    return lazy_view(lazy_view(tensor, **lazy).clone(), **lazy)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call writes to, also those that its schema hides."""
    return [*mutated_tensors(func, args, kwargs), *(args[place] for place in updated_places(func, args))]


def leaves_are_real(step: TrainingStep, batch: Any) -> bool:
    """Return whether the step can run: neither its tensors nor the batch's are fakes or on the meta device.

    Args:
        step: its parameters and buffers are looked at.
        batch: as the step takes it.
    """
    tensors = [*step.model.parameters(), *step.model.buffers(), *tree_flatten(batch)[0]]
    return not any(isinstance(t, torch.Tensor) and (is_fake(t) or t.device.type == "meta") for t in tensors)
