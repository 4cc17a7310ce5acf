"""Dictionaries that a step has read, held against later steps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.capture.copies import MISSING, entries_of, entry_of, is_same
from memfit.torch_private.guarding import ATTRIBUTES_HAVE_VERSIONS, DictVersions, dict_version
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


class GuardedTables:
    """All dictionaries that a step has read. They are compared by their versions, and those that changed by entries."""

    def __init__(self) -> None:
        self._tables: list[GuardedTable] = []
        self._empty: list[tuple[str, dict[Any, Any]]] = []
        self._unversioned: list[int] = []
        self._volatile_numbers: set[int] = set()

    def add(self, guarded: GuardedTable, *, is_modules: bool = False) -> None:
        """Add a dictionary.

        Args:
            guarded: it, with the values that the step took from it.
            is_modules: whether it is a table of a module's, or of hooks, which has a version; attributes may have none.
        """
        if isinstance(guarded.table, OrderedDict) or not (is_modules or ATTRIBUTES_HAVE_VERSIONS):
            self._unversioned.append(len(self._tables))  # it is looked into at each step, as where the order may change
        self._tables.append(guarded)

    def add_empty(self, path: str, table: dict[Any, Any]) -> None:
        """Add a dictionary that has to stay empty.

        Args:
            path: names it in messages.
            table: the dictionary itself, which is looked at in each step.
        """
        self._empty.append((path, table))

    def arm(self) -> None:
        """Take the present versions for those of what the step was captured with."""
        self._empty_dicts = [table for _, table in self._empty]
        self._versions = [dict_version(guarded.table) for guarded in self._tables]
        self._follow(())

    def difference(
        self, tensors: Sequence[torch.Tensor], take: Callable[[list[torch.Tensor]], None]
    ) -> Difference | None:
        """Return the first entry that differs, or None.

        Args:
            tensors: that are guarded, by number.
            take: is given them as they are now, if dictionaries changed and no entry differs.
        """
        is_touched = any(not self._tables[number].is_untouched() for number in self._unversioned)
        volatile = list(map(dict_version, self._volatile))
        if is_touched or volatile != self._volatile_versions or not self._stable.match():
            now = [*tensors]
            difference = self._changed(now)
            if difference is not None:
                return difference
            take(now)
        if any(self._empty_dicts):
            return next(Difference(what=path) for path, table in self._empty if table)
        return None

    def _changed(self, tensors: list[torch.Tensor]) -> Difference | None:
        """Look at the entries of the tables whose versions changed; if none differs, take the new versions."""
        versions = [dict_version(guarded.table) for guarded in self._tables]
        changed = [i for i, pair in enumerate(zip(versions, self._versions, strict=True)) if pair[0] != pair[1]]
        for number in dict.fromkeys([*changed, *self._unversioned]):
            difference = self._tables[number].difference(tensors)
            if difference is not None:
                return difference
        self._versions = versions
        self._follow(changed)
        return None

    def _follow(self, changed: Sequence[int]) -> None:
        """Watch tables that changed once by themselves: making all of Dynamo's guards anew takes milliseconds."""
        known = len(self._volatile_numbers)
        self._volatile_numbers.update(changed)
        self._volatile = [self._tables[number].table for number in self._volatile_numbers]
        self._volatile_versions = list(map(dict_version, self._volatile))
        if known == 0 or len(self._volatile_numbers) > known:
            others = (t.table for number, t in enumerate(self._tables) if number not in self._volatile_numbers)
            self._stable = DictVersions(tuple(others))
