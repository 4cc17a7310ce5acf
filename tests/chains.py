"""Graphs of layers in a line, for the tests of planners: backward reads the results of forward."""

from __future__ import annotations

from memfit.device import GENERIC
from memfit.graph import Graph, Op, Phase, Role, Storage
from memfit.plan import Problem
from memfit.planners import PLANNERS, options_of

NO_LIMIT = 1 << 60


def counted(planner: str, moves: int, episodes: int = 3) -> dict[str, int]:
    """The options that limit a planner by counts in place of seconds, if it has any."""
    counts = {"iterations": moves, "episodes": episodes}
    return {option: count for option, count in counts.items() if option in options_of(PLANNERS[planner])}


def network(sizes: list[int], reads: list[list[int]] | None = None, seconds: list[float] | None = None) -> Graph:
    """Forward layers of these sizes, each reading layers before it (-1: the input); backward reads inputs and output.

    A loss op reads the last layer; the gradient of layer i reads what layer i read, its output, and the last gradient.
    """
    reads = reads or [[number - 1] for number in range(len(sizes))]
    seconds = seconds or [1.0] * len(sizes)
    storages = [Storage(id=0, name="input", bytes=64, role=Role.INPUT)]
    ops: list[Op] = []

    def add(name: str, phase: Phase, read: list[int], size: int, role: Role, took: float) -> int:
        storages.append(Storage(id=len(storages), name=name, bytes=size, role=role))
        write = len(storages) - 1
        read = list(dict.fromkeys(read))
        ops.append(Op(id=len(ops), name=name, phase=phase, reads=tuple(read), writes=(write,), seconds=took))
        return write

    for number, size in enumerate(sizes):
        add(f"f{number}", Phase.FORWARD, [r + 1 for r in reads[number]], size, Role.ACTIVATION, seconds[number])
    gradient = add("loss", Phase.FORWARD, [len(sizes)], 1, Role.OUTPUT, 1.0)
    for number in reversed(range(len(sizes))):
        read = [*(r + 1 for r in reads[number]), number + 1, gradient]
        role = Role.GRADIENT if number else Role.OUTPUT
        gradient = add(f"g{number}", Phase.BACKWARD, read, sizes[number], role, 1.0)
    return Graph.build(name="network", storages=storages, ops=ops)


def chain(length: int, size_bytes: int = 100) -> Graph:
    """Layers of one op and one storage, and their backward: a gradient reads the layer's input and the last gradient.

    Backward begins with the gradient of the last layer, which reads the output of that layer. No op computes a loss.
    """
    storages = [Storage(id=0, name="input", bytes=size_bytes, role=Role.INPUT)]
    ops: list[Op] = []

    def add(name: str, phase: Phase, reads: tuple[int, ...], role: Role) -> int:
        storages.append(Storage(id=len(storages), name=name, bytes=size_bytes, role=role))
        write, module = len(storages) - 1, f"model.layers.{name[1:]}"
        ops.append(Op(id=len(ops), name=name, phase=phase, module=module, reads=reads, writes=(write,), seconds=1.0))
        return write

    values = [0]
    for number in range(length):
        values.append(add(f"f{number}", Phase.FORWARD, (values[-1],), Role.ACTIVATION))
    gradient = values[-1]
    for number in reversed(range(length)):
        role = Role.OUTPUT if number == 0 else Role.GRADIENT
        gradient = add(f"b{number}", Phase.BACKWARD, (values[number], gradient), role)
    return Graph.build(name=f"chain{length}", storages=storages, ops=ops)


def problem(graph: Graph, budget_bytes: int = NO_LIMIT, **fields: object) -> Problem:
    return Problem(graph=graph, device=GENERIC, budget_bytes=budget_bytes, **fields)  # type: ignore[arg-type]


def heads() -> Graph:
    """Three results of 100 bytes, and an output of 40 bytes made from each."""
    roles = [Role.INPUT, *[Role.ACTIVATION] * 3, *[Role.OUTPUT] * 3]
    sizes = [10, *[100] * 3, *[40] * 3]
    reads, writes = [0, 1, 0, 2, 0, 3], [1, 4, 2, 5, 3, 6]
    return Graph.build(
        name="heads",
        storages=[Storage(id=i, name=f"s{i}", bytes=sizes[i], role=roles[i]) for i in range(7)],
        ops=[
            Op(id=i, name=f"op{i}", phase=Phase.FORWARD, reads=(reads[i],), writes=(writes[i],), seconds=1.0)
            for i in range(6)
        ],
    )
