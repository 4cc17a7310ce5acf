"""Compilation of searches and packers before the first plan needs them, once on a machine."""

from __future__ import annotations

from memfit.device import GENERIC
from memfit.graph import Graph, Op, Phase, Role, Storage
from memfit.packing.registry import compile_packers
from memfit.plan import Problem
from memfit.planners.registry import make_planner

_LAYERS, _BYTES = 6, 1 << 20
_MOVES = 1_000


def compile_ahead() -> None:
    """Plan and pack a small step. The machine code of searches, bounds, simulator and packers is kept on disk."""
    graph = _chain()
    budget_bytes = (_LAYERS // 2 + 3) * _BYTES
    make_planner("auto", iterations=_MOVES).plan(Problem(graph=graph, device=GENERIC, budget_bytes=budget_bytes))
    compile_packers()


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
