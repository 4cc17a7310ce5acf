"""How far iterators are that a step may advance: Python's own, and those of DataLoaders; and setting them back."""

from __future__ import annotations

import gc
import operator
import warnings
from types import GeneratorType
from typing import Any

from memfit.capture.copies import ATOMS


class Position:
    """How far an iterator is that a step may advance: one of Python's own, or a DataLoader's.

    Args:
        path: names it in messages.
        iterator: see above.
    """

    def __init__(self, path: str, iterator: Any) -> None:
        self.path, self.iterator = path, iterator
        self.before = _position_of(iterator)

    @property
    def is_changed(self) -> bool:
        """Whether values were taken from it."""
        return _position_of(self.iterator) != self.before

    @property
    def may_be_set(self) -> bool:
        """Whether it can be set to where it was: it is over a sequence, and not at its end."""
        return isinstance(self.iterator, _OVER_SEQUENCES) and None not in (self.before, self.read())

    def read(self) -> Any:
        """Return where it is."""
        return _position_of(self.iterator)

    def write(self, position: Any) -> None:
        """Set it to where `read` has said that it was."""
        self.iterator.__setstate__(position)

    def put_back(self) -> bool:
        """Set it back; return whether that was possible."""
        if not self.may_be_set:
            return False
        self.write(self.before)
        return True


_OVER_SEQUENCES: Any = tuple(type(iter(kind)) for kind in ([], (), "", "é", b"", bytearray()))
# not those over ranges, which from Python 3.12 on cannot be set back


def is_plain_iterator(value: Any) -> bool:
    """Return whether a value is an iterator whose position `Position` knows."""
    cls = type(value)
    if any(each.__name__ == "_BaseDataLoaderIter" for each in cls.__mro__):
        return True
    return cls.__module__ in ("builtins", "itertools") and hasattr(cls, "__next__")


def _position_of(iterator: Any) -> Any:
    """Return what differs once a value was taken from an iterator; of the user's values, none is compared."""
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        if frame is None:
            return None
        return frame.f_lasti, {name: _known(value) for name, value in frame.f_locals.items()}
    if hasattr(iterator, "_num_yielded"):
        return iterator._num_yielded
    if isinstance(iterator, _OVER_SEQUENCES):
        state = iterator.__reduce__()[2:]
        return state[0] if state else None
    inner, state = _flat(gc.get_referents(iterator)), None  # `zip` and `map` have a tuple of iterators
    if type(iterator).__module__ == "itertools":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            inner = _flat(iterator.__reduce__()[1:])
        state = list(map(_known, inner))
    try:
        left: Any = operator.length_hint(iterator, -1)
    except OverflowError:  # a range of so many
        left = repr(iterator.__reduce__()[1:])
    return left, state, [_position_of(each) for each in inner if is_plain_iterator(each)]


def _flat(values: Any) -> list[Any]:
    """Return values, and those in tuples among them in the place of these."""
    return [each for value in values for each in (value if isinstance(value, tuple) else (value,))]


def _known(value: Any) -> Any:
    """Return what tells a number, a text or a tuple of such from another, and any other object by itself."""
    if isinstance(value, tuple):
        return tuple(map(_known, value))
    if is_plain_iterator(value):  # made anew each time it is asked for
        return None
    return repr(value) if type(value) in ATOMS else id(value)
