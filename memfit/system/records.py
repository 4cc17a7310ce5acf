"""Types of the arrays and records that compiled searches, packers and planners work on."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
Table = Any
"""An array of records, read and written by the names of their fields, which numpy's own type does not know."""


def record(
    integers: str = "", *, short: str = "", floats: str = "", flags: str = "", unsigned: str = ""
) -> np.dtype[np.void]:
    """Return the type of records with these fields, in this order.

    >>> record("start end", flags="closed").names
    ('start', 'end', 'closed')

    Args:
        integers: names of int64 fields, with spaces between them.
        short: of int32 fields.
        floats: of float64 fields.
        flags: of bool fields.
        unsigned: of uint64 fields.
    """
    kinds = (integers, np.int64), (short, np.int32), (floats, np.float64), (flags, np.bool_), (unsigned, np.uint64)
    return np.dtype([(name, kind) for names, kind in kinds for name in names.split()], align=True)
