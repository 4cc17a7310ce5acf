"""Compilation of searches and packers before the first plan needs them, once on a machine."""

from __future__ import annotations

import ctypes

import numpy as np
from msgspec.structs import replace

from memfit.device import GENERIC, Device
from memfit.graph import Graph, Op, Phase, Role, Storage
from memfit.packing.registry import compile_packers
from memfit.plan import Problem
from memfit.planners.registry import make_planner
from memfit.system.addresses import returns_same

_LAYERS, _BYTES = 6, 1 << 20
_MOVES = 1_000
_LINK = 1e10  # bytes a second


def compile_ahead() -> None:
    """Plan and pack a small step, with and without a host; the machine code is kept on disk."""
    linked = replace(GENERIC, to_host_bytes_per_second=_LINK, to_device_bytes_per_second=_LINK)
    for device, host_bytes in ((GENERIC, 0), (linked, _LAYERS * _BYTES)):
        make_planner("auto", iterations=_MOVES).plan(small_problem(device, host_bytes))
    compile_packers()
    word = np.zeros(1, np.int64)
    returns_same(ctypes.cast(ctypes.CDLL(None).labs, ctypes.c_void_p).value, word, word)


def small_problem(device: Device = GENERIC, host_budget_bytes: int = 0) -> Problem:
    """Return the planning of a small step that has to recompute, or to offload.

    Args:
        device: with a link, if there is a host budget.
        host_budget_bytes: 0 offloads nothing.
    """
    budget_bytes = (_LAYERS // 2 + 3) * _BYTES
    return Problem(graph=_chain(), device=device, budget_bytes=budget_bytes, host_budget_bytes=host_budget_bytes)


def compile_simulator() -> None:
    """Compile what every plan waits for, also one without a search: check and simulation."""
    budget_bytes = 4 * _LAYERS * _BYTES
    make_planner("none").plan(Problem(graph=_chain(), device=GENERIC, budget_bytes=budget_bytes))


def _chain() -> Graph:
    """Return a step whose layers keep one activation each for backward."""
    storages = [Storage(id=0, name="input", bytes=_BYTES, role=Role.INPUT, resident=True)]
    ops: list[Op] = []
    for layer in range(_LAYERS):
        storages.append(Storage(id=layer + 1, name=f"activation_{layer}", bytes=_BYTES, role=Role.ACTIVATION))
        ops.append(_op(len(ops), Phase.FORWARD, (layer,), layer + 1))
    for layer in reversed(range(_LAYERS)):
        storages.append(Storage(id=len(storages), name=f"gradient_{layer}", bytes=_BYTES, role=Role.GRADIENT))
        above = () if layer == _LAYERS - 1 else (len(storages) - 2,)
        ops.append(_op(len(ops), Phase.BACKWARD, (layer + 1, *above), len(storages) - 1))
    return Graph.build(name="chain", storages=storages, ops=ops)


def _op(number: int, phase: Phase, reads: tuple[int, ...], write: int) -> Op:
    return Op(id=number, name=f"op_{number}", phase=phase, reads=reads, writes=(write,), seconds=1e-3)
