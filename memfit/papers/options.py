"""Options of the planners that papers published: one error for a value that is out of range."""

from __future__ import annotations

from typing import NoReturn

from memfit.errors import InvalidOptionError
from memfit.planners.protocols import Planner


def refuse(planner: Planner, option: str, expected: str) -> NoReturn:
    """Raise InvalidOptionError for the value that an option of a planner has.

    Args:
        planner: has the option as a field.
        option: its name.
        expected: what its value should be.
    """
    value = getattr(planner, option)
    raise InvalidOptionError(f"planner {planner.name!r}: option {option} is {value!r}, expected {expected}")
