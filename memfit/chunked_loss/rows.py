"""Rows: what logits are made of, and how to compute some rows of them at a time, forward and backward.

A projection acts on each row by itself, and so do the scaling, casts and soft caps behind it. Logits are therefore
kept as what is projected, the weights, and the steps from there; each use of them runs the steps for some rows, takes
what it needs, and lets the rows go (as Liger's fused linear cross entropy does, Hsu et al. 2024). Gradients of weights
add up in float32 if the weights have fewer bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.errors import UnsupportedStepError
from memfit.torch_private.tensors import tree_map

_PARTS = 16  # of the gradient of a weight, each of which is added by itself
_ALIGNED_ROWS = 64  # chunks begin at multiples, so that vectors of a kernel hold the same rows


@dataclass(frozen=True, slots=True)
class By:
    """The place of a tensor in a step's arguments: among the rows, what is fixed, or the results of earlier steps."""

    kind: str
    number: int


ROW, FIXED, STEP = "row", "fixed", "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A function of rows.

    Attributes:
        call: the function.
        args, kwargs: of it, with `By` in the places of tensors.
        autocast: the dtype that operators are cast to while it runs; None outside of autocast.
    """

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: torch.dtype | None

    def moved(self, places: dict[By, By]) -> Step:
        """Return the step with other places of its tensors."""

        def move(leaf: Any) -> Any:
            return places.get(leaf, leaf) if isinstance(leaf, By) else leaf

        return replace(self, args=tree_map(move, self.args), kwargs=tree_map(move, self.kwargs))

    def run(self, tensors: Callable[[By], torch.Tensor], device: torch.device) -> torch.Tensor:
        """Return the result for some rows.

        Args:
            tensors: returns the tensor of a place.
            device: of all of them.
        """

        def fill(leaf: Any) -> Any:
            return tensors(leaf) if isinstance(leaf, By) else leaf

        with autocast_of(self.autocast, device):
            return self.call(*tree_map(fill, self.args), **tree_map(fill, self.kwargs))


def autocast_of(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which operators are cast to a dtype on a device, and to none if it is None."""
    if dtype is None and not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)


def autocast_now(device: torch.device) -> torch.dtype | None:
    """Return the dtype that operators are cast to on a device now; None outside of autocast."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projection:
    """The product of rows with a weight: the only step whose gradient of a fixed tensor is large.

    Attributes:
        row, weight, bias: places among the rows and among what is fixed.
        autocast: as in `Step`.
    """

    row: int
    weight: int
    bias: int | None
    autocast: torch.dtype | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Results that are computed by rows.

    Attributes:
        rows: tensors of which each row of the results needs one, `[*lead, n]`.
        fixed: tensors that all rows need.
        projections: of rows, which the steps begin with: the results of step `n` of these are `By(STEP, n)`.
        steps: that follow, in order.
        shape: of the result, `[*lead, width]`.
        dtype: of it.
        versions: of the tensors, when they were noted.
    """

    rows: tuple[torch.Tensor, ...]
    fixed: tuple[torch.Tensor, ...]
    projections: tuple[Projection, ...]
    steps: tuple[Step, ...] = ()
    shape: torch.Size
    dtype: torch.dtype
    versions: tuple[tuple[torch.Tensor, int], ...] = ()

    def require_unchanged(self) -> None:
        """Raise UnsupportedStepError if code has written to a tensor since: eager would have taken its old content."""
        if any(tensor._version != version for tensor, version in self.versions):
            raise UnsupportedStepError(
                "chunk_loss: what the logits are made of was written to in place before they were used (the head's "
                "input, its weight, or what they were scaled by); use the logits first, or leave chunk_loss out"
            )

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        return self.rows[0].device

    @property
    def lead(self) -> tuple[int, ...]:
        """The sizes of the dimensions before the last one."""
        return tuple(self.shape[:-1])

    @property
    def count(self) -> int:
        """How many rows there are."""
        return math.prod(self.lead)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors that the results are made of, the rows first."""
        return (*self.rows, *self.fixed)

    def viewed(self, view: Callable[[torch.Tensor], torch.Tensor]) -> Rows:
        """Return the same with the dimensions before the last one viewed otherwise.

        Args:
            view: takes a tensor `[*lead, n]`, and returns one `[*other_lead, n]`.
        """
        rows = tuple(view(each) for each in self.rows)
        return replace(self, rows=rows, shape=torch.Size((*rows[0].shape[:-1], self.shape[-1])))

    def at_once(self) -> int:
        """Return the rows of a chunk: as many as make its results as large as all that is projected."""
        width = max(self.rows[each.row].shape[-1] for each in self.projections)
        chunks = max(1, -(-self.shape[-1] // width))
        return -(-max(1, -(-self.count // chunks)) // _ALIGNED_ROWS) * _ALIGNED_ROWS

    def chunks(self) -> Iterator[slice]:
        """Yield the rows of each chunk."""
        size = self.at_once()
        for start in range(0, self.count, size):
            yield slice(start, min(self.count, start + size))


def joined(one: Rows, other: Rows) -> tuple[Rows, By, By]:
    """Return rows that have the steps of both, and where their results are.

    Args:
        one: the first.
        other: of as many rows.
    """
    rows, fixed = list(one.rows), list(one.fixed)
    places: dict[By, By] = {}
    for kind, own, added in ((ROW, rows, other.rows), (FIXED, fixed, other.fixed)):
        for number, tensor in enumerate(added):
            at = next((n for n, each in enumerate(own) if each is tensor), len(own))
            if at == len(own):
                own.append(tensor)
            places[By(kind, number)] = By(kind, at)
    first, more = len(one.projections), len(other.projections)
    steps = len(one.steps)
    for number in range(more):
        places[By(STEP, number)] = By(STEP, first + number)
    for number in range(len(other.steps)):
        places[By(STEP, more + number)] = By(STEP, first + more + number)
    own_places = {By(STEP, first + n): By(STEP, first + more + len(other.steps) + n) for n in range(steps)}
    projections = tuple(
        replace(
            each,
            row=places[By(ROW, each.row)].number,
            weight=places[By(FIXED, each.weight)].number,
            bias=None if each.bias is None else places[By(FIXED, each.bias)].number,
        )
        for each in other.projections
    )
    both = replace(
        one,
        rows=tuple(rows),
        fixed=tuple(fixed),
        projections=(*one.projections, *projections),
        steps=(*(each.moved(places) for each in other.steps), *(each.moved(own_places) for each in one.steps)),
        versions=(*one.versions, *other.versions),
    )
    of_one = By(STEP, first + steps - 1)
    return both, own_places.get(of_one, of_one), places[By(STEP, more + len(other.steps) - 1)]


class Chunk:
    """Some rows: their results, computed anew, and the gradients of what they are made of.

    Args:
        of: the rows.
        flat: `of.rows`, each with its dimensions before the last one as one.
        at: the rows of this chunk.
        wants: of each of `of.tensors`, whether its gradient is asked for.
    """

    def __init__(self, of: Rows, flat: Sequence[torch.Tensor], at: slice, wants: Sequence[bool]) -> None:
        self._of, self._wants = of, wants
        self._rows = [each[at] for each in flat]
        self._leaves: dict[By, torch.Tensor] = {}
        self._projected: list[torch.Tensor] = []

    def reduced(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return what is left of these rows, with a graph that keeps its tensors as they are, whatever hooks there are.

        Args:
            reduce: takes the results.
        """
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return reduce(self.result())

    def result(self) -> torch.Tensor:
        """Return the results of these rows, `[rows, width]`; a graph of them goes back to what is asked for."""
        of = self._of
        with torch.no_grad():
            self._projected = [self._product(each) for each in of.projections]
        for each in self._projected:
            each.requires_grad_(torch.is_grad_enabled())
        made = list(self._projected)

        def tensor_at(by: By) -> torch.Tensor:
            if by.kind == STEP:
                return made[by.number]
            if by not in self._leaves:
                tensor = self._rows[by.number] if by.kind == ROW else of.fixed[by.number]
                number = by.number if by.kind == ROW else len(of.rows) + by.number
                leaf = tensor.detach()
                self._leaves[by] = leaf.requires_grad_(torch.is_grad_enabled() and self._wants[number])
            return self._leaves[by]

        for step in of.steps:
            made.append(step.run(tensor_at, of.device))
        return made[-1]

    def _product(self, of: Projection) -> torch.Tensor:
        weight, bias = self._of.fixed[of.weight], None if of.bias is None else self._of.fixed[of.bias]
        with autocast_of(of.autocast, self._of.device):
            return torch.nn.functional.linear(self._rows[of.row].detach(), weight.detach(), bias)

    def add_gradients(self, of: Sequence[torch.Tensor], by: Sequence[torch.Tensor], gradients: Gradients) -> None:
        """Add the gradients of some results of these rows to those of all.

        Args:
            of: results, which have a graph.
            by: their gradients.
            gradients: of all rows, of which these are the next.
        """
        wanted = {place: leaf for place, leaf in self._leaves.items() if leaf.requires_grad}
        found = torch.autograd.grad(
            list(of), [*self._projected, *wanted.values()], list(by), allow_unused=True, materialize_grads=False
        )
        split = len(self._projected)
        for projection, gradient in zip(self._of.projections, found[:split], strict=True):
            if gradient is not None:
                self._add_product(projection, gradient, gradients)
        for place, gradient in zip(wanted, found[split:], strict=True):
            if gradient is not None and place.kind == ROW:
                gradients.add_rows(place.number, gradient)
            elif gradient is not None:
                gradients.add_fixed(place.number, lambda total, part=gradient: total.add_(part))
        gradients.next_rows(self._rows[0].shape[0])

    def _add_product(self, of: Projection, gradient: torch.Tensor, gradients: Gradients) -> None:
        row, weight = self._rows[of.row], self._of.fixed[of.weight]
        if self._wants[of.row]:
            gradients.add_rows(of.row, gradient @ weight.to(gradient.dtype))
        if self._wants[len(self._of.rows) + of.weight]:
            gradients.add_fixed(of.weight, lambda total: _add_outer(total, gradient, row.to(gradient.dtype)))
        if of.bias is not None and self._wants[len(self._of.rows) + of.bias]:
            gradients.add_fixed(of.bias, lambda total: total.add_(gradient.sum(0, dtype=total.dtype)))


def _add_outer(total: torch.Tensor, gradient: torch.Tensor, row: torch.Tensor) -> None:
    """Add the gradient of a weight; of fewer bits than the total in parts, so that no second one is ever whole."""
    if gradient.dtype == total.dtype:
        total.addmm_(gradient.t(), row)
        return
    rows = -(-total.shape[0] // _PARTS)
    for start in range(0, total.shape[0], rows):
        part = gradient[:, start : start + rows].t()
        if part.is_cuda:  # whose kernels add up in float32 in any case
            product = torch.mm(part, row, out_dtype=total.dtype)
        elif part.dtype == torch.float16:  # a sum over rows may be too large for it
            product = part.to(total.dtype) @ row.to(total.dtype)
        else:
            product = part @ row
        total[start : start + rows].add_(product)


class Gradients:
    """The gradients of all that rows are made of, added up chunk by chunk.

    Args:
        of: the rows.
    """

    def __init__(self, of: Rows) -> None:
        self._of = of
        self._rows: dict[int, torch.Tensor] = {}
        self._fixed: dict[int, torch.Tensor] = {}
        self._start = 0

    def add_rows(self, number: int, gradient: torch.Tensor) -> None:
        """Add the gradient of the present rows of a tensor.

        Args:
            number: of the tensor among `Rows.rows`.
            gradient: [rows of the present chunk, last size of the tensor].
        """
        if number not in self._rows:
            self._rows[number] = torch.zeros(
                (self._of.count, self._of.rows[number].shape[-1]),
                dtype=self._of.rows[number].dtype,
                device=self._of.device,
            )
        self._rows[number][self._start : self._start + gradient.shape[0]].add_(gradient)

    def next_rows(self, count: int) -> None:
        """Go on with the rows behind the present ones, which are so many."""
        self._start += count

    def add_fixed(self, number: int, add: Callable[[torch.Tensor], Any]) -> None:
        """Let `add` add to the gradient of a fixed tensor, which is kept in float32 if that has more bits.

        Args:
            number: of the tensor among `Rows.fixed`.
            add: called with the sum so far, to which it adds.
        """
        fixed = self._of.fixed[number]
        if number not in self._fixed:
            is_short = torch.finfo(fixed.dtype).bits < torch.finfo(torch.float32).bits
            self._fixed[number] = torch.zeros_like(fixed, dtype=torch.float32 if is_short else fixed.dtype)
        add(self._fixed[number])

    def take(self) -> list[torch.Tensor | None]:
        """Return the gradient of each of the rows' tensors, None of those that have none.

        Those of fixed tensors in float16 stay in float32: a sum over all rows may be too large for it.
        """
        of = self._of
        rows = [self._rows.pop(n, None) for n in range(len(of.rows))]
        shaped = [None if each is None else each.reshape(of.rows[n].shape) for n, each in enumerate(rows)]
        fixed = [self._fixed.pop(n, None) for n in range(len(of.fixed))]
        kinds = [torch.float32 if each.dtype == torch.float16 else each.dtype for each in of.fixed]
        return [*shaped, *(None if each is None else each.to(kind) for each, kind in zip(fixed, kinds, strict=True))]
