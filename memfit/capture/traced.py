"""Calls and storages of a step while it is traced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.binding import Value, values_in
from memfit.graph import Phase, Role
from memfit.torch_private.tensors import tensors_in, tree_flatten

_aten = torch.ops.aten


@dataclass(slots=True, kw_only=True)
class TracedStorage:
    """A storage while it is traced; `bytes` are those on the step's device, 0 for a storage that lives elsewhere."""

    name: str
    bytes: int
    role: Role
    resident: bool = False


@dataclass(slots=True, kw_only=True)
class TracedCall:
    """A call while it is traced: the fields of `Call`, and what `Op` needs beside them.

    A check returns nothing and writes nothing: it is there for the error that it may raise. `sources` are what the call
    was traced from, where that is known: nodes of a joint graph.
    """

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    results: tuple[Value | None, ...] = (None,)
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    mutates: tuple[int, ...] = ()
    phase: Phase
    module: str
    random: str | None = None
    group: str | None = None
    recomputable: bool = True
    is_check: bool = False
    workspace_bytes: int | None = None
    generator_state: int | None = None
    sources: tuple[Any, ...] = ()

    def described(self) -> tuple[Any, ...]:
        """Return what two calls share that do the same to the same Values; closures are compared by name."""
        return self.name, str(getattr(self.target, "__name__", self.target)), self.args, self.kwargs, self.mutates

    @staticmethod
    def of(
        name: str,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        made: Sequence[Value] = (),
        mutated: Value | None = None,
        kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> TracedCall:
        """Return a call that is not dispatched: it reads the Values among its arguments, but for one that it writes to.

        Args:
            name: of the op.
            target: a function or an operator.
            args, kwargs: its arguments.
            made: its results.
            mutated: what it writes to.
            others: further fields.
        """
        mutates = () if mutated is None else (mutated.storage,)
        used = dict.fromkeys(value.storage for value in values_in((args, kwargs or {})))
        return TracedCall(
            name=name,
            target=target,
            args=args,
            kwargs=kwargs or {},
            results=tuple(made) or (None,),
            reads=tuple(storage for storage in used if storage not in mutates),
            writes=tuple(value.storage for value in made),
            mutates=mutates,
            **others,
        )


@dataclass(slots=True, kw_only=True)
class Entry:
    """An operator call that is about to be entered; special cases change all but `func` and `given`.

    Attributes:
        func: the operator overload that ran.
        given: its positional arguments, with tensors.
        target, args, kwargs: the call that computes the op, with Values.
        outputs: the returned leaves.
        mutated: the tensors that the call writes to.
        hidden: storages among the arguments that it does not count as reading.
        statistics: storages that it reads as running statistics, mean and variance; its last results are new ones.
    """

    func: Any
    given: tuple[Any, ...]
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Any]
    mutated: list[torch.Tensor]
    hidden: set[int] = field(default_factory=set[int])
    statistics: tuple[int, ...] = ()


def mutated_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that the operator writes to by its schema; the conjugate of real numbers is not written.

    Args:
        func: an operator overload.
        args: its positional arguments.
        kwargs: its named ones.
    """
    if func is _aten.conj_physical_.default and not args[0].is_complex():
        return []
    return tensors_in(given_to_write(func._schema, args, kwargs))


def given_to_write(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return what a call gives for the arguments that its operator writes to.

    Args:
        schema: of the operator.
        args: of the call, by position.
        kwargs: those by name.
    """
    given = [(args[at] if at < len(args) else kwargs.get(each.name), each) for at, each in enumerate(schema.arguments)]
    return [value for value, each in given if each.alias_info is not None and each.alias_info.is_write]


def on_its_device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a call on fakes, without the device of the fakes' own metadata.

    A sum with derivatives that are known to be zero takes it from a view of those zeros, and copies what it adds there.

    Args:
        func: an operator overload.
        args, kwargs: of the call.
    """
    is_moved = func is _aten._to_copy.default and kwargs.get("device") == _META and args[0].device != _META
    return {**kwargs, "device": args[0].device} if is_moved else kwargs


def short_name(func: Any) -> str:
    return func._schema.name.split("::")[-1].rstrip("_")


# which autograd calls or leaves out, by other references to a gradient
_META = torch.device("meta")
_OF_SUMS = ("clone", "add", "add_", "copy_", "overwrite.aten.copy_")
_OF_COPIES = ("new_empty_strided", "empty_strided")  # of what is copied: they compute nothing


def are_alike(calls: Iterable[TracedCall], others: Iterable[TracedCall]) -> bool:
    """Return whether two steps call the same operators with the same numbers, in whatever order."""
    ours, theirs = (Counter(map(_with_numbers, each)) for each in (calls, others))
    ours.pop((), None)
    theirs.pop((), None)
    return ours == theirs


def _with_numbers(call: TracedCall) -> tuple[str, ...]:
    numbers = [repr(leaf) for leaf in tree_flatten((call.args, call.kwargs))[0] if isinstance(leaf, (int, float))]
    target = str(getattr(call.target, "__name__", call.target))
    name = target.rpartition(".")[0] or target
    return () if name in _OF_COPIES or (name in _OF_SUMS and not numbers) else (target, *numbers)
