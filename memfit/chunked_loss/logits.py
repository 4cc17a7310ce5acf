"""Logits that are not there: a tensor to the code that uses them, of which some rows at a time are computed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from memfit.chunked_loss import reductions
from memfit.chunked_loss.rows import FIXED, ROW, STEP, By, Projection, Rows, Step, autocast_now, joined
from memfit.errors import UnsupportedStepError
from memfit.torch_private.tensors import (
    INGREDIENTS,
    real_tensors,
    tree_map,
    without_memory,
    without_torch_function,
)

_log = logging.getLogger("memfit")


def _names(of: str) -> frozenset[str]:
    return frozenset(of.split())


# functions and methods of torch
_FACTS = _names(
    "shape dtype device ndim layout is_cuda is_cpu is_sparse is_nested is_quantized is_meta is_mps is_xpu size dim "
    "numel nelement ndimension is_floating_point is_complex is_tensor __len__ __hash__ names is_leaf element_size "
    "itemsize"
)
_OF_NUMBERS = _names(
    "add sub subtract mul multiply div divide true_divide neg negative tanh clamp clip clamp_min clamp_max sigmoid exp "
    "softplus square relu abs where masked_fill maximum minimum pow float half bfloat16 double to type type_as "
    "nan_to_num rsub __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __rdiv__ __neg__ "
    "__pow__ contiguous clone"
)
_OF_ROWS = _names("log_softmax softmax")
_LEFT_OF_ROWS = _names("logsumexp argmax argmin amax amin sum mean gather take_along_dim")
_VIEWS = _names("view reshape flatten unflatten squeeze unsqueeze view_as reshape_as")
_TURNS = _names("transpose swapaxes swapdims permute movedim moveaxis mT")
_WRITES = _names("__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ipow__")


class ChunkedLogits(torch.Tensor):
    """Logits of which some rows at a time are computed, where they are used.

    Casts, scaling, soft caps and views are noted; cross entropies and what is computed of each row run by chunks of
    rows. Any other use computes all of them, as without chunks, which is said once.

    Attributes:
        of: the rows.
        has_classes_second: whether the last dimension was moved behind the first one.
    """

    of: Rows
    has_classes_second: bool
    _whole: torch.Tensor | None

    @staticmethod
    def __new__(cls, of: Rows, *, has_classes_second: bool = False) -> ChunkedLogits:
        shape = torch.Size((of.shape[0], of.shape[-1], *of.shape[1:-1])) if has_classes_second else of.shape
        made = without_memory(cls, shape, of.dtype, of.device)
        made.of, made.has_classes_second, made._whole = of, has_classes_second, None
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        name = _name_of(func)
        if name in _FACTS:
            with without_torch_function():
                return func(*args, **named)
        is_there = any(isinstance(each, ChunkedLogits) and each._whole is not None for each in (*args, *named.values()))
        answer = NotImplemented if is_there else _HANDLERS.get(name, _none)(func, args, named)
        if answer is not NotImplemented:
            return answer
        if name in _WRITES or (name.endswith("_") and not name.endswith("__")):
            raise UnsupportedStepError(
                f"chunk_loss: {name} writes to the logits, which are never whole; make new ones (logits = logits * x), "
                "or leave chunk_loss out"
            )
        return func(*tree_map(_made_whole(name), args), **tree_map(_made_whole(name), named))

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute all for an operator that was called past torch's functions."""
        return func(*tree_map(_made_whole(str(func)), args), **tree_map(_made_whole(str(func)), kwargs or {}))

    def whole(self) -> torch.Tensor:
        """Return all of them, with a graph as eager's; the same tensor each time."""
        if self._whole is None:
            found = reductions.whole(self.of)
            self._whole = found.movedim(-1, 1) if self.has_classes_second else found
        return self._whole


def project(row: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> ChunkedLogits:
    """Return `torch.nn.functional.linear(row, weight, bias)` by chunks of rows.

    Args:
        row: `[*lead, n]`.
        weight: `[width, n]`.
        bias: `[width]`.
    """
    autocast = autocast_now(row.device)
    fixed = (weight,) if bias is None else (weight, bias)
    projection = Projection(row=0, weight=0, bias=None if bias is None else 1, autocast=autocast)
    shape = torch.Size((*row.shape[:-1], weight.shape[0]))
    return ChunkedLogits(
        Rows(
            rows=(row,),
            fixed=fixed,
            projections=(projection,),
            shape=shape,
            dtype=autocast or row.dtype,
            versions=tuple((each, each._version) for each in (row, *fixed)),
        )
    )


INGREDIENTS[ChunkedLogits] = lambda logits: logits.of.rows


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return func.__self__.__name__ if name == "__get__" else name


_said: set[str] = set()


def _made_whole(name: str) -> Callable[[Any], Any]:
    def made(leaf: Any) -> Any:
        if not isinstance(leaf, ChunkedLogits):
            return leaf
        if leaf._whole is None and name not in _said:
            _said.add(name)
            _log.warning("memfit: chunk_loss: %s needs the logits whole, of shape %s", name, tuple(leaf.of.shape))
        return leaf.whole()

    return made


# -- operators that are noted, and operators that are computed by chunks


def _none(*_: Any) -> Any:
    return NotImplemented


def _detached(_func: Callable[..., Any], args: tuple[Any, ...], _named: dict[str, Any]) -> Any:
    of = args[0].of
    rows, fixed = (tuple(each.detach() for each in tensors) for tensors in (of.rows, of.fixed))
    return ChunkedLogits(replace(of, rows=rows, fixed=fixed), has_classes_second=args[0].has_classes_second)


def _of_numbers(func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Note a function of each number by itself."""
    chunked = [leaf for leaf in (*args, *named.values()) if isinstance(leaf, ChunkedLogits)]
    first = chunked[0].of
    if any(each.has_classes_second or each.of.shape != first.shape for each in chunked):
        return NotImplemented
    places = {id(chunked[0]): By(STEP, len(first.projections) + len(first.steps) - 1)}
    both = first
    for each in chunked[1:]:
        if id(each) not in places:
            both, one, other = joined(both, each.of)
            places = dict.fromkeys(places, one) | {id(each): other}
    if len(places) > 2:
        return NotImplemented
    rows, fixed, versions = list(both.rows), list(both.fixed), list(both.versions)

    def noted(leaf: Any) -> Any:
        if isinstance(leaf, ChunkedLogits):
            return places[id(leaf)]
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.device != first.device and leaf.dim():
            raise _NotByRowsError
        versions.append((leaf, leaf._version))
        if leaf.shape[:-1] == first.shape[:-1] and leaf.shape and leaf.shape[-1] in (1, first.shape[-1]):
            rows.append(leaf)
            return By(ROW, len(rows) - 1)
        if leaf.numel() in (1, first.shape[-1]) and (leaf.numel() == 1 or leaf.shape[-1:] == first.shape[-1:]):
            fixed.append(leaf.reshape(leaf.shape[-1:]))  # of fewer dimensions than rows have
            return By(FIXED, len(fixed) - 1)
        raise _NotByRowsError

    try:
        step = Step(
            call=func, args=tree_map(noted, args), kwargs=tree_map(noted, named), autocast=autocast_now(first.device)
        )
    except _NotByRowsError:
        return NotImplemented
    of = replace(both, rows=tuple(rows), fixed=tuple(fixed), steps=(*both.steps, step), versions=tuple(versions))
    dtype = _dtype_of(of)
    return NotImplemented if dtype is None else ChunkedLogits(replace(of, dtype=dtype))


class _NotByRowsError(Exception):
    pass


def _dtype_of(of: Rows) -> torch.dtype | None:
    """Return the dtype that the last step makes; None if it makes other than numbers on the same device."""
    before = of.dtype
    like = {
        ROW: lambda n: torch.zeros((1, of.rows[n].shape[-1]), dtype=of.rows[n].dtype, device=of.device),
        FIXED: lambda n: torch.zeros(of.fixed[n].shape[-1:], dtype=of.fixed[n].dtype, device=of.device),
        STEP: lambda _: torch.zeros((1, of.shape[-1]), dtype=before, device=of.device),
    }
    with real_tensors(), torch.no_grad():
        found = of.steps[-1].run(lambda by: like[by.kind](by.number), of.device)
    is_like_before = found.shape == (1, of.shape[-1]) and found.device == of.device and found.is_floating_point()
    return found.dtype if is_like_before else None


def _along_rows(logits: ChunkedLogits, dim: Any) -> bool:
    return not logits.has_classes_second and dim in (-1, logits.dim() - 1)


def _of_rows(func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Note a softmax along the last dimension."""
    given = {**dict(zip(("input", "dim"), args, strict=False)), **named}
    if (
        len(args) > 2
        or not isinstance(given["input"], ChunkedLogits)
        or not _along_rows(given["input"], given.get("dim"))
    ):
        return NotImplemented
    dtype = given.get("dtype")
    call = torch.log_softmax if _name_of(func) == "log_softmax" else torch.softmax
    return _of_numbers(call, (given["input"], -1), {} if dtype is None else {"dtype": dtype})


def _left_of_rows(func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Compute what is left of each row by chunks."""
    logits, *rest = args
    dim = rest[0] if rest else named.get("dim")
    dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
    if not isinstance(logits, ChunkedLogits) or isinstance(dim, bool) or not _along_rows(logits, dim):
        return NotImplemented
    of = logits.of
    options = dict(named)
    options.pop("dim", None)
    autocast = autocast_now(of.device)
    if _name_of(func) in ("gather", "take_along_dim"):
        index = rest[1] if len(rest) > 1 else options.pop("index", None)
        if not isinstance(index, torch.Tensor) or index.shape[:-1] != of.shape[:-1] or rest[2:] or options:
            return NotImplemented
        flat = index.reshape(of.count, index.shape[-1])
        return reductions.of_each_row(of, lambda rows, at: torch.gather(rows, -1, flat[at]))

    def reduce(rows: torch.Tensor, _at: slice) -> torch.Tensor:
        with reductions.autocast_of(autocast, of.device):
            return func(rows, -1, *rest[1:], **options)

    return reductions.of_each_row(of, reduce)


def _view(func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Note a view of the dimensions before the last one."""
    logits = args[0]
    if not isinstance(logits, ChunkedLogits) or logits.has_classes_second:
        return NotImplemented
    of, width = logits.of, logits.of.shape[-1]
    if _name_of(func) == "view" and isinstance(args[1], torch.dtype):
        return NotImplemented
    with real_tensors():
        shape = func(torch.empty(of.shape, dtype=torch.bool, device="meta"), *args[1:], **named).shape
    if len(shape) < 2 or shape[-1] != width:
        return NotImplemented
    return ChunkedLogits(of.viewed(lambda each: each.reshape(*shape[:-1], each.shape[-1])))


def _item(_func: Callable[..., Any], args: tuple[Any, ...], _named: dict[str, Any]) -> Any:
    """Note an index into the dimensions before the last one."""
    logits, index = args
    if not isinstance(logits, ChunkedLogits) or logits.has_classes_second:
        return NotImplemented
    parts = index if isinstance(index, tuple) else (index,)
    taken = sum(
        part.dim() if isinstance(part, torch.Tensor) and part.dtype == torch.bool else 1
        for part in parts
        if part is not None and part is not Ellipsis
    )
    if Ellipsis not in [part for part in parts if not isinstance(part, torch.Tensor)]:
        parts = (*parts, Ellipsis)
    if taken >= logits.dim():
        last = parts[-1] if parts[-1] is not Ellipsis else None
        if taken > logits.dim() or not (isinstance(last, slice) and last == slice(None)):
            return NotImplemented
    of = logits.of
    viewed = of.viewed(lambda each: each[parts])
    if any(each.shape[-1] != before.shape[-1] for each, before in zip(viewed.rows, of.rows, strict=True)):
        return NotImplemented
    return ChunkedLogits(viewed) if len(viewed.shape) > 1 else NotImplemented


def _turn(func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Note that the last dimension is moved behind the first one, or back."""
    logits = args[0]
    if not isinstance(logits, ChunkedLogits):
        return NotImplemented
    sizes = torch.Size(range(2, 2 + logits.dim()))
    with real_tensors():
        turned = tuple(func(torch.empty(sizes, dtype=torch.bool, device="meta"), *args[1:], **named).shape)
    second = (sizes[0], sizes[-1], *sizes[1:-1])
    last = (sizes[0], *sizes[2:], sizes[1])
    if turned == (last if logits.has_classes_second else second) and logits.dim() > 2:
        return ChunkedLogits(logits.of, has_classes_second=not logits.has_classes_second)
    return NotImplemented


def _loss(names: Sequence[str]) -> Callable[..., Any]:
    def loss(func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        given = {**dict(zip(names, args, strict=False)), **named}
        logits, target = given.pop("input"), given.pop("target")
        for old in ("size_average", "reduce"):
            if given.pop(old, None) is not None:
                return NotImplemented
        if not isinstance(logits, ChunkedLogits) or isinstance(target, ChunkedLogits):
            return NotImplemented
        if logits.dim() > 2 and not logits.has_classes_second:  # classes are the second dimension, not the last one
            return NotImplemented
        if target.is_floating_point() and logits.has_classes_second:
            target = target.movedim(1, -1)
        if given.get("weight") is None:
            given.pop("weight", None)
        return reductions.loss_of(func, logits.of, target, autocast=autocast_now(logits.of.device), **given)

    return loss


_HANDLERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_OF_NUMBERS, _of_numbers),
    **dict.fromkeys(_OF_ROWS, _of_rows),
    **dict.fromkeys(_LEFT_OF_ROWS, _left_of_rows),
    **dict.fromkeys(_VIEWS, _view),
    **dict.fromkeys(_TURNS, _turn),
    "__getitem__": _item,
    "detach": _detached,
    "requires_grad_": lambda _func, args, _named: args[0],
    "requires_grad": lambda _func, args, _named: any(each.requires_grad for each in args[0].of.tensors),
    "cross_entropy": _loss(
        ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    ),
    "nll_loss": _loss(("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")),
}
