"""Windows of a training loop: the bytes that each takes, and the seconds of its forward and backward pass."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.capture.step_check import refuse_first_fsdp
from memfit.capture.training_step import parameters_of
from memfit.checkpointing.reporting import WindowSeen
from memfit.cost.stopwatch import Stopwatch
from memfit.memory.contract import Usage, Warnings, WindowKind
from memfit.memory.uncounted import Uncounted
from memfit.step.hooks import Awaited
from memfit.system.recorder import Record, record
from memfit.torch_private.cuda import LastStream
from memfit.torch_private.modules import Structure
from memfit.torch_private.tensors import tensors_reached

_MOST_REMEMBERED = 1000
_NOT_STEERED = (
    "a backward pass comes from a call of the model in eval mode, which memfit.checkpoint does not steer; call "
    "model.train(), and set single modules to eval() after it"
)


class Meter:
    """Measures one window at a time.

    Args:
        device: of the model.

    Attributes:
        last_stream: of the windows; whoever begins one follows it.
        uncounted: live tensors and buckets that the recorder does not count.
        created_bytes: of the state that optimizers have made in the last window.
        is_before_update: whether it took the most elsewhere than in its updates: with that state, it will take more.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.uncounted = device, Uncounted(device)
        self._uncounted_bytes = 0  # when the window began
        self._open: Record | None = None
        self._watch: Stopwatch | None = None
        self._update: Record | None = None
        self._created_bytes = self._update_bytes = self.created_bytes = 0
        self.is_before_update = False
        self.last_stream = LastStream(device)

    @property
    def is_open(self) -> bool:
        """Whether a window is open."""
        return self._open is not None

    def open(self) -> None:
        """Begin a window."""
        self._uncounted_bytes = self.uncounted.live_bytes()
        self._open = record(self._device).begin()
        self._watch = Stopwatch(self._device)

    def end_of_backward(self) -> None:
        """Note that a backward pass is over; of several the last one counts."""
        if self._watch is not None:
            self._watch.stop()

    def before_update(self) -> None:
        """Note that an optimizer's step begins."""
        self._update = record(self._device).begin()

    def after_update(self) -> int:
        """Note that an optimizer's step is over, and return the bytes of the state that it has made."""
        if self._update is None:
            return 0
        update, self._update = self._update.close(), None
        created_bytes = max(0, update.end_bytes - update.start_bytes)
        self._created_bytes += created_bytes
        self._update_bytes = max(self._update_bytes, update.most_live_bytes)
        return created_bytes

    def close(self, kind: WindowKind, other_bytes: int = 0) -> Usage:
        """End the window, and return what it took.

        Args:
            kind: of the window.
            other_bytes: that are live, and do not count against the budget.
        """
        assert self._open is not None
        recorded, self._open = self._open.close(), None
        self.created_bytes, self.is_before_update = self._created_bytes, recorded.most_live_bytes > self._update_bytes
        self._created_bytes = self._update_bytes = 0
        beside_bytes = self._uncounted_bytes - other_bytes
        live_bytes, start_bytes = beside_bytes + recorded.most_live_bytes, beside_bytes + recorded.start_bytes
        taken_bytes = max(recorded.most_taken_bytes - other_bytes, live_bytes)
        return Usage(taken_bytes=taken_bytes, live_bytes=live_bytes, kind=kind, start_bytes=start_bytes)

    def seconds(self) -> float | None:
        """Return the seconds from the beginning of the last window to the end of backward; waits for the device."""
        return None if self._watch is None else self._watch.seconds()


@dataclass(slots=True)
class History:
    """What windows took, the latest ones, and totals of all.

    Attributes:
        latest: windows.
        count, lean, over: of all windows, of lean passes, and of those that took more than the budget.
        most_bytes: that one took.
    """

    latest: deque[WindowSeen] = field(default_factory=lambda: deque(maxlen=_MOST_REMEMBERED))
    count: int = 0
    lean: int = 0
    over: int = 0
    most_bytes: int = 0

    def add(self, window: WindowSeen, *, is_over: bool) -> None:
        """Count a window.

        Args:
            window: that has ended; the latest are kept, and the oldest of them is dropped.
            is_over: whether it took more than the budget.
        """
        self.latest.append(window)
        self.count += 1
        self.lean += window.plan == 0 and window.kind is not WindowKind.EVALUATION
        self.over += is_over
        self.most_bytes = max(self.most_bytes, window.taken_bytes)


class Awaiting:
    """The backward passes of a window that have yet to begin, as what was returned for them shows.

    Args:
        begins: called when one does.

    Attributes:
        is_in_call: whether a call of the model runs.
    """

    def __init__(self, begins: Callable[[], None]) -> None:
        self._begins = begins
        self._all: weakref.WeakSet[Awaited] = weakref.WeakSet()
        self._entry: Awaited | None = None
        self.is_in_call = False

    def __bool__(self) -> bool:
        return bool(self._all)

    def expect(self, output: Any, *, of_entry: bool = False) -> None:
        """Expect one from what a call has returned, of which a loop may use any part.

        Args:
            output: of the call.
            of_entry: whether it is a block's, and the backward pass that of a window which a block's call has begun.
        """
        awaited = self._entry if of_entry else Awaited(self._begun)
        for tensor in tensors_reached(output):
            if tensor.requires_grad and awaited is not None:
                if not of_entry:
                    self._all.add(awaited)
                tensor.register_hook(awaited)

    def enter(self) -> None:
        """Expect one of a window that a block's call begins, and not the model's."""
        self._entry = Awaited(self._begun)
        self._all.add(self._entry)

    @property
    def has_entered(self) -> bool:
        """Whether a block's call has begun the window."""
        return self._entry is not None

    @property
    def is_spent(self) -> bool:
        """Whether a block's call has begun the window, and its backward pass has begun, or is not expected any more."""
        return self._entry is not None and self._entry not in self._all

    def clear(self) -> None:
        """Expect none any more."""
        self._all.clear()

    def forget(self) -> None:
        """Begin with another window."""
        self.clear()
        self._entry = None

    def _begun(self, awaited: Awaited) -> None:
        if awaited in self._all:  # or it came to another output before
            self._all.discard(awaited)
            self._begins()


class Updates:
    """The updates by optimizers, and what they say of the windows between them.

    Attributes:
        to_come: how many there will be before plans are made.

    Args:
        model: whose gradients tell micro-batches apart.
        to_come: see above.
    """

    def __init__(self, model: torch.nn.Module, to_come: int) -> None:
        self.to_come = to_come
        self._model, self._structure = model, Structure(model)
        self._seen: weakref.ref[torch.nn.Parameter] | None = None  # the model's first one in the last window
        self._first = [weakref.ref(each) for each in model.parameters()]  # a wrapper may keep them from its calls
        self._count = self._before = 0  # now, and when the last window began

    def kind(self) -> WindowKind:
        """Return the kind of a window that begins; wrappers may keep gradients where no parameter shows them.

        Raises:
            UnsupportedStepError: the model was wrapped by FSDP's first version since.
        """
        parameters = self._parameters()
        if self._seen is None or self._seen() is not parameters[0]:  # sharding replaces them
            self._seen = weakref.ref(parameters[0])
            refuse_first_fsdp([*parameters, *(each() for each in self._first)], "memfit.checkpoint")
        has_gradients = any(each.is_leaf and each.grad is not None for each in parameters)
        is_later = has_gradients or 0 < self._count == self._before
        self._before = self._count
        return WindowKind.LATER if is_later else WindowKind.FIRST

    def form(self, given: Any) -> int:
        """Return a number for what needs a gradient in a window that begins: the input or not, and which parameters.

        Layers are unfrozen as a training goes on, and a discriminator is called with data and with what is trained.

        Args:
            given: all arguments of the call.
        """
        needs = [tensor.requires_grad for tensor in (*tensors_reached(given), *self._parameters())]
        return hash(tuple(needs))

    def _parameters(self) -> list[torch.nn.Parameter]:
        self._structure.refresh()
        return [each for table in self._structure.parameters for each in table.values() if each is not None]

    def count(self) -> int:
        """Count an update; return how many there were."""
        self._count += 1
        return self._count

    def are_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer updates the model."""
        first = (each() for each in self._first)  # of one that `fully_shard` keeps gathered, modules show others
        own = set(map(id, (*self._model.parameters(), *first)))
        # a tensor that is no parameter, and so of no module, is a copy of some that a wrapper updates: DeepSpeed's
        return any(id(each) in own or type(each) is torch.Tensor for each in parameters_of(optimizer))


def watch_evaluation(model: torch.nn.Module, output: Any, warnings: Warnings) -> None:
    """Warn if a call in eval mode is trained on, which is not steered.

    Args:
        model: that was called.
        output: of the call.
        warnings: of the loop.
    """
    grown = next((tensor for tensor in tensors_reached(output) if tensor.requires_grad), None)
    if grown is not None and not model.training:
        grown.register_hook(lambda _: warnings.warn(_NOT_STEERED, "eval mode", most=1))
