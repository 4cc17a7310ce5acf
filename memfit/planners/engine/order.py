"""The order in which ops are first computed: the original one, or the one that updates each parameter at once."""

from __future__ import annotations

from memfit.graph import Graph, Op, Phase


def original_order(graph: Graph) -> tuple[int, ...]:
    """Return op ids as they stand in the graph."""
    return tuple(range(len(graph.ops)))


def update_at_once_order(graph: Graph) -> tuple[int, ...]:
    """Return op ids with every op of the update phase moved up to right behind the last op that it depends on.

    A parameter is updated as soon as its gradient is there, so that no two gradients need to live at once. An op that
    reads many gradients (clipping by norm, a foreach optimizer) waits for the last of them, and so does what depends on
    it. The order is the original one where no op can move.

    Guarantees: every op stands behind the writers of what it touches, behind all earlier ops that touch a storage which
    it touches too and which the step mutates, behind earlier ops of its generator or ranks, and on its side of each
    boundary.

    Source: the update of each parameter in its backward hook (torch.Tensor.register_post_accumulate_grad_hook).
    """
    behind = [0] * len(graph.ops)  # the op behind which each stands; itself where it stays
    for op, earlier in zip(graph.ops, earlier_ops(graph), strict=True):
        behind[op.id] = op.id
        if op.phase == Phase.UPDATE:
            first_allowed = max((b.position for b in graph.boundaries if b.position <= op.id), default=0)
            behind[op.id] = max((behind[each] for each in earlier), default=0)
            behind[op.id] = max(behind[op.id], first_allowed)
    return tuple(sorted(range(len(graph.ops)), key=lambda op: (behind[op], op)))


def earlier_ops(graph: Graph) -> list[set[int]]:
    """Return for each op its direct predecessors: the writers of its storages, and the ops tied by `ordered_by`."""
    earlier: list[set[int]] = []
    last: dict[int | str, int] = {}  # by what ties ops to one another
    for op in graph.ops:
        keys = ordered_by(graph, op)
        writers = {graph.writer_of[storage] for storage, _ in graph.read_versions[op.id] if storage in graph.writer_of}
        earlier.append(writers.union(last[key] for key in keys if key in last))
        last.update(dict.fromkeys(keys, op.id))
    return earlier


def ordered_by(graph: Graph, op: Op) -> list[int | str]:
    """Return what ties `op` to other ops in order: mutated storages that it touches, its generator, its ranks.

    Args:
        graph: the step.
        op: of the graph.
    """
    return [*(s for s, _ in graph.read_versions[op.id] if graph.last_version[s]), *op.kept_in_order]
