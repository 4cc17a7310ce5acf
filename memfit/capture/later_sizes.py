"""Captures of a step at size after size of its batches: from some size on, without running the step's code.

A step is captured at its first sizes as if each were the only one. Then it is captured once more with symbols in the
place of the sizes that change (`memfit.capture.symbols`). From that, the graph of a later size is made by evaluating
the symbols' expressions, if the batch meets every condition under which the step makes the same calls, and if nothing
else changed that the step reads. The first graphs that are made so are compared with captures, and each op of every
graph is still run by itself on its device, where its results are compared with the captured ones.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from memfit.binding import Call, Resident
from memfit.capture.build import Captured
from memfit.capture.guards import Guards
from memfit.capture.symbols import Formulas, Shapes, Symbols, Template
from memfit.capture.trace import Trace
from memfit.capture.training_step import TrainingStep, plain, same_objects
from memfit.capture.update_trial import is_update
from memfit.capture.whole_step import Recorded, capture_whole_step, record_at_all_sizes
from memfit.cost.observations import Corrections
from memfit.torch_private.tensors import tree_flatten

_log = logging.getLogger(__name__)

_CAPTURED = 4  # sizes that are captured before symbols are tried: a capture with symbols takes as long as a few
_LEAST = 8  # smaller sizes are captured: 0 and 1 change the meaning of operators
_PROOFS = 2  # graphs that have to be equal to captures before others take the place of captures
_MOST_NUMBERS = 64  # of a constant that each capture makes
_MOST_LAYOUTS, _MOST_STATES = 8, 4  # gradients that are there or not, training or evaluation


class CapturedSizes:
    """Captures a training step at the sizes of its batches.

    Args:
        step: the step.
    """

    def __init__(self, step: TrainingStep) -> None:
        self._step = step
        self._layouts: dict[Hashable, _Layout] = {}

    def capture(self, batch: Any, corrections: Corrections | None = None) -> Captured:
        """Return the step captured on a batch, without `stream` where the step's code did not run for it.

        Args:
            batch: of any size.
            corrections: as for `capture_whole_step`.

        Raises:
            MemfitError: as `capture_whole_step`.
        """
        leaves, structure = tree_flatten(batch)
        key = structure, tuple(map(_leaf_layout, leaves)), same_objects(leaves)
        layout = self._layouts[key] = self._layouts.pop(key, None) or _Layout()
        for old in list(self._layouts)[:-_MOST_LAYOUTS]:
            del self._layouts[old]
        if corrections or not self._step.has_backward or self._step.across is not None:
            layout.is_refused = True
        if layout.is_refused:
            return capture_whole_step(self._step, batch, corrections)
        shapes = tuple(tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else () for leaf in leaves)
        known, made = layout.at(batch, shapes)
        if known is not None and made is not None and known.proofs >= _PROOFS:
            return made
        captured = capture_whole_step(self._step, batch)
        if known is not None and made is not None:
            layout.prove(known, made, captured)
        elif layout.is_due(shapes):
            layout.begin(self._step, batch, captured)
        return captured


@dataclass(slots=True)
class _AllSizes:
    """A step that was recorded with symbols.

    Attributes:
        guards: on what it read.
        recorded: with a `Size` in the place of each expression.
        parts: of `recorded`.
        formulas: give the sizes.
        constants: tensors that it read, and that the guards know.
        proofs: how many graphs made from it were equal to captures.
    """

    guards: Guards
    recorded: Recorded
    parts: Template
    formulas: Formulas
    constants: Sequence[torch.Tensor]
    proofs: int = 0

    @staticmethod
    def of(step: TrainingStep, batch: Any, known: Sequence[Shapes]) -> _AllSizes:
        """Record a step with symbols for the sizes that differ.

        Args:
            step: the step, as it is between two of its runs.
            batch: an example.
            known: the shapes of the batches so far; the last are those of `batch`.

        Raises:
            Exception: torch cannot run the step on symbols.
        """
        symbols = Symbols(known)
        recorded, guards = record_at_all_sizes(step, batch, symbols)
        guards.arm()
        constants = [r.constant for r in recorded.trace.residents if r.constant is not None]
        parts, formulas = symbols.without_symbols(_parts(recorded)), symbols.formulas()
        return _AllSizes(
            guards=guards,
            recorded=_with_parts(recorded, parts),
            parts=Template(parts, len(formulas.expressions)),
            formulas=formulas,
            constants=[constant for constant in constants if guards.tensors.number_of(constant) is not None],
        )

    def at(self, batch: Any, shapes: Shapes) -> Captured | None:
        """Return the captured step at the sizes of a batch, or None if it may make other calls there.

        Args:
            batch: answers what the step asks of its values.
            shapes: of the batch.
        """
        values = self.formulas.values(shapes, _LEAST)
        if values is None or self.guards.difference() is not None:
            return None
        if None in map(self.guards.tensors.number_of, self.constants):  # another took its place
            return None
        captured = replace(_with_parts(self.recorded, self.parts.at(values)).captured(), guards=self.guards)
        return captured if captured.answers(batch) else None


@dataclass(slots=True)
class _Layout:
    """Batches that differ in nothing but sizes.

    Attributes:
        shapes: that were captured.
        misses: captures since symbols were last tried.
        states: a recorded step for each state of what it reads.
        is_refused: whether each size is to be captured.
    """

    shapes: list[Shapes] = field(default_factory=list[Shapes])
    misses: int = 0
    states: list[_AllSizes] = field(default_factory=list[_AllSizes])
    is_refused: bool = False

    def at(self, batch: Any, shapes: Shapes) -> tuple[_AllSizes | None, Captured | None]:
        """Return the recorded step that holds for a batch, and its graph there; None and None if there is none.

        Args:
            batch: answers what the step asks of its values.
            shapes: of the batch.
        """
        for state in self.states:
            made = state.at(batch, shapes)
            if made is not None:
                return state, made
        return None, None

    def is_due(self, shapes: Shapes) -> bool:
        """Count a capture; return whether symbols should be tried now."""
        self.misses += 1
        self.shapes = [each for each in self.shapes if each != shapes] + [shapes]
        return self.misses > _CAPTURED and len(self.shapes) > _CAPTURED and len(self.states) < _MOST_STATES

    def begin(self, step: TrainingStep, batch: Any, captured: Captured) -> None:
        """Record the step with symbols, and compare what it gives for this batch with its capture.

        Args:
            step: the step.
            batch: whose shapes were counted last.
            captured: the step's capture on it.
        """
        self.misses = 0
        try:
            state = _AllSizes.of(step, batch, self.shapes)
            made = state.at(batch, self.shapes[-1])
        except Exception as error:  # noqa: BLE001 (torch, and the user's code on symbols, raise all kinds of errors)
            self._refuse(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            return
        self.states.append(state)
        if made is None:
            self._refuse("a condition does not hold for the batch that was recorded")
        else:
            self.prove(state, made, captured)

    def prove(self, state: _AllSizes, made: Captured, captured: Captured) -> None:
        """Compare a graph made from symbols with a capture at the same sizes; refuse symbols if they differ.

        Args:
            state: that the graph was made from.
            made: the step with that graph.
            captured: the step's capture.
        """
        if are_same_captures(made, captured):
            state.proofs += 1
        else:
            self._refuse("the graph made from symbols is not the captured one")

    def _refuse(self, reason: str) -> None:
        _log.info("each size of a batch is captured: %s", reason)
        self.is_refused = True
        self.states.clear()


def _leaf_layout(leaf: Any) -> Hashable:
    """Return what two leaves share whose batches may differ in nothing but sizes."""
    if not isinstance(leaf, torch.Tensor):
        return type(leaf), repr(plain(leaf))
    kind = str(leaf.layout), leaf.dtype, leaf.device, leaf.requires_grad, leaf.is_conj(), leaf.is_neg()
    if leaf.layout is torch.strided and leaf.is_contiguous():
        return *kind, leaf.ndim
    return *kind, leaf.shape, leaf.stride() if leaf.layout is torch.strided else None


def _parts(recorded: Recorded) -> tuple[Any, ...]:
    """Return what may hold sizes of a recorded step."""
    trace = recorded.trace
    return trace.storages, trace.calls, trace.residents, recorded.outputs, recorded.looks


def _with_parts(recorded: Recorded, parts: tuple[Any, ...]) -> Recorded:
    """Return a recorded step with other parts (see `_parts`)."""
    storages, calls, residents, outputs, looks = parts
    trace = recorded.trace
    own = Trace(device=trace.device, scope=trace.scope, storages=storages, calls=calls, residents=residents)
    return replace(recorded, trace=own, outputs=outputs, looks=looks)


def are_same_captures(one: Captured, other: Captured) -> bool:
    """Return whether two captures have the same graph, and calls with the same arguments and strides."""
    mine, theirs = one.binding, other.binding
    return (
        one.graph == other.graph
        and len(mine.calls) == len(theirs.calls)
        and all(map(_is_same_call, mine.calls, theirs.calls))
        and all(map(_is_same_resident, mine.residents, theirs.residents))
        and mine.outputs == theirs.outputs
        and one.checkpoints == other.checkpoints
        and len(one.looks) == len(other.looks)
    )


def _is_same_call(one: Call, other: Call) -> bool:
    if is_update(one) and is_update(other):  # each capture makes its own
        one = replace(one, target=other.target)
    return one == other


def _is_same_resident(one: Resident, other: Resident) -> bool:
    same = (one.value, one.origin, one.key) == (other.value, other.origin, other.key)
    return same and (one.constant is other.constant or _is_same_constant(one.constant, other.constant))


def _is_same_constant(one: Any, other: Any) -> bool:
    """Return whether both are equal tensors that the step's code has made of numbers."""
    if one is None or other is None or one.numel() > _MOST_NUMBERS or one.dtype != other.dtype:
        return False
    return bool(torch.equal(one, other))
