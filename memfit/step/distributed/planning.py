"""Planning across ranks: each measures its ops, rank 0 plans for the most seconds and bytes, and all get its plan."""

from __future__ import annotations

import socket
from dataclasses import replace

import msgspec
import torch

from memfit.capture import Captured
from memfit.capture.across import Across
from memfit.cost.collectives import (
    CollectiveRates,
    keep_rates,
    kept_rates,
    kinds_of,
    measured_rates,
    with_collectives,
)
from memfit.errors import BY_CHECKPOINT
from memfit.graph import Graph
from memfit.plan import Plan
from memfit.planning import Settings
from memfit.step.agreement import Agreement
from memfit.step.prepare import Planning


class _Costs(msgspec.Struct, frozen=True, kw_only=True):
    """The costs of a graph's ops, in their order."""

    seconds: list[float]
    workspace_bytes: list[int | None]
    reuses: list[tuple[tuple[int, int], ...]]

    @staticmethod
    def of(graph: Graph) -> _Costs:
        return _Costs(
            seconds=[op.seconds for op in graph.ops],
            workspace_bytes=[op.workspace_bytes for op in graph.ops],
            reuses=[op.reuses for op in graph.ops],
        )

    @staticmethod
    def of_slowest(all_costs: list[_Costs]) -> _Costs:
        """Return the most seconds and workspace of each op, and the reuses that every rank's kernel allows."""
        first = all_costs[0]
        return _Costs(
            seconds=[max(column) for column in zip(*(costs.seconds for costs in all_costs), strict=True)],
            workspace_bytes=[
                None if None in column else max(size for size in column if size is not None)
                for column in zip(*(costs.workspace_bytes for costs in all_costs), strict=True)
            ],
            reuses=[
                tuple(pair for pair in pairs if all(pair in costs.reuses[op] for costs in all_costs))
                for op, pairs in enumerate(first.reuses)
            ],
        )

    def applied(self, graph: Graph) -> Graph:
        ops = (
            msgspec.structs.replace(op, seconds=seconds, workspace_bytes=workspace_bytes, reuses=reuses)
            for op, seconds, workspace_bytes, reuses in zip(
                graph.ops, self.seconds, self.workspace_bytes, self.reuses, strict=True
            )
        )
        return msgspec.structs.replace(graph, ops=tuple(ops))


class AcrossRanks(Planning):
    """Plans a step together with the other ranks of its group.

    Args:
        own: where the costs on this rank come from, and on rank 0 the plan.
        agreement: of the ranks.
        across: their group.
    """

    def __init__(self, own: Planning, agreement: Agreement, across: Across) -> None:
        self._own = own
        self._agreement = agreement
        self._across = across

    def with_costs(self, captured: Captured, settings: Settings) -> Captured:
        """Return the step finished on its device, with the costs of the slowest rank.

        Raises:
            RankError: the ranks captured different steps.
        """
        finished = self._agreement.together("measuring ops", lambda: self._own.with_costs(captured, settings))
        graph = finished.graph
        self._agreement.require_equal(
            "the steps",
            graph.fingerprint,
            lambda: _lines(graph),
            f"give all ranks the same model and batches of the same shapes; with others {BY_CHECKPOINT}",
        )
        costs = self._agreement.to_first("gathering costs", _Costs.of(graph))
        merged = self._agreement.from_first(
            "gathering costs", lambda: msgspec.json.encode(_Costs.of_slowest(costs)) if costs else b""
        )
        graph = msgspec.json.decode(merged, type=_Costs).applied(graph)
        rates = {kind: self._rates(captured.binding.device, kind) for kind in kinds_of(graph)}
        graph = with_collectives(graph, lambda kind, size_bytes: rates[kind].seconds(size_bytes))
        return replace(finished, graph=graph)

    def plan(self, captured: Captured, settings: Settings, bytes_outside: int) -> Plan:
        """Return rank 0's plan, for the most bytes outside of any rank.

        Args:
            captured: this rank's step, with its costs.
            settings: of the plan.
            bytes_outside: bytes on this rank's device beside the graph's.
        """
        most_outside = max(self._agreement.all("counting bytes", bytes_outside))
        content = self._agreement.from_first(
            "planning", lambda: self._own.plan(captured, settings, most_outside).encode()
        )
        return self._agreement.together(
            "reading the plan", lambda: Plan.decode(content, "the plan of rank 0", graph=captured.graph)
        )

    def _rates(self, device: torch.device, kind: str) -> CollectiveRates:
        """Return the rates of a kind of collectives: those that rank 0 has kept, or new ones."""
        agreement, group = self._agreement, self._across.group
        hosts = agreement.all("calibrating", socket.gethostname())
        kept = agreement.from_first("calibrating", lambda: msgspec.json.encode(kept_rates(group, device, hosts, kind)))
        rates = msgspec.json.decode(kept, type=CollectiveRates | None)
        if rates is None:
            rates = measured_rates(group, device, kind, agreement.slowest)
            if agreement.rank == 0:
                keep_rates(rates, group, device, hosts, kind)
        return rates


def _lines(graph: Graph) -> list[str]:
    """Return in words what the fingerprint of a graph covers, residents first."""
    storages = [f"{s.role} {s.name!r} of {s.bytes} bytes" for s in graph.storages]
    ops = [f"op {op.name!r} ({op.target}), reading {op.reads} and writing {op.writes + op.mutates}" for op in graph.ops]
    return [*storages, *ops]
