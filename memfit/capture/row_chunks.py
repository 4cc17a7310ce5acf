"""Row chunks: a chain of ops that work row by row becomes one op that runs the chain on some rows at a time.

The distances of a million points to each centre are one large result of which the next op keeps a number a row. Run on
a sixteenth of the points at a time, the chain takes a sixteenth of the memory.

Which operators keep rows apart is known: those that work element by element, those that name other dimensions than the
first, products with a matrix on the left or of a matrix for each row, convolutions and pooling of a batch,
normalization of each row, and what is picked from a table. All results of a chain have as many rows,
and so have the arguments that are taken row by row. Kernels may still give other bits for fewer rows, which is tried:
the chain is run both ways on the same inputs, and stays as it was if one bit differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.binding import Binding, Call, Value, values_in
from memfit.capture.build import Captured
from memfit.capture.row_wise import arguments_by_rows, is_by_rows, is_row_wise, map_arguments
from memfit.cost.op_inputs import InputMaker
from memfit.graph import Graph, Op, Phase
from memfit.memory.place import bytes_of, lazy_view
from memfit.torch_private.tensors import tensors_in, tree_flatten

COUNTS = (2, 4, 8, 16, 32, 64, 128, 256)
_LEAST_SHARE = 0.01  # of the largest storage: a chain that holds less inside is left as it is
_ALIGNED_ROWS = 64  # chunks begin at multiples, so that vectors of a kernel hold the same rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChunks:
    """A chain of calls, run on some rows at a time.

    Attributes:
        parts: the calls, in order. A Value on storage -1 - n stands for argument n, any other one for a view of a
            result, as it is for all rows.
        by_rows: the positions of the arguments that are taken row by row.
        rows: of each result; a list of sizes that begins with as many is one of a result.
        count: the chunks; all but the last have equally many rows.
        outputs: what it returns.
        device: where its results are.
    """

    parts: tuple[Call, ...]
    by_rows: frozenset[int]
    rows: int
    count: int
    outputs: tuple[Value, ...]
    device: torch.device

    @property
    def __name__(self) -> str:
        digest = hashlib.sha256(repr((self.parts, self.by_rows, self.outputs)).encode()).hexdigest()[:8]
        return f"in_{self.count}_row_chunks#{digest}"

    @property
    def rows_at_once(self) -> int:
        """The rows of a chunk."""
        rows = -(-self.rows // self.count)
        return min(self.rows, -(-rows // _ALIGNED_ROWS) * _ALIGNED_ROWS if rows > _ALIGNED_ROWS else rows)

    def __call__(self, *given: torch.Tensor) -> Any:
        whole = {value.storage: value.empty(self.device) for value in self.outputs}
        used = ((number, values_in((each.args, each.kwargs, each.results))) for number, each in enumerate(self.parts))
        last_use = {value.storage: number for number, values in used for value in values}
        for start in range(0, self.rows, self.rows_at_once):
            self._run(given, start, min(self.rows_at_once, self.rows - start), whole, last_use)
        results = tuple(whole.values())
        return results[0] if len(results) == 1 else results

    def _run(
        self,
        given: Sequence[torch.Tensor],
        start: int,
        rows: int,
        whole: Mapping[int, torch.Tensor],
        last_use: Mapping[int, int],
    ) -> None:
        """Run the chain on some rows, and copy what is returned of them."""
        made: dict[int, torch.Tensor] = {}
        at = _At(self, given, made, start, rows)
        for number, part in enumerate(self.parts):
            returned = part.target(*at.filled(part.args), **at.filled(part.kwargs))
            for value, result in zip(part.results, tree_flatten(returned)[0], strict=True):
                if value is not None:
                    made[value.storage] = result
                    if value.storage in whole:
                        whole[value.storage].narrow(0, start, rows).copy_(result)
            for storage in [storage for storage in made if last_use[storage] == number]:
                del made[storage]


@dataclass(frozen=True, slots=True)
class _At:
    """Some rows of a chain's arguments and results. (An inner function that calls itself would keep them alive.)"""

    chain: RowChunks
    given: Sequence[torch.Tensor]
    made: Mapping[int, torch.Tensor]
    start: int
    rows: int

    def filled(self, tree: Any) -> Any:
        """Return arguments with tensors in the places of Values, and with the sizes of these rows."""
        if isinstance(tree, Value):
            return self._tensor(tree)
        if isinstance(tree, list | tuple):
            branches: list[Any] = [self.filled(branch) for branch in tree]  # pyright: ignore[reportUnknownVariableType]
            if branches and all(isinstance(each, int) for each in branches) and branches[0] == self.chain.rows:
                branches[0] = self.rows
            return type(tree)(branches)  # pyright: ignore[reportUnknownVariableType]
        if isinstance(tree, Mapping):
            return {key: self.filled(value) for key, value in tree.items()}  # pyright: ignore[reportUnknownVariableType]
        return tree

    def _tensor(self, value: Value) -> torch.Tensor:
        if value.storage >= 0:
            view = self.made[value.storage].as_strided((self.rows, *value.shape[1:]), value.stride, value.offset)
            return lazy_view(view, conjugated=value.conjugated, negated=value.negated)
        position = -1 - value.storage
        tensor = self.given[position]
        return tensor.narrow(0, self.start, self.rows) if position in self.chain.by_rows else tensor


def in_row_chunks(captured: Captured, count: int, *, is_run: bool = True) -> Captured | None:
    """Return a captured step with its chains of row-wise ops run in `count` chunks each; None if there is no chain.

    Args:
        captured: a step without a backward pass.
        count: into how many chunks the rows are cut.
        is_run: whether the chains are run once on their device, which is here. Otherwise kernels are taken to give the
            same bits for fewer rows.
    """
    found = captured
    refused: set[_Chain] = set()
    while (chain := _next_chain(found, count, refused)) is not None:
        changed, call = _with_chain(found, chain, count)
        if not is_run or _gives_same_bits(changed, call):
            found, refused = changed, set()  # ops and storages have new numbers
        else:
            refused.add(chain)
    return None if found is captured else found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chain:
    """Ops that are run by rows: their ids, the rows, and the storages that they write."""

    ops: tuple[int, ...]
    rows: int
    results: tuple[int, ...]


def _next_chain(captured: Captured, count: int, refused: set[_Chain]) -> _Chain | None:
    """Return the chain that holds the most bytes inside, among those that were not refused; None if there is none."""
    graph, calls = captured.graph, captured.binding.calls
    rows = {value.shape[0] for call in calls for value in call.results if value is not None and value.shape}
    chains = [chain for each in sorted(rows) if each >= count for chain in _chains(captured, each)]
    bytes_of = {chain: _inner_bytes(graph, chain) for chain in chains if chain not in refused}
    best = max(bytes_of, key=lambda chain: (bytes_of[chain], len(chain.ops)), default=None)
    least_bytes = _LEAST_SHARE * max((storage.bytes for storage in graph.storages), default=0)
    return best if best is not None and bytes_of[best] > least_bytes else None


def _inner_bytes(graph: Graph, chain: _Chain) -> int:
    """Return the bytes of the results that no other op reads."""
    inner = set(chain.results) - _outputs(graph, chain)
    return sum(graph.storages[storage].bytes for storage in inner)


def _outputs(graph: Graph, chain: _Chain) -> set[int]:
    """Return the results that are read outside of the chain, or required at the end."""
    own = set(chain.ops)
    read = {storage for op in graph.ops if op.id not in own for storage in (*op.reads, *op.mutates)}
    return {s for s in chain.results if s in read or graph.storages[s].required_at_end}


@dataclass(slots=True, kw_only=True)
class _Growing:
    """A chain under construction: its ops, what they read from outside, and the ops outside that depend on it."""

    ops: list[int]
    reads: set[int]
    behind: set[int]


class _SpreadError(Exception):
    """A chain makes something of which one of its ops needs all rows at once."""

    def __init__(self, storage: int) -> None:
        super().__init__()
        self.storage = storage


def _chains(captured: Captured, rows: int) -> list[_Chain]:
    """Return connected sets of row-wise ops that can be run as one op: none reads what depends on another of them.

    What makes a value of which a row-wise op needs all rows (the norms of all points, added to each row of distances)
    is left out of the chains.
    """
    outside: set[int] = set()
    writer_of = {storage: op for op in captured.graph.ops for storage in op.writes}
    while True:
        try:
            return _chains_without(captured, rows, outside)
        except _SpreadError as spread:
            waiting = [spread.storage]
            while waiting:
                op = writer_of.get(waiting.pop())
                if op is not None and op.id not in outside:
                    outside.add(op.id)
                    waiting += op.reads


def _chains_without(captured: Captured, rows: int, outside: set[int]) -> list[_Chain]:
    """Return the chains of ops that are not `outside`.

    Raises:
        _SpreadError: one of them needs all rows of what it makes.
    """
    graph, calls = captured.graph, captured.binding.calls
    chains: list[_Growing] = []
    chain_of: dict[int, _Growing] = {}  # storage -> the chain that makes it
    bases: dict[int, Value] = {}
    for op, call in zip(graph.ops, calls, strict=True):
        own: _Growing | None = None
        if op.id not in outside and is_row_wise(op, call, rows):
            own = _joined(op, call, rows, chains, chain_of, bases)
            bases |= {value.storage: value for value in values_in(call.results)}
            chain_of |= dict.fromkeys(op.writes, own)
        for other in chains:
            depends = not other.behind.isdisjoint(op.reads) or any(chain_of.get(s) is other for s in op.reads)
            if other is not own and depends:
                other.behind |= {*op.writes, *op.mutates}
    return [
        _Chain(
            ops=tuple(sorted(c.ops)), rows=rows, results=tuple(s for op in sorted(c.ops) for s in graph.ops[op].writes)
        )
        for c in chains
        if _may_move(graph, sorted(c.ops))
    ]


def _joined(
    op: Op, call: Call, rows: int, chains: list[_Growing], chain_of: dict[int, _Growing], bases: Mapping[int, Value]
) -> _Growing:
    """Add an op to the chains that it reads, which become one; where that cannot be, it begins a chain of its own."""
    inputs = [chain for chain in chains if any(chain_of.get(storage) is chain for storage in op.reads)]
    inner = [value for value in values_in((call.args, call.kwargs)) if value.storage in bases]
    alone = _Growing(ops=[op.id], reads=set(op.reads), behind=set())
    together = [*inputs, alone]
    apart = any(not one.behind.isdisjoint(other.reads) for one in inputs for other in together)
    for value, by_rows in arguments_by_rows(call, rows):
        if value.storage in bases and value.shape[:1] == (rows,) and not by_rows:
            raise _SpreadError(value.storage)
    if apart or not all(is_by_rows(value, bases[value.storage]) for value in inner):
        chains.append(alone)
        return alone
    results = {storage for storage, chain in chain_of.items() if any(chain is each for each in inputs)}
    joined = _Growing(
        ops=[op for each in together for op in each.ops],
        reads={storage for each in together for storage in each.reads} - results,
        behind={storage for each in together for storage in each.behind},
    )
    chains[:] = [chain for chain in chains if not any(chain is each for each in inputs)] + [joined]
    chain_of |= dict.fromkeys(results, joined)
    return joined


def _may_move(graph: Graph, ops: Sequence[int]) -> bool:
    """Return whether no op between the first and the last writes in place or draws: their order must stay."""
    return all(not op.mutates and op.random is None for op in graph.ops[ops[0] : ops[-1] + 1])


def _with_chain(captured: Captured, chain: _Chain, count: int) -> tuple[Captured, Call]:
    """Return the captured step with a chain as one op, and its call."""
    graph, binding = captured.graph, captured.binding
    outputs = _outputs(graph, chain)
    target, args = _target(binding, chain, count, outputs)
    order = _order(graph, chain)
    place = order.index(-1)
    inner = set(chain.results) - outputs
    left = [storage.id for storage in graph.storages if storage.id not in inner]
    first = graph.ops[chain.ops[0]]
    joined = Op(
        id=place,
        name=f"{first.name}_by_rows",
        target=target.__name__,
        phase=Phase.FORWARD,
        module=first.module,
        reads=tuple(dict.fromkeys(value.storage for value in args)),
        writes=tuple(value.storage for value in target.outputs),
        seconds=0.0,
    )
    call = Call(op=place, target=target, args=args, results=target.outputs)
    made = [(joined, call) if op < 0 else (graph.ops[op], binding.calls[op]) for op in order]
    changed = captured.with_ops(made, left)
    return changed, changed.binding.calls[place]


def _target(binding: Binding, chain: _Chain, count: int, outputs: set[int]) -> tuple[RowChunks, tuple[Value, ...]]:
    """Return what runs a chain, and its arguments."""
    own = set(chain.results)
    given: dict[tuple[Value, bool], int] = {}

    def local(value: Value, by_rows: bool) -> Value:
        if value.storage in own:
            return value
        return replace(value, storage=-1 - given.setdefault((value, by_rows), len(given)))

    def part(call: Call) -> Call:
        args, kwargs = map_arguments(call, chain.rows, local)
        return Call(op=0, target=call.target, args=args, kwargs=kwargs, results=call.results)

    calls = [binding.calls[op] for op in chain.ops]
    chunks = RowChunks(
        parts=tuple(map(part, calls)),
        by_rows=frozenset(position for (_, by_rows), position in given.items() if by_rows),
        rows=chain.rows,
        count=count,
        outputs=tuple(v for call in calls for v in values_in(call.results) if v.storage in outputs),
        device=binding.device,
    )
    return chunks, tuple(value for value, _ in given)


def _order(graph: Graph, chain: _Chain) -> list[int]:
    """Return the ids of the other ops in their new order, with -1 for the chain: after all that it reads."""
    own, behind = set(chain.ops), set(chain.results)
    before: list[int] = []
    after: list[int] = []
    for op in graph.ops:
        if op.id in own:
            continue
        if op.id > chain.ops[-1] or behind & {*op.reads, *op.mutates}:
            after.append(op.id)
            behind |= {*op.writes, *op.mutates}
        else:
            before.append(op.id)
    return [*before, -1, *after]


def _gives_same_bits(captured: Captured, call: Call) -> bool:
    """Return whether a chain gives, in chunks, the bits that it gives at once."""
    target: RowChunks = call.target  # pyright: ignore[reportAssignmentType]
    inputs = InputMaker(captured.binding.device)
    try:
        args, _ = inputs.make(call, captured.graph.storages)
        at_once = replace(target, count=1)(*args)
        in_chunks = target(*args)
    except (RuntimeError, IndexError, ValueError, TypeError):  # it is no chain of rows after all
        return False
    return all(
        torch.equal(bytes_of(one), bytes_of(other))
        for one, other in zip(tensors_in(at_once), tensors_in(in_chunks), strict=True)
    )
