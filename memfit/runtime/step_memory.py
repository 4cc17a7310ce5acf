"""Step memory: what serves a planned step's requests, an arena of its own or torch's allocator."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch

from memfit.runtime.arena.arena import Arena


class StepMemory:
    """The memory of a step's calls.

    Args:
        arena: serves the calls; without one torch's allocator does.
        optimizer: the step's, if calls run one: its first step makes its state, so that the second requests other
            memory.
    """

    def __init__(self, arena: Arena | None, optimizer: torch.optim.Optimizer | None) -> None:
        self.arena = arena
        self._optimizer = optimizer

    @property
    def held_bytes(self) -> int:
        """The bytes that are held between calls, beside the step's residents."""
        return 0 if self.arena is None else self.arena.held_bytes

    @property
    def is_settled(self) -> bool:
        """Whether the next call will take what the last one took. A call that an arena only records is no such call."""
        return self.arena is None or self.arena.last_step.recorded == 0

    @property
    def recorded(self) -> int:
        """How many requests calls made while the arena recorded them."""
        return 0 if self.arena is None else self.arena.counts.recorded

    def key(self, signature: Hashable) -> tuple[Hashable, int]:
        """Return what calls of this signature have in common that request the same memory."""
        return signature, 0 if self._optimizer is None else len(self._optimizer.state)

    def call(self, signature: Hashable) -> AbstractContextManager[Any]:
        """Return the `with` block in which a call of this signature runs."""
        return nullcontext() if self.arena is None else self.arena.step(key=self.key(signature))

    def forget(self, signature: Hashable) -> None:
        """Drop the layouts of a signature, whose calls will request other memory from now on."""
        if self.arena is None:
            return
        for key in tuple(self.arena.plans):
            if cast("tuple[Hashable, int]", key)[0] == signature:
                self.arena.forget(key)
