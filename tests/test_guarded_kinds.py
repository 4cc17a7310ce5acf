"""Whatever kind of Python object a loss reads a number from, a later step sees that the number has changed."""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import enum
import functools
import gc
import logging
import os
import queue
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memfit
from memfit.checkpointing.step import CheckpointedStep

Read = Callable[[Any], Any]
Write = Callable[[Any, float], object]


class Number(float): ...


class Text(str): ...


class Bag(dict[Any, Any]): ...


class Row(list[Any]): ...


class Pair(tuple[Any, ...]): ...


class Several(set[Any]): ...


class Queue(collections.deque[Any]): ...


class Numbers(np.ndarray[Any, Any]): ...


class Plain:
    """An object without anything of its own."""


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Lazy(Bag):
    """A dictionary that finds its values when it is asked, as transformers' tables of classes do, and fails."""

    def __getitem__(self, key: Any) -> Any:
        raise ValueError(f"{key} is not loaded")

    def __iter__(self) -> Iterator[Any]:
        raise ValueError("nothing is loaded")

    def keys(self) -> Any:
        raise ValueError("nothing is loaded")


class LazyOrder(collections.OrderedDict[str, float]):
    """An ordered dictionary that can't be walked through."""

    def __iter__(self) -> Iterator[str]:
        raise ValueError("nothing is loaded")

    def keys(self) -> Any:
        raise ValueError("nothing is loaded")

    def items(self) -> Any:
        raise ValueError("nothing is loaded")


class LazyRow(Row):
    """A list that can't be walked through."""

    def __iter__(self) -> Iterator[Any]:
        raise ValueError("nothing is loaded")


class Computed:
    """Computes an attribute for the class that it is in."""

    def __init__(self) -> None:
        self.value = 2.0

    def __get__(self, owner: Any, cls: type) -> float:
        return self.value


class Asking:
    gain = Computed()


class Kind(type):
    gain = 2.0


class OfKind(metaclass=Kind): ...


@dataclass(slots=True)
class Slotted:
    gain: float = 2.0


def with_gain(owner: Any) -> Any:
    owner.gain = 2.0
    return owner


def set_gain(owner: Any, value: float) -> None:
    owner.gain = value


ATTRIBUTE: tuple[Read, Write] = (lambda own: own.gain, set_gain)
WITH_ATTRIBUTES: dict[str, Callable[[], Any]] = {
    "a number": lambda: Number(1.0),
    "a text": lambda: Text("a"),
    "a dictionary": Bag,
    "a list": Row,
    "a tuple": Pair,
    "a set": Several,
    "a deque": Queue,
    "an array": lambda: np.zeros(2).view(Numbers),
    "a partial function": lambda: functools.partial(len, [1]),
    "a function": lambda: lambda: 1,
    "a member of an enumeration": lambda: Color.RED,
    "a number of an enumeration": lambda: Level.LOW,
    "a tensor": lambda: torch.ones(2),
    "a parameter": lambda: nn.Parameter(torch.ones(2)),
    "a class": lambda: type("Made", (), {}),
    "a module of Python's": lambda: types.ModuleType("made_for_a_test"),
    "a slotted object": Slotted,
    "an exception": lambda: ValueError("a"),
    "a thread's own": threading.local,
    "a thread": threading.Thread,
    "a logger": lambda: logging.getLogger("memfit.test_guarded_kinds"),
    "an optimizer": lambda: torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1),
    "a data set": lambda: torch.utils.data.TensorDataset(torch.zeros(2)),
}


def item(key: Any = 0) -> tuple[Read, Write]:
    return (lambda own: own[key]), (lambda own, value: own.__setitem__(key, value))


def _two() -> float:
    return 2.0


def _three() -> float:
    return 3.0


def _set_environment(_own: Any, value: float) -> None:
    os.environ["MEMFIT_TEST_GAIN"] = str(value)


def _set_order(own: collections.OrderedDict[str, float], value: float) -> None:
    own.move_to_end("two" if value == 3.0 else "three")


class Structure(ctypes.Structure):
    _fields_ = (("gain", ctypes.c_double), ("function", ctypes.c_void_p))


def _set_or_reset(own: contextvars.ContextVar[float], value: float) -> None:
    if value != 2.0:
        TOKENS.append(own.set(value))
    elif TOKENS:
        own.reset(TOKENS.pop())


ELSEWHERE = {"gain": 2.0}


class Special:
    """Has no attribute: Python looks up in the class what it is asked, and a dictionary elsewhere has the answer."""

    __slots__ = ()

    def __getattr__(self, _name: str) -> float:
        return ELSEWHERE["gain"]

    def __getitem__(self, _index: int) -> float:
        return ELSEWHERE["gain"]

    def __bool__(self) -> bool:
        return ELSEWHERE["gain"] == 2.0

    def __enter__(self) -> float:
        return ELSEWHERE["gain"]

    def __exit__(self, *_error: object) -> None:
        pass

    def __index__(self) -> int:
        return int(ELSEWHERE["gain"])

    def __format__(self, _how: str) -> str:
        return str(ELSEWHERE["gain"])

    def __next__(self) -> float:
        return ELSEWHERE["gain"]

    def __class_getitem__(cls, _key: int) -> float:
        return ELSEWHERE["gain"]

    def times(self, factor: float) -> float:
        return ELSEWHERE["gain"] * factor

    once = functools.partialmethod(times, 1.0)


class Answering(type):
    def __getattr__(cls, _name: str) -> float:
        return ELSEWHERE["gain"]


class Answered(metaclass=Answering): ...


class Above:
    gain = 2.0


class Below(Above):
    gain = 1.0

    def above(self) -> float:
        return super().gain


class Cached:
    @functools.cached_property
    def gain(self) -> float:
        return ELSEWHERE["gain"]


def _made_module() -> types.ModuleType:
    made = types.ModuleType("made_for_a_test")
    made.__getattr__ = lambda _name: ELSEWHERE["gain"]  # pyright: ignore[reportAttributeAccessIssue]
    return made


def _set_and_forget(own: Any, value: float) -> None:
    ELSEWHERE["gain"] = value
    vars(own).clear()


BY_ITS_NAME = 2.0


def _entered(own: Special) -> float:
    with own as gain:
        return gain


def _set_elsewhere(_own: object, value: float) -> None:
    ELSEWHERE["gain"] = value


class Two:
    pass


class Three:
    pass


class Kinds(enum.Enum):
    PLAIN = types.SimpleNamespace(gain=2.0)


TOKENS: list[contextvars.Token[float]] = []
UNSET: contextvars.ContextVar[float] = contextvars.ContextVar("unset")
VARIABLE = contextvars.ContextVar("gain", default=2.0)
HOLDERS: dict[str, tuple[Callable[[], Any], Read, Write]] = {
    "an entry of a derived class": (lambda: Bag(a=2.0), *item("a")),
    "an entry that is not given out": (
        lambda: Lazy(a=2.0),
        lambda own: own.get("a"),
        lambda own, value: own.update(a=value),
    ),
    "an item that can't be walked to": (lambda: LazyRow([2.0]), *item()),
    "a dictionary's default": (
        lambda: collections.defaultdict(_two),
        lambda own: own.default_factory(),
        lambda own, value: setattr(own, "default_factory", _two if value == 2.0 else _three),
    ),
    "chained dictionaries": (lambda: collections.ChainMap({"a": 2.0}), *item("a")),
    "a read-only view": (
        lambda: types.MappingProxyType({"a": 2.0}),
        lambda own: own["a"],
        lambda own, value: _entries_behind(own).__setitem__("a", value),
    ),
    "the values of a dictionary": (
        lambda: {"a": 2.0}.values(),
        sum,
        lambda own, value: _entries_behind(own).__setitem__("a", value),
    ),
    "a method of a dictionary": (
        lambda: {"a": 2.0}.get,
        lambda own: own("a"),
        lambda own, value: own.__self__.__setitem__("a", value),
    ),
    "a method of a list": (
        lambda: [2.0].__getitem__,
        lambda own: own(0),
        lambda own, value: own.__self__.__setitem__(0, value),
    ),
    "bytes": (lambda: bytearray(b"\x02"), lambda own: own[0], lambda own, value: own.__setitem__(0, int(value))),
    "a view of bytes": (
        lambda: memoryview(bytearray(b"\x02")),
        lambda own: own[0],
        lambda own, value: own.__setitem__(0, int(value)),
    ),
    "an array of Python's": (lambda: array.array("d", [2.0]), *item()),
    "a masked array": (lambda: np.ma.array([2.0], mask=[False]), *item()),
    "a number of C's": (
        lambda: ctypes.c_double(2.0),
        lambda own: own.value,
        lambda own, value: setattr(own, "value", value),
    ),
    "a structure of C's": (lambda: Structure(2.0, None), *ATTRIBUTE),
    "an array of C's": (lambda: (ctypes.c_double * 2)(2.0, 1.0), *item()),
    "the order of a dictionary": (
        lambda: collections.OrderedDict(two=2.0, three=3.0),
        lambda own: next(iter(own.values())),
        _set_order,
    ),
    "an ordered dictionary that gives nothing out": (
        lambda: LazyOrder(a=2.0),
        lambda own: collections.OrderedDict.__getitem__(own, "a"),
        lambda own, value: collections.OrderedDict.__setitem__(own, "a", value),
    ),
    "a context variable without a value": (
        lambda: UNSET,
        lambda own: own.get(2.0),
        _set_or_reset,
    ),
    "a context variable": (lambda: VARIABLE, lambda own: own.get(), lambda own, value: own.set(value)),
    "a weak reference": (
        lambda: weakref.ref(KEPT),
        lambda own: own().gain,
        lambda own, value: set_gain(own(), value),
    ),
    "a dictionary of weak references": (
        lambda: weakref.WeakValueDictionary(a=KEPT),
        lambda own: own["a"].gain,
        lambda own, value: set_gain(own["a"], value),
    ),
    "a queue": (
        queue.Queue,
        lambda own: own.queue[0] if own.queue else 2.0,
        lambda own, value: (own.queue.clear(), own.put(value)),
    ),
    "the environment": (lambda: None, lambda _own: float(os.environ.get("MEMFIT_TEST_GAIN", "2")), _set_environment),
    "the environment by a function": (
        lambda: None,
        lambda _own: float(os.getenv("MEMFIT_TEST_GAIN", "2")),
        _set_environment,
    ),
    "what computes an attribute": (
        Asking,
        lambda own: own.gain,
        lambda _own, value: setattr(Asking.__dict__["gain"], "value", value),
    ),
    "an attribute that its class makes up": (Special, lambda own: own.anything, _set_elsewhere),
    "an item that its class makes up": (Special, lambda own: own[0], _set_elsewhere),
    "a truth value": (Special, lambda own: 2.0 if own else 3.0, _set_elsewhere),
    "a context manager": (Special, _entered, _set_elsewhere),
    "an index": (Special, lambda own: [1.0, 1.0, 2.0, 3.0][own], _set_elsewhere),
    "a format": (Special, lambda own: float(f"{own}"), _set_elsewhere),
    "what comes next": (Special, next, _set_elsewhere),
    "an item of a class": (Special, lambda _own: Special[0], _set_elsewhere),
    "a partial method": (Special, lambda own: own.once(), _set_elsewhere),
    "an attribute that a metaclass makes up": (lambda: Answered, lambda own: own.anything, _set_elsewhere),
    "an attribute that a module makes up": (_made_module, lambda own: own.anything, _set_elsewhere),
    "an attribute of a base class": (Below, Below.above, lambda _own, value: setattr(Above, "gain", value)),
    "a cached property": (Cached, lambda own: own.gain, _set_and_forget),
    "what a proxy stands for": (lambda: weakref.proxy(KEPT), *ATTRIBUTE),
    "a global by its name": (
        lambda: None,
        lambda _own: globals()["BY_ITS_NAME"],
        lambda _own, value: globals().update(BY_ITS_NAME=value),
    ),
    "a global of a module that is looked up": (
        lambda: None,
        lambda _own: sys.modules[__name__].BY_ITS_NAME,
        lambda _own, value: globals().update(BY_ITS_NAME=value),
    ),
    "a class of a class": (lambda: OfKind, lambda own: own.gain, lambda _own, value: setattr(Kind, "gain", value)),
    "a distribution": (
        lambda: torch.distributions.Normal(2.0, 1.0),
        lambda own: own.mean,
        lambda own, value: setattr(own, "loc", torch.tensor(value)),
    ),
    "a class that isinstance asks for": (
        Two,
        lambda own: 2.0 if isinstance(own, Two) else 3.0,
        lambda own, value: setattr(own, "__class__", Two if value == 2.0 else Three),
    ),
    "a member of an enumeration": (
        lambda: Kinds,
        lambda kinds: kinds.PLAIN.value.gain,
        lambda kinds, value: setattr(kinds.PLAIN.value, "gain", value),
    ),
}
KEPT = with_gain(Plain())


def _entries_behind(view: Any) -> dict[Any, Any]:
    (entries,) = (found for found in gc.get_referents(view) if isinstance(found, dict))
    return entries


def check(holder: Any, read: Read, write: Write) -> None:
    """Run planned steps of a loss that reads a number, before and after it is set, beside the same loss in eager."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
    batch = torch.randn(8, 16)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean() * read(holder)

    write(holder, 2.0)
    step = memfit.fit(model, loss, batch, budget="64MiB", planner="none")
    outcomes: list[float] = []
    for value in (2.0, 3.0, 2.0):
        write(holder, value)
        for _ in range(4):
            model.zero_grad()
            outcomes.append(step(batch).item())
            assert outcomes[-1] == loss(model, batch).item(), f"with {value}"
    assert outcomes[0] != outcomes[4] and outcomes[0] == outcomes[-1]
    assert len(step.plans) <= 2


@pytest.fixture(autouse=True)
def _environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_TEST_GAIN", "2.0")


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_ATTRIBUTES)
def test_an_attribute_of(name: str) -> None:
    check(with_gain(WITH_ATTRIBUTES[name]()), *ATTRIBUTE)


@pytest.mark.slow
@pytest.mark.parametrize("name", HOLDERS)
def test_what_is_held_by(name: str) -> None:
    make, read, write = HOLDERS[name]
    check(make(), read, write)


def _rotated(entries: Any) -> float:
    first = next(iter(entries))
    entries[first] = entries.pop(first)
    return entries[first]


def _moved(entries: Any) -> float:
    entries.move_to_end("b")
    return entries["b"]


def test_a_step_that_turns_a_dictionary_round_is_no_graph() -> None:
    entries = {"a": 2.0, "b": 3.0}
    model, values = nn.Linear(16, 16), torch.ones(2, 16)

    def loss(given: Any, batch: Any) -> torch.Tensor:
        return given(batch).mean() * _rotated(entries)

    step = memfit.fit(model, loss, values, budget="1MiB", planner="none")
    assert isinstance(step, CheckpointedStep)
    assert list(entries) == ["a", "b"]
    losses = [step(values).item() for _ in range(4)]
    assert losses == [(model(values).mean() * factor).item() for factor in (2.0, 3.0, 2.0, 3.0)]


def test_a_step_may_move_what_it_has_used_to_the_end() -> None:
    entries = collections.OrderedDict(a=1.0, b=2.0, c=4.0)
    check(entries, _moved, lambda own, value: own.__setitem__("b", value))
