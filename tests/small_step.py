"""A training step of nine ops that has one of everything: the hand-solved tests replay it."""

from __future__ import annotations

from memfit.graph import Boundary, Graph, Op, Phase, Role, Storage


def small_step() -> Graph:
    """Forward (with dropout, noise and a mutation), loss, boundary, backward, all-reduce, update."""
    activation = Role.ACTIVATION
    storages = [
        Storage(id=0, name="x", bytes=100, role=Role.INPUT),
        Storage(id=1, name="weight", bytes=200, role=Role.PARAMETER),
        Storage(id=2, name="conv", bytes=64, role=activation),
        Storage(id=3, name="relu", bytes=64, role=activation),
        Storage(id=4, name="mask", bytes=16, role=activation),
        Storage(id=5, name="dropout", bytes=64, role=activation),
        Storage(id=6, name="noise", bytes=8, role=activation),
        Storage(id=7, name="loss", bytes=4, role=Role.OUTPUT),
        Storage(id=8, name="tangent", bytes=4, role=Role.GRADIENT),
        Storage(id=9, name="gradient", bytes=200, role=Role.GRADIENT, required_at_end=True),
        Storage(id=10, name="reduced", bytes=200, role=Role.GRADIENT),
    ]
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    ops = [
        Op(id=0, name="conv", phase=forward, reads=(0, 1), writes=(2,), seconds=2.0, workspace_bytes=50),
        Op(id=1, name="relu", phase=forward, reads=(2,), writes=(3,), seconds=1.0, reuses=((2, 3),)),
        Op(id=2, name="dropout", phase=forward, reads=(3,), writes=(4, 5), seconds=1.0, random="cpu"),
        Op(id=3, name="noise", phase=forward, reads=(5,), writes=(6,), seconds=1.0, random="cpu"),
        Op(id=4, name="add_", phase=forward, reads=(5, 6), writes=(), mutates=(5,), seconds=1.0),
        Op(id=5, name="mean", phase=forward, reads=(5,), writes=(7,), seconds=1.0),
        Op(id=6, name="backward", phase=backward, reads=(8, 4, 3), writes=(9,), seconds=4.0),
        Op(id=7, name="reduce", phase=backward, reads=(9,), writes=(10,), seconds=1.0, recomputable=False),
        Op(id=8, name="sgd", phase=Phase.UPDATE, reads=(10,), writes=(), mutates=(1,), seconds=1.0),
    ]
    boundary = Boundary(position=6, departures=(7,), arrivals=(8,))
    return Graph.build(name="small step", storages=storages, ops=ops, boundaries=[boundary])


# Positions 0 to 9: compute 0 to 5, the boundary at 6, compute 6 to 8.
KEEP_EVERYTHING = (
    "compute 0",
    "compute 1",
    "compute 2",
    "compute 3",
    "compute 4",
    "compute 5",
    "boundary 0",
    "compute 6",
    "compute 7",
    "compute 8",
)
