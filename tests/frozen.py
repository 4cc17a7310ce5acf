"""Frozen objects: those that garbage collections leave out, though memfit finds the tensors and generators among them.

Half a million objects are imported by all tests together. Each planned step asks for a full collection, and looks
through all objects that are alive, for which `alive_objects` thaws them. It would take most of the time of small tests.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

from memfit.system import alive


class Frozen:
    """What was alive when the tests of a file began, thawed by no search for objects that are alive.

    The search takes its place in memfit before other files of memfit import it.
    """

    def __init__(self) -> None:
        self._wanted: list[Callable[[], Any]] = []
        self._is_frozen = False
        self.search_and_thaw = alive.alive_objects
        alive.alive_objects = self.search

    def freeze(self) -> None:
        """Freeze what is alive, without garbage, beside what is frozen already, which is not looked at again."""
        if not gc.get_freeze_count():
            self._wanted.clear()
        while gc.collect():
            pass
        self._wanted += map(_reference, filter(_is_wanted, gc.get_objects()))
        gc.freeze()
        self._is_frozen = True

    def thaw(self) -> None:
        """Leave all objects to garbage collections."""
        gc.unfreeze()
        self._wanted.clear()
        self._is_frozen = False
        while gc.collect():
            pass

    def search(self) -> list[Any]:
        """Return the objects that are alive, of the frozen ones those that memfit searches for."""
        if not self._is_frozen:
            return self.search_and_thaw()
        kept = [thing for reference in self._wanted if (thing := reference()) is not None]
        return [*kept, *gc.get_objects()]


def _is_wanted(thing: object) -> bool:
    """Return whether it is a tensor or a random generator; optimizers are looked for, too, but not of other files."""
    kind = type(thing)
    torch, draws = sys.modules.get("torch"), sys.modules.get("memfit.capture.draws")
    return (torch is not None and issubclass(kind, torch.Tensor)) or (
        draws is not None and issubclass(kind, draws.GENERATORS)
    )


def _reference(thing: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(thing)
    except TypeError:  # some generators of NumPy's
        return lambda: thing


FROZEN = Frozen()
