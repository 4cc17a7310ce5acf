"""Numbers and names as text: seconds, ratios, counts, and names without control characters."""

from __future__ import annotations

from memfit.graph import Graph
from memfit.system.lines import printable

_AGES = ((86_400, "day"), (3_600, "hour"), (60, "minute"))
_SECOND_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def seconds_text(seconds: float | None) -> str:
    """Return a time in the unit that suits it; a dash for one that is not known.

    >>> seconds_text(1.136), seconds_text(0.0123), seconds_text(4e-7), seconds_text(0.0)
    ('1.136 s', '12.3 ms', '400 ns', '0 s')
    """
    if seconds is None:
        return "–"
    if seconds == 0:
        return "0 s"
    sign, size = ("-", -seconds) if seconds < 0 else ("", seconds)
    scale, unit = next((pair for pair in _SECOND_UNITS if size >= pair[0] * 0.9995), _SECOND_UNITS[-1])
    number = size / scale
    digits = 3 if unit == "s" and number < 100 else 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{sign}{number:.{digits}f} {unit}"


def age_text(seconds: float | None) -> str:
    """Return that a plan was kept so long ago, to follow how it was made; empty of one that was made now.

    >>> age_text(7_300), age_text(59), age_text(200_000), age_text(None)
    (', kept 2 hours ago', ', kept a moment ago', ', kept 2 days ago', '')
    """
    if seconds is None:
        return ""
    size, unit = next((pair for pair in _AGES if seconds >= pair[0]), (0, ""))
    return f", kept {count_text(int(seconds // size), unit)} ago" if size else ", kept a moment ago"


def change_text(ratio: float | None) -> str:
    """Return a relative change, such as an overhead, with its sign; a dash for one that is not known.

    >>> change_text(0.1153), change_text(0.0), change_text(-0.002)
    ('+11.5%', '+0.0%', '-0.2%')
    """
    if ratio is None:
        return "–"
    return f"{ratio + 0.0:+.1%}" if abs(ratio) >= 0.0005 else "+0.0%"


def share_text(part: float, whole: float) -> str:
    """Return `part` of `whole` in percent; a dash where the whole is zero.

    >>> share_text(5, 20), share_text(1, 0)
    ('25%', '–')

    Args:
        part: in the unit of `whole`.
        whole: 0 or more.
    """
    if not whole:
        return "–"
    share = part / whole
    return f"{share:.0%}" if share == 0 or share >= 0.0995 else f"{share:.1%}"


def count_text(count: int, noun: str) -> str:
    """Return a count, 0 or more, with its noun, which gets an s for any count but 1.

    >>> count_text(1, "storage"), count_text(1200, "storage"), count_text(2, "time")
    ('1 storage', '1,200 storages', '2 times')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def status_text(status: str) -> str:
    """Return a status in words.

    >>> status_text("timed_out"), status_text("optimal")
    ('none found', 'optimal')
    """
    return {"timed_out": "none found"}.get(
        status, status.replace("_", " ")
    )  # a planner may have tried all of its plans


def times_text(count: int) -> str:
    """Return a count as once, twice, or `n` times."""
    return {1: "once", 2: "twice"}.get(count, f"{count:,} times")


def module_text(graph: Graph, storage: int) -> str:
    """Return the module of the op that writes a storage, printable; empty for residents and arrivals.

    Args:
        graph: the step.
        storage: a storage's id.
    """
    writer = graph.writer(storage)
    return "" if writer is None else printable(writer.module)
