"""Running each op of a step once before a step counts: libraries then have their workspaces, and engines are chosen."""

from __future__ import annotations

import threading
from collections import defaultdict

import torch

from memfit.binding import Binding
from memfit.cost.observations import PRIVATE, call_key
from memfit.cost.op_inputs import InputMaker
from memfit.cost.single_op import Measurer, undisturbed
from memfit.graph import Graph
from memfit.system.recorder import allocated_bytes
from memfit.torch_private.cuda import has_captured_graphs, release_cublas_workspaces

_Thread = tuple[torch.device, int]  # libraries keep a workspace for each thread

_warm: dict[_Thread, set[str]] = defaultdict(set)
_kept_bytes: dict[_Thread, int] = defaultdict(int)


def warm(graph: Graph, binding: Binding) -> int:
    """Run each distinct op that this thread has not run before; return the bytes that libraries keep on the device.

    What a step takes would otherwise depend on whether its ops were measured in this process or their costs came from
    the disk: cuBLAS allocates a workspace at a thread's first call, and `torch.backends.cudnn.benchmark` tries
    engines at the first call of each size. Ops that refuse made inputs, or that have no room, are left to the step.

    Args:
        graph: a captured graph.
        binding: its calls, on a device at hand.
    """
    device: torch.device = binding.device
    thread = device, threading.get_ident()
    if thread not in _warm and not has_captured_graphs(device):
        release_cublas_workspaces()  # of calls before, or their bytes would not be seen
    before_bytes = allocated_bytes(device)
    with undisturbed(device):
        _run_new(graph, binding, _warm[thread])
    _kept_bytes[thread] += max(0, allocated_bytes(device) - before_bytes)
    return _kept_bytes[thread]


def _run_new(graph: Graph, binding: Binding, known: set[str]) -> None:
    inputs = InputMaker(binding.device)
    measurer = Measurer(graph=graph, device=binding.device, inputs=inputs, clock=lambda: 0.0, most_runs=1)
    for op, call in zip(graph.ops, binding.calls, strict=True):
        key = call_key(call) or f"{PRIVATE}{call.op}"
        if key not in known:
            measurer.run_once(op, call)
            known.add(key)
