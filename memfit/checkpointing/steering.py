"""Steering of stock checkpoints: what is done with each call of a block, or of a module inside, in one pass."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import Signature, signature
from types import MethodType
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as stock_checkpoint

from memfit.capture.step_check import calls_scripts, scripts_in
from memfit.checkpointing.chain import Link
from memfit.checkpointing.contexts import Again, Keep, KeepRule, Repeated, selective_contexts
from memfit.checkpointing.groups import CHAINS, HALVED, HOSTED, INPUT_RULES
from memfit.checkpointing.passes import Pass, Ruling, Spot
from memfit.checkpointing.reached import OR_EAGER_MODE, reach_of
from memfit.checkpointing.recording import LeanRecorder
from memfit.checkpointing.snapshots import CallSnapshot
from memfit.errors import MemfitError, UnsupportedStepError
from memfit.memory.host.room import Host, OnHost
from memfit.torch_private.ambient import saved_as_they_are
from memfit.torch_private.autograd import hooks_aside_in_transforms, in_backward, in_transform
from memfit.torch_private.checkpoints import ends_early, in_selective_checkpoint, tell_mismatch

_OF_CHECKPOINTS = {*signature(stock_checkpoint).parameters, "fn", "preserve_rng_state"}  # would not reach the block


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A call of a module: its forward pass, with the arguments."""

    spot: Spot
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        return self.forward(*self.args, **self.kwargs)


class Steering:
    """Carries out the present pass; the handle sets it.

    Args:
        device: of the model.
        enter: called with the arguments of each call of a block; begins a pass, and returns what is to be told of the
            block's results, where the loop calls no model but a method or a part of it.
    """

    def __init__(self, device: torch.device, enter: Callable[[Any], Callable[[Any], None] | None]) -> None:
        self.device, self._enter = device, enter
        self.host: Host | None = None
        self.looking: Callable[[Spot, Pass, Ruling | None], AbstractContextManager[None]] | None = None
        self.present: Pass | None = None
        self.is_frozen = False

    @property
    def recorder(self) -> LeanRecorder | None:
        """What records the present pass, if it is lean."""
        return self.present.recorder if self.present is not None else None

    def run(self, spot: Spot, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call of a module as the present pass says.

        Args:
            spot: the module.
            forward: its own forward pass, or the part of it that a library hands to its checkpoint.
            args, kwargs: given to `forward`.
        """
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs) if spot.is_outside else self._compiled(spot, forward, args, kwargs)
        call = _Call(spot, forward, args, kwargs)
        is_in_transform = in_transform()
        if is_in_transform or in_selective_checkpoint():  # of the user's: what it keeps is its own to say
            if is_in_transform and self.present is not None:
                self.present.has_transforms = True
            return call.run()
        returned = self._enter((args, kwargs)) if spot.is_block else None
        if self.present is None or not torch.is_grad_enabled():
            return call.run()
        output = self._steered(self.present, call)
        if returned is not None:
            returned(output)
        return output

    def _steered(self, present: Pass, call: _Call) -> Any:
        spot = call.spot
        present.make_room()
        if spot.is_block:
            present.let_leave()
        ruling = present.ruling(spot, (call.args, call.kwargs))
        if not spot.is_block or self.looking is None:
            return self._ruled(present, call, ruling)
        with self.looking(spot, present, ruling):
            return self._ruled(present, call, ruling)

    def _ruled(self, present: Pass, call: _Call, ruling: Ruling | None) -> Any:
        spot, args, kwargs = call.spot, call.args, call.kwargs
        recorder = present.recorder
        if recorder is not None and spot.is_block and (ruling is not None or spot.is_rest):
            return self._record(present, recorder, call, is_kept=ruling is None)
        if ruling is None:
            if spot.reach is not None:
                spot.reach.free_replaced()
            if recorder is not None and recorder.inside is not None:
                with recorder.inside.span(spot.name, args, kwargs):
                    return call.run()
            return call.run()
        if present.has_chains and spot.is_block:
            return self._chained(present, call, ruling)
        return self._held_checkpoint(present, call, ruling)

    def _held_checkpoint(self, present: Pass, call: _Call, ruling: Ruling) -> Any:
        contexts = partial(self._contexts, present, call.spot, ruling, call.spot.snapshot(call.args, call.kwargs))
        return self._checkpoint(contexts, call.forward, call.args, call.kwargs)

    def _compiled(self, spot: Spot, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a compiler is to trace: a stock checkpoint, once the policy stays."""
        ruling = self.present.rulings.get(spot.name) if self.is_frozen and self.present is not None else None
        if ruling is None:
            return forward(*args, **kwargs)
        if any(name in kwargs for name in _OF_CHECKPOINTS):  # which the compiler of torch 2.11 can read, too
            forward, kwargs = partial(forward, **kwargs), {}
        if not isinstance(ruling, KeepRule):
            return stock_checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return stock_checkpoint(
            forward, *args, use_reentrant=False, context_fn=partial(selective_contexts, ruling.names), **kwargs
        )

    def _checkpoint(
        self, contexts: Callable[[], Any], forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        forward, args, kwargs = _each_once(forward, args, kwargs)
        forward = partial(forward, **kwargs) if kwargs else forward  # some may have names of _OF_CHECKPOINTS
        # The inputs: the block's own saves have the checkpoint's hooks.
        with hooks_aside_in_transforms(), saved_as_they_are():
            return stock_checkpoint(forward, *args, use_reentrant=False, context_fn=contexts)

    def _contexts(self, present: Pass, spot: Spot, ruling: Ruling, snapshot: CallSnapshot) -> tuple[Any, Any]:
        if not isinstance(ruling, KeepRule):
            return nullcontext(), Repeated(partial(self._again_once, present, spot, snapshot, nullcontext()))
        keep = Keep(ruling)
        return keep, Repeated(partial(self._again_once, present, spot, snapshot, Again(keep)))

    @contextmanager
    def _again_once(
        self, present: Pass, spot: Spot, snapshot: CallSnapshot, inner: AbstractContextManager[Any]
    ) -> Iterator[None]:
        before, self.present = self.present, present
        present.make_room()
        try:
            with _named(spot.name), hooks_aside_in_transforms(), snapshot.again(), inner:
                yield
        finally:
            self.present = before

    def _record(self, present: Pass, recorder: LeanRecorder, call: _Call, *, is_kept: bool) -> Any:
        """Run a call of a block in a lean pass, and note all that it does.

        Args:
            present: the pass.
            recorder: of it.
            call: the call.
            is_kept: whether it is no checkpoint, since it lies beside the blocks; else all is recomputed.
        """
        spot = call.spot
        mode = recorder.forward(spot.name, call.args, call.kwargs, is_kept=is_kept, is_compiled=spot.is_compiled)
        snapshot = self._looked_at(recorder, spot, call.args, call.kwargs)
        mode.before_write = snapshot.before_write
        number, without = mode.number, Pass(rulings=present.rulings, offload=present.offload)

        @contextmanager
        def again() -> Iterator[None]:
            recorder.again(number)
            with self._again_once(without, spot, snapshot, mode.noting_groups()):
                yield

        if is_kept:
            with mode, mode.noting_groups():
                output = call.run()
        else:
            output = self._checkpoint(lambda: (mode, Repeated(again)), call.forward, call.args, call.kwargs)
        spot.calls_compiled |= mode.calls_compiled
        scripts = scripts_in(spot.module)
        why = calls_scripts(scripts) if scripts else snapshot.end_of_forward(mode.read, mode.wrote)
        if why:
            recorder.refuse(mode.call, f"block {spot.name!r} {why}")
        recorder.returned(mode, output)
        return output

    def _looked_at(self, recorder: LeanRecorder, spot: Spot, args: Any, kwargs: dict[str, Any]) -> CallSnapshot:
        """Return a snapshot of all that a block reaches, which is looked for again."""
        written = spot.reach.written if spot.reach is not None else set[tuple[int, str]]()
        spot.reach = reach_of(spot.module, spot.name, recorder.generators, recorder.own)
        spot.reach.is_compiled = spot.is_compiled
        spot.reach.written |= written
        return CallSnapshot(spot.reach, args, kwargs, copies_all=True)

    def _chained(self, present: Pass, call: _Call, ruling: Ruling) -> Any:
        """Run a call of a block whose input, or that of the next block, is recomputed."""
        spot, forward, args, kwargs = call.spot, call.forward, call.args, call.kwargs
        places = [n for n, arg in enumerate(args) if isinstance(arg, torch.Tensor) and arg.requires_grad]
        before, present.link = present.link, None
        is_named = len(places) == 1 and any(value is args[places[0]] for value in kwargs.values())
        if isinstance(ruling, KeepRule) or (ruling in INPUT_RULES and (len(places) != 1 or is_named)):
            return self._held_checkpoint(present, call, ruling)
        if len(places) != 1 or is_named:  # the first of a chain: the batch needs no gradient
            snapshot, link = spot.snapshot(args, kwargs), Link(forward, args, kwargs, None, None, None, self.device)
            output = self._checkpoint(partial(self._contexts, present, spot, ruling, snapshot), forward, args, kwargs)
            link.again, present.link = snapshot.again, link
            link.note_output(output)
            return output
        (place,) = places
        given, rest = args[place], (*args[:place], *args[place + 1 :])
        is_chained = ruling in CHAINS and before is not None and before.returned(given)
        kept: torch.Tensor | OnHost | None = None if is_chained else given
        if ruling == HOSTED and self.host is not None and self.host.suits(given):
            kept = present.leaving = self.host.copy(given.detach())
            present.hosted.append(weakref.ref(kept))
        before = before if is_chained else None
        link = Link(forward, rest, kwargs, place, kept, before, self.device, is_halved=ruling == HALVED)
        snapshot = spot.snapshot(rest, kwargs)
        link.again = snapshot.again
        arriving = [given]
        del given, args, call

        def run(_: torch.Tensor) -> Any:
            tensor = arriving.pop() if arriving else link.take_input()
            if isinstance(kept, OnHost) and in_backward():
                present.fetch(before=kept)
            return forward(*rest[:place], tensor, *rest[place:], **kwargs)

        contexts = partial(self._contexts, present, spot, ruling, snapshot)
        output = self._checkpoint(contexts, run, (torch.empty(0, device=self.device),), {})
        link.note_output(output)
        present.link = link
        return output


def _each_once(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return a call that is given each tensor once, although `forward` may be given it in several places.

    A checkpoint saves each argument by itself, and code may ask whether two are the same: `nn.MultiheadAttention` does.
    """
    firsts = {id(arg): place for place, arg in reversed(list(enumerate(args))) if isinstance(arg, torch.Tensor)}
    again = [firsts.get(id(arg), place) for place, arg in enumerate(args)]
    named = {name: firsts[id(value)] for name, value in kwargs.items() if id(value) in firsts}
    if not named and again == list(range(len(args))):
        return forward, args, kwargs
    once = tuple(arg if first == place else None for place, (arg, first) in enumerate(zip(args, again, strict=True)))
    others = {name: value for name, value in kwargs.items() if name not in named}

    def run(*given: Any) -> Any:
        return forward(*(given[first] for first in again), **others, **{name: given[n] for name, n in named.items()})

    return run, once, {}


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Name the block whose second forward pass fails, or saves others for backward than the first.

    Raises:
        UnsupportedStepError: it does.
    """

    def told(error: Exception) -> UnsupportedStepError:
        return UnsupportedStepError(
            f"block {name!r} computes something else when it is recomputed for backward: it reads what its first "
            "forward pass, or the loop since then, has changed, where memfit does not see it. Change it after "
            f"backward, name other blocks: memfit.checkpoint(..., blocks=[...]) without {name!r}{OR_EAGER_MODE}. "
            f"In it: {next(iter(str(error).splitlines()), '')}"
        )

    tell_mismatch(told)
    try:
        yield
    except Exception as error:
        if isinstance(error, (MemfitError, torch.OutOfMemoryError)) or ends_early(error):
            raise
        raise told(error) from error


class Steered:
    """Stands in the place of a module's `forward`.

    A copy of the module, or a pickled one, has its own `forward` again.

    Args:
        steering: of the model.
        spot: the module.
        forward: its own.
    """

    def __init__(self, steering: Steering, spot: Spot, forward: Callable[..., Any]) -> None:
        self.steering, self._spot, self.forward = steering, spot, forward
        self._of_class = getattr(type(spot.module), "forward", None)
        self._is_of_class = self._of_class is not None and getattr(forward, "__func__", None) is self._of_class

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.steering.run(self._spot, self._current(), args, kwargs)

    def _current(self) -> Callable[..., Any]:
        """Return the module's forward pass: that of its class as it is now, if it had no other."""
        kind: Any = type(self._spot.module)
        if not self._is_of_class or kind.forward is self._of_class:
            return self.forward
        return partial(kind.forward, self._spot.module)

    @property
    def block_name(self) -> str:
        """The name of the block that it is, or is inside of."""
        return (self._spot.block or self._spot).name

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._spot.module)) if self._is_of_class else None
        return copy.deepcopy(self.forward, memo) if copied is None else OfClass(copied)

    def __reduce__(self) -> Any:
        return getattr, (self._spot.module, "forward")  # the class's: the module's own table is not there yet


class OfClass:
    """The `forward` of a copy's class, in the copy's own table, where its original has a stand-in.

    A bound method there would be a reference of the copy to itself, so that its memory would stay until Python looks
    for such references.

    Args:
        module: the copy, which is held weakly.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        return type(module).forward(module, *args, **kwargs)

    @property
    def __func__(self) -> Any:
        module: Any = self._module()
        return type(module).forward

    @property
    def __signature__(self) -> Signature:
        return signature(MethodType(self.__func__, self._module()))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return OfClass(memo[id(self._module())])

    def __reduce__(self) -> Any:
        return getattr, (self._module(), "forward")


class SteeredFunction:
    """Stands in the place of a transformers layer's checkpointing function, which drops caches by itself.

    Args:
        steering: of the model.
        spot: the layer.
    """

    def __init__(self, steering: Steering, spot: Spot) -> None:
        self.steering, self._spot = steering, spot

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._spot.is_outside:
            return forward(*args, **kwargs)
        return self.steering.run(self._spot, forward, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _stock_function()

    def __reduce__(self) -> Any:
        return _stock_function, ()


def _stock_function() -> Callable[..., Any]:
    return partial(stock_checkpoint, use_reentrant=False)
