"""Steering of stock checkpoints: what is done with each call of a block, or of a module inside, in one pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as stock_checkpoint

from memfit.checkpointing.chain import Link
from memfit.checkpointing.choices import NONE, Rule
from memfit.checkpointing.contexts import (
    Again,
    Keep,
    KeepRule,
    Place,
    StandIns,
    Watched,
    selective_contexts,
    statistics_in,
    tables_in,
)
from memfit.checkpointing.planning import CHAINED
from memfit.checkpointing.recording import LeanRecorder
from memfit.checkpointing.seen import CallSeen
from memfit.torch_private.modules import own_call


@dataclass(slots=True, eq=False)
class Spot:
    """A module whose calls are steered.

    Attributes:
        name: in the model.
        module: itself.
        is_block: whether it is a block, and not a module inside of one.
        is_outside: whether its calls are compiled, and steered around the compiled code.
        is_rest: whether it lies beside the blocks, and is no checkpoint in lean passes.
        block: that it is inside of; None of a block.
        statistics: places of batch normalization's statistics in it.
        changed: other places that the forward pass of a block was seen to change.
    """

    name: str
    module: torch.nn.Module
    is_block: bool
    is_rest: bool = False
    is_outside: bool = False
    block: Spot | None = None
    statistics: list[Place] = field(default_factory=list[Place])
    changed: list[Place] = field(default_factory=list[Place])
    _tables: set[int] = field(default_factory=set[int])

    def __post_init__(self) -> None:
        self.statistics = statistics_in(self.module)
        self._tables = {id(table) for table in tables_in(self.module)}

    @property
    def is_compiled(self) -> bool:
        """Whether calls of it, or of a module in it, are compiled."""
        return any(own_call(module) is not None for module in self.module.modules())

    def held(self) -> list[tuple[Place, Any]]:
        """Return what the places hold now that a forward pass will change."""
        if self.block is None:
            return [(place, place.held()) for place in self.changed]
        return [(place, place.held()) for place in self.block.changed if id(place.table) in self._tables]


Ruling = str | KeepRule
"""Of one module: `full`, `full, input too`, or the results that are kept; a module without one runs as it is."""


@dataclass(slots=True, eq=False)
class Pass:
    """What is done in one pass: from a call of the model to the next one.

    Attributes:
        rulings: by the name of the module.
        recorder: of a lean pass.
        link: of the call of a block that was last, where inputs are chained.
        has_chains: whether any are.
    """

    rulings: Mapping[str, Ruling]
    recorder: LeanRecorder | None = None
    link: Link | None = None
    has_chains: bool = False


def rulings_of(rules: Mapping[str, Rule], calls: Sequence[CallSeen], overloads: Mapping[str, Any]) -> dict[str, Ruling]:
    """Return rules in the form in which they are carried out.

    Args:
        rules: name of a module -> rule.
        calls: as they were seen; of blocks of which results are kept.
        overloads: name -> operator.
    """
    seen = {call.block: call for call in reversed(calls)}
    found: dict[str, Ruling] = {}
    for name, rule in rules.items():
        if isinstance(rule, str):
            if rule != NONE:
                found[name] = rule
            continue
        wanted, ops = set(rule), seen[name].ops
        kept = frozenset(number for number, op in enumerate(ops) if (op.name, op.nth) in wanted)
        expected = tuple(overloads[op.name] for op in ops)
        found[name] = KeepRule(expected=expected, kept=kept, names=frozenset(rule))
    return found


class Steering:
    """Carries out the present pass; the handle sets it.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.present: Pass | None = None
        self.is_frozen = False

    def run(self, spot: Spot, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call of a module as the present pass says."""
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs) if spot.is_outside else self._compiled(spot, forward, args, kwargs)
        present = self.present
        if present is None or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        ruling = present.rulings.get(spot.name)
        if present.recorder is not None and spot.is_rest and ruling is None:
            return self._record_kept(present.recorder, spot, forward, args, kwargs)
        if ruling is None:
            if present.recorder is not None and present.recorder.inside is not None:
                with present.recorder.inside.span(spot.name, args, kwargs):
                    return forward(*args, **kwargs)
            return forward(*args, **kwargs)
        if present.recorder is not None and spot.is_block:
            return self._record(present, spot, forward, args, kwargs)
        if present.has_chains and spot.is_block:
            return self._chained(present, spot, ruling, forward, args, kwargs)
        return self._checkpoint(partial(self._contexts, present, spot, ruling), forward, args, kwargs)

    def _compiled(self, spot: Spot, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a compiler is to trace: a stock checkpoint, once the policy stays."""
        ruling = self.present.rulings.get(spot.name) if self.is_frozen and self.present is not None else None
        if ruling is None:
            return forward(*args, **kwargs)
        if not isinstance(ruling, KeepRule):
            return stock_checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return stock_checkpoint(
            forward, *args, use_reentrant=False, context_fn=partial(selective_contexts, ruling.names), **kwargs
        )

    def _checkpoint(
        self, contexts: Callable[[], Any], forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        forward, args, kwargs = _each_once(forward, args, kwargs)
        return stock_checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    def _contexts(self, present: Pass, spot: Spot, ruling: Ruling) -> tuple[Any, Any]:
        held = spot.held()
        if not isinstance(ruling, KeepRule):
            return nullcontext(), self._again(present, spot, held, nullcontext())
        keep = Keep(ruling)
        return keep, self._again(present, spot, held, Again(keep))

    @contextmanager
    def _again_once(
        self, present: Pass, spot: Spot, held: Sequence[tuple[Place, Any]], inner: AbstractContextManager[Any]
    ) -> Iterator[None]:
        before, self.present = self.present, present
        try:
            with StandIns(spot.statistics, held), inner:
                yield
        finally:
            self.present = before

    def _again(
        self, present: Pass, spot: Spot, held: Sequence[tuple[Place, Any]], inner: AbstractContextManager[Any]
    ) -> AbstractContextManager[None]:
        return Repeated(partial(self._again_once, present, spot, held, inner))

    def _record(self, present: Pass, spot: Spot, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a call of a block in a lean pass: all of it is computed again, and all that it does is noted."""
        recorder = present.recorder
        assert recorder is not None
        mode = recorder.forward(spot.name, args, kwargs, is_compiled=spot.is_compiled)
        watched = Watched(spot.module)
        held: list[tuple[Place, Any]] = []
        number = mode.number
        without = Pass(rulings=present.rulings)

        def contexts() -> tuple[Any, Any]:
            return mode, Repeated(again)

        @contextmanager
        def again() -> Iterator[None]:
            recorder.again(number)
            with self._again_once(without, spot, held, nullcontext()):
                yield

        output = self._checkpoint(contexts, forward, args, kwargs)
        held += watched.changed()
        spot.changed = [place for place, _ in held]
        recorder.returned(mode, output)
        return output

    def _record_kept(
        self, recorder: LeanRecorder, spot: Spot, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Run a call of what lies beside the blocks in a lean pass: it is no checkpoint, and all it does is noted."""
        mode = recorder.forward(spot.name, args, kwargs, is_kept=True, is_compiled=spot.is_compiled)
        watched = Watched(spot.module)
        with mode:
            output = forward(*args, **kwargs)
        spot.changed = [place for place, _ in watched.changed()]
        recorder.returned(mode, output)
        return output

    def _chained(
        self,
        present: Pass,
        spot: Spot,
        ruling: Ruling,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a call of a block whose input, or that of the next block, is computed again."""
        places = [n for n, arg in enumerate(args) if isinstance(arg, torch.Tensor) and arg.requires_grad]
        before, present.link = present.link, None
        is_named = len(places) == 1 and any(value is args[places[0]] for value in kwargs.values())
        if isinstance(ruling, KeepRule) or len(places) != 1 or is_named:
            return self._checkpoint(partial(self._contexts, present, spot, ruling), forward, args, kwargs)
        (place,) = places
        given, rest = args[place], (*args[:place], *args[place + 1 :])
        is_chained = ruling == CHAINED and before is not None and before.returned(given)
        link = Link(
            forward, rest, kwargs, place, None if is_chained else given, before if is_chained else None, self.device
        )
        held = spot.held()
        link.stand_ins = partial(StandIns, spot.statistics, held)
        arriving = [given]
        del given, args

        def run(_: torch.Tensor) -> Any:
            tensor = arriving.pop() if arriving else link.take_input()
            return forward(*rest[:place], tensor, *rest[place:], **kwargs)

        contexts = partial(self._chain_contexts, present, spot, held)
        output = self._checkpoint(contexts, run, (torch.empty(0, device=self.device),), {})
        link.note_output(output)
        present.link = link
        return output

    def _chain_contexts(self, present: Pass, spot: Spot, held: Sequence[tuple[Place, Any]]) -> tuple[Any, Any]:
        return nullcontext(), self._again(present, spot, held, nullcontext())


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


class Repeated:
    """A context that can be entered again after it was left: a backward pass may come twice.

    Args:
        make: returns a context that can be entered once.
    """

    __slots__ = ("_entered", "_make")

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._entered = self._make()
        self._entered.__enter__()

    def __exit__(self, *raised: Any) -> bool | None:
        return self._entered.__exit__(*raised)


class Steered:
    """Stands in the place of a module's `forward`.

    A copy of the module, or a pickled one, has its own `forward` again.

    Args:
        steering: of the model.
        spot: the module.
        forward: its own.
    """

    def __init__(self, steering: Steering, spot: Spot, forward: Callable[..., Any]) -> None:
        self._steering, self._spot, self.forward = steering, spot, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._steering.run(self._spot, self.forward, args, kwargs)

    @property
    def block_name(self) -> str:
        """The name of the block that it is, or is inside of."""
        return (self._spot.block or self._spot).name

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.forward, memo)

    def __reduce__(self) -> Any:
        return getattr, (self._spot.module, "forward")  # the class's: the module's own table is not there yet


class SteeredFunction:
    """Stands in the place of a transformers layer's checkpointing function, which drops caches by itself.

    Args:
        steering: of the model.
        spot: the layer.
    """

    def __init__(self, steering: Steering, spot: Spot) -> None:
        self._steering, self._spot = steering, spot

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._steering.run(self._spot, forward, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _stock_function()

    def __reduce__(self) -> Any:
        return _stock_function, ()


def _stock_function() -> Callable[..., Any]:
    return partial(stock_checkpoint, use_reentrant=False)
