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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from memfit.binding import Binding, Call, Value, map_values, values_in
from memfit.capture.build import Captured
from memfit.capture.reuse import all_laid_out_as
from memfit.cost.op_inputs import InputMaker
from memfit.graph import Graph, Op, Phase
from memfit.memory.place import bytes_of, lazy_view
from memfit.torch_private.tensors import tensors_in, tree_flatten

_aten = torch.ops.aten
# The positions of arguments of which each row of the result needs all rows, whatever their shapes.
_WHOLE: dict[Any, tuple[int, ...]] = {
    _aten.mm: (1,),
    _aten.mv: (1,),
    _aten.addmm: (2,),
    _aten.addmv: (2,),
    _aten.bmm: (),
    _aten.baddbmm: (),
    _aten.convolution: (1, 2),
    _aten.max_pool2d_with_indices: (),
    _aten.avg_pool2d: (),
    _aten._adaptive_avg_pool2d: (),
    _aten.bucketize: (1,),
    _aten.embedding: (0,),
    _aten.index_select: (0,),
    _aten.index: (0,),
    _aten._cdist_forward: (1,),
    _aten._euclidean_dist: (1,),
}
_OF_LAST = (_aten.native_layer_norm, _aten._fused_rms_norm)  # along the last dimensions, whose sizes they are given
_COPIES = (_aten._to_copy, _aten.clone)
_MIXES_ROWS = (_aten.renorm, _aten.unique_dim, _aten.unique_consecutive)  # along the dimensions that they do not name
COUNTS = (2, 4, 8, 16, 32, 64, 128, 256)
_LEAST_SHARE = 0.01  # of the largest storage: a chain that holds less inside is left as it is
_ALIGNED_ROWS = 64  # chunks begin at multiples, so that vectors of a kernel hold the same rows


@dataclass(frozen=True, slots=True)
class _Given:
    """Stands for an argument of the whole chain; `by_rows` says whether it is taken row by row."""

    position: int
    by_rows: bool


@dataclass(frozen=True, slots=True)
class _Made:
    """Stands for a view of a result of the chain, as `value` describes it for all rows."""

    value: Value


@dataclass(frozen=True, slots=True)
class _Rows:
    """Stands for the number of rows in a list of sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[int | None, ...]
    last_used: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChunks:
    """A chain of calls, run on some rows at a time.

    Attributes:
        parts: the calls, in order.
        rows: of each result.
        count: the chunks; all but the last have equally many rows.
        outputs: what it returns.
        device: where its results are.
    """

    parts: tuple[_Part, ...]
    rows: int
    count: int
    outputs: tuple[Value, ...]
    device: torch.device

    @property
    def __name__(self) -> str:
        digest = hashlib.sha256(repr((self.parts, self.outputs)).encode()).hexdigest()[:8]
        return f"in_{self.count}_row_chunks#{digest}"

    @property
    def rows_at_once(self) -> int:
        """The rows of a chunk."""
        rows = -(-self.rows // self.count)
        return min(self.rows, -(-rows // _ALIGNED_ROWS) * _ALIGNED_ROWS if rows > _ALIGNED_ROWS else rows)

    def __call__(self, *given: torch.Tensor) -> Any:
        whole = {
            value.storage: torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=self.device)
            for value in self.outputs
        }
        for start in range(0, self.rows, self.rows_at_once):
            self._run(given, start, min(self.rows_at_once, self.rows - start), whole)
        results = tuple(whole.values())
        return results[0] if len(results) == 1 else results

    def _run(self, given: Sequence[torch.Tensor], start: int, rows: int, whole: Mapping[int, torch.Tensor]) -> None:
        """Run the chain on some rows, and copy what is returned of them."""
        made: dict[int, torch.Tensor] = {}
        at = _At(given, made, start, rows)
        for part in self.parts:
            returned = part.target(*at.filled(part.args), **at.filled(part.kwargs))
            for storage, result in zip(part.results, tree_flatten(returned)[0], strict=True):
                if storage is not None:
                    made[storage] = result
                    if storage in whole:
                        whole[storage].narrow(0, start, rows).copy_(result)
            for storage in part.last_used:
                del made[storage]


@dataclass(frozen=True, slots=True)
class _At:
    """Some rows of a chain's arguments and results. (An inner function that calls itself would keep them alive.)"""

    given: Sequence[torch.Tensor]
    made: Mapping[int, torch.Tensor]
    start: int
    rows: int

    def filled(self, tree: Any) -> Any:
        """Return arguments with tensors and sizes in the places of what stands for them."""
        if isinstance(tree, _Given):
            tensor = self.given[tree.position]
            return tensor.narrow(0, self.start, self.rows) if tree.by_rows else tensor
        if isinstance(tree, _Made):
            value = tree.value
            view = self.made[value.storage].as_strided((self.rows, *value.shape[1:]), value.stride, value.offset)
            return lazy_view(view, conjugated=value.conjugated, negated=value.negated)
        if isinstance(tree, _Rows):
            return self.rows
        if isinstance(tree, list | tuple):
            return type(tree)(map(self.filled, tree))  # pyright: ignore[reportUnknownArgumentType]
        if isinstance(tree, Mapping):
            return {key: self.filled(value) for key, value in tree.items()}  # pyright: ignore[reportUnknownVariableType]
        return tree


def in_row_chunks(captured: Captured, count: int) -> Captured | None:
    """Return a captured step with its chains of row-wise ops run in `count` chunks each; None if there is no chain.

    Args:
        captured: a step without a backward pass, on a device that is here: the chains are run once.
        count: into how many chunks the rows are cut.
    """
    found = captured
    refused: set[_Chain] = set()
    while (chain := _next_chain(found, count, refused)) is not None:
        changed, call = _with_chain(found, chain, count)
        if _gives_same_bits(changed, call):
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
    """A chain while it is found: its ops, what they read from outside, and what outside depends on it."""

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
        if op.id not in outside and _is_row_wise(op, call, rows):
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
    for value, by_rows in _arguments(call, rows):
        if value.storage in bases and value.shape[:1] == (rows,) and not by_rows:
            raise _SpreadError(value.storage)
    if apart or not all(_is_by_rows(value, bases[value.storage]) for value in inner):
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


def _is_row_wise(op: Op, call: Call, rows: int) -> bool:
    """Return whether an op may work row by row, as far as shapes tell: trying it decides."""
    if op.random or op.mutates or not op.recomputable or op.phase is not Phase.FORWARD or not call.results:
        return False
    results = [value for value in call.results if value is not None]
    if len(results) != len(call.results) or len({value.storage for value in results}) != len(results):
        return False
    if not _keeps_rows_apart(call) or not all(v.shape[:1] == (rows,) and _is_plain(v) for v in results):
        return False
    return any(by_rows for _, by_rows in _arguments(call, rows))


def _keeps_rows_apart(call: Call) -> bool:
    """Return whether each row of an operator's result depends on the same row of what it takes by rows.

    Operators that work element by element do; so do those that work along other dimensions than the first, which they
    name (the last one where they name none), products of matrices, and what is picked from a table.
    """
    packet, first = getattr(call.target, "overloadpacket", None), next(values_in(call.args), None)
    if packet is None or first is None or packet in _MIXES_ROWS:
        return False
    if first.dtype.is_complex and not all_laid_out_as(first, (call.args, call.kwargs)):
        return False  # the compiler's loops over complex numbers round otherwise at their ends
    if packet in _WHOLE or packet in _COPIES or torch.Tag.pointwise in call.target.tags:  # pyright: ignore
        return True
    if packet in _OF_LAST:
        return len(call.args[1]) < len(first.shape)
    if packet is _aten.constant_pad_nd:
        return len(call.args[1]) < 2 * len(first.shape)
    arguments = call.target._schema.arguments  # pyright: ignore[reportFunctionMemberAccess]
    given = {argument.name: argument.default_value for argument in arguments}
    given |= {argument.name: arg for argument, arg in zip(arguments, call.args, strict=False)}
    given |= call.kwargs
    along = given.get("dim", given.get("dims"))
    if along is None or along == []:
        return False
    dimensions = along if isinstance(along, list | tuple) else [along]
    return all(isinstance(each, int) and each % len(first.shape) != 0 for each in dimensions)


def _arguments(call: Call, rows: int) -> Iterator[tuple[Value, bool]]:
    """Yield the tensors among the arguments of a call, and whether each is taken row by row."""
    whole = _WHOLE.get(getattr(call.target, "overloadpacket", None), ())
    for place, arg in enumerate((*call.args, dict(call.kwargs))):
        for value in values_in(arg):
            yield value, place not in whole and _takes_rows(value, call, rows)


def _takes_rows(value: Value, call: Call, rows: int) -> bool:
    """Return whether an argument may be taken row by row: one of fewer dimensions than the result is spread over it."""
    dimensions = min(len(result.shape) for result in values_in(call.results))
    return value.shape[:1] == (rows,) and len(value.shape) >= dimensions


def _is_plain(value: Value) -> bool:
    """Return whether a result is stored row after row, without gaps, and as it is."""
    size = 1
    for extent, stride in zip(reversed(value.shape), reversed(value.stride), strict=True):
        if extent != 1 and stride != size:
            return False
        size *= extent
    return value.offset == 0 and not value.conjugated and not value.negated


def _is_by_rows(value: Value, base: Value) -> bool:
    """Return whether each row of a view lies within the same row of the storage's own tensor."""
    row = base.stride[0]
    within = value.offset + sum((n - 1) * stride for n, stride in zip(value.shape[1:], value.stride[1:], strict=True))
    same_rows = value.shape[:1] == base.shape[:1] and value.stride[:1] == (row,)
    return same_rows and value.dtype == base.dtype and within < max(1, row)


def _with_chain(captured: Captured, chain: _Chain, count: int) -> tuple[Captured, Call]:
    """Return the captured step with a chain as one op, and its call."""
    graph, binding = captured.graph, captured.binding
    own, outputs = set(chain.ops), _outputs(graph, chain)
    target, args = _target(binding, chain, count, outputs)
    values = {value.storage: value for value in target.outputs}
    order = _order(graph, chain)
    place = order.index(-1)
    inner = set(chain.results) - outputs
    kept = [storage for storage in graph.storages if storage.id not in inner]
    number_of = {storage.id: number for number, storage in enumerate(kept)}
    first = graph.ops[chain.ops[0]]
    joined = Op(
        id=place,
        name=f"{first.name}_by_rows",
        target=target.__name__,
        phase=Phase.FORWARD,
        module=first.module,
        reads=tuple(dict.fromkeys(number_of[value.storage] for value in args)),
        writes=tuple(number_of[storage] for storage in values),
        seconds=0.0,
    )
    ops: list[Op] = []
    calls: list[Call] = []

    def renumbered(tree: Any) -> Any:
        return map_values(tree, lambda value: replace(value, storage=number_of[value.storage]))

    for new, old in enumerate(order):
        if old < 0:
            ops.append(joined)
            calls.append(Call(op=new, target=target, args=renumbered(args), results=renumbered(tuple(values.values()))))
            continue
        assert old not in own
        ops.append(_renumbered_op(graph.ops[old], new, number_of))
        call = binding.calls[old]
        forms = {
            number_of[read]: replace(form, extra=renumbered(form.extra)) for read, form in call.in_place_forms.items()
        }
        state = None if call.generator_state is None else number_of[call.generator_state]
        changed = replace(call, op=new, args=renumbered(call.args), kwargs=renumbered(call.kwargs))
        calls.append(replace(changed, results=renumbered(call.results), generator_state=state, in_place_forms=forms))
    storages = [msgspec.structs.replace(storage, id=number) for number, storage in enumerate(kept)]
    changed_graph = Graph.build(name=graph.name, storages=storages, ops=ops, device=graph.device, source=graph.source)
    residents = tuple(replace(resident, value=renumbered(resident.value)) for resident in binding.residents)
    changed_binding = replace(
        binding, calls=tuple(calls), residents=residents, outputs=renumbered(dict(binding.outputs))
    )
    return replace(captured, graph=changed_graph, binding=changed_binding, observed=()), calls[place]


def _target(binding: Binding, chain: _Chain, count: int, outputs: set[int]) -> tuple[RowChunks, tuple[Value, ...]]:
    """Return what runs a chain, and its arguments."""
    own = set(chain.results)
    given: dict[Value, int] = {}

    def template(tree: Any, call: Call, *, is_whole: bool) -> Any:
        if isinstance(tree, Value):
            if tree.storage in own:
                return _Made(tree)
            by_rows = not is_whole and _takes_rows(tree, call, chain.rows)
            return _Given(given.setdefault(tree, len(given)), by_rows)
        if isinstance(tree, list | tuple):
            sizes = list(tree)
            if sizes and sizes[0] == chain.rows and all(isinstance(size, int) for size in sizes):
                return type(tree)([_Rows(), *sizes[1:]])
            return type(tree)(template(branch, call, is_whole=is_whole) for branch in sizes)  # pyright: ignore
        return tree

    def arguments(call: Call) -> tuple[Any, ...]:
        whole = _WHOLE.get(getattr(call.target, "overloadpacket", None), ())
        return tuple(template(arg, call, is_whole=place in whole) for place, arg in enumerate(call.args))

    calls = [binding.calls[op] for op in chain.ops]
    last = {value.storage: n for n, call in enumerate(calls) for value in values_in((call.args, call.kwargs))}
    for number, call in enumerate(calls):
        for value in values_in(call.results):
            last.setdefault(value.storage, number)
    parts = tuple(
        _Part(
            target=call.target,
            args=arguments(call),
            kwargs={key: template(value, call, is_whole=False) for key, value in call.kwargs.items()},
            results=tuple(None if value is None else value.storage for value in call.results),
            last_used=tuple(storage for storage in chain.results if last[storage] == number),
        )
        for number, call in enumerate(calls)
    )
    returned = tuple(v for call in calls for v in values_in(call.results) if v.storage in outputs)
    chunks = RowChunks(parts=parts, rows=chain.rows, count=count, outputs=returned, device=binding.device)
    return chunks, tuple(given)


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


def _renumbered_op(op: Op, number: int, number_of: Mapping[int, int]) -> Op:
    fields = {name: tuple(number_of[s] for s in getattr(op, name)) for name in ("reads", "writes", "mutates")}
    reuses = tuple((number_of[read], number_of[write]) for read, write in op.reuses)
    return msgspec.structs.replace(op, id=number, reuses=reuses, **fields)


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
