"""Attributes of torch's classes and modules that are other ones inside a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute that `owner` itself has, and set it back at the end of the block.

    Args:
        owner: a class or a module.
        name: of the attribute.
        value: of it, inside the block.
    """
    found = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, found)
