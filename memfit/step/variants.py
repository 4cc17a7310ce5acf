"""Variants: the programs of a planned step, each for batches of one signature and one state of all that is guarded."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.capture import Guards
from memfit.capture.guarded_table import Difference
from memfit.memory.contract import Standing
from memfit.memory.footprint import footprint
from memfit.step.prepare import MOST_OPS
from memfit.step.step_program import StepProgram, adds_to_gradients

_log = logging.getLogger(__name__)

_KEPT = 8  # variants of one batch signature, as many as Dynamo keeps of a function


@dataclass(slots=True, kw_only=True, eq=False)
class Variant:
    """A program, and the guards that say when it may run.

    Attributes:
        key: tells it from all other variants of its step.
        program: replaced where its plan took more than its budget.
        number: counts the variants of its step, in the order in which they were made.
        standing: what its steps have shown of the budget.
        resident_bytes: what was on the device before a step, by the key of its memory.
        proved: keys of memory of which two steps in a row kept the budget.
        judged_key: of the memory of the step that was judged last.
        given_up: why nothing more can be done against a step that took too much; empty if something can.
        told_bytes: the most that a step took that no plan could prevent, as far as was said.
    """

    key: Hashable
    program: StepProgram
    number: int
    standing: Standing = field(default_factory=Standing)
    resident_bytes: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    proved: set[Hashable] = field(default_factory=set[Hashable])
    judged_key: Hashable = None
    given_up: str = ""
    told_bytes: int = 0

    def gradient_bytes(self, device: torch.device) -> int:
        """Return the bytes of the gradients on a device that the variant adds to; several may share a bucket."""
        if not adds_to_gradients(self.program.prepared.captured):
            return 0
        return sum(footprint((parameter.grad for parameter in self.guards.parameters.values()), device).values())

    def forget_steps(self) -> None:
        """Forget what steps have shown: later ones take other memory."""
        self.resident_bytes.clear()
        self.proved.clear()
        self.judged_key = None

    @property
    def ops(self) -> int:
        """How many ops its graph has."""
        return len(self.program.plan.graph.ops)

    @property
    def guards(self) -> Guards:
        """Hold a call against the capture that the program was made of."""
        guards = self.program.prepared.captured.guards
        assert guards is not None
        return guards


class Variants:
    """The variants of a planned step, by batch signature: the signature that was used last stands last, its last used
    variant first.

    So many are kept as have `MOST_OPS` ops together, and the first one of all, which the step was made with.

    Attributes:
        latest: that a call ran; None before the first.
    """

    latest: Variant | None = None

    def __init__(self) -> None:
        self._of: dict[Hashable, list[Variant]] = {}
        self._made = 0
        self._changes: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Variant]:
        """Iterate over all variants, in the order in which they were made."""
        return iter(sorted((v for known in self._of.values() for v in known), key=lambda variant: variant.number))

    def find(self, signature: Hashable, batch: Any) -> tuple[Variant | None, Difference | None]:
        """Return the variant that may run now, or None and what differs from the variant that was used last.

        Args:
            signature: of the batch.
            batch: answers what the step asks of it.
        """
        known = self._of.get(signature, [])
        first: Difference | None = None
        for position, variant in enumerate(known):
            difference = variant.guards.difference()
            if difference is None and variant.program.prepared.captured.answers(batch):
                if position:
                    known.insert(0, known.pop(position))
                self._of[signature] = self._of.pop(signature)
                return variant, None
            first = first or difference
        return None, first

    def add(self, signature: Hashable, program: StepProgram) -> tuple[Variant, list[Variant]]:
        """Add a program for the present state; return its variant, and those that were dropped for it.

        A variant is dropped if a module or parameter of it was replaced, so that it holds what is in use no more, if
        too many others of its signature were used since, and if too many of all signatures were.

        Args:
            signature: of the batch that the program was captured on.
            program: the program.
        """
        self._made += 1
        variant = Variant(key=(signature, self._made), program=program, number=self._made)
        dropped: list[Variant] = []
        for known in self._of.values():
            dropped += [v for v in known if (d := v.guards.difference()) is not None and d.is_replaced]
            known[:] = [v for v in known if v not in dropped]
        mine = self._of[signature] = self._of.pop(signature, [])
        mine.insert(0, variant)
        dropped += mine[_KEPT:]
        del mine[_KEPT:]
        dropped += self._drop_oldest(variant)
        self._of = {each: known for each, known in self._of.items() if known}
        return variant, dropped

    def _drop_oldest(self, newest: Variant) -> list[Variant]:
        """Drop the variants that were not used for longest until the others have few enough ops."""
        ops = sum(variant.ops for known in self._of.values() for variant in known)
        dropped: list[Variant] = []
        for known in self._of.values():
            for variant in known[::-1]:
                if ops <= MOST_OPS:
                    return dropped
                if variant is not newest and variant.number > 1:
                    known.remove(variant)
                    dropped.append(variant)
                    ops -= variant.ops
        return dropped

    def notify(self, difference: Difference) -> None:
        """Log the first two changes of what differs; train and eval mode, frozen parameters and gradients are routine.

        Args:
            difference: why the step is captured again.
        """
        what = difference.what.partition(" (")[0]
        self._changes[what] += 1
        if difference.is_routine:
            return
        if self._changes[what] == 1:
            _log.warning(
                "memfit: %s changed since the step was captured: it is captured and planned again; the old plan is "
                "kept, and used if the value returns",
                difference.what,
            )
        elif self._changes[what] == 2:
            _log.warning(
                "memfit: %s changed again; every new value costs a capture and a plan: pass changing values "
                "as tensors in the batch",
                difference.what,
            )
