"""Streams: the calls that a step dispatches, in order, described so that two runs of one step can be compared.

A call is described by its operator, its arguments and its results. A tensor is described by its dtype and shape, and by
the number of its storage, which counts storages in the order of their first use: two equal streams also have the same
data flow. A tensor that is neither the step's own nor made in the step is described by its content too.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from types import CodeType
from typing import Any, NamedTuple

import torch

from memfit.capture.lines import OWN, is_users_file
from memfit.cost.observations import Corrections, RealResult
from memfit.memory.place import bytes_of
from memfit.torch_private.autograd import RUNS_BACKWARD, backward_node
from memfit.torch_private.tensors import (
    READS_A_NUMBER,
    StorageWeakRef,
    is_fake,
    real_tensors,
    storage_key,
    tensors_in,
    tree_map,
)

_MOST_FRAMES = 200
_CONTENT_BYTES = 1 << 20  # of a tensor from outside of the step: a draw is smaller, a teacher's weights are larger

LIFT = torch.ops.aten.lift_fresh.default  # of a tensor made from numbers: its result is new, its argument is not

# Python asks a fake, whose class is a subclass, before a plain tensor: `plain < fake` becomes `fake > plain`.
_MIRRORED = {
    one: other
    for pair in (("eq", "eq"), ("ne", "ne"), ("lt", "gt"), ("le", "ge"))
    for one, other in permutations([getattr(torch.ops.aten, name).Tensor for name in pair])
}

# Calls that depend on whether tensors are fake, and compute nothing.
_IDLE = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.set_.source_Storage)

Frames = tuple[tuple[CodeType, int], ...]


class Described(NamedTuple):
    """A tensor of a stream.

    Attributes:
        storage: the number of its storage.
        dtype, shape, device: as the tensor has them.
        place: of an argument its offset and strides, but for those of dimensions of one element; empty for a result.
        content: a digest of a tensor from outside of the step; None for the step's own.
    """

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    place: tuple[int, ...]
    content: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched:
    """One call of a stream.

    Attributes:
        target: the operator overload's name.
        arguments: positional and keyword arguments, with Described in the places of tensors.
        results: the returned tensors; None for an integer that is read, which a capture only checks.
        frames: the Python frames that led to it, outermost first: code and line.
        in_backward: whether autograd makes the call.
    """

    target: str
    arguments: Any
    results: Any
    frames: Frames
    in_backward: bool

    def is_as(self, other: Dispatched) -> bool:
        """Return whether two calls are equal, wherever they were made."""
        mine, theirs = ((call.target, call.arguments, call.results) for call in (self, other))
        return mine == theirs

    @property
    def new_bytes(self) -> int:
        """The bytes of the results whose storages no argument has."""
        given = {leaf.storage for leaf in _described_in(self.arguments)}
        made = {leaf.storage: leaf for leaf in _described_in(self.results) if leaf.storage not in given}
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in made.values())

    def __str__(self) -> str:
        return f"{self.target}({', '.join(_words(argument) for argument in self.arguments[0])})"


@dataclass(kw_only=True)
class Stream:
    """Collects the calls of one run.

    Attributes:
        own: the keys of the storages of parameters, buffers and batch, whose contents are not compared; none are real
            in a capture.
        calls: the calls so far.
        contents: the real tensors for which fakes stand, by the key of the fake's storage.
        corrections: of a capture: what real kernels return in the place of their fakes' results.
    """

    own: frozenset[int] = frozenset()
    calls: list[Dispatched] = field(default_factory=list[Dispatched])
    contents: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    corrections: Corrections = field(default_factory=dict[str, Mapping[int, RealResult | None]])
    _digests: dict[int, str] = field(default_factory=dict[int, str])
    _numbers: dict[int, int] = field(default_factory=dict[int, int])
    _stands_for: dict[int, int] = field(default_factory=dict[int, int])
    _outside: set[int] = field(default_factory=set[int])
    _held: dict[int, Any] = field(default_factory=dict[int, Any])  # weak references, so that no key is used twice

    def add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> Dispatched | None:
        """Enter a call after it ran, and return it; None for one that does not count.

        Args:
            func: the operator overload.
            args, kwargs: its arguments.
            returned: what it returned.
        """
        if func in _IDLE or func.namespace in ("prim", "profiler") or _computes_nothing(func, args, returned):
            return None
        func, args = self._known_first(func, args)
        arguments = ((("number", _digest(args[0])),), {}) if func is LIFT else self._described_arguments(args, kwargs)
        call = Dispatched(
            target=str(func),
            arguments=arguments,
            results=None if _reads_an_integer(func, returned) else tree_map(self._described_result, returned),
            frames=_frames(),
            in_backward=backward_node() is not None,
        )
        self.calls.append(call)
        return call

    def _known_first(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """Return a comparison with an operand from outside of the step as its second one; any other call as it is."""
        if func not in _MIRRORED or self._is_known(args[0]) or not self._is_known(args[1]):
            return func, args
        return _MIRRORED[func], (args[1], args[0])

    def _is_known(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is the step's own, or made in the step; in a capture those stand for no real one."""
        key = self.key(tensor)
        if not self.own:
            return key not in self.contents
        return key in self.own or (key in self._numbers and key not in self._outside)

    def key(self, tensor: torch.Tensor) -> int:
        """Return the key of a tensor's storage, which no other storage of this stream has, at any time."""
        key = storage_key(tensor)
        if key not in self._held:
            self._held[key] = StorageWeakRef(tensor.untyped_storage())
        return self._stands_for.get(key, key)

    def stand_for(self, tensor: torch.Tensor, key: int) -> None:
        """Let the storage of `tensor` stand for another, and have its key.

        Args:
            tensor: a fake of a tensor of the run.
            key: of that tensor's storage, as `key` returned it; the storage may be gone.
        """
        self._stands_for[self.key(tensor)] = key

    def is_outside(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor's storage was there before the run: it was not first seen as a result."""
        key = self.key(tensor)
        return key not in self._numbers or key in self._outside

    def look_at(self, arguments: Any) -> None:
        """Take the content of tensors from outside, before a call that may write to them."""
        for tensor in tensors_in(arguments):
            if tensor.layout is torch.strided and self.key(tensor) not in self._numbers:
                content = self._content(self.key(tensor), tensor)
                if content is not None:
                    self._digests[self.key(tensor)] = content

    def _content(self, key: int, tensor: torch.Tensor) -> str | None:
        real = self.contents.get(key, tensor)
        return None if key in self.own or is_fake(real) or real.device.type == "meta" else _digest(real)

    def generators(self) -> set[torch.Generator]:
        """Return the generators that were handed to the calls."""
        given = (call.arguments[1].get("generator") for call in self.calls)
        default = {torch.default_generator, *torch.cuda.default_generators}
        return {generator for generator in given if isinstance(generator, torch.Generator)} - default

    def numbers(self) -> list[Any]:
        """Return digests of the tensors that the run has made of numbers and arrays."""
        return [call.arguments for call in self.calls if call.target == str(LIFT)]

    def here(self) -> str:
        """Return `file:line` of the innermost frame of the user's that is being run."""
        frames = users_frames(_frames())
        return _line(frames[-1]) if frames else "the training step"

    def _described_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tree_map(self._described_argument, (args, kwargs))

    def _described_argument(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf if isinstance(leaf, torch.Generator) else (type(leaf).__name__, repr(leaf))
        if leaf.layout is not torch.strided:
            return Described(-1, leaf.dtype, tuple(leaf.shape), leaf.device.type, (), str(leaf.layout))
        key = self.key(leaf)
        content = None
        if key not in self._numbers:
            self._outside.add(key)
            content = self._digests.get(key) or self._content(key, leaf)
        return self._described(leaf, key, _place(leaf), content)

    def _described_result(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return (type(leaf).__name__, repr(leaf))
        if leaf.layout is not torch.strided:
            return self._described_argument(leaf)
        return self._described(leaf, self.key(leaf), (), None)

    def _described(self, tensor: torch.Tensor, key: int, place: tuple[int, ...], content: str | None) -> Described:
        number = self._numbers.setdefault(key, len(self._numbers))
        return Described(number, tensor.dtype, tuple(tensor.shape), tensor.device.type, place, content)


def _reads_an_integer(func: Any, returned: Any) -> bool:
    return func is READS_A_NUMBER and isinstance(returned, int) and not isinstance(returned, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first call in which two streams differ; None stands for the end of a stream."""

    expected: Dispatched | None
    found: Dispatched | None

    @property
    def is_autograds(self) -> bool:
        """Return whether both calls are made by autograd's own formulas, in no function of the user's."""
        calls = (self.expected, self.found)
        return all(call is not None and call.in_backward and not _called_in_backward(call.frames) for call in calls)

    @property
    def lines(self) -> tuple[str, str]:
        """The lines of user or library code where the two runs part: (expected, found), equal if only values differ."""
        expected, found = (users_frames(call.frames if call else ()) for call in (self.expected, self.found))
        mine, theirs = (_place_without_lines(call) for call in (self.expected, self.found))
        for mine_frame, theirs_frame in zip(expected, found, strict=False):
            mine, theirs = _line(mine_frame), _line(theirs_frame)
            if mine_frame != theirs_frame:
                return mine, theirs
        if len(expected) != len(found):
            longer = expected if len(expected) > len(found) else found
            line = _line(longer[min(len(expected), len(found))])
            return (line, theirs) if longer is expected else (mine, line)
        return mine, theirs


def _place_without_lines(call: Dispatched | None) -> str:
    if call is None:
        return "the end of the step"
    return "backward" if call.in_backward else "the training step"


def _computes_nothing(func: Any, args: tuple[Any, ...], returned: Any) -> bool:
    """Return whether a call computes nothing: autograd replays views of fakes that it does not replay of others."""
    tensors = tensors_in(returned)
    if tensors and all(each.device.type == "meta" for each in tensors):  # a form, of a derivative known to be zero
        return True
    if not tensors or func is LIFT or func._schema.is_mutable:
        return False
    if any(tensor.layout is not torch.strided for tensor in (*tensors, *tensors_in(args))):
        return False
    given = {storage_key(tensor) for tensor in tensors_in(args)}
    return all(storage_key(tensor) in given for tensor in tensors)


def _place(tensor: torch.Tensor) -> tuple[int, ...]:
    if 0 in tensor.shape:
        return ()
    strides = (stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    return (int(tensor.storage_offset()), *strides)


def _described_in(tree: Any) -> Iterator[Described]:
    if isinstance(tree, Described):
        yield tree
    elif isinstance(tree, dict):
        yield from _described_in(tuple(tree.values()))
    elif isinstance(tree, tuple | list):
        for branch in tree:
            yield from _described_in(branch)


def _words(argument: Any) -> str:
    if isinstance(argument, Described):
        return f"{str(argument.dtype).removeprefix('torch.')}{list(argument.shape)}"
    if isinstance(argument, list):
        return f"[{', '.join(map(_words, argument))}]"
    if isinstance(argument, torch.Generator):
        return "generator"
    return argument[1] if isinstance(argument, tuple) and len(argument) == 2 else str(argument)


def _digest(tensor: torch.Tensor) -> str:
    """Return a digest of the first bytes of a tensor's storage."""
    with real_tensors():
        return hashlib.blake2b(bytes_of(tensor)[:_CONTENT_BYTES].cpu().numpy().tobytes(), digest_size=16).hexdigest()


def _frames() -> Frames:
    frames: list[tuple[CodeType, int]] = []
    frame: Any = sys._getframe(2)
    while frame is not None and len(frames) < _MOST_FRAMES:
        frames.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    frames.reverse()
    return tuple(frames)


def users_frames(frames: Frames) -> list[tuple[CodeType, int]]:
    """Return the frames that are neither torch's nor memfit's, below memfit's first one."""
    own = next((place for place, (code, _) in enumerate(frames) if code.co_filename.startswith(OWN)), 0)
    return [(code, line) for code, line in frames[own:] if is_users_file(code.co_filename)]


def _called_in_backward(frames: Frames) -> bool:
    """Return whether a frame inside of the innermost backward pass, which the user may have called, is the user's."""
    passes = [place for place, (code, _) in enumerate(frames) if code is RUNS_BACKWARD.__code__]
    return any(is_users_file(code.co_filename) for code, _ in frames[passes[-1] if passes else 0 :])


def _line(frame: tuple[CodeType, int]) -> str:
    return f"{frame[0].co_filename}:{frame[1]}"


def tensors_of(trees: Iterable[Any]) -> frozenset[int]:
    """Return the keys of the storages of all tensors in `trees`."""
    return frozenset(storage_key(tensor) for tree in trees for tensor in tensors_in(tree))
