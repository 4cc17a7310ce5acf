"""Places: where Python code keeps state that it may change, each with a getter and a setter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from memfit.capture.copies import BUFFERS, MISSING, Items, Table, each_of, entries_of, entry_of, is_same
from memfit.capture.discovery import Discovery
from memfit.capture.draws import differ, place_of

_MOST_ENTRIES = 10_000  # of a container that is copied for each call of a block
_MOST_BYTES = 1 << 20  # of an array


@dataclass(frozen=True, slots=True, eq=False)
class PythonPlace:
    """Where code keeps something that it may change.

    Attributes:
        read: returns a copy of what is there now.
        write: lets it hold what `read` has returned.
        is_same: whether two copies are the same.
        of: the container whose entries they are; None of another place.
    """

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    is_same: Callable[[Any, Any], bool]
    of: Any = None

    @property
    def is_small(self) -> bool:
        """Whether it may be copied for each call of a block."""
        if isinstance(self.of, np.ndarray):
            return self.of.nbytes <= _MOST_BYTES
        if isinstance(self.of, BUFFERS):
            return memoryview(self.of).nbytes <= _MOST_BYTES
        return self.of is None or sum(1 for _ in each_of(self.of)) <= _MOST_ENTRIES


def places_of(found: Discovery, without: Iterable[int] = ()) -> list[PythonPlace]:
    """Return the places among what was found, but for generators and iterators.

    Args:
        found: what code can reach.
        without: ids of dictionaries and containers that are held otherwise.
    """
    others = set(without)
    places = [_of_table(table) for key, table in found.tables.items() if key not in others and not _is_unread(table)]
    places += [_of_items(each) for each in found.items if id(each.items) not in others]
    return places + [PythonPlace(each.read, each.write, is_same) for each in found.cells]


def of_generator(generator: Any) -> PythonPlace:
    """Return the place of the state of a generator of torch's, Python's or NumPy's."""
    if isinstance(generator, torch.Generator):
        return PythonPlace(generator.get_state, generator.set_state, torch.equal)
    return PythonPlace(*place_of(generator), lambda before, now: not differ(before, now))


def _is_unread(table: Table) -> bool:
    """Return whether a table is of a library's object, of which the step reads nothing that is known."""
    return table.is_librarys and table.names is not None and not table.names


def _of_table(table: Table) -> PythonPlace:
    names = tuple(table.before)
    if not table.is_whole or table.is_librarys:
        return PythonPlace(
            lambda: {name: entry_of(table.table, name) for name in names}, partial(_put, table), _same_entries
        )
    read = table.table.copy if type(table.table) is dict else partial(entries_of, table.table)
    return PythonPlace(read, partial(_put_all, table), _same_entries, table.table)


def _put(table: Table, entries: dict[Any, Any]) -> None:
    for name, value in entries.items():
        if not is_same(value, entry_of(table.table, name)):
            table.write(name, value)


def _put_all(table: Table, entries: dict[Any, Any]) -> None:
    """Let a table hold these entries, in their order, and no others."""
    now = entries_of(table.table)
    for key in now.keys() - entries.keys():
        table.write(key, MISSING)
    if list(now) != list(entries):
        for key in entries:
            if key in now:
                table.write(key, MISSING)
            table.write(key, entries[key])
    _put(table, entries)


def _of_items(items: Items) -> PythonPlace:
    is_list = type(items.items) is list
    return PythonPlace(items.items.copy if is_list else items.read, items.write, _same_items, items.items)


def _same_entries(before: dict[Any, Any], now: dict[Any, Any]) -> bool:
    return list(before) == list(now) and all(map(is_same, before.values(), now.values()))


def _same_items(before: Any, now: Any) -> bool:
    return len(before) == len(now) and all(map(is_same, before, now))
