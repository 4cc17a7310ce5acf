"""What a call will take of its device: known from the first call like it, bounded from above before that."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from memfit.capture.generators import without_generator
from memfit.cost.gpu_timing import now
from memfit.cost.single_op import uncollected
from memfit.eager_mode.call_times import CallTimes
from memfit.eager_mode.sources import tensors_given
from memfit.memory.place import Place
from memfit.system.recorder import Usage, record, taken_bytes
from memfit.torch_private.autograd import no_modes
from memfit.torch_private.tensors import (
    DATA_DEPENDENT_ERRORS,
    SHORTENS,
    FakeTensorMode,
    failing_fakes_unlogged,
    storage_key,
    tensors_in,
    tree_map,
)

if TYPE_CHECKING:
    from memfit.eager_mode.contents import Contents

# Workspace of an operator that was never called, as a share of its inputs and results: of libraries, and of others.
_OF_LIBRARIES, _OF_OTHERS = 1.0, 0.1
_IN_LIBRARIES = (
    "ctc",
    "conv",
    "mm",
    "attention",
    "rnn",
    "lstm",
    "gru",
    "linalg",
    "fft",
    "sort",
    "topk",
    "unique",
    "index",
)
_MARGIN = 1.5  # on the largest share that was seen
_SMALL_BYTES = 1 << 12  # workspaces below it do not grow with the inputs
_POINTWISE = torch.Tag.pointwise  # such operators work without any
_DATA_DECIDES = torch.Tag.dynamic_output_shape
_MASKS = (torch.bool, torch.uint8)
_aten = torch.ops.aten
_META = torch.device("meta")
_BOOLS = ((False,), (True,))
_WITHOUT_BYTES = (torch.Generator, torch.ScriptObject)  # which of them a call is given changes no need
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter


class Need(NamedTuple):
    """What a call takes.

    Attributes:
        peak_bytes: the most during the call: results and workspace.
        result_bytes: what it takes more after it.
        seconds: it took.
        number: tells calls of different keys apart.
    """

    peak_bytes: int
    result_bytes: int
    seconds: float
    number: int


class Needs:
    """What calls took so far.

    Attributes:
        bounded: how many calls were bounded because none like them had been seen, and how many took more than that.
        exceeded: how many of those took more than their bound.
        largest_bytes: of the storages of all results so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bounded = self.exceeded = self.largest_bytes = 0
        self._on_gpu = CallTimes(device)
        self._shares: dict[tuple[Any, bool], float] = {}  # operator, images not row by row -> largest workspace share

    def bound(self, function: Any, args: Any, kwargs: Any) -> int:
        """Return an upper bound of the bytes that a call takes that was not seen before.

        Its results are known from their shapes. The workspace is bounded by those of the same operator's calls, as a
        share of inputs and results.

        Args:
            function: the operator's overload.
            args, kwargs: of the call.
        """
        results = self._result_bytes(function, args, kwargs)
        kind = function, _is_rearranged(args)
        share = _MARGIN * (self._shares[kind] if kind in self._shares else _never_seen(*kind))
        return results + _SMALL_BYTES + math.ceil(share * (_input_bytes(args, kwargs) + results))

    def learn(self, function: Any, args: Any, kwargs: Any, bound_bytes: int, contents: Contents) -> tuple[Any, Need]:
        """Make a call for the first time; return its result, and the bytes and seconds that it took.

        Args:
            function, args, kwargs: the call.
            bound_bytes: what `bound` says of it.
            contents: of which some may be freed while it runs.
        """
        freed_bytes = 0
        after: list[tuple[int, Usage]] = []
        began = now(self.device)
        with uncollected(), record(self.device) as usage, ExitStack() as records:

            def freed(more_bytes: int) -> None:
                nonlocal freed_bytes
                freed_bytes += more_bytes
                after.append((freed_bytes, records.enter_context(record(self.device))))

            contents.on_freed = freed
            records.callback(setattr, contents, "on_freed", lambda _bytes: None)
            returned = function(*args, **kwargs)
        seconds = now(self.device) - began
        peaks = (freed + each.start_bytes - usage.start_bytes + each.peak_bytes for freed, each in after)
        peak_bytes = max(usage.peak_bytes, *peaks, 0)
        result_bytes = max(0, usage.end_bytes - usage.start_bytes + freed_bytes)
        need = Need(peak_bytes, result_bytes, seconds, self.bounded)
        share = max(0, peak_bytes - result_bytes - _SMALL_BYTES) / max(1, _input_bytes(args, kwargs) + result_bytes)
        kind = function, _is_rearranged(args)
        self._shares[kind] = max(share, self._shares.get(kind, 0.0))
        self.largest_bytes = max([self.largest_bytes, *self._sizes_beside(returned, tensors_given((args, kwargs)))])
        self.bounded += 1
        self.exceeded += peak_bytes > bound_bytes
        return returned, need

    def timed(self, function: Any, args: Any, kwargs: Any, need: Need) -> tuple[Any, float]:
        """Make a call on a GPU that is like an earlier one; return what it returned, and the seconds of its kernels.

        A GPU runs kernels after the call has returned. One call of each kind lies between two events there, which are
        read when the GPU has reached them, and stands for those after it: the second one, since the first loads the
        kernels. Until then the seconds of the first count, which was waited for.

        Args:
            function: the operator's overload.
            args, kwargs: of the call.
            need: that the first call like it has shown.
        """
        if not self._on_gpu.has_to_time(need.number):
            return function(*args, **kwargs), self._on_gpu.seconds.get(need.number, need.seconds)
        with self._on_gpu.between_events(need.number):
            returned = function(*args, **kwargs)
        return returned, need.seconds

    def _result_bytes(self, function: Any, args: Any, kwargs: Any) -> int:
        """Return the bytes of a call's results, from their shapes.

        Meta tensors give most of them in some microseconds; fakes, which know the device, take a hundred times as long.
        """
        if any(tensor.is_nested for tensor in tensors_given((args, kwargs))):
            return 2 * _nested_bytes(args, kwargs)
        if _POINTWISE in function.tags:
            return taken_bytes(_pointwise_bytes(function, args, kwargs), self.device)
        if function.overloadpacket in SHORTENS:
            return 2 * _input_bytes(args, kwargs)
        given: list[torch.Tensor] = []

        def on_meta(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                given.append(_like(leaf, _META))
                return given[-1]
            return _META if isinstance(leaf, torch.device) else None if isinstance(leaf, torch.Generator) else leaf

        try:
            returned = function(*tree_map(on_meta, list(args)), **tree_map(on_meta, kwargs))
        except Exception:  # noqa: BLE001 (meta kernels raise all kinds of errors)
            if _DATA_DECIDES in function.tags:
                return taken_bytes(_counted_bytes(function, args, kwargs), self.device)
            return self._fake_result_bytes(function, args, kwargs)
        return self._bytes_beside(returned, given)

    def _fake_result_bytes(self, function: Any, args: Any, kwargs: Any) -> int:
        given = tensors_given((args, kwargs))
        try:
            with failing_fakes_unlogged(), FakeTensorMode(allow_non_fake_inputs=True):
                fakes = {id(tensor): _like(tensor, tensor.device) for tensor in given}
                filled = tree_map(lambda leaf: fakes.get(id(leaf), leaf), (args, kwargs))
                returned = function(*filled[0], **without_generator(filled[1]))
        except DATA_DEPENDENT_ERRORS:
            return taken_bytes(_counted_bytes(function, args, kwargs), self.device)
        except Exception:  # noqa: BLE001 (fakes raise all kinds of errors)
            return 2 * _input_bytes(args, kwargs)
        return self._bytes_beside(returned, fakes.values())

    def _bytes_beside(self, returned: Any, given: Iterable[torch.Tensor]) -> int:
        """Return the bytes of the storages of results that are not those of arguments."""
        return sum(self._sizes_beside(returned, given))

    def _sizes_beside(self, returned: Any, given: Iterable[torch.Tensor]) -> list[int]:
        own = {storage_key(tensor) for tensor in given if _is_dense(tensor)}
        results = {storage_key(tensor): tensor for tensor in tensors_in(returned) if _is_dense(tensor)}
        sizes = (tensor.untyped_storage().nbytes() for key, tensor in results.items() if key not in own)
        return [taken_bytes(size, self.device) for size in sizes]


def key_of(args: Any, kwargs: Any = None, *, is_whole: bool = True) -> Hashable:
    """Return what decides the needs of an operator's call: shapes and dtypes of its tensors, and its other arguments.

    Args:
        args, kwargs: of the call.
        is_whole: whether these are all of its arguments.

    Raises:
        RuntimeError: an argument is a tensor without a shape.
    """
    parts: list[Any] = []
    has_tensor = has_list = False
    for arg in args:
        kind = type(arg)
        if kind is _Tensor or kind is _Parameter or isinstance(arg, _Tensor):
            parts += (arg.shape, arg.stride(), arg.dtype, arg.is_cpu or arg.device)  # a device is slow to hash
            has_tensor = True
        elif arg is None:
            parts.append(None)
        elif kind is float:
            parts.append(float)  # a number that changes in each step changes no need
        elif kind is bool:
            parts.append(_BOOLS[arg])  # or it would equal a number, which gives other dtypes
        elif kind is list or kind is tuple:
            parts.append(tuple(arg) if not arg or type(arg[0]) is int else key_of(arg, is_whole=False))
            has_list = True
        else:
            parts.append(kind if kind in _WITHOUT_BYTES else arg)
    if not has_tensor:
        parts.append(torch.get_default_dtype())
        if not has_list and is_whole:
            parts += args  # numbers decide the size of what is made of them alone
    if kwargs:
        parts.append(key_of(tuple(kwargs.values()), is_whole=False))
    return tuple(parts)


def _is_rearranged(args: Any) -> bool:
    """Return whether there are images among the arguments that are not laid out row by row (channels_last): kernels may
    copy them."""
    return any(tensor.ndim in (4, 5) and not tensor.is_contiguous() for tensor in tensors_given(args))


def _never_seen(function: Any, is_rearranged: bool) -> float:
    if _POINTWISE in function.tags:
        return 0.0
    if is_rearranged:
        return _OF_LIBRARIES
    return _OF_LIBRARIES if any(word in str(function) for word in _IN_LIBRARIES) else _OF_OTHERS


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return Place.of(tensor).empty(device)


def _pointwise_bytes(function: Any, args: Any, kwargs: Any) -> int:
    """Return what the results of an operator take at most that works element by element."""
    if function._schema.is_mutable:
        return 0
    given = tensors_given((args, kwargs))
    sizes = [1] * max((tensor.ndim for tensor in given), default=0)
    for tensor in given:
        for place, size in enumerate(reversed(tensor.shape)):
            sizes[place] = size if sizes[place] == 1 else sizes[place]
    dtypes = [*(tensor.dtype for tensor in given), torch.get_default_dtype(), kwargs.get("dtype") or torch.bool]
    dtypes += [torch.complex128] if any(isinstance(arg, complex) for arg in args) else []
    return len(function._schema.returns) * math.prod(sizes) * max(dtype.itemsize for dtype in dtypes)


def _counted_bytes(function: Any, args: Any, kwargs: Any) -> int:
    """Return the most bytes of results whose sizes the data decides; where a mask decides, its elements are counted.

    Of other operators, as many results as there are elements, each with an index for each dimension.
    """
    packet = function.overloadpacket
    if packet is _aten.nonzero and not kwargs:
        return _index_bytes(args[0])
    if packet is _aten.masked_select and not kwargs:
        values, mask = args
        whole = torch.logical_or(_like(values, _META), _like(mask, _META)).numel()
        chosen = _count(mask) * (whole // max(1, mask.numel()))
        return chosen * values.element_size() + 8 * whole  # and the places of the chosen ones
    if packet is _aten.index and all(place is None or place.dtype in _MASKS for place in args[1]):
        values, masks = args[0], [mask for mask in args[1] if mask is not None]
        row = values.numel() // max(1, math.prod(mask.numel() for mask in masks))
        return max(map(_count, masks)) * row * values.element_size() + sum(map(_index_bytes, masks))
    if packet is _aten._ctc_loss:
        likelihoods, targets, _, lengths = args[:4]
        longest = max((int(length) for length in lengths), default=0)
        rows = likelihoods.numel() // max(1, likelihoods.shape[-1])
        return likelihoods.element_size() * (rows * (2 * longest + 1) + targets.numel() + 1)
    return 2 * sum(8 * tensor.numel() * max(1, tensor.ndim) for tensor in tensors_given((args, kwargs)))


def _count(mask: torch.Tensor) -> int:
    with no_modes():
        return int(torch.count_nonzero(mask))


def _index_bytes(mask: torch.Tensor) -> int:
    """Return the bytes of the indices of a tensor's elements that are not zero."""
    return 8 * max(1, mask.ndim) * _count(mask)


def _input_bytes(args: Any, kwargs: Any) -> int:
    """Return the bytes of the elements that a call is given."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_given((args, kwargs)) if _is_dense(tensor))


def _nested_bytes(args: Any, kwargs: Any) -> int:
    """Return the bytes of the elements of the dense and nested tensors that a call is given."""
    given = [tensor for tensor in tensors_given((args, kwargs)) if tensor.layout in (torch.strided, torch.jagged)]
    return sum(int(tensor.numel()) * tensor.element_size() for tensor in given)


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested
