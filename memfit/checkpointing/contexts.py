"""The contexts of a checkpoint's two forward passes: kept results, and what the second pass must not change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from memfit.torch_private.autograd import UnwrappedMode, backward_keeps_graph, in_backward
from memfit.torch_private.checkpoints import IGNORED_OPS, detached
from memfit.torch_private.modules import module_tables
from memfit.torch_private.tensors import BatchNormBase, tree_map

_ABSENT = object()
_TABLES = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRule:
    """The operators of a block whose results are kept.

    Attributes:
        expected: the operators, in order, as they were seen.
        kept: numbers of those whose results are kept.
        names: (name, number of this name) of the same.
    """

    expected: tuple[Any, ...]
    kept: frozenset[int]
    names: frozenset[tuple[str, int]]


class Keep(UnwrappedMode):
    """A checkpoint's first forward pass: keeps results.

    As soon as an operator differs from the one that was seen, nothing is kept: which results may be kept together is
    known of the operators that were seen only.

    Args:
        rule: which results.
    """

    def __init__(self, rule: KeepRule) -> None:
        super().__init__()
        self._expected, self._kept_numbers = rule.expected, rule.kept
        self._number = 0
        self._is_other = False
        self.kept: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **kwargs) if kwargs else func(*args)
        if func in IGNORED_OPS or self._is_other:
            return returned
        number = self._number
        self._number = number + 1
        if number >= len(self._expected) or self._expected[number] is not func:
            self._is_other = True
            self.kept.clear()
        elif number in self._kept_numbers:
            self.kept[number] = tree_map(detached, returned)
        return returned


class Again(UnwrappedMode):
    """A checkpoint's second forward pass: returns results that were kept.

    Args:
        keep: of the first forward pass.
    """

    def __init__(self, keep: Keep) -> None:
        super().__init__()
        self._keep = keep
        self._number = 0

    def __enter__(self) -> Again:
        self._number = 0
        self._is_last = not (in_backward() and backward_keeps_graph())
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in IGNORED_OPS:
            number = self._number
            self._number = number + 1
            kept = self._keep.kept
            if number in kept:
                return tree_map(detached, kept.pop(number) if self._is_last else kept[number])
        return func(*args, **kwargs) if kwargs else func(*args)


def selective_contexts(names: frozenset[tuple[str, int]]) -> Any:
    """Return stock's contexts of a checkpoint that keeps results, which compilers know.

    Args:
        names: (name of an operator, number of this name in the block) of those that are kept.
    """
    counts: Counter[str] = Counter()

    def decide(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        name = str(operator)
        counts[name] += 1
        is_kept = (name, counts[name] - 1) in names
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide, allow_cache_entry_mutation=True)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A place that a block's forward pass changes: a key of a table of a module."""

    table: dict[str, Any]
    key: str

    def held(self) -> Any:
        """Return what it holds now, copied if a forward pass may write to it."""
        value = self.table.get(self.key, _ABSENT)
        return value.detach().clone() if isinstance(value, torch.Tensor) and not value.requires_grad else value

    def put(self, value: Any) -> None:
        """Let it hold a value."""
        if value is _ABSENT:
            self.table.pop(self.key, None)
        else:
            self.table[self.key] = value


class StandIns:
    """The `with` block of a second forward pass: the places that the first one changed hold what they held before.

    Args:
        statistics: of batch normalization, which a forward pass writes and does not read.
        changed: other places, and what each held before the first forward pass.
    """

    __slots__ = ("_changed", "_real", "_statistics")

    def __init__(self, statistics: Sequence[Place], changed: Sequence[tuple[Place, Any]]) -> None:
        self._statistics, self._changed = statistics, changed

    def __enter__(self) -> None:
        places = [*self._statistics, *(place for place, _ in self._changed)]
        self._real = [(place, place.table.get(place.key, _ABSENT)) for place in places]
        for place in self._statistics:
            place.put(place.held())
        for place, before in self._changed:
            place.put(before.clone() if isinstance(before, torch.Tensor) and not before.requires_grad else before)

    def __exit__(self, *raised: Any) -> None:
        for place, real in self._real:
            place.put(real)
        self._real = []


class Watched:
    """What a module and those in it hold, so that it is seen what a forward pass changes.

    Args:
        module: with all modules in it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._tables = tables_in(module)
        self._statistics = {
            (id(module_tables(each)[1]), key)
            for each in module.modules()
            if isinstance(each, BatchNormBase)
            for key in module_tables(each)[1]
        }
        self._before = [
            {
                key: (value, _version(value), Place(table, key).held())
                for key, value in table.items()
                if key not in _TABLES and (id(table), key) not in self._statistics
            }
            for table in self._tables
        ]

    def changed(self) -> list[tuple[Place, Any]]:
        """Return the places that were changed since, and what each held; statistics of batch normalization left out."""
        found: list[tuple[Place, Any]] = []
        for table, before in zip(self._tables, self._before, strict=True):
            for key in table.keys() | before.keys():
                if key in _TABLES or (id(table), key) in self._statistics:
                    continue
                was, version, copy = before.get(key, (_ABSENT, None, _ABSENT))
                now = table.get(key, _ABSENT)
                if now is not was or _version(now) != version:
                    found.append((Place(table, key), copy))
        return found


def _version(value: Any) -> int | None:
    is_counted = isinstance(value, torch.Tensor) and not value.is_inference()
    return value._version if is_counted else None


def tables_in(module: torch.nn.Module) -> list[dict[str, Any]]:
    """Return the tables of attributes and of buffers of a module and those inside of it."""
    return [table for each in module.modules() for table in (vars(each), module_tables(each)[1])]


def statistics_in(module: torch.nn.Module) -> list[Place]:
    """Return the places of batch normalization's running statistics in a module."""
    tables = [module_tables(each)[1] for each in module.modules() if isinstance(each, BatchNormBase)]
    return [Place(table, key) for table in tables for key, buffer in table.items() if buffer is not None]
