"""Draws from generators that are not torch's: a step that draws from one is refused, whoever holds the generator.

The captured step runs no Python, so that it would repeat one drawn number forever. Python's and NumPy's generators are
found among all objects that are alive, and their states are compared before and after. Where other threads run, only
what this thread draws counts: the step's code is run again, while NumPy's generators are locked against other threads
and Python's are watched by a profile function.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import compress
from typing import Any

import numpy as np
import torch

from memfit.errors import NoGraphError
from memfit.system.alive import alive_objects
from memfit.torch_private.patching import replaced

GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)
_SETTERS = frozenset(["manual_seed", "seed", "set_state", "set_offset", "graphsafe_set_state"])


class HostGenerators:
    """Python's and NumPy's generators that are alive, and their states."""

    def __init__(self) -> None:
        self._owners = _owners()
        self._before = [_state(generator) for generator, _ in self._owners]

    def owners(self) -> list[Any]:
        """Return the generators."""
        return [owner for owner, _ in self._owners]

    def changed(self) -> list[int]:
        """Return the numbers of the generators whose states are others than before."""
        pairs = zip(self._owners, self._before, strict=True)
        return [number for number, ((generator, _), before) in enumerate(pairs) if differ(_state(generator), before)]

    def names(self, numbers: list[int]) -> str:
        """Return what the generators are called, in words."""
        return " and ".join(dict.fromkeys(self._owners[number][1] for number in numbers))

    def put_back(self, numbers: list[int]) -> None:
        """Set generators to the states that they had."""
        for number in numbers:
            _set_state(self._owners[number][0], self._before[number])

    def drawn_by_this_thread(self, run: Callable[[], Any], numbers: list[int]) -> list[int]:
        """Return those among `numbers` that `run` draws from, on this thread.

        Args:
            run: runs the step's code again.
            numbers: generators whose states have changed.
        """
        if len(sys._current_frames()) == 1:
            return numbers
        called: set[int] = set()

        def watch(_frame: Any, event: str, function: Any) -> None:
            if event == "c_call":
                called.add(id(getattr(function, "__self__", None)))

        with ExitStack() as stack:
            locked = [number for number in numbers if not isinstance(self._owners[number][0], random.Random)]
            for number in locked:
                stack.enter_context(_bits(self._owners[number][0]).lock)
            before = {number: _state(self._owners[number][0]) for number in locked}
            profile = sys.getprofile()
            sys.setprofile(watch)
            try:
                with suppress(Exception):  # the first run has raised it
                    run()
            finally:
                _profile_again(profile)
            drawn = {number for number in locked if differ(_state(self._owners[number][0]), before[number])}
        return [number for number in numbers if number in drawn or id(self._owners[number][0]) in called]


def _profile_again(profile: Any) -> None:
    """Set what `sys.getprofile` returned: before Python 3.12 it may be a running cProfile, which is no function."""
    if callable(profile) or profile is None:
        sys.setprofile(profile)
    else:
        sys.setprofile(None)
        profile.enable()


@contextmanager
def host_draws_refused(run_again: Callable[[], Any]) -> Iterator[None]:
    """Refuse a step whose code draws from Python's or NumPy's generators inside the block.

    Args:
        run_again: runs the same code once more, where it must be told which thread has drawn.

    Raises:
        NoGraphError: names the generator, whose state is restored.
    """
    generators = HostGenerators()
    changed: list[int] = []
    try:
        yield
    finally:
        changed = generators.changed()
        if changed:
            changed = generators.drawn_by_this_thread(run_again, changed)
            generators.put_back(changed)
    if changed:
        raise NoGraphError(
            f"the step draws from {generators.names(changed)}, whose numbers a planned step would never draw again",
            "draw from torch's generators (torch.rand), or draw outside of the step and pass it in the batch",
        )


class _Seedless:
    """Stands for one of torch's default generators: refuses to be seeded by one thread, and passes all else on."""

    def __init__(self, generator: torch.Generator, thread: int) -> None:
        self._generator = generator
        self._thread = thread

    def __getattr__(self, name: str) -> Any:
        if name in _SETTERS and threading.get_ident() == self._thread:
            raise NoGraphError(
                f"the step calls `{name}` of torch's generator (as torch.manual_seed, torch.set_rng_state and "
                "torch.random.fork_rng do), which a planned step would not",
                "seed outside of the step, or pass a tensor that was drawn outside",
            )
        return getattr(self._generator, name)


@contextmanager
def seeding_refused() -> Iterator[None]:
    """Refuse a step that seeds torch's default generators, or sets their states, inside the block on this thread.

    Raises:
        NoGraphError: from the line that does it.
    """
    thread = threading.get_ident()
    cpu, cuda = torch.random.default_generator, torch.cuda.default_generators
    seedless = tuple(_Seedless(generator, thread) for generator in cuda)
    with (
        replaced(torch.random, "default_generator", _Seedless(cpu, thread)),
        replaced(torch.cuda, "default_generators", seedless),
    ):
        yield


def place_of(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return a getter and a setter of the state of a generator of Python's or NumPy's."""
    owner = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
    return partial(_state, owner), partial(_set_state, owner)


def _owners() -> list[tuple[Any, str]]:
    """Return each generator with what it is called: those of the modules, then all other instances."""
    modules = (random.random.__self__, np.random.mtrand._rand)  # pyright: ignore[reportFunctionMemberAccess]
    found: dict[int, tuple[Any, str]] = {id(modules[0]): (modules[0], "Python's `random`")}
    found[id(_bits(modules[1]))] = modules[1], "`numpy.random`"
    things = alive_objects()
    wanted = set(_with_subclasses(GENERATORS))
    for thing in compress(things, map(wanted.__contains__, map(type, things))):  # of millions, without a loop of Python
        kind = type(thing)
        if issubclass(kind, random.Random):
            if not issubclass(kind, random.SystemRandom):
                found.setdefault(id(thing), (thing, f"an instance of {kind.__module__}.{kind.__qualname__}"))
        elif issubclass(kind, np.random.RandomState):
            found.setdefault(id(_bits(thing)), (thing, "an instance of numpy.random.RandomState"))
        else:
            found.setdefault(id(_bits(thing)), (_bits(thing), "an instance of numpy.random.Generator"))
    return list(found.values())


def _with_subclasses(kinds: Iterable[type]) -> Iterator[type]:
    for kind in kinds:
        yield kind
        yield from _with_subclasses(kind.__subclasses__())


def _bits(generator: Any) -> Any:
    """Return NumPy's bit generator, which has the state and the lock."""
    if isinstance(generator, np.random.RandomState):
        return generator._bit_generator
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)  # with the normal number that it keeps for its next call
    return generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.state = state


def differ(left: Any, right: Any) -> bool:
    """Return whether two states differ: tuples of Python's, or dictionaries of numbers, arrays and dictionaries."""
    if isinstance(left, dict):
        return any(differ(left[key], right[key]) for key in left)  # pyright: ignore[reportUnknownVariableType]
    if isinstance(left, np.ndarray):
        return not np.array_equal(left, right)  # pyright: ignore[reportUnknownArgumentType]
    return bool(left != right)
