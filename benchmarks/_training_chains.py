"""Random training steps of a few dozen ops: a chain of layers with skip connections, its loss, and backward."""

from __future__ import annotations

import random

from memfit.graph import Graph, Op, Phase, Role, Storage

_KIB = 1 << 10
_SIZES = tuple(kib * _KIB for kib in (16, 32, 48, 64, 96, 128))
_SECONDS = {"conv": (3e-4, 1e-3), "relu": (3e-5, 1e-4), "norm": (1e-4, 2e-4), "add": (5e-5, 1e-4)}
_REACH = 6  # an addition reads one of the last few values beside the last


def training_chain(layers: int, seed: int) -> Graph:
    """Return the step of a network of so many layers: 41 ops at 18 layers, 60 at 26, more or less.

    Convolutions change the size and keep their input for backward, as norms do; relu works in place and keeps its
    output; additions keep nothing. Where a value is read twice its gradients are added up.
    """
    return _Chain(layers, random.Random(seed)).graph(f"chain of {layers} layers, seed {seed}")


class _Chain:
    def __init__(self, layers: int, pick: random.Random) -> None:
        self.pick = pick
        self.storages: list[Storage] = []
        self.ops: list[Op] = []
        self.values = [self._storage("x", 64 * _KIB, Role.INPUT)]
        self.layers = [self._layer(number) for number in range(layers)]
        self._backward()

    def graph(self, name: str) -> Graph:
        return Graph.build(name=name, storages=self.storages, ops=self.ops)

    def _storage(self, name: str, size_bytes: int, role: Role) -> int:
        self.storages.append(Storage(id=len(self.storages), name=name, bytes=size_bytes, role=role))
        return len(self.storages) - 1

    def _op(
        self,
        name: str,
        phase: Phase,
        reads: list[int],
        writes: list[int],
        seconds: float,
        workspace_bytes: int = 0,
        reuses: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self.ops.append(
            Op(
                id=len(self.ops),
                name=name,
                phase=phase,
                reads=tuple(dict.fromkeys(reads)),
                writes=tuple(writes),
                seconds=seconds,
                workspace_bytes=workspace_bytes,
                reuses=reuses,
            )
        )

    def _layer(self, number: int) -> tuple[str, list[int], list[int], int, float]:
        """Add a forward op; return its kind, the values and the parameters that it reads, its result, its seconds."""
        kind = self.pick.choice(("conv", "conv", "relu", "norm", "add")) if number > 1 else "conv"
        reads = [self.values[-1]]
        if kind == "add":
            reads.append(self.pick.choice(self.values[-_REACH:-1]))
        size_bytes = self.pick.choice(_SIZES) if kind == "conv" else self.storages[reads[0]].bytes
        weights = [self._storage(f"weight{number}", 4 * _KIB, Role.PARAMETER)] if kind in ("conv", "norm") else []
        written = self._storage(f"{kind}{number}", size_bytes, Role.ACTIVATION)
        seconds = self.pick.uniform(*_SECONDS[kind])
        workspace_bytes = self.pick.choice((0, 0, 16 * _KIB)) if kind == "conv" else 0
        over = ((reads[0], written),) if kind == "relu" else ()
        self._op(f"{kind}{number}", Phase.FORWARD, reads + weights, [written], seconds, workspace_bytes, over)
        self.values.append(written)
        return kind, reads, weights, written, seconds

    def _backward(self) -> None:
        last = self.values[-1]
        loss = self._storage("loss", 4, Role.OUTPUT)
        self._op("loss", Phase.FORWARD, [last], [loss], 1e-5)
        first = self._storage("gradient", self.storages[last].bytes, Role.GRADIENT)
        self._op("loss_backward", Phase.BACKWARD, [last], [first], 1e-5)
        gradients = {last: first}
        for number, (kind, reads, weights, written, seconds) in reversed(list(enumerate(self.layers))):
            needed = {"conv": reads, "relu": [written], "norm": reads, "add": []}[kind]
            name = f"{kind}{number}_backward"
            values = [read for read in reads if read != self.values[0]]
            comes = gradients[written]
            made = [self._storage(f"{name}_{v}", self.storages[v].bytes, Role.GRADIENT) for v in values]
            outputs = [self._storage(f"{name}_weight", self.storages[w].bytes, Role.OUTPUT) for w in weights]
            over = ((comes, made[0]),) if kind == "relu" else ()
            self._op(name, Phase.BACKWARD, [comes, *needed, *weights], made + outputs, 2 * seconds, reuses=over)
            for value, new in zip(values, made, strict=True):
                gradients[value] = self._sum(gradients[value], new) if value in gradients else new

    def _sum(self, first: int, second: int) -> int:
        total = self._storage(f"sum{len(self.ops)}", self.storages[first].bytes, Role.GRADIENT)
        reuses = ((first, total), (second, total))
        self._op(f"sum{len(self.ops)}", Phase.BACKWARD, [first, second], [total], 5e-5, reuses=reuses)
        return total
