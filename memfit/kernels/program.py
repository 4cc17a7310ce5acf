"""`Program`: the schedule of a captured step, compiled to Python functions."""

from __future__ import annotations

import itertools
import linecache
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from memfit.binding import Value
from memfit.capture import Captured
from memfit.kernels.absent_gradients import Absent
from memfit.kernels.lowering import Line, LoweredHalf, lower
from memfit.memory.host.layout import NO_HOST_COPIES, HostLayout
from memfit.memory.host.store import HostStore, leave, take_up
from memfit.schedule import Schedule

_numbers = itertools.count()
TICKET = -1  # in `Half.takes` and `Half.saved`: stands for the host copies that the forward half leaves (see `leave`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """One function of a program.

    Attributes:
        function: takes a list of tensors, which it empties, and returns a list: the values for the user, then the
            tensors of `saved`.
        takes: the storages of its arguments, in order.
        saved: the storages that the next half takes.

    Both may hold TICKET in the place of a storage.
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


def make_program(
    captured: Captured,
    schedule: Schedule,
    outputs: Sequence[Sequence[Value]],
    host: HostLayout = NO_HOST_COPIES,
    store: HostStore | None = None,
    at: Callable[[int], None] | None = None,
    absent: Absent | None = None,
) -> Program:
    """Compile a schedule that `check` has accepted.

    Args:
        captured: the step that the schedule is of.
        schedule: the instructions.
        outputs: for each half, the values that it returns to the user.
        host: the places of the host copies of a schedule that offloads.
        store: has slabs for them.
        at: called with each position of the schedule that allocates, before it does, and with -1 after the last.
        absent: the gradients that the backward half does without.

    Raises:
        HostMemoryError: the host, or the disk, has no room for the host copies.
    """
    says_positions = at is not None
    lowered, namespace = lower(
        captured.graph, captured.binding, schedule, outputs, host, says_positions=says_positions, absent=absent
    )
    offloads = store is not None and host.height_bytes > 0
    if offloads:
        if absent is None:
            store.reserve(host.height_bytes)
        namespace |= {"begin": partial(store.begin, host.height_bytes), "leave": leave, "take_up": take_up}
    namespace |= {"at": at}
    names = ("step",) if len(lowered) == 1 else ("forward", "backward")
    halves: list[Half] = []
    sources: list[str] = []
    for number, (name, half) in enumerate(zip(names, lowered, strict=True)):
        later = {storage for following in lowered[number + 1 :] for storage in following.takes}
        takes, saved = half.takes, tuple(sorted(half.live & later))
        head, left = _host_lines(lowered, number) if offloads else ([], "")
        if head and number > 0:
            takes = (TICKET, *takes)
        returned = [*half.outputs, *map(_argument, saved), *([left] if left else [])]
        sources.append(_source(name, takes, [*head, *half.lines], returned))
        function = _compile(captured.graph.name, name, sources[-1], namespace)
        if offloads:
            function = _settling(function, store)
        halves.append(Half(function=function, takes=takes, saved=(*saved, *([TICKET] if left else []))))
    return Program(halves=tuple(halves), source="\n".join(sources))


def _host_lines(lowered: Sequence[LoweredHalf], number: int) -> tuple[list[str], str]:
    """Return the lines that begin a half with its slab and host copies, and the expression that leaves them."""
    names = [", ".join(["lease", *(f"h{storage}" for storage in half.host_copies)]) for half in lowered]
    head = f"({names[number - 1]},) = take_up(ticket)" if number > 0 else "lease = begin()"
    return [head], "" if number + 1 == len(lowered) else f"leave({names[number]})"


def _argument(storage: int) -> str:
    return "ticket" if storage == TICKET else f"s{storage}"


def _source(name: str, takes: Sequence[int], lines: Sequence[Line | str], returned: Sequence[str]) -> str:
    code = [f"def {name}(arguments):"]
    if takes:
        code.append(f"    {', '.join(map(_argument, takes))}{',' if len(takes) == 1 else ''} = arguments")
    code.append("    arguments.clear()")
    code += [f"    {line}" for line in lines]
    code.append(f"    return [{', '.join(returned)}]")
    return "\n".join(code) + "\n"


def _settling(function: Callable[[list[Any]], list[Any]], store: HostStore) -> Callable[[list[Any]], list[Any]]:
    """Return a half that waits for all copies under way if it fails: their memory must not be used again before.

    Its variables are cleared then: while somebody keeps the error, they would keep the slab and the activations.
    """

    def half(arguments: list[Any]) -> list[Any]:
        try:
            return function(arguments)
        except BaseException as error:
            store.settle()
            traceback.clear_frames(error.__traceback__)
            raise

    return half


def _compile(graph_name: str, name: str, source: str, namespace: dict[str, Any]) -> Callable[[list[Any]], list[Any]]:
    filename = f"<memfit {name} of {ascii(graph_name)[1:-1]} #{next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope = dict(namespace)
    exec(compile(source, filename, "exec"), scope)  # only ever source that `lower` made
    weakref.finalize(scope[name], linecache.cache.pop, filename, None)
    return torch.no_grad()(scope[name])
