"""Registries of planners and packers: a kind by its name, made with options that are the fields of its dataclass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from memfit.errors import InvalidOptionError

T = TypeVar("T")


def make_registered(what: str, kinds: Mapping[str, type[T]], name: str, options: Mapping[str, object]) -> T:
    """Return the thing called `name` with these options.

    Args:
        what: `planner` or `packer`, for messages.
        kinds: all of them by name; each is a dataclass.
        name: one of them.
        options: of its fields.

    Raises:
        InvalidOptionError: no such thing, or it has no such option; the message lists those that exist.
    """
    if name not in kinds:
        raise InvalidOptionError(f"no {what} is called {name!r}; there are {', '.join(sorted(kinds))}")
    known = options_of(kinds[name])
    for option in options:
        if option not in known:
            there = ", ".join(known) if known else "none"
            raise InvalidOptionError(f"{what} {name!r} has no option {option!r}; its options: {there}")
    return kinds[name](**options)


def options_of(kind: type[Any]) -> dict[str, str]:
    """Return option -> what it does, for the lists of the command line."""
    return {field.name: field.metadata.get("help", "") for field in dataclasses.fields(kind)}


def made_without(kind: type[T], without: str, *, owner: str, known: Sequence[str]) -> T:
    """Return a record of parts that can be switched off, with all switched on but some.

    Args:
        kind: a dataclass with a field for each part, true by default.
        without: names of parts, with commas between them; empty switches nothing off.
        owner: whose parts they are, for messages.
        known: the parts that it has.

    Raises:
        InvalidOptionError: it has no such part; the message lists those that it has.
    """
    off = [name for each in without.split(",") if (name := each.strip())]
    for name in off:
        if name not in known:
            raise InvalidOptionError(f"{owner} has no part {name!r}; its parts: {', '.join(known)}")
    return kind(**dict.fromkeys(off, False))
