"""Feature map memory of a graph by the strategies of Chen et al. 2016, and of those that stand beside them.

    none       every node has memory of its own
    inplace    an op's result takes over an input of equal size that nothing reads later
    sharing    inplace, and memory is used again once nothing reads it (section 3)
    drop       sharing, batch normalization and ReLU are recomputed (section 4.2)
    sublinear  sharing, and Algorithm 3 with the search of appendix A

What the process takes from a GPU in all (Figures 5b and 6b) is what torch's allocator reserves for `sharing` and for
`sublinear`, by memfit's model of it (`memfit.simulate.reserved`): residents and the blocks of two steps, in the
allocator's default settings and with expandable segments. CUDA's context and workspaces are not in it.

Beside them, of the ResNet, stand Algorithm 3 with the best of 250 budgets B in place of appendix A's (`best B`), and
the optimal split of Feng 2018 (`linear_split`).
"""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec
import numpy as np

from memfit.device import GENERIC
from memfit.graph import Graph, Op, Phase
from memfit.papers.planners.linear_split import linear_chain, solve_chain
from memfit.papers.planners.recompute_counts import counts_keeping, evaluate_counts
from memfit.papers.planners.sublinear import appendix_a_splits
from memfit.papers.planners.vertices import vertices_of
from memfit.plan import Problem
from memfit.planners.engine.order import update_at_once_order
from memfit.planners.engine.retention.decisions import Evaluation
from memfit.planners.engine.retention.emit import emit
from memfit.planners.engine.retention.instance import Instance, build_instance
from memfit.planners.engine.starts.forward_part import ForwardPart, Split
from memfit.report.live import play
from memfit.simulate.cuda_allocator import AllocatorSettings
from memfit.simulate.reserved import reserved

NO_LIMIT = 1 << 60
MANY_BUDGETS = (0.35, math.sqrt(2), 250)  # of sqrt(x y): from, to, how many

ALLOCATORS = {"default": AllocatorSettings(), "expandable": AllocatorSettings(expandable_segments=True)}
MOST_REPLAYED_OPS = 50_000  # the allocator's model serves each request in Python, and its free lists grow with the ops
STEPS = 2  # that the allocator serves: the first may split blocks in another way than later ones find them

# Kernels that may write over an input: MXNet's FInplaceOption of the same operators, and their gradients.
_IN_PLACE = (
    "relu",
    "add",
    "mul",
    "sigmoid",
    "tanh",
    "threshold_backward",
    "sigmoid_backward",
    "tanh_backward",
)
_DROPPED = ("native_batch_norm", "relu")


def _evaluated(program: Instance, split: Split) -> Evaluation:
    return evaluate_counts(program, counts_keeping(program, split.kept))


def kind(op: Op) -> str:
    """The operator's name: `relu` of `aten.relu.default`."""
    parts = op.target.split(".")
    return parts[1] if len(parts) > 1 else op.target


def with_reuses(graph: Graph) -> Graph:
    """Say of each op whose kernel may write in place which input it may take over."""
    size = [storage.bytes for storage in graph.storages]
    resident = [storage.resident for storage in graph.storages]

    def reuses(op: Op) -> tuple[tuple[int, int], ...]:
        if kind(op) not in _IN_PLACE:
            return ()
        return tuple((r, w) for r in op.reads for w in op.writes if size[r] == size[w] and not resident[r])

    return msgspec.structs.replace(graph, ops=tuple(msgspec.structs.replace(op, reuses=reuses(op)) for op in graph.ops))


def without_sharing(graph: Graph) -> tuple[int, int]:
    """Return the bytes of strategies `none` and `inplace`: all nodes, and all but those that take over an input's."""
    last_read = {storage: op.id for op in graph.ops for storage in op.reads}
    updated = {storage for op in graph.ops if op.phase == "update" for storage in op.reads}  # weight gradients
    every, fresh = 0, 0
    for op in graph.ops:
        written = sum(graph.storages[s].bytes for s in op.writes if s not in updated)
        taken = [r for r, w in op.reuses if last_read[r] == op.id and not graph.storages[r].required_at_end]
        every += written
        fresh += written - max((graph.storages[r].bytes for r in taken if op.writes[0] not in updated), default=0)
    return every, fresh


def strategies(graph: Graph, *, of_resnet: bool) -> dict[str, Any]:
    """Return feature map bytes by strategy, and the seconds of planning; of a ResNet also the least peak's parts."""
    graph = with_reuses(graph)
    every, fresh = without_sharing(graph)
    started = time.perf_counter()
    problem = Problem(graph=graph, device=GENERIC, budget_bytes=NO_LIMIT)
    program = build_instance(problem, update_at_once_order(graph))
    shared = evaluate_counts(program, np.zeros(len(program.op_at), np.int64))
    found = {"none": every, "inplace": fresh, "sharing": shared.peak_bytes - program.base_bytes}
    if of_resnet:
        dropped = [op >= 0 and kind(graph.ops[op]) in _DROPPED for op in program.op_at]
        found["drop"] = above_residents(program, np.array(dropped))
    started_search = time.perf_counter()
    best, split = min(
        ((_evaluated(program, split), split) for split in appendix_a_splits(ForwardPart.of(program))),
        key=lambda pair: pair[0].peak_bytes,
    )
    found["sublinear"] = best.peak_bytes - program.base_bytes
    search_seconds = time.perf_counter() - started_search
    replayed: dict[str, Any] = {}
    if len(graph.ops) <= MOST_REPLAYED_OPS:
        replayed["total_bytes"] = {"sharing": totals(program, shared), "sublinear": totals(program, best)}
    return {
        "bytes": found,
        **replayed,
        **({"sublinear_at_peak": at_peak(program, best, split)} if of_resnet else {}),
        "resident_bytes": program.base_bytes,
        "ops": len(graph.ops),
        "program_seconds": started_search - started,
        "search_seconds": search_seconds,
    }


def totals(program: Instance, evaluation: Evaluation) -> dict[str, int]:
    """Return the bytes that torch's allocator reserves for a sequence, parameters and batch included, by settings."""
    schedule = emit(program, evaluation.sequence)
    return {
        name: reserved(program.graph, schedule, settings, steps=STEPS).peak_bytes
        for name, settings in ALLOCATORS.items()
    }


def beyond_the_paper(graph: Graph) -> dict[str, int]:
    """Return the feature map bytes of the best of many budgets B, and of Feng 2018's optimal split."""
    graph = with_reuses(graph)
    problem = Problem(graph=graph, device=GENERIC, budget_bytes=NO_LIMIT)
    program = build_instance(problem, update_at_once_order(graph))
    return {"best B": least_of_many_budgets(program), "linear_split": optimal_split(program)}


def least_of_many_budgets(program: Instance) -> int:
    """Return the feature map bytes of Algorithm 3 with the best of many B around sqrt(x y), for each set of places."""
    forward_part = ForwardPart.of(program)
    splits: dict[frozenset[int], Split] = {}
    for candidates in (forward_part.is_candidate, forward_part.is_narrow):
        first = forward_part.split(0, candidates)
        root = math.sqrt(first.between_bytes * first.stage_bytes)
        found = [forward_part.split(int(times * root), candidates) for times in np.geomspace(*MANY_BUDGETS)]
        splits |= {split.kept: split for split in found}
    return min(_evaluated(program, split).peak_bytes for split in splits.values()) - program.base_bytes


def optimal_split(program: Instance) -> int:
    """Return the feature map bytes of Feng 2018's optimal split."""
    vertices = vertices_of(program)
    chain, between = linear_chain(vertices)
    split = solve_chain([vertices.cost_bytes[vertex] for vertex in chain], between)
    return above_residents(program, vertices.recompute_counts(program, [chain[index] for index in split.stored]))


def at_peak(program: Instance, evaluation: Evaluation, split: Split) -> dict[str, int]:
    """Return the bytes at the peak: kept between stages, of the stage that is recomputed, and of backward."""
    graph = program.graph
    run = play(graph, emit(program, evaluation.sequence), GENERIC)
    found = {"kept": 0, "stage": 0, "backward": 0}
    for storage in run.live_at(run.timeline.peak_position):
        if not graph.storages[storage].resident:
            is_forward = graph.ops[graph.writer_of[storage]].phase is Phase.FORWARD
            which = "kept" if storage in split.kept else "stage" if is_forward else "backward"
            found[which] += graph.storages[storage].bytes
    return found


def above_residents(program: Instance, counts: Any) -> int:
    """Return the peak of these mirror counts above parameters and batch."""
    return evaluate_counts(program, counts.astype(np.int64)).peak_bytes - program.base_bytes
