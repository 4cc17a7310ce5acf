"""Structures of streams: what two captures of a step on batches of other sizes have in common."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from memfit.capture.stream import Described, Dispatched, Frames, Stream

_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), "<")
_SMALL = 8  # whole numbers below it are told apart: dimensions, counts of heads or groups
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
    users: dict[int, str] = {}
    digest = hashlib.blake2b(digest_size=16)
    for call in stream.calls:
        digest.update(repr(_described(call, users)).encode())
    return digest.hexdigest()


def _described(call: Dispatched, users: dict[int, str]) -> Any:
    positional, named = call.arguments
    sizes = _sizes_of(call.target)
    arguments = [_described_tree(tree, place in sizes) for place, tree in enumerate(positional)]
    options = [(name, _described_tree(tree, name in sizes)) for name, tree in named.items()]
    results = _described_tree(call.results, False)
    return call.target, call.in_backward, _lines(call.frames, users), arguments, options, results


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


def _lines(frames: Frames, users: dict[int, str]) -> tuple[tuple[str, int], ...]:
    """Return file and line of each frame that is neither torch's nor memfit's, below memfit's first one."""
    own = next((place for place, (code, _) in enumerate(frames) if code.co_filename.startswith(_OWN[1])), 0)
    named = ((_user_file(code, users), line) for code, line in frames[own:])
    return tuple((name, line) for name, line in named if name)


def _user_file(code: CodeType, users: dict[int, str]) -> str:
    """Return the file of the user's code, and an empty text for torch's and memfit's."""
    name = users.get(id(code))
    if name is None:
        name = users[id(code)] = "" if code.co_filename.startswith(_OWN) else code.co_filename
    return name


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
