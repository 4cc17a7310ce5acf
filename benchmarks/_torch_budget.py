"""torch's own answer: `activation_memory_budget`, with eager's kernels in place of Inductor's.

AOTAutograd's min-cut partitioner chooses what is saved, and both halves run as plain generated code over the same ATen
kernels that eager calls. They take their arguments in a list that they empty, or saved activations would live to the
end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.fx.graph import _BoxedCodeGen

# Private names, and only here: the budget is a setting of torch._functorch, and no public backend applies the
# partitioner without also decomposing the graph into other kernels.


def compile_with_budget(model: torch.nn.Module, activation_memory_budget: float) -> Callable[..., Any]:
    """Return `model` compiled under torch's activation memory budget, with eager's kernels.

    The settings stay in force: use one budget in a process.
    """
    torch._dynamo.reset()
    torch._functorch.config.activation_memory_budget = activation_memory_budget
    return torch.compile(model, backend=_partitioned_eager)


def _partitioned_eager(graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    return aot_autograd(
        fw_compiler=_boxed,
        bw_compiler=_boxed,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )(graph_module, inputs)


def _boxed(graph_module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    graph_module.graph.set_codegen(_BoxedCodeGen())
    graph_module.recompile()
    forward = graph_module.forward

    def run(arguments: list[Any]) -> Any:
        return forward(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
