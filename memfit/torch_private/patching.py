"""Attributes of torch's classes and modules that are other ones inside a block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute, and set it back at the end of the block, or delete it where `owner` has inherited it.

    Args:
        owner: a class or a module.
        name: of the attribute.
        value: of it, inside the block.
    """
    is_own, found = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, found)
        else:
            delattr(owner, name)


class Inside:
    """A context of any number of threads: the first to come patches, the last to go puts back.

    Args:
        patch: is given where to enter the patches.
    """

    def __init__(self, patch: Callable[[ExitStack], None]) -> None:
        self._patch = patch
        self._lock, self._patches, self._count = threading.Lock(), ExitStack(), 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._count:
                self._patch(self._patches)
            self._count += 1

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                self._patches.close()
