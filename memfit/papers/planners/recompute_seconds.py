"""The seconds of a recomputation from what is on the device, as recomputations are chosen one after the other."""

from __future__ import annotations

import numpy as np

from memfit.planners.engine.retention.instance import Instance


class RecomputeSeconds:
    """Seconds to recompute a storage at a position, sources that were dropped themselves included.

    Seconds are counted once, and again only for storages one of whose sources was dropped since.
    """

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        tables = instance.tables
        self._writer: list[int] = tables.storages["writer"].tolist()
        self._last_use: list[int] = tables.intervals["start"][tables.storages["last_interval"]].tolist()
        self._last_allowed: list[int] = tables.positions["last_rematerialization"].tolist()
        self._seconds: list[float] = tables.positions["seconds"].tolist()
        self._dropped: dict[int, list[tuple[int, int]]] = {}
        self._found: dict[tuple[int, int], tuple[float, set[int]]] = {}

    def of(self, storage: int, position: int) -> float:
        """Return the seconds; infinite if an op on the way must not be recomputed.

        Args:
            storage: managed storage.
            position: where it is read.
        """
        if (storage, position) not in self._found:
            self._found[storage, position] = self._count(storage, position)
        return self._found[storage, position][0]

    def drop(self, storage: int, start: int, end: int) -> None:
        """Count a managed storage as gone between two positions.

        Args:
            storage: managed storage.
            start: the last position at which it is there.
            end: the position that needs it again; there it is still gone.
        """
        self._dropped.setdefault(storage, []).append((start, end))
        self._found = {key: found for key, found in self._found.items() if storage not in found[1]}

    def _count(self, storage: int, position: int) -> tuple[float, set[int]]:
        """Return the seconds, and the sources on the device."""
        total, sources = 0.0, set[int]()
        waiting, seen = [self._writer[storage]], {self._writer[storage]}
        while waiting:
            op = waiting.pop()
            if self._last_allowed[op] < position:
                return np.inf, sources
            total += self._seconds[op]
            for source in self._instance.reads(op):
                if self._is_there(source, position):
                    sources.add(source)
                elif self._writer[source] not in seen:
                    seen.add(self._writer[source])
                    waiting.append(self._writer[source])
        return total, sources

    def _is_there(self, storage: int, position: int) -> bool:
        gone = any(start < position <= end for start, end in self._dropped.get(storage, ()))
        return self._last_use[storage] >= position and not gone
