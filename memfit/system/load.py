"""What other processes take of the machine while something is measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

BUSY = 0.1
"""Share of the processors that others took, above which times are of a busy moment."""

_STAT = Path("/proc/stat")  # man 5 proc_stat: user nice system idle iowait irq softirq steal
_RUNNING = (0, 1, 2, 5, 6, 7)  # of these fields, those in which a processor works, for this system or for another one
_TICKS = 2  # by which the system's count may be late, on each processor


class Load:
    """Measures from when it is made what share of the machine's processors others took."""

    def __init__(self) -> None:
        self._began = _now()

    def others(self) -> float:
        """Return the share of the processors, 0 to 1, that were not this process's and not idle; 0 if unknown.

        Spans below the resolution of the system's counts, some hundredths of a second, count as quiet.
        """
        began, now = self._began, _now()
        if began is None or now is None:
            return 0.0
        wall, own, running = (after - before for before, after in zip(began, now, strict=True))
        processors = os.cpu_count() or 1
        late = _TICKS * processors / os.sysconf("SC_CLK_TCK")
        return max(0.0, min(1.0, (running - own - late) / (processors * wall))) if wall > 0 else 0.0


def _now() -> tuple[float, float, float] | None:
    """Return the seconds of wall time, of this process, and those in which all processors worked."""
    try:
        ticks = [int(field) for field in _STAT.read_text().split("\n", 1)[0].split()[1:]]
    except (OSError, ValueError):  # not Linux, or not to be read
        return None
    running = sum(ticks[place] for place in _RUNNING if place < len(ticks)) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), time.process_time(), running
