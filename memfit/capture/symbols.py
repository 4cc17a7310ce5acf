"""Symbolic sizes: the sizes of a batch while a step is captured for all of them at once.

torch's own symbols stand for the sizes of the batch that change. What the step computes from them stays an expression,
and each comparison that Python or a kernel makes is noted as a condition, which a later batch has to meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch

from memfit.binding import Value
from memfit.torch_private.symbols import guesses_noted, make_size_environment, make_size_symbol
from memfit.torch_private.tensors import FakeTensorMode

if TYPE_CHECKING:
    import sympy

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
Shapes = tuple[tuple[int, ...], ...]
"""The shape of each leaf of a batch; that of a leaf that is no tensor is empty."""


class NotSymbolicError(Exception):
    """A step that cannot be captured for all sizes at once; it is captured for each of them."""


@dataclass(frozen=True, slots=True)
class Size:
    """Stands for an expression of the sizes of a batch, by its number."""

    number: int


class Symbols:
    """The symbols of one capture, the expressions computed from them, and the conditions that code has tested.

    Args:
        known: the shapes of the batches so far; the last are those of the batch at hand. A size that was not always the
            same has a symbol. Sizes that were always equal have one together, and have to be equal in later batches.

    Attributes:
        mode: the fake mode of the capture.
        shapes: of the batch at hand, with symbols.
    """

    def __init__(self, known: Sequence[Shapes]) -> None:
        self._environment = make_size_environment()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=self._environment, static_shapes=True)
        histories = [tuple(each[leaf] for each in known) for leaf in range(len(known[0]))]
        self._histories = [tuple(zip(*history, strict=True)) for history in histories]  # of each size of each leaf
        changing = (sizes for leaf in self._histories for sizes in leaf if len(set(sizes)) > 1)
        self._symbols = {
            sizes: make_size_symbol(self._environment, number, sizes[-1])
            for number, sizes in enumerate(dict.fromkeys(changing))
        }
        self.shapes = [tuple(self._symbols.get(sizes, sizes[-1]) for sizes in leaf) for leaf in self._histories]
        self._expressions: dict[sympy.Expr, int] = {}

    def noting(self) -> AbstractContextManager[None]:
        """Return a block in which all that torch's C++ asks about sizes is decided by those at hand, and noted."""
        return guesses_noted(self._environment)

    def without_symbols(self, tree: Any) -> Any:
        """Return a copy of a tree (see `map_sizes`) in which a `Size` stands for each expression.

        Raises:
            NotSymbolicError: it holds a fraction or a truth value that depends on sizes.
        """
        return map_sizes(tree, self._numbered)

    def formulas(self) -> Formulas:
        """Return how the expressions that were numbered are computed from the shapes of a later batch.

        Raises:
            NotSymbolicError: it holds for the sizes at hand alone, as where Python counts to a size.
        """
        environment: Any = self._environment
        fixed = any(symbol.node.expr.is_Integer for symbol in self._symbols.values())
        if fixed or environment.deferred_runtime_asserts:
            raise NotSymbolicError("the step does something else at each size")
        expression_of = {sizes: symbol.node._expr for sizes, symbol in self._symbols.items()}
        return Formulas(
            shapes=tuple(tuple(expression_of.get(sizes, sizes[-1]) for sizes in leaf) for leaf in self._histories),
            ranges={symbol: environment.var_to_range[symbol] for symbol in expression_of.values()},
            conditions=tuple(guard.expr for guard in environment.guards),
            equalities=tuple(environment.replacements.items()),
            expressions=tuple(self._expressions),
        )

    def _numbered(self, size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            raise NotSymbolicError("an operator is given a number that is computed from sizes, and is no size")
        expression: Any = size.node.expr
        if expression.is_Integer:
            return int(expression)
        return Size(self._expressions.setdefault(expression, len(self._expressions)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Formulas:
    """Expressions of the sizes of a batch, and the conditions under which they hold.

    Attributes:
        shapes: of the batch: symbols, and the sizes that have none.
        ranges: of each symbol, as torch took it for granted.
        conditions: what was found true of the sizes.
        equalities: symbols, and what each was found equal to.
        expressions: in the order of their numbers.
    """

    shapes: tuple[tuple[Any, ...], ...]
    ranges: dict[sympy.Symbol, Any]
    conditions: tuple[Any, ...]
    equalities: tuple[tuple[Any, Any], ...]
    expressions: tuple[sympy.Expr, ...]

    def values(self, shapes: Shapes, least: int) -> tuple[int, ...] | None:
        """Return the value of each expression for a batch, or None if a condition is not met.

        Args:
            shapes: of the batch.
            least: no size that has a symbol may be less.
        """
        import sympy  # by torch for its symbols, long before

        known: dict[Any, Any] = {}
        for mine, theirs in zip(self.shapes, shapes, strict=True):
            for expected, size in zip(mine, theirs, strict=True):
                if expected in self.ranges:
                    expected = known.setdefault(expected, sympy.Integer(size))
                if expected != size:
                    return None
        for symbol, size in known.items():
            if size < least or not self.ranges[symbol].lower <= size <= self.ranges[symbol].upper:
                return None
        if any(condition.xreplace(known) is not sympy.true for condition in self.conditions):
            return None
        if any(symbol.xreplace(known) != other.xreplace(known) for symbol, other in self.equalities):
            return None
        found: list[Any] = [expression.xreplace(known) for expression in self.expressions]
        return tuple(int(value) for value in found) if all(value.is_Integer for value in found) else None


def at_hand(tree: Any) -> Any:
    """Return a copy of a tree with the sizes of the batch at hand in the place of symbols."""
    return map_sizes(tree, lambda size: size.node.hint)


def map_sizes(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return a tree with `function(size)` in the place of each symbolic number and each `Size`.

    Args:
        tree: nested tuples, lists, dicts and dataclasses; what has no such number in it is returned itself.
        function: returns what takes the number's place.
    """
    if isinstance(tree, (Size, *_SYMBOLIC)):
        return function(tree)
    if isinstance(tree, dict):
        items = cast("dict[Any, Any]", tree).items()
        mapped = {key: map_sizes(branch, function) for key, branch in items}
        return mapped if any(mapped[key] is not branch for key, branch in items) else tree
    if isinstance(tree, tuple | list):
        branches = [map_sizes(branch, function) for branch in cast("tuple[Any, ...]", tree)]
        if all(new is old for new, old in zip(branches, cast("tuple[Any, ...]", tree), strict=True)):
            return tree
        return branches if isinstance(tree, list) else tuple(branches)
    names = _fields_of(type(tree))
    if not names:
        return tree
    changed = {name: new for name in names if (new := map_sizes(old := getattr(tree, name), function)) is not old}
    return replace(tree, **changed) if changed else tree


class Template:
    """A tree with a `Size` in the place of each expression, from which the trees of other sizes are made.

    What has no size in it is the same in all of them, and equal `Value`s are one object.

    Args:
        tree: as for `map_sizes`.
        sizes: how many numbers the `Size`s in it have.
    """

    def __init__(self, tree: Any, sizes: int) -> None:
        self._makers: list[Callable[[list[Any]], Any]] = []  # each is given the sizes, and what those before it made
        self._places: dict[Value, int] = {}
        self._sizes = sizes
        self._tree, self._place = tree, self._add(tree)

    def at(self, values: Sequence[int]) -> Any:
        """Return the tree with these values of the sizes, by their numbers."""
        made: list[Any] = list(values)
        for make in self._makers:
            made.append(make(made))
        return self._tree if self._place is None else made[self._place]

    def _add(self, tree: Any) -> int | None:
        """Return where a branch will be among what is made, or None if it has no size in it."""
        if isinstance(tree, Size):
            return tree.number
        if isinstance(tree, Value):
            if tree not in self._places and (place := self._made_of(tree)) is not None:
                self._places[tree] = place
            return self._places.get(tree)
        return self._made_of(tree)

    def _made_of(self, tree: Any) -> int | None:
        names: Sequence[Any] = ()
        if isinstance(tree, dict):
            names, branches = tuple(cast("dict[Any, Any]", tree)), list(cast("dict[Any, Any]", tree).values())
        elif isinstance(tree, tuple | list):
            branches = list(cast("tuple[Any, ...]", tree))
        else:
            names = _fields_of(type(tree))
            branches = [getattr(tree, name) for name in names]
        kind: Callable[..., Any] = type(tree)
        places = [(number, place) for number, each in enumerate(branches) if (place := self._add(each)) is not None]
        if not places:
            return None

        def make(made: list[Any]) -> Any:
            filled = branches.copy()
            for number, place in places:
                filled[number] = made[place]
            if not names:
                return filled if kind is list else tuple(filled)
            fields = dict(zip(names, filled, strict=True))
            return fields if kind is dict else kind(**fields)

        self._makers.append(make)
        return self._sizes + len(self._makers) - 1


@cache
def _fields_of(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()
