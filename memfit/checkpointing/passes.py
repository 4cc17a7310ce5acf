"""Passes: which modules are steered, and what is done with their calls from a call of the model to the next one."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.checkpointing.chain import Link
from memfit.checkpointing.choices import FULL, NONE, Rule
from memfit.checkpointing.contexts import KeepRule
from memfit.checkpointing.groups import INPUT_RULES
from memfit.checkpointing.lean_offload import LeanOffload
from memfit.checkpointing.reached import Reach, reach_of_tables
from memfit.checkpointing.recording import LeanRecorder
from memfit.checkpointing.seen import CACHED_CAST, CallSeen
from memfit.checkpointing.snapshots import CallSnapshot
from memfit.memory.host.room import OnHost
from memfit.torch_private.modules import own_call
from memfit.torch_private.tensors import bytes_in


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
        reach: what it can read and change, as the last lean pass found it; None before.
        calls_compiled: whether its code calls what `torch.compile` has compiled.
    """

    name: str
    module: torch.nn.Module
    is_block: bool
    is_rest: bool = False
    is_outside: bool = False
    block: Spot | None = None
    reach: Reach | None = None
    calls_compiled: bool = False

    @property
    def is_compiled(self) -> bool:
        """Whether calls of it, or of a module in it, are compiled."""
        return (
            self.is_outside
            or self.calls_compiled
            or any(own_call(module) is not None for module in self.module.modules())
        )

    def snapshot(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallSnapshot:
        """Return what a call that begins can read.

        Args:
            args, kwargs: of it.
        """
        outer = self.block.reach if self.block is not None else None
        if outer is not None:
            outer.free_replaced()
        if outer is not None and (self.reach is None or self.reach.places is not outer.places):
            self.reach = outer.within(self.module, self.name)
        if self.reach is None:
            self.reach = reach_of_tables(self.module, self.name)
        return CallSnapshot(self.reach, args, kwargs)


Ruling = str | KeepRule
"""Of one module: `full`, one of CHAINS, or the results that are kept; a module without one runs as it is."""


@dataclass(slots=True, eq=False)
class Pass:
    """What is done in one pass: from a call of the model to the next one.

    Attributes:
        rulings: by the name of the module.
        recorder: of a lean pass.
        offload: of what is kept beside its checkpoints, in a pass without a plan.
        link: of the call of a block that was last, where inputs are chained.
        has_chains: whether any are, or inputs go to the host.
        calls: of each block so far.
        given_bytes: of all tensors that were given to them.
        planned: bytes that were given to each call of a block in the pass that the plan was made from. Calls that it
            does not have, and larger ones, are recomputed. None of a pass in which they are not.
        leaving: the input that goes to the host now.
        hosted: inputs on the host, in the order of the forward pass.
        has_transforms: whether transformations of torch.func have called blocks.
    """

    rulings: Mapping[str, Ruling]
    recorder: LeanRecorder | None = None
    offload: LeanOffload | None = None
    link: Link | None = None
    has_chains: bool = False
    calls: Counter[str] = field(default_factory=Counter[str])
    given_bytes: int = 0
    planned: Mapping[str, Sequence[int]] | None = None
    leaving: OnHost | None = None
    hosted: list[weakref.ref[OnHost]] = field(default_factory=list[weakref.ref[OnHost]])
    has_transforms: bool = False

    def ruling(self, spot: Spot, given: Any) -> Ruling | None:
        """Return what is done with a call of a module, which is counted.

        Args:
            spot: the module.
            given: all arguments of the call.
        """
        ruling = self.rulings.get(spot.name)
        if not spot.is_block:
            return ruling
        given_bytes = bytes_in(given)
        nth = self.calls[spot.name]
        self.calls[spot.name] += 1
        self.given_bytes += given_bytes
        if self.planned is None or spot.is_rest or ruling in INPUT_RULES:
            return ruling
        seen = self.planned.get(spot.name, ())
        return ruling if nth < len(seen) and given_bytes <= seen[nth] else FULL

    def form(self, spot: Spot, ruling: Ruling | None) -> str:
        """Return what is recomputed of a call of a block: the same on ranks that recompute the same.

        Args:
            spot: the block.
            ruling: of the call. Where inputs are recomputed, those of the other blocks count, too.
        """
        inside = {name.removeprefix(spot.name): each for name, each in self.rulings.items() if f"{spot.name}." in name}
        rulings = {**(self.rulings if self.has_chains else inside), "": ruling}
        forms = {name: sorted(each.names) if isinstance(each, KeepRule) else each for name, each in rulings.items()}
        return str(sorted(forms.items()))

    def make_room(self) -> None:
        """Keep the device's memory within the budget, if nothing is planned."""
        if self.offload is not None:
            self.offload.make_room()

    def returned(self) -> None:
        """Note that a call of the model has returned."""
        if self.recorder is not None:
            self.recorder.has_returned = True
        self.make_room()
        self.let_leave()
        self.link = None  # or the last input would be held until the end of backward

    def let_leave(self) -> None:
        """Let the device's memory of the input go that goes to the host."""
        leaving, self.leaving = self.leaving, None
        if leaving is not None:
            leaving.wait()

    def fetch(self, before: OnHost | None = None) -> None:
        """Begin to copy the last input back, or the one before an input that is back."""
        while before is not None and self.hosted and self.hosted[-1]() is not before:
            self.hosted.pop()
        if before is not None and self.hosted:
            self.hosted.pop()
        following = self.hosted[-1]() if self.hosted else None
        if following is not None:
            following.begin_back()


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
        wanted, ops = set(rule), [op for op in seen[name].ops if op.name != CACHED_CAST]
        kept = frozenset(number for number, op in enumerate(ops) if (op.name, op.nth) in wanted)
        expected = tuple(overloads[op.name] for op in ops)
        found[name] = KeepRule(expected=expected, kept=kept, names=frozenset(rule))
    return found
