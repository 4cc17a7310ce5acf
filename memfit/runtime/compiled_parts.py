"""The graphs around breaks, compiled one by one, with the plans that they have in the step's ledger."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

import torch

from memfit.capture.joint import BetweenHalves, JointCapture
from memfit.runtime.compile.backend import CompiledGraph, PlannedGraph
from memfit.runtime.compile.settings import GraphSettings, settings_of
from memfit.runtime.graph_part import Part
from memfit.runtime.ledger import Ledger
from memfit.runtime.prepare import Prepared, program_of, with_costs
from memfit.torch_private.tensors import DATA_DEPENDENT_ERRORS

_log = logging.getLogger("memfit")
_MOST_SIZES = 3  # that one graph is planned at, if batches of one shape lead to more


class PartGraph(PlannedGraph):
    """A graph of Dynamo's that shares the ledger's budget.

    Args:
        module: the graph.
        options: of all graphs of the step.
        ledger: plans them together.
        residents: storages that are there before the step, with their bytes.
    """

    def __init__(
        self, module: torch.fx.GraphModule, options: GraphSettings, ledger: Ledger, residents: dict[int, int]
    ) -> None:
        super().__init__(module, lambda: options)
        self.ledger = ledger
        self.residents = residents
        self.has_warned_of_sizes = False

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph: the step that it is a part of has the device's turn, and is compiled anew for other hooks."""
        return self._call(inputs)

    def compile(self, inputs: Sequence[Any], before: CompiledGraph | None) -> CompiledGraph:
        """As `PlannedGraph.compile`. A graph that reads a number of Python's, which changes, runs as eager does.

        So does one at new sizes that follow from the values of a batch, once it has been planned at several of them.
        """
        if before is None and self.ledger.is_batch_known and len(self.compiled) >= _MOST_SIZES:
            if not self.has_warned_of_sizes:
                self.has_warned_of_sizes = True
                _log.warning(
                    "memfit: a graph at a graph break has other sizes in each step, which the batch's values decide: "
                    "beside the %d sizes that are planned it runs as eager does",
                    _MOST_SIZES,
                )
            return cast("CompiledGraph", _UnplannedPart(self.module))
        try:
            return _CompiledPart(self, inputs, before)
        except DATA_DEPENDENT_ERRORS:
            _log.warning(
                "memfit: a graph at a graph break reads a number that changes between steps: it is not planned"
            )
            return cast("CompiledGraph", _UnplannedPart(self.module))

    def drop(self, parts: Sequence[Part]) -> None:
        """Drop what was compiled for parts that the ledger has forgotten."""
        kept = ((k, c) for k, c in self.compiled.items() if not isinstance(c, _CompiledPart) or c.part not in parts)
        self.compiled = dict(kept)


class _UnplannedPart:
    """A graph that runs as eager does."""

    prepared = plan = None

    def __init__(self, module: torch.fx.GraphModule) -> None:
        self.function = module.forward

    def should_plan_again(self, inputs: Sequence[Any]) -> bool:
        """Never."""
        del inputs
        return False

    def check_gradients(self, gradients: Sequence[Any]) -> None:
        """Nothing was assumed of them."""


class _CompiledPart(CompiledGraph):
    """A graph at concrete sizes, with the plan that its part has in the ledger."""

    graph: PartGraph
    between = BetweenHalves()

    def __init__(self, graph: PartGraph, inputs: Sequence[Any], before: CompiledGraph | None) -> None:
        graph.ledger.compiled += 1
        self.part: Part | None = before.part if isinstance(before, _CompiledPart) else None
        self.beside_bytes = 0
        super().__init__(graph, inputs, before)

    def count_bytes(self) -> None:
        """Count the step's residents that are not the graph's."""
        own = {tensor.untyped_storage().data_ptr() for tensor in self.inputs}
        self.beside_bytes = sum(size for pointer, size in self.graph.residents.items() if pointer not in own)

    def should_plan_again(self, inputs: Sequence[Any]) -> bool:
        """Return whether the ledger has made another plan."""
        del inputs
        return self.part is not None and self.prepared is not None and self.prepared.plan is not self.part.plan

    def prepare(self, capture: JointCapture) -> Prepared:
        """Return the program of the part's plan; of its leanest one if it is new."""
        settings, memory = self.graph.options.settings, self.graph.ledger.memory
        captured = with_costs(capture.captured, settings)
        if self.part is None:
            self.part = Part(
                captured=captured,
                settings=settings_of(self.graph.options, captured.graph),
                beside_bytes=self.beside_bytes,
            )
        for is_forward in (True, False):
            memory.forget((self.part, is_forward))
        plan = self.part.plan
        program = program_of(captured, plan, [capture.forward_outputs, capture.backward_outputs], settings)
        return Prepared(captured=captured, plan=plan, program=program, seconds={})

    def run_forward(self, arguments: list[Any]) -> list[Any]:
        """As `CompiledGraph.run_forward`."""
        reads = frozenset(a.untyped_storage().data_ptr() for a in arguments if isinstance(a, torch.Tensor))
        return self._run(self.halves.forward, arguments, reads)

    def run_backward(self, arguments: list[Any]) -> list[Any]:
        """As `CompiledGraph.run_backward`."""
        return self._run(self.halves.backward, arguments, None)

    def _run(self, half: Any, arguments: list[Any], reads: frozenset[int] | None) -> list[Any]:
        assert self.part is not None
        ledger, is_forward = self.graph.ledger, reads is not None
        ledger.begin(self.part, reads)
        try:
            with ledger.memory.call((self.part, is_forward)):
                return half(arguments)
        finally:
            ledger.end(self.part, is_forward=is_forward)
