"""The tables of a block's modules as one place: attributes, parameters, buffers, hooks, by their numbers."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from memfit.capture.copies import MISSING, is_same
from memfit.checkpointing.reached import is_exchanged
from memfit.memory.python_places import PythonPlace
from memfit.torch_private.sharding import is_sharded
from memfit.torch_private.tensors import is_plain_dense


def of_tables(tables: Sequence[dict[str, Any]]) -> PythonPlace:
    """Return the place of all tables of a block's modules: what it holds is by their numbers, without empty ones."""

    def read() -> dict[int, dict[str, Any]]:
        return {number: table.copy() for number, table in enumerate(tables) if table}

    def write(held: dict[int, dict[str, Any]]) -> None:
        for number, table in enumerate(tables):
            if _differ(table, held.get(number, {})):
                _put_entries(table, held.get(number, {}))

    def is_same(held: dict[int, dict[str, Any]], other: dict[int, dict[str, Any]]) -> bool:
        return held.keys() == other.keys() and not any(map(_differ, held.values(), other.values()))

    return PythonPlace(read, write, is_same)


def _differ(table: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two tables hold other objects, or by other keys, or in another order."""
    if len(table) != len(other):
        return True
    return not (all(map(operator.is_, table.values(), other.values())) and [*table] == [*other])


def _put_entries(table: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Put a module's table back, without the entries that libraries replace by themselves."""
    for key in [*wanted, *(table.keys() - wanted.keys())]:
        now, value = table.get(key, MISSING), wanted.get(key, MISSING)
        if is_same(now, value) or _is_librarys(now) or _is_librarys(value) or _is_one_memory(now, value):
            continue
        if value is MISSING:
            del table[key]
        else:
            table[key] = value


def _is_librarys(value: Any) -> bool:
    """Return whether a value is a stand-in of memfit's, or a parameter that FSDP or DeepSpeed puts there."""
    if isinstance(value, torch.Tensor):
        return is_sharded(value) or is_exchanged(value)
    return value is not MISSING and type(value).__module__.startswith("memfit.")


def _is_one_memory(now: Any, value: Any) -> bool:
    """Return whether two tensors are the same elements, as FSDP makes views of its flat parameter for each pass.

    Others differ: a result that is kept has its memory in both forward passes, and a graph of each.
    """
    if not (isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor)):
        return False
    if now._base is None or not is_exchanged(now._base):
        return False
    is_alike = now.requires_grad == value.requires_grad and now.shape == value.shape
    if not (is_alike and is_plain_dense(now) and is_plain_dense(value)):
        return False
    return now.data_ptr() == value.data_ptr() != 0 and now.stride() == value.stride()
