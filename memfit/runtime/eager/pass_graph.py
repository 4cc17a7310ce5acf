"""The Graph of a pass of a training loop, and what a plan of it says about the pass's contents."""

from __future__ import annotations

from dataclasses import dataclass, field

from memfit.device import Device
from memfit.graph import Graph, Op, Phase, Role, Storage
from memfit.runtime.eager.trace import BEFORE, Content, Trace
from memfit.schedule import Code, Schedule

Key = tuple[int, int]
"""Names contents of a pass: `Content.born` and `Content.place`."""

_LEAST_DISTANCE, _MOST_READS = 16, 64  # calls between, and number of, the reads of what is not copied to the host
_SLACK = 8  # calls for which a variable of the loop may hold contents after the last call that reads them


@dataclass(frozen=True, slots=True, kw_only=True)
class PassGraph:
    """A graph of a pass: op 0 makes what was there before and goes during the pass, op i + 1 is call i.

    Attributes:
        graph: of the pass.
        contents: of the graph's storages, by id.
        bytes_outside: on the device, and in none of them.
    """

    graph: Graph
    contents: tuple[Content, ...]
    bytes_outside: int


@dataclass(slots=True, kw_only=True)
class Decisions:
    """What a plan does with the contents of a pass.

    Attributes:
        let_go: position -> contents that are let go before the call at this position.
        held: contents -> (from, to), positions between which their storage is held, though the loop does not hold it.
        released: position -> contents that are held no longer from before the call at this position on.
        to_host, to_device: position -> contents whose copy begins before the call at this position.
    """

    let_go: dict[int, list[Key]] = field(default_factory=dict[int, list[Key]])
    held: dict[Key, list[tuple[int, int]]] = field(default_factory=dict[Key, list[tuple[int, int]]])
    released: dict[int, list[Key]] = field(default_factory=dict[int, list[Key]])
    to_host: dict[int, list[Key]] = field(default_factory=dict[int, list[Key]])
    to_device: dict[int, list[Key]] = field(default_factory=dict[int, list[Key]])


def graph_of(trace: Trace, device: Device) -> PassGraph:
    """Return the graph of a pass.

    Contents are storages: what a call wrote in place, and can write again, is another storage with the memory of the
    first. What code itself holds is read by the last call before it was gone, and never recomputed. A device with a
    link may copy what autograd saved to its host; all else is read so often that no copy is worth it.

    Args:
        trace: a pass from its first call to its last.
        device: gives the alignment.
    """
    contents = tuple(trace.contents)
    ids = {content: number for number, content in enumerate(contents)}
    reads = [list[int]() for _ in range(len(trace.calls) + 1)]
    for position, call in enumerate(trace.calls):
        reads[position + 1] = [ids[content] for content in call.reads]
    for content in contents:
        last = _held_until(content)
        if last is not None and ids[content] not in reads[last + 1]:
            reads[last + 1].append(ids[content])
    if device.has_link:
        distance = max(_LEAST_DISTANCE, len(trace.calls) // _MOST_READS)
        for content in contents:
            if content.dies is not None and not _is_free(content):
                for position in range(content.born + 1, content.dies, distance):
                    if ids[content] not in reads[position + 1]:
                        reads[position + 1].append(ids[content])
    arriving = tuple(ids[content] for content in contents if content.born == BEFORE and content.dies is not None)
    ops = [Op(id=0, name="before", phase=Phase.FORWARD, reads=(), writes=arriving, seconds=0.0, recomputable=False)]
    for position, call in enumerate(trace.calls):
        can_be_remade = bool(call.makes) and not call.mutates and all(_is_free(content) for content in call.makes)
        ops.append(
            Op(
                id=position + 1,
                name=call.name,
                phase=Phase.BACKWARD if call.is_backward else Phase.FORWARD,
                reads=tuple(reads[position + 1]),
                writes=tuple(ids[content] for content in call.makes),
                mutates=tuple(ids[content] for content in call.mutates),
                seconds=call.seconds,
                workspace_bytes=max(0, call.need.peak_bytes - call.need.result_bytes),
                recomputable=can_be_remade,
                reuses=tuple((ids[c.written_over], ids[c]) for c in call.makes if c.written_over is not None),
            )
        )
    storages = [
        Storage(
            id=number,
            name=f"{number}",
            bytes=content.bytes,
            role=Role.PARAMETER if content.born == BEFORE and content.dies is None else Role.ACTIVATION,
            resident=content.born == BEFORE and content.dies is None,
            required_at_end=content.dies is None,
        )
        for number, content in enumerate(contents)
    ]
    before_bytes = sum(device.aligned(content.bytes) for content in contents if content.born == BEFORE)
    return PassGraph(
        graph=Graph.build(name="pass", storages=storages, ops=ops),
        contents=contents,
        bytes_outside=max(0, trace.live_bytes - before_bytes),
    )


def decisions_of(made: PassGraph, schedule: Schedule) -> Decisions:
    """Return what a schedule does with the contents of a pass.

    The loop makes each call in its place. Where the schedule computes an op later for the first time, its writes are
    let go meanwhile, if that is long enough.

    Args:
        made: the pass, with its graph.
        schedule: of the graph.
    """
    graph, contents, decisions = made.graph, made.contents, Decisions()
    overwritten = {content.written_over for content in contents}
    position, computed = BEFORE - 1, 0
    postponed: set[int] = set()
    since: dict[int, int] = {}  # storage -> the position at which it was made, or made again

    def leave(storage: int, begin: int, end: int) -> None:
        content = contents[storage]
        _leave(decisions, content, begin, end, can_be_held=content not in overwritten)

    rows = zip(schedule.codes.tolist(), schedule.operands.tolist(), schedule.extras.tolist(), strict=True)
    for code, operand, extra in rows:
        if code == Code.COMPUTE:
            begin = position
            if operand >= computed:
                postponed.update(range(computed, operand))
                begin, position, computed = operand - 1, operand - 1, operand + 1
            elif operand in postponed:
                postponed.remove(operand)
                if position - (operand - 1) <= _SLACK:
                    begin = operand - 1
                else:
                    for storage in graph.ops[operand].writes:
                        leave(storage, operand - 1, operand - 1)
            if extra >= 0:
                leave(extra, since.pop(extra, position), position)
            since.update(dict.fromkeys(graph.ops[operand].writes, begin))
        elif code == Code.DROP:
            leave(operand, since.pop(operand, position), position)
        elif code in (Code.OFFLOAD, Code.PREFETCH) and _is_free(contents[operand]):
            copies = decisions.to_host if code == Code.OFFLOAD else decisions.to_device
            copies.setdefault(position + 1, []).append((contents[operand].born, contents[operand].place))
            if code == Code.PREFETCH:
                since[operand] = position
    return decisions


def _leave(decisions: Decisions, content: Content, since: int, position: int, *, can_be_held: bool) -> None:
    """Note that the plan has contents from one position to another, and no longer."""
    if not content.can_be_remade or content.dies is None:
        return
    key = (content.born, content.place)
    if position + 1 < content.dies:
        decisions.let_go.setdefault(position + 1, []).append(key)
    is_made_again = since != content.born
    if can_be_held and position > since and (is_made_again or position >= content.dies):
        decisions.held.setdefault(key, []).append((since, position + 1))
        decisions.released.setdefault(position + 1, []).append(key)


def _is_free(content: Content) -> bool:
    """Return whether contents can be dropped and made again while the loop runs."""
    return content.can_be_remade and not content.is_held and content.dies is not None and _held_until(content) is None


def _held_until(content: Content) -> int | None:
    """Return the position up to which code itself holds contents, where that is later than their last use."""
    last = max((content.born, *content.reads[-1:]))
    if content.dies is None or content.dies - 1 <= last:
        return None
    is_exact = not content.can_be_remade or content.is_held
    return content.dies - 1 if is_exact or content.dies - 1 > last + _SLACK else None
