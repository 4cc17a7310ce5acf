"""The mode under which a step is captured: every call on fakes is entered into the trace."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from memfit.capture.functionalize import Counts, RequireClasses, RequireTrue, as_the_real_kernel, corrected, is_pure
from memfit.capture.generators import without_generator
from memfit.capture.lines import calling_line
from memfit.capture.looks import Look, look_at
from memfit.capture.stream import Stream
from memfit.capture.symbols import Symbols, at_hand
from memfit.capture.trace import Trace
from memfit.capture.traced import mutated_tensors, on_its_device
from memfit.capture.under_modes import UnderModes, is_looked_at
from memfit.errors import NoGraphError, UnsupportedStepError
from memfit.torch_private.absent import has_no_memory
from memfit.torch_private.autograd import TorchDispatchMode, only_mode
from memfit.torch_private.sharding import is_sharded
from memfit.torch_private.symbols import symbolic_kernels
from memfit.torch_private.tensors import (
    DATA_DEPENDENT_ERRORS,
    READS_A_NUMBER,
    FakeTensorMode,
    as_fake,
    is_fake,
    is_of_array,
    known_value,
    storage_key,
    strided_as_real,
    tensors_in,
    tree_map,
)

_aten = torch.ops.aten
_ASKS_FOR_DEVICE = torch.ops.prim.device.default
_CONSTRAINTS = str(Path(torch.__file__).parent / "distributions" / "constraints.py")
_CHECK_FRAMES = 8  # from a reading of a value out to the constraint that asked for it


class CallRecorder(TorchDispatchMode):
    """Enters each call into the trace and the stream. Real tensors, over which the step closes, become fakes.

    Attributes:
        records_stream: whether calls are entered into the stream.
        fake_of_storage: the fakes of real tensors, by the keys of their storages.
        looks: what the step's code asked of values.

    Args:
        trace, stream: of the step.
        mode: of the fakes.
        leaves: of the batch.
        symbols: of sizes; None where all are numbers.
        under_modes: is shown the calls whose gradients differ where modes watch.
        counts_as_asked: whether bincount is taken to return as many numbers as its `minlength`, which is checked at
            each call; or its size is data's to decide, around which a training step is planned.
    """

    def __init__(
        self,
        trace: Trace,
        stream: Stream,
        *,
        mode: FakeTensorMode,
        leaves: Sequence[Any],
        symbols: Symbols | None,
        under_modes: UnderModes,
        counts_as_asked: bool,
    ) -> None:
        super().__init__()
        self.records_stream = symbols is None
        self.fake_of_storage: dict[int, torch.Tensor] = {}
        self.looks: list[Look] = []
        self._of_arrays: dict[int, torch.Tensor] = {}  # by the keys of their storages, which they keep
        self._trace, self._stream, self._mode, self._leaves = trace, stream, mode, leaves
        self._symbols, self._under_modes, self._counts_as_asked = symbols, under_modes, counts_as_asked

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ASKS_FOR_DEVICE:  # most of all calls, and none of the step's
            return func(*args)
        kwargs = kwargs or {}
        if func is not _aten.lift_fresh.default:  # its argument is a tensor that the step has just made
            args, kwargs = tree_map(self._faked, (args, kwargs))
        kwargs = on_its_device(func, args, kwargs)
        written = [each for each in mutated_tensors(func, args, kwargs) if each.layout is torch.strided]
        sizes = [self._written_bytes(func, each) for each in written]
        if is_looked_at(func):
            self._under_modes.look_at(func, args, len(self._trace.calls), calling_line())
        if func is READS_A_NUMBER and not known_value(args[0]):
            returned = self._number(func, args)
        else:
            returned = self._run(func, args, kwargs)
            if func is _aten.lift_fresh.default and is_of_array(args[0]):
                self._of_arrays[storage_key(returned)] = returned
            if any(self._written_bytes(func, each) > size for each, size in zip(written, sizes, strict=True)):
                raise NoGraphError(
                    f"{calling_line()}: {func} gives a tensor that it writes to (out=) more memory",
                    "let it return a new tensor, or hand it one of the result's size",
                )
            if torch.Tag.inplace_view not in func.tags:
                returned = self._trace.add_call(func, args, kwargs, returned)
        if self.records_stream:
            self._stream.add(func, args, kwargs, returned)
        return returned

    def _written_bytes(self, func: Any, tensor: torch.Tensor) -> int:
        """Return the bytes of a storage that is written; that of an array is refused."""
        if storage_key(tensor) in self._of_arrays:
            raise NoGraphError(
                f"{calling_line()}: the step writes to the memory of an array ({func}), and a planned step, which has "
                "read its values once, would not",
                "write to a buffer, or to a copy: torch.tensor(array)",
            )
        return tensor.untyped_storage().nbytes() if self._symbols is None and is_fake(tensor) else 0

    def one_hot(self, original: Any, indices: Any, num_classes: int = -1) -> torch.Tensor:
        """Return what `one_hot` makes of a fake by the calls that it makes for real tensors; its checks are entered.

        Args:
            original: torch's own, which computes it otherwise for fakes, without checks.
            indices, num_classes: as for torch's own.
        """
        is_checked = is_fake(indices) and indices.device.type == "cpu"
        if not is_checked or indices.dtype != torch.int64 or num_classes < 1 or indices.numel() == 0:
            return original(indices, num_classes)
        ends = torch.aminmax(indices)
        if self.records_stream:
            for end in ends:
                self._stream.add(READS_A_NUMBER, (end,), {}, 0)
        check = RequireClasses(line=calling_line(), classes=num_classes)
        self._trace.add_check("check", check, [self._trace.value(end) for end in ends])
        sizes = [*indices.shape, num_classes]
        made = _aten.zeros.default(sizes, dtype=indices.dtype, layout=torch.strided, device=indices.device)
        return made.scatter_(-1, indices.unsqueeze(-1), 1)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._symbols is not None:
            with symbolic_kernels() if not func.is_view else nullcontext():
                return corrected(func, args, func(*args, **without_generator(kwargs)))
        try:
            return corrected(func, args, strided_as_real(func, args, func(*args, **without_generator(kwargs))))
        except DATA_DEPENDENT_ERRORS:
            if func is _aten.bincount.default and self._counts_as_asked and args[2:] > (0,):
                return Counts(func=func, line="", length=args[2]).fake(*args[:2])
            raise
        except Exception:  # fake kernels raise all kinds of errors
            if not is_pure(func) or not tensors_in((args, kwargs)):
                raise
            return as_the_real_kernel(func, args, kwargs)

    def _number(self, func: Any, args: tuple[Any, ...]) -> Any:
        if self._is_checked(args[0]):
            self._trace.add_check("check", RequireTrue(line=calling_line()), [self._trace.value(args[0])])
            return True
        return self._looked_at(func, args)

    def _is_checked(self, tensor: torch.Tensor) -> bool:
        """Return whether a value is read to check arguments of a distribution: what is false there raises an error."""
        call = self._trace.maker_of(tensor)
        if call is None:
            return False
        if call.target is _aten._is_all_true.default:
            return True
        return call.name == "all" and any(
            frame.filename == _CONSTRAINTS for frame in traceback.extract_stack(limit=_CHECK_FRAMES)
        )

    def _faked(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            return leaf
        if is_fake(leaf) and not has_no_memory(leaf):
            return leaf
        if is_sharded(leaf):
            raise UnsupportedStepError(
                f"{calling_line()}: the step computes with a parameter that is sharded there (a DTensor of shape "
                f"{list(leaf.shape)}); a planned step uses gathered parameters only: those of a module, in its forward"
            )
        key = storage_key(leaf)
        whole = self.fake_of_storage.get(key)  # a parameter's too, that the step's code holds itself
        if whole is None:
            fake = self.fake_of_storage[key] = as_fake(self._mode, leaf)
            self._trace.stands_for[storage_key(fake)] = leaf
            self._stream.contents[self._stream.key(fake)] = leaf
            return fake
        with torch.no_grad(), only_mode(self._mode):
            return torch.as_strided(whole.view(leaf.dtype), leaf.shape, leaf.stride(), leaf.storage_offset())

    def _looked_at(self, func: Any, args: Any) -> Any:
        (tensor,) = args
        symbols = self._symbols
        concrete = at_hand if symbols is not None else _as_it_is
        look = look_at(tensor, self._trace, self._leaves, concrete) if tensor.dtype == torch.bool else None
        if look is None:
            return func(*args)  # raises one of DATA_DEPENDENT_ERRORS
        if look.residents:  # another batch, or a tensor changed between steps, may answer otherwise
            self.looks.append(look)
        return look.answer


def _as_it_is(look: Look) -> Look:
    return look
