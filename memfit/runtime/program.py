"""`Program`: the schedule of a captured step, compiled to Python functions."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfit.binding import Value
from memfit.capture import Captured
from memfit.runtime.lowering import LoweredHalf, lower
from memfit.schedule import Schedule

_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """One function of a program.

    Attributes:
        function: takes a list of tensors, which it empties, and returns a list: the values for the user, then the
            tensors of `saved`.
        takes: the storages of its arguments, in order.
        saved: the storages that the next half takes.
    """

    function: Callable[[list[Any]], list[Any]]
    takes: tuple[int, ...]
    saved: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The functions of a schedule: one for a whole step, two around a forward/backward boundary.

    Attributes:
        halves: the functions, in the order of their calls.
        source: their Python code.
    """

    halves: tuple[Half, ...]
    source: str


def make_program(captured: Captured, schedule: Schedule, outputs: Sequence[Sequence[Value]]) -> Program:
    """Compile a schedule that `check` has accepted.

    Args:
        captured: the step that the schedule is of.
        schedule: the instructions.
        outputs: for each half, the values that it returns to the user.
    """
    lowered, namespace = lower(captured.graph, captured.binding, schedule, outputs)
    names = ("step",) if len(lowered) == 1 else ("forward", "backward")
    halves: list[Half] = []
    sources: list[str] = []
    for number, (name, half) in enumerate(zip(names, lowered, strict=True)):
        later = {storage for following in lowered[number + 1 :] for storage in following.takes}
        saved = tuple(sorted(half.live & later))
        sources.append(_source(name, half, saved))
        function = _compile(captured.graph.name, name, sources[-1], namespace)
        halves.append(Half(function=function, takes=half.takes, saved=saved))
    return Program(halves=tuple(halves), source="\n".join(sources))


def _source(name: str, half: LoweredHalf, saved: tuple[int, ...]) -> str:
    lines = [f"def {name}(arguments):"]
    if half.takes:
        names = ", ".join(f"s{storage}" for storage in half.takes)
        lines.append(f"    {names}{',' if len(half.takes) == 1 else ''} = arguments")
    lines.append("    arguments.clear()")
    lines += [f"    {line}" for line in half.lines]
    returned = [*half.outputs, *(f"s{storage}" for storage in saved)]
    lines.append(f"    return [{', '.join(returned)}]")
    return "\n".join(lines) + "\n"


def _compile(graph_name: str, name: str, source: str, namespace: dict[str, Any]) -> Callable[[list[Any]], list[Any]]:
    filename = f"<memfit {name} of {ascii(graph_name)[1:-1]} #{next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope = dict(namespace)
    exec(compile(source, filename, "exec"), scope)  # only ever source that `lower` made
    return torch.no_grad()(scope[name])
