"""Structures of streams: what two captures of a step on batches of other sizes have in common."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from memfit.capture.stream import Described, Dispatched, Stream, users_frames

_SMALL = 8  # smaller whole numbers are part of the structure: dimensions, counts of heads or groups
_RANGES = "aten.arange."


def structure_of(stream: Stream) -> str:
    """Return a digest that two streams share exactly if they differ in nothing but sizes.

    Equal are: the operators, in order; the lines of the user's Python that made each call; the data flow, as numbers of
    storages; dtypes, devices, numbers of dimensions and the order of strides; arguments that are no sizes by the
    operator's schema; contents of tensors from outside of the step. Of a size only counts whether it is small, and
    which small one it is: 0 and 1 change the meaning of an operator.

    Args:
        stream: of a capture.
    """
    digest = hashlib.blake2b(digest_size=16)
    for call in stream.calls:
        digest.update(repr(_described(call)).encode())
    return digest.hexdigest()


def _described(call: Dispatched) -> Any:
    positional, named = call.arguments
    sizes = _sizes_of(call.target)
    arguments = [_described_tree(tree, place in sizes) for place, tree in enumerate(positional)]
    options = [(name, _described_tree(tree, name in sizes)) for name, tree in named.items()]
    results = _described_tree(call.results, False)
    lines = tuple((code.co_filename, line) for code, line in users_frames(call.frames))
    return call.target, call.in_backward, lines, arguments, options, results


@cache
def _sizes_of(target: str) -> frozenset[int | str]:
    """Return the positions and names of an operator's arguments that may be sizes.

    Whole numbers are, by its schema; numbers that tensors are computed with are not, but for the ends of a range.
    """
    namespace, _, rest = target.partition(".")
    packet, _, overload = rest.partition(".")
    if not overload:
        return frozenset()
    operator = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
    schema = getattr(operator, "_schema", None)
    kinds = ("int", "number") if target.startswith(_RANGES) else ("int",)
    sizes: set[int | str] = set()
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if any(kind in str(argument.type) for kind in kinds):
            sizes |= {place, argument.name}
    return frozenset(sizes)


def _described_tree(tree: Any, is_size: bool) -> Any:
    if isinstance(tree, Described):
        strides = tree.place[1:]
        order = tuple(sorted(range(len(strides)), key=lambda dimension: (strides[dimension], dimension)))
        return (
            tree.storage,
            str(tree.dtype),
            _kinds(tree.shape),
            tree.device,
            _kinds(tree.place[:1]),
            order,
            tree.content,
        )
    if isinstance(tree, dict):
        return [(name, _described_tree(branch, is_size)) for name, branch in tree.items()]
    if is_size and isinstance(tree, tuple) and len(tree) == 2 and tree[0] == "int":
        return _kinds((int(tree[1]),))
    if isinstance(tree, tuple | list):
        return [_described_tree(branch, is_size) for branch in tree]
    return "generator" if isinstance(tree, torch.Generator) else tree


def _kinds(numbers: Iterable[int]) -> tuple[int, ...]:
    """Return small numbers as they are, and others as the least that is not small, with their sign."""
    return tuple(max(-_SMALL, min(_SMALL, number)) for number in numbers)
