"""Recording of a lean pass: what the forward pass of each block does, and the most bytes in each part of the pass."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

import torch

from memfit.capture.draws import HostGenerators
from memfit.checkpointing.block_modes import BlockMode, CompiledMode
from memfit.checkpointing.choices import none_choice
from memfit.checkpointing.reached import OR_EAGER_MODE
from memfit.checkpointing.seen import CallSeen, LeanPass, MomentSeen, OpSeen, StorageSeen
from memfit.cost.stopwatch import Stopwatch
from memfit.errors import UnsupportedStepError
from memfit.system.recorder import Record, allocated_bytes, record, taken_bytes
from memfit.torch_private.checkpoints import saved_node_names
from memfit.torch_private.sharding import key_of, local
from memfit.torch_private.tensors import StorageWeakRef, bytes_in, tensors_reached

_MOST_NODES = 10_000
_YOUNG, _ALL = 1, 2  # generations of objects

_collected: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # the models of which a pass was recorded


class _Held(Protocol):
    def expired(self) -> bool: ...


class LeanRecorder:
    """Records one lean pass.

    Args:
        device: of the model.
        start_bytes: that are live now, garbage included, which is freed.
        uncounted_bytes: that are live, too, and that the recorder of the device does not count.
        model: whose own tensors blocks may write to.

    Attributes:
        has_returned: whether the model's call has returned.
        is_incomplete: whether compiled code ran in a block that was not known to call any.
        groups: process groups of the collectives in blocks.
        created_bytes: of the optimizer's state that updates have made: later passes begin with it.
    """

    def __init__(
        self,
        device: torch.device,
        start_bytes: int,
        uncounted_bytes: int,
        model: torch.nn.Module,
    ) -> None:
        before_bytes = allocated_bytes(device)
        # What Python frees in the pass, and is there before it, hides as many bytes of it. To look at all objects takes
        # as long as a step, and is for the first pass: later ones seldom see garbage that old.
        gc.collect(_YOUNG if model in _collected else _ALL)
        _collected.add(model)
        start_bytes -= before_bytes - allocated_bytes(device)
        self.device, self._uncounted_bytes = device, uncounted_bytes
        self.has_returned = self._has_backward = self._is_over = self.is_incomplete = False
        self.lean = LeanPass(start_bytes=start_bytes)
        self.overloads: dict[str, Any] = {}
        self.own = {key_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self.inside: BlockMode | None = None
        self.groups: list[Any] = []
        self.generators = HostGenerators()
        self.created_bytes = 0
        self._alive: set[int] = set()
        self._alive_of: Counter[str] = Counter()
        self._last_output: weakref.ref[torch.Tensor] | None = None
        self._outputs: list[tuple[StorageSeen, _Held]] = []  # of calls before any backward pass since
        self._timed: list[tuple[OpSeen, Stopwatch]] = []
        self._segment: Record | None = None
        self._absent_bytes = self._peak_bytes = 0
        self._where: tuple[int, int | None, int | None, int | None] = (-1, None, None, None)
        self._forward_now: int | None = None  # the call whose forward pass runs
        self._kept_now: int | None = None  # the call whose forward pass runs, if it is kept
        self._kept_in: list[int | None] = []  # the same by moment
        self._segment = record(device).begin()

    def forward(
        self, block: str, args: Any, kwargs: Any, *, is_kept: bool = False, is_compiled: bool = False
    ) -> BlockMode:
        """Return the context of the first forward pass of a call of a block.

        Args:
            block: its name.
            args, kwargs: of the call.
            is_kept: whether it is no checkpoint.
            is_compiled: whether it is compiled, or a module in it, so that its operators are not to be seen.
        """
        number = len(self.lean.calls)
        given = tensors_reached((args, kwargs))
        call = CallSeen(block=block, given_bytes=bytes_in(given), is_kept=is_kept)
        self.lean.calls.append(call)
        self._alive.add(number)
        self._alive_of[block] += 1
        self.lean.at_once[block] = max(self.lean.at_once[block], self._alive_of[block])
        self._forward_now, self._kept_now = number, number if is_kept else None
        self._cut(None)
        grown = [tensor for tensor in given if tensor.requires_grad]
        before = self._last_output() if self._last_output is not None else None
        given_as = [arg is before for arg in args].count(True), any(arg is before for arg in kwargs.values())
        call.follows = len(grown) == 1 and grown[0] is before and given_as == (1, False)
        if call.follows:
            call.input_bytes = taken_bytes(local(grown[0]).untyped_storage().nbytes(), self.device)
        kind = CompiledMode if is_compiled else BlockMode
        return kind(self, number, call, given)

    def returned(self, mode: BlockMode, output: Any) -> None:
        """Note what a call of a block returned.

        Raises:
            UnsupportedStepError: the block has a reentrant checkpoint inside.
        """
        mode.end_of_forward()
        outputs = tensors_reached(output)
        for tensor in outputs:
            storage = mode.of.get(key_of(tensor))
            if storage is not None:
                self._outputs.append((mode.call.storages[storage], StorageWeakRef(local(tensor).untyped_storage())))
        grown = [tensor for tensor in outputs if tensor.requires_grad]
        self._last_output = weakref.ref(grown[0]) if len(grown) == 1 else None
        self._forward_now = self._kept_now = None
        self._cut(None)
        if grown and "CheckpointFunctionBackward" in saved_node_names(grown[0], _MOST_NODES):
            self.refuse(
                mode.call,
                f"block {mode.call.block!r} calls torch.utils.checkpoint with use_reentrant=True, which runs "
                "a backward pass of its own inside of backward; give use_reentrant=False, or take that checkpoint out: "
                "memfit.checkpoint decides what is recomputed",
            )

    def refuse(self, call: CallSeen, why: str) -> None:
        """Note that a call cannot be recomputed.

        Raises:
            UnsupportedStepError: it is to be.
        """
        if not call.is_kept:
            raise UnsupportedStepError(f"{why}{OR_EAGER_MODE}")
        call.must_stay = why

    def note_groups(self, groups: Iterable[Any]) -> None:
        """Note process groups of a collective in a block."""
        self.groups += [group for group in groups if not any(group is other for other in self.groups)]

    def again(self, number: int) -> None:
        """Note that the backward pass of a call begins, with its second forward pass if it is not kept."""
        if self._is_over or (number not in self._alive and self.lean.calls[number].is_kept):
            return
        self._has_backward = True
        self._look_at_outputs()
        self.lean.is_twice |= number not in self._alive
        if number in self._alive:
            self._alive.remove(number)
            self._alive_of[self.lean.calls[number].block] -= 1
        self._cut(number)

    def end_of_backward(self) -> None:
        """Note that the backward pass is over, which recomputes no block where hooks inside keep what it saves."""
        self._has_backward = True
        self._look_at_outputs()
        self._cut(None)

    def _look_at_outputs(self) -> None:
        """Note which outputs are held, as inputs of other calls are: none costs nothing that its block alone keeps."""
        for storage, reference in self._outputs:
            storage.is_output |= not reference.expired()
        self._outputs.clear()

    @property
    def is_complete(self) -> bool:
        """Whether the pass can be planned from: forward has returned, and backward has come to a block, or is over."""
        return self.has_returned and (self._has_backward or not self.lean.calls)

    def end(self) -> LeanPass:
        """End the record, and return what it holds."""
        self._close()
        self._is_over = True
        for op, watch in self._timed:
            op.seconds = watch.seconds() or 0.0
        self._timed.clear()
        self._take_kept_away()
        self.lean.created_bytes = self.created_bytes
        return self.lean

    def _take_kept_away(self) -> None:
        """Let moments have the bytes of a pass in which kept calls, too, were checkpoints.

        In its own forward pass a kept call holds what it does step by step, so that nothing is taken away there.
        """
        kept = [(number, none_choice(call).held_bytes) for number, call in enumerate(self.lean.calls) if call.is_kept]
        for place, (moment, now) in enumerate(zip(self.lean.moments, self._kept_in, strict=True)):
            size_bytes = sum(size for number, size in kept if number <= moment.last and number != now)
            if size_bytes:
                self.lean.moments[place] = replace(moment, peak_bytes=moment.peak_bytes - size_bytes)

    def time(self, op: OpSeen, watch: Stopwatch) -> None:
        """Let the seconds of an operator be those of a watch, which is read at the end.

        Args:
            op: the operator.
            watch: that was stopped after it.
        """
        self._timed.append((op, watch))

    def left(self, size_bytes: int, was: StorageWeakRef | None = None, now: _Held | None = None) -> None:
        """Count bytes that this pass alone has on the host as if they were on the device.

        Args:
            size_bytes: that have left the device; negative if they come back.
            was: the storage that has left.
            now: what says whether it is held, as the storage did.
        """
        for place, (output, held) in enumerate(self._outputs):
            if now is not None and isinstance(held, StorageWeakRef) and held == was:
                self._outputs[place] = output, now
        self._measure()
        self._absent_bytes += size_bytes
        if not self._is_over:
            self._segment = record(self.device).begin()

    def _cut(self, own: int | None) -> None:
        self._close()
        self._where = max(self._alive, default=-1), own, self._forward_now, self._kept_now
        self._segment = record(self.device).begin()

    def _measure(self) -> None:
        if self._segment is not None:
            usage, self._segment = self._segment.close(), None
            self._peak_bytes = max(self._peak_bytes, usage.most_live_bytes + self._absent_bytes)

    def _close(self) -> None:
        if self._segment is None:
            return
        self._measure()
        last, own, forward, kept = self._where
        peak_bytes, self._peak_bytes = self._uncounted_bytes + self._peak_bytes - self.created_bytes, 0
        self.lean.moments.append(MomentSeen(last=last, own=own, peak_bytes=peak_bytes, forward=forward))
        self._kept_in.append(kept)
