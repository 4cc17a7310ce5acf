"""A dictionary that a step has read, held against later steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.capture.copies import MISSING, entries_of, entry_of, is_same
from memfit.torch_private.tensors import is_plain_dense


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something that a step depends on, and that is not as it was when the step was captured.

    Attributes:
        what: names it.
        is_routine: whether training loops change it all the time: train and eval mode, gradients that are there.
        is_replaced: whether it is a module or a parameter whose place another one has taken, for good.
    """

    what: str
    is_routine: bool = False
    is_replaced: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class GuardedTable:
    """A dictionary, and the values that a step took from it.

    Attributes:
        path: names it in messages.
        table: the dictionary.
        values: the values, by key; MISSING for a key that has to be absent.
        accepted: further values that give the same step.
        is_whole: whether there must be no other keys, and the order counts.
        numbers: the positions of its tensors among all that are guarded, by key.
    """

    path: str
    table: dict[Any, Any]
    values: dict[Any, Any]
    accepted: dict[Any, Any] = field(default_factory=dict[Any, Any])
    is_whole: bool = False
    numbers: dict[Any, int] = field(default_factory=dict[Any, int])

    def is_untouched(self) -> bool:
        """Return whether the dictionary holds the very objects that the step took from it."""
        if self.is_whole and self._has_other_keys:
            return False
        return all(entry_of(self.table, key) is value for key, value in self.values.items())

    def difference(self, tensors: list[torch.Tensor]) -> Difference | None:
        """Return the first entry that differs; a tensor that took the place of another is put into `tensors`."""
        for key, before in self.values.items():
            now = entry_of(self.table, key)
            if key in self.numbers and is_plain_dense(now):
                tensors[self.numbers[key]] = now
            elif now is before or (key in self.accepted and is_same(self.accepted[key], now)):
                continue
            elif not is_same(before, now):
                replaced = isinstance(before, torch.nn.Module | torch.nn.Parameter)
                return Difference(what=name_of(self.path, key), is_routine=key == "training", is_replaced=replaced)
            self.values[key] = now
        if self.is_whole and self._has_other_keys:
            return Difference(what=self.path)
        return None

    @property
    def _has_other_keys(self) -> bool:
        """Whether its keys are neither those from before the step nor those that the step leaves."""
        keys = list(entries_of(self.table))
        return keys != list(self.values) and keys != [k for k, v in self.values.items() if v is not MISSING]


def name_of(path: str, key: Any) -> str:
    return f"{path}.{key}" if isinstance(key, str) and key.replace(".", "_").isidentifier() else f"{path}[{key!r}]"
