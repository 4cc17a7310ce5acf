"""Copies to the host and back as operators, which stand in graphs that a compiler takes.

`leave` starts the copy of a tensor to the host, and gives a ticket for it; `left` waits for that, so that the tensor's
memory may be freed after it. `bring` allocates the tensor anew and starts the copy back, and `arrived`, which counts
as a write to it, waits for that. A ticket is a small tensor on the CPU: autograd may save it in the tensor's place.
When it is freed, so is the copy.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from memfit.cost.workspaces import OURS
from memfit.graph import Graph
from memfit.memory.host.store import Reserved, leave, left
from memfit.schedule import Code, Schedule

_numbers = itertools.count()
_strides: dict[tuple[int, int], tuple[int, ...]] = {}  # chosen by a compiler, by store and place
_stores: weakref.WeakValueDictionary[int, Reserved] = weakref.WeakValueDictionary()


def enter(store: Reserved) -> int:
    """Return a number by which operators find a graph's part of a store, as long as somebody refers to it."""
    number = next(_numbers)
    _stores[number] = store
    return number


def places_apart(graph: Graph, schedule: Schedule, alignment: int) -> tuple[dict[int, int], int]:
    """Return a place on the host for each storage that is copied, and the bytes of all: no two have the same.

    A compiler may put copies in another order than the schedule's, as far as tickets leave it free.

    Args:
        graph: of the plan.
        schedule: its copies count.
        alignment: of each place, in bytes.
    """
    places: dict[int, int] = {}
    height = 0
    for storage in dict.fromkeys(schedule.operands[schedule.codes == Code.OFFLOAD].tolist()):
        places[storage] = height
        height += -(-max(1, graph.storages[storage].bytes) // alignment) * alignment
    return places, height


def _leave(tensor: torch.Tensor, previous: torch.Tensor | None, store: int, offset: int) -> torch.Tensor:
    lease = _stores[store].begin() if previous is None else left(previous)[0]
    return leave(lease, lease.offload(tensor, offset))


def _left(tensor: torch.Tensor, ticket: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - which lives until now
    lease, copy = left(ticket)
    copy.wait()
    return leave(lease, copy)


def _bring(
    ticket: torch.Tensor,
    store: int,  # noqa: ARG001 - these six are for the compiler
    offset: int,  # noqa: ARG001
    size: Sequence[int],  # noqa: ARG001
    stride: Sequence[int],  # noqa: ARG001
    dtype: torch.dtype,  # noqa: ARG001
    device: torch.device,  # noqa: ARG001
) -> torch.Tensor:
    return left(ticket)[1].prefetch()


def _arrived(tensor: torch.Tensor, ticket: torch.Tensor) -> None:  # noqa: ARG001
    left(ticket)[1].arrived()


@cache
def operators() -> dict[str, Any]:
    """Return the four operators by name; they are made when they are first asked for."""
    library = torch.library.Library(OURS, "FRAGMENT")
    schemas = {
        "leave": ("(Tensor tensor, Tensor? previous, int store, int offset) -> Tensor", _leave, _fake_leave),
        "left": ("(Tensor tensor, Tensor ticket) -> Tensor", _left, _fake_ticket),
        "bring": (
            "(Tensor ticket, int store, int offset, int[] size, int[] stride, ScalarType dtype, Device device) "
            "-> Tensor",
            _bring,
            _fake_tensor,
        ),
        "arrived": ("(Tensor(a!) tensor, Tensor ticket) -> ()", _arrived, _fake_nothing),
    }
    for name, (schema, run, fake) in schemas.items():
        library.define(name + schema)
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{OURS}::{name}", fake, lib=library)
    _kept.append(library)
    return {name: getattr(getattr(torch.ops, OURS), name).default for name in schemas}


_kept: list[Any] = []  # a library that is collected takes its operators along


def _fake_ticket(*_: Any) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def _fake_leave(tensor: torch.Tensor, _previous: torch.Tensor | None, store: int, offset: int) -> torch.Tensor:
    _strides[store, offset] = tuple(tensor.stride())
    return _fake_ticket()


def _fake_tensor(
    _ticket: torch.Tensor,
    store: int,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    return torch.empty_strided(size, _strides.get((store, offset), stride), dtype=dtype, device=device)


def _fake_nothing(*_: Any) -> None:
    return None
