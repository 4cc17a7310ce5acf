"""The objects that are alive in this process."""

from __future__ import annotations

import gc
from typing import Any


def alive_objects() -> list[Any]:
    """Return all objects that Python's garbage collector knows.

    Those that somebody has frozen (`gc.freeze`) would not be among them, and are thawed. They are not frozen again: the
    younger ones would be frozen with them, and never be collected.
    """
    if gc.get_freeze_count():
        gc.unfreeze()
    return gc.get_objects()
