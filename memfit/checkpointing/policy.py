"""Policies as plain data: batch size -> block -> `none`, `full`, or operators whose results are kept. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from memfit.checkpointing.choices import FULL, NONE, Rule
from memfit.checkpointing.groups import INPUT_RULES
from memfit.errors import InvalidFileError
from memfit.memory.contract import WindowKind

Policy = Mapping[tuple[int, WindowKind], Mapping[str, Rule]]
"""(elements of the batch, kind of window) -> name of a module -> rule."""

_LATER = " later"
_TEXTS = (NONE, FULL, *INPUT_RULES)


def to_plain(policy: Policy) -> dict[str, dict[str, Any]]:
    """Return a policy as plain data, which JSON takes.

    >>> to_plain({(64, WindowKind.LATER): {"h.0": (("aten.mm.default", 1),)}})
    {'64 later': {'h.0': ['aten.mm.default#1']}}
    """
    return {
        f"{numel}{_LATER if kind is WindowKind.LATER else ''}": {
            name: rule if isinstance(rule, str) else [f"{op}#{nth}" for op, nth in rule] for name, rule in rules.items()
        }
        for (numel, kind), rules in policy.items()
    }


def read_policy(given: Mapping[str, Any] | str | Path) -> Policy:
    """Return a policy from plain data, or from a JSON file with it.

    >>> read_policy({"64": {"h.0": "full"}})
    {(64, <WindowKind.FIRST: 'first'>): {'h.0': 'full'}}

    Raises:
        InvalidFileError: no such file, no JSON, or other content.
    """
    where = "policy"
    if not isinstance(given, Mapping):
        where = str(given)
        try:
            given = json.loads(Path(given).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidFileError(f"{where}: cannot be read as a policy: {error}") from error
    if not isinstance(given, Mapping) or not given:
        raise InvalidFileError(f"{where}: expected batch size -> block -> rule, as handle.policy() gives it")
    return {_size(where, key): _rules(f"{where}: {key}", rules) for key, rules in given.items()}


def _size(where: str, key: Any) -> tuple[int, WindowKind]:
    text = str(key)
    number = text.removesuffix(_LATER)
    if not number.isdecimal():
        raise InvalidFileError(f"{where}: {key!r} is no batch size; expected elements of the batch, such as 4096")
    return int(number), WindowKind.LATER if text.endswith(_LATER) else WindowKind.FIRST


def _rules(where: str, rules: Any) -> dict[str, Rule]:
    if not isinstance(rules, Mapping):
        raise InvalidFileError(f"{where}: expected block -> rule, got {rules!r}")
    of = cast("Mapping[str, Any]", rules)
    return {str(name): _rule(f"{where}: {name}", rule) for name, rule in of.items()}


def _rule(where: str, rule: Any) -> Rule:
    if isinstance(rule, str) and rule in _TEXTS:
        return rule
    if isinstance(rule, list):
        pairs = [str(text).rpartition("#") for text in cast("list[object]", rule)]
        if all(name and nth.isdecimal() for name, _, nth in pairs):
            return tuple((name, int(nth)) for name, _, nth in pairs)
    raise InvalidFileError(
        f"{where}: {rule!r} is no rule; expected {', '.join(map(repr, _TEXTS))}, or operators such as "
        "['aten.addmm.default#0']"
    )


def rules_for(policy: Policy, numel: int, kind: WindowKind) -> Mapping[str, Rule]:
    """Return the rules for a batch: those of the smallest batch that is as large, or else of the largest one.

    Args:
        policy: by (elements, kind of window).
        numel: elements of the batch.
        kind: of the pass: its rules are preferred among those of one size.
    """
    sizes = sorted(policy, key=lambda key: (key[0] < numel, key[0] if key[0] >= numel else -key[0], key[1] is not kind))
    return policy[sizes[0]]
