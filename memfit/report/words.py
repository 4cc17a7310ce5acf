"""Figures as people read them: seconds, ratios and counts in words, names with the control characters taken out."""

from __future__ import annotations

_SECOND_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def seconds_text(seconds: float) -> str:
    """Return a time in the unit that suits it.

    >>> seconds_text(1.136), seconds_text(0.0123), seconds_text(4e-7), seconds_text(0.0)
    ('1.136 s', '12.3 ms', '400 ns', '0 s')
    """
    if seconds == 0:
        return "0 s"
    sign, size = ("-", -seconds) if seconds < 0 else ("", seconds)
    scale, unit = next((pair for pair in _SECOND_UNITS if size >= pair[0] * 0.9995), _SECOND_UNITS[-1])
    number = size / scale
    digits = 3 if unit == "s" and number < 100 else 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{sign}{number:.{digits}f} {unit}"


def change_text(ratio: float) -> str:
    """Return a relative change with its sign: an overhead, say.

    >>> change_text(0.1153), change_text(0.0), change_text(-0.002)
    ('+11.5%', '+0.0%', '-0.2%')
    """
    return f"{ratio + 0.0:+.1%}" if abs(ratio) >= 0.0005 else "+0.0%"


def share_text(part: float, whole: float) -> str:
    """Return `part` of `whole` in percent; a dash where there is no whole.

    >>> share_text(5, 20), share_text(1, 0)
    ('25%', '–')
    """
    if not whole:
        return "–"
    share = part / whole
    return f"{share:.0%}" if share == 0 or share >= 0.0995 else f"{share:.1%}"


def count_text(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun.

    >>> count_text(1, "storage"), count_text(1200, "storage"), count_text(2, "time")
    ('1 storage', '1,200 storages', '2 times')
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def times_text(count: int) -> str:
    """Return how often something happens: once, twice, `n` times."""
    return {1: "once", 2: "twice"}.get(count, f"{count:,} times")


def printable(name: str) -> str:
    """Return a name from a graph with all that could move a terminal's cursor replaced by `?`.

    >>> printable("relu\\x1b[2J\\n")
    'relu?[2J?'
    """
    if name.isprintable():
        return name
    return "".join(character if character.isprintable() else "?" for character in name)
