"""Program: the lowered schedule of a captured step as Python functions that can be called."""

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
    """One function of a program: it takes a list of tensors, which it empties, and returns a list.

    `takes` are the storages of its arguments in order. It returns the tensors of `outputs` (Values), then those of the
    `saved` storages.
    """

    function: Callable[[list[Any]], list[Any]]
    takes: tuple[int, ...]
    outputs: tuple[Value, ...]
    saved: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The functions of a schedule: one for a whole step, two around a boundary; `source` is their code."""

    halves: tuple[Half, ...]
    source: str


def make_program(captured: Captured, schedule: Schedule, outputs: Sequence[Sequence[Value]]) -> Program:
    """Compile `schedule`; `outputs` are the values that each half hands to the user. Call `check` on the schedule
    first.
    """
    lowered = lower(captured.graph, captured.binding, schedule, outputs)
    later: set[int] = set()
    saved: list[tuple[int, ...]] = []
    for half in reversed(lowered.halves):
        saved.append(tuple(storage for storage in half.gives if storage in later))
        later = set(half.takes)
    saved.reverse()
    functions: list[Half] = []
    sources: list[str] = []
    for number, half in enumerate(lowered.halves):
        name = "step" if len(lowered.halves) == 1 else ("forward", "backward")[number]
        source = _source(name, half, saved[number])
        sources.append(source)
        function = _compile(captured.graph.name, name, source, lowered.namespace)
        functions.append(Half(function=function, takes=half.takes, outputs=tuple(outputs[number]), saved=saved[number]))
    return Program(halves=tuple(functions), source="\n".join(sources))


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
    filename = f"<memfit {name} of {graph_name} #{next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope = dict(namespace)
    exec(compile(source, filename, "exec"), scope)  # the source is ours: it is made from a checked schedule
    return torch.no_grad()(scope[name])
