"""The contexts of a checkpoint's two forward passes of which some results are kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from memfit.capture.functionalize import as_cast
from memfit.errors import UnsupportedStepError
from memfit.torch_private.autograd import UnwrappedMode, backward_keeps_graph, in_backward
from memfit.torch_private.checkpoints import IGNORED_OPS, detached, is_cached_cast
from memfit.torch_private.tensors import tree_map


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
        self.expected, self._kept_numbers = rule.expected, rule.kept
        self._number = 0
        self._is_other = False
        self.kept: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = as_cast(func, args, self.has_autocast)
        returned = call(*args, **kwargs) if kwargs else call(*args)
        if func in IGNORED_OPS or self._is_other or is_cached_cast(func, args, kwargs):
            return returned
        number = self._number
        self._number = number + 1
        if number >= len(self.expected) or self.expected[number] is not func:
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
        if func not in IGNORED_OPS and not is_cached_cast(func, args, kwargs):
            number = self._number
            self._number = number + 1
            kept = self._keep.kept
            if number in kept:
                if self._keep.expected[number] is not func:
                    raise UnsupportedStepError(
                        f"a block computes something else when it is recomputed for backward: {func} in the place of "
                        f"{self._keep.expected[number]}; it reads what its first forward pass, or the loop since then, "
                        "has changed (a cache, say): fill caches before the training, or name other blocks: "
                        "memfit.checkpoint(..., blocks=[...])"
                    )
                return tree_map(detached, kept.pop(number) if self._is_last else kept[number])
        call = as_cast(func, args, self.has_autocast)
        return call(*args, **kwargs) if kwargs else call(*args)


def selective_contexts(names: frozenset[tuple[str, int]]) -> Any:
    """Return stock's contexts of a checkpoint that keeps results, which compilers know.

    Args:
        names: (name of an operator, number of this name in the block) of those that are kept.
    """
    counts: Counter[str] = Counter()

    def decide(_context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if is_cached_cast(operator, args, kwargs):
            return CheckpointPolicy.PREFER_RECOMPUTE
        name = str(operator)
        counts[name] += 1
        is_kept = (name, counts[name] - 1) in names
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide, allow_cache_entry_mutation=True)


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
