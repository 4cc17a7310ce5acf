"""Types of the engine's arrays and records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Table(Protocol):
    """An array of records, read and written by the names of their fields, which numpy's own type does not know."""

    def __getitem__(self, key: Any, /) -> Any:
        """Return a record, a column, or a part of the table."""
        ...

    def __setitem__(self, key: Any, value: Any, /) -> None:
        """Replace a record, a column, or a part of the table."""
        ...

    def __len__(self) -> int:
        """Return the number of records."""
        ...

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the records."""
        ...

    def copy(self) -> Table:
        """Return a copy."""
        ...


def record(integers: str = "", *, floats: str = "", flags: str = "", unsigned: str = "") -> np.dtype[np.void]:
    """Return the type of records with these fields, in this order.

    >>> record("start end", flags="closed").names
    ('start', 'end', 'closed')

    Args:
        integers: names of int64 fields, with spaces between them.
        floats: of float64 fields.
        flags: of bool fields.
        unsigned: of uint64 fields.
    """
    kinds = (integers, np.int64), (floats, np.float64), (flags, np.bool_), (unsigned, np.uint64)
    return np.dtype([(name, kind) for names, kind in kinds for name in names.split()], align=True)
