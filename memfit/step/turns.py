"""Turns: one thread at a time runs planned steps on a device.

A step that computes a random op again sets the device's generator back for it, and keeps account of its own memory; a
second step at the same time would draw from that state, and write to what the first one reads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch

from memfit.capture import TrainingStep
from memfit.errors import UnsupportedStepError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holder:
    """A thread that has the turn.

    Attributes:
        thread, name: the thread.
        runs: the steps that it is in, the innermost last, each with what it is called.
    """

    thread: int
    name: str
    runs: list[tuple[object, str]] = field(default_factory=list[tuple[object, str]])


class Turn:
    """Lets one thread at a time in, and no step into itself; whoever comes in between is refused.

    A thread that has the turn may run other steps inside of its own.
    """

    def __init__(self) -> None:
        self._holders: dict[int, _Holder] = {}  # by process: a forked one does not inherit the turn

    @contextmanager
    def of(self, step: object, what: str, *, may_nest: bool = False) -> Iterator[None]:
        """Return a block that has the turn.

        Args:
            step: that runs in the block.
            what: the step is called in errors, such as "the planned step of Net".
            may_nest: whether the step may run inside of itself.

        Raises:
            UnsupportedStepError: another thread has the turn, or the step runs already.
        """
        process, thread = os.getpid(), threading.get_ident()
        # One operation, which no other thread can come between.
        holder = self._holders.setdefault(process, _Holder(thread=thread, name=threading.current_thread().name))
        if holder.thread != thread:
            _, running = holder.runs[-1] if holder.runs else (None, "another one")
            raise UnsupportedStepError(
                f"{what} was called in thread {threading.current_thread().name!r} while {running} runs in thread "
                f"{holder.name!r}: one thread at a time may run it, since both would share memory and random numbers; "
                "call one after the other, for example with a threading.Lock around each call"
            )
        if not may_nest and any(each is step for each, _ in holder.runs):
            raise UnsupportedStepError(
                f"{what} was called inside of itself, from a hook or an operator that it runs: one call at a time may "
                "run it; call it when the step has returned"
            )
        run = (step, what)
        holder.runs.append(run)
        try:
            yield
        finally:
            holder.runs[:] = [each for each in holder.runs if each is not run]
            if not holder.runs:
                self._holders.pop(process, None)


_turns: dict[torch.device, Turn] = {}


def turn_on(device: torch.device) -> Turn:
    """Return the turn of a device, which all planned steps on it share."""
    return _turns.setdefault(device, Turn())


def turn_for(
    step: TrainingStep, device: torch.device, what: str, planned: object | None = None
) -> AbstractContextManager[None]:
    """Return a block for work on a training step, which no other thread's planned steps run beside.

    A model that ranks share is brought to what a step finds, whatever has run since the last one.

    Args:
        step: is planned, run or measured.
        device: that it runs on.
        what: the work is called, such as "the planned step".
        planned: the planned step that runs; None for work that runs planned and eager ones.

    Raises:
        UnsupportedStepError: as `Turn.of`.
    """
    if step.across is not None:
        step.across.settle()
    return turn_on(device).of(planned or step, f"{what} of {step.name or type(step.model).__name__}")
