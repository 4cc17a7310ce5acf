"""What one of many ranks takes: bytes by kind at the peak of its step, seconds, and how often it gathers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from memfit.graph import Graph, Phase, Role, Storage
from memfit.options import Cluster
from memfit.report.formatting import seconds_text
from memfit.report.live import Run
from memfit.schedule import Code
from memfit.system.budget import format_bytes

KINDS: tuple[str, ...] = ("parameters", "gradients", "state", "activations", "gathers")


class RankFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The step of one rank, under one schedule.

    Attributes:
        ranks: how many there are.
        shards: over how many of them the model is sharded; 1 if each has all of it.
        by_kind: kind -> bytes at the peak. Parameters are those that the rank keeps, gathers those that it has gathered
            from others, gradients those of parameters, and state the optimizer's, and buffers; activations are all
            else: their gradients, workspace and the batch among it.
        peak_bytes: their sum.
        resident_bytes: what is there before and after the step.
        seconds: of the step; None if they are not known.
        communication_seconds: that collectives take, beside compute or not.
        gathers: how often a group of parameters is gathered, on average; None if nothing is.
    """

    ranks: int
    shards: int
    by_kind: Mapping[str, int]
    peak_bytes: int
    resident_bytes: int
    seconds: float | None = None
    communication_seconds: float | None = None
    gathers: float | None = None

    def keys(self) -> dict[str, Any]:
        """The figures as JSON."""
        return msgspec.structs.asdict(self)

    def cells(self) -> tuple[str, ...]:
        """The figures as texts: one for each of `COLUMNS`."""
        kinds = (format_bytes(self.by_kind[kind]) for kind in KINDS)
        return (f"{self.ranks:,}", *kinds, format_bytes(self.peak_bytes), seconds_text(self.seconds))


COLUMNS = ("ranks", *KINDS, "peak", "a step")


def rank_figures(cluster: Cluster, run: Run, *, shards: int, has_seconds: bool) -> RankFigures:
    """Return the figures of a simulated schedule.

    Args:
        cluster: the ranks.
        run: of the step of one of them.
        shards: over how many of them its model is sharded.
        has_seconds: whether the graph has the seconds of its ops.
    """
    graph, position = run.graph, run.timeline.peak_position
    by_kind: dict[str, int] = dict.fromkeys(KINDS, 0)
    of_parameters = _gradients_of_parameters(graph)
    for storage in run.live_at(position):
        by_kind[_kind(graph.storages[storage], of_parameters)] += run.device.aligned(graph.storages[storage].bytes)
    by_kind["activations"] += run.timeline.peak_bytes - sum(by_kind.values())
    gathers = [op.id for op in graph.ops if op.is_gather]
    computed = run.schedule.operands[run.schedule.codes == Code.COMPUTE].tolist()
    known = set(gathers)
    return RankFigures(
        ranks=cluster.ranks,
        shards=shards,
        by_kind=by_kind,
        peak_bytes=run.timeline.peak_bytes,
        resident_bytes=run.device.resident_bytes(graph),
        seconds=run.timeline.makespan_seconds if has_seconds else None,
        communication_seconds=run.timeline.busy_seconds.get("communication", 0.0) if has_seconds else None,
        gathers=sum(op in known for op in computed) / len(gathers) if gathers else None,
    )


def _kind(storage: Storage, of_parameters: set[int]) -> str:
    if storage.role is Role.PARAMETER:
        return "parameters" if storage.resident else "gathers"
    if storage.role is Role.STATE:
        return "state"
    return "gradients" if storage.id in of_parameters else "activations"


def _gradients_of_parameters(graph: Graph) -> set[int]:
    """Return the gradients that are reduced, kept or used by an update; others are those of activations."""
    gradients = {storage.id for storage in graph.storages if storage.role is Role.GRADIENT}
    found = {storage.id for storage in graph.storages if storage.resident or storage.required_at_end} & gradients
    for op in graph.ops:
        if op.phase is Phase.UPDATE or (op.group is not None and not op.is_gather):
            found |= gradients & {*op.reads, *op.mutates, *op.writes}
    into = {read for op in graph.ops if not found.isdisjoint((*op.mutates, *op.writes)) for read in op.reads}
    return found | (into & gradients)
