"""Running the ops of a graph on several threads, out of one arena, each as soon as what it depends on is over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import torch

from memfit.errors import InvalidOptionError
from memfit.graph import Graph
from memfit.packing.parallel import ParallelLayout, predecessors_of

Kernel = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]


def execute(predecessors: Sequence[Sequence[int]], run: Callable[[int], None], *, threads: int) -> None:
    """Call `run(op)` for each op once all its predecessors are over, on as many threads.

    >>> order = []
    >>> execute([[], [0], [1]], order.append, threads=2)
    >>> order
    [0, 1, 2]

    Raises:
        InvalidOptionError: no threads, or a cycle, in which no op could ever begin.
        Whatever an op raises first; what has not begun by then does not begin.
    """
    if threads < 1:
        raise InvalidOptionError(f"threads is {threads}, expected 1 or more")
    waiting = [len(set(before)) for before in predecessors]
    dependents: list[list[int]] = [[] for _ in predecessors]
    for op, before in enumerate(predecessors):
        for other in set(before):
            dependents[other].append(op)
    over = 0
    with ThreadPoolExecutor(threads) as pool:
        running: dict[Future[None], int] = {pool.submit(run, op): op for op, count in enumerate(waiting) if count == 0}
        while running:
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            failed = next((error for future in ended if (error := future.exception()) is not None), None)
            if failed is not None:
                for future in running:
                    future.cancel()
                raise failed
            for op in [running.pop(future) for future in ended]:
                over += 1
                for later in dependents[op]:
                    waiting[later] -= 1
                    if waiting[later] == 0:
                        running[pool.submit(run, later)] = later
    if over < len(waiting):
        stuck = [op for op, count in enumerate(waiting) if count > 0]
        raise InvalidOptionError(f"ops {stuck[:5]} wait for each other; expected predecessors without a cycle")


class ParallelArena:
    """One piece of memory for the storages of a graph, and the threads that fill it.

    Args:
        graph: what runs; its ops are numbered as the kernels are.
        layout: where each storage lies. Storages that it leaves out come with `tensors`.
        kernels: op -> what computes it: reads its inputs, writes its results into the tensors it is given.
        like: storage -> a tensor of its shape and dtype (`torch.empty(..., device="meta")` will do).
    """

    def __init__(
        self, graph: Graph, layout: ParallelLayout, kernels: Mapping[int, Kernel], like: Mapping[int, torch.Tensor]
    ) -> None:
        self._graph, self._kernels = graph, kernels
        before = [set(needed) for needed in predecessors_of(graph)]
        for earlier, later in layout.dependences:
            before[later].add(earlier)
        self._predecessors = [sorted(needed) for needed in before]
        self.memory = torch.zeros(max(layout.height_bytes, 1), dtype=torch.uint8)
        self._views = {s: self._view(offset, like[s]) for s, offset in layout.offsets_bytes.items()}
        self._lock = threading.Lock()

    def _view(self, offset_bytes: int, like: torch.Tensor) -> torch.Tensor:
        size_bytes = like.numel() * like.element_size()
        return self.memory[offset_bytes : offset_bytes + size_bytes].view(like.dtype).view(like.shape)

    def run(self, tensors: Mapping[int, torch.Tensor], *, threads: int = 2) -> None:
        """Run every op once; `tensors` are the storages outside the arena, results included. One run at a time."""
        places = {**tensors, **self._views}

        def compute(op: int) -> None:
            known = self._graph.ops[op]
            reads = dict.fromkeys((*known.reads, *known.mutates))
            self._kernels[op]([places[s] for s in reads], [places[s] for s in known.writes])

        with self._lock:
            execute(self._predecessors, compute, threads=threads)
