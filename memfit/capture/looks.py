"""Looks: truth values of the batch that the step's Python code has asked for, and that it may branch on.

A look is answered at capture by the real batch, and before each step by the batch at hand: the program that was
captured with other answers is not run. Only questions about the batch and the step's constants are answered. A value
that depends on parameters or buffers changes from step to step, and breaks the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.binding import Origin, Resident, Value, map_values
from memfit.capture.trace import Trace
from memfit.capture.traced import TracedCall
from memfit.memory.place import at_offset_zero, bytes_of
from memfit.torch_private.tensors import is_fake, real_tensors, tree_flatten


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A truth value that was looked at.

    Attributes:
        value: the tensor that holds it.
        answer: what the step was captured with.
        calls: those that compute it, in order.
        residents: the tensors of the batch and the constants that they read.
    """

    value: Value
    answer: bool
    calls: tuple[TracedCall, ...]
    residents: tuple[Resident, ...]

    def ask(self, leaves: Sequence[Any], at_hand: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Return the truth value for the leaves of a batch.

        Args:
            leaves: of the batch.
            at_hand: returns the tensor that has taken the place of a constant since.
        """
        mutated = {storage for call in self.calls for storage in call.mutates}
        made: dict[int, torch.Tensor] = {}
        with real_tensors():
            for resident in self.residents:
                is_input = resident.origin is Origin.INPUT
                tensor = at_offset_zero(leaves[int(resident.key)]) if is_input else at_hand(resident.constant)
                made.setdefault(resident.value.storage, tensor)
            for storage in mutated & made.keys():
                made[storage] = bytes_of(made[storage]).clone()

            def tensor_of(value: Value) -> torch.Tensor:
                return value.on(made[value.storage])

            last = {storage: call for call in self.calls for storage in (*call.reads, *call.writes, *call.mutates)}
            last.pop(self.value.storage, None)
            for call in self.calls:
                returned = call.target(*map_values(call.args, tensor_of), **map_values(call.kwargs, tensor_of))
                for value, leaf in zip(call.results, tree_flatten(returned)[0], strict=True):
                    if value is not None:
                        made.setdefault(value.storage, leaf)
                leaf = returned = None  # pyright: ignore[reportUnusedVariable]
                for storage in (*call.reads, *call.writes, *call.mutates):
                    if last.get(storage) is call:  # or all of a long computation would be live at once
                        made.pop(storage, None)
            return bool(tensor_of(self.value).item())


def look_at(tensor: torch.Tensor, trace: Trace, batch: Sequence[Any], concrete: Callable[[Look], Look]) -> Look | None:
    """Return the look at a truth value, answered by the batch, or None if the batch alone does not decide it.

    Args:
        tensor: a fake with one element of dtype bool.
        trace: the calls so far.
        batch: the real leaves of the batch.
        concrete: gives the look the sizes of that batch.
    """
    value = trace.value(tensor)
    needed = {value.storage}
    calls: list[TracedCall] = []
    for call in reversed(trace.calls):
        if needed & {*call.writes, *call.mutates}:
            if call.random is not None or not call.recomputable:
                return None
            needed |= {*call.reads, *call.mutates}
            calls.append(call)
    residents = [resident for resident in trace.residents if resident.value.storage in needed]
    if any(_changes(resident, batch) for resident in residents):
        return None
    look = Look(value=value, answer=False, calls=tuple(reversed(calls)), residents=tuple(residents))
    return replace(look, answer=concrete(look).ask(batch, lambda constant: constant))


def _changes(resident: Resident, batch: Sequence[Any]) -> bool:
    if resident.origin is Origin.INPUT:
        return is_fake(batch[int(resident.key)]) or batch[int(resident.key)].device.type == "meta"
    return resident.origin is not Origin.CONSTANT
