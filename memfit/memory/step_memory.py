"""Step memory: what serves a planned step's requests, an arena of its own or torch's allocator."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch

from memfit.capture.training_step import parameters_of
from memfit.memory.arena.arena import Arena
from memfit.memory.arena.library import ArenaUnavailableError
from memfit.memory.arena.places import Places
from memfit.planning import Settings
from memfit.simulate.reserved import ARENA, DEFAULT, EXPANDABLE
from memfit.system.recorder import empty_cache
from memfit.torch_private.cuda import LastStream, prepare_allocator

_log = logging.getLogger("memfit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Where the memory of a step's requests comes from.

    Attributes:
        by: ARENA, EXPANDABLE or DEFAULT.
        why: nothing better is there; empty where that was asked for, or where nothing is better.
    """

    by: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.by} ({self.why})" if self.why else self.by


class HasPlaces(Protocol):
    """A program whose requests may have places in an arena."""

    @property
    def places(self) -> Places | None:
        """Of its requests; None if they have none."""
        ...

    def first_places(self) -> Places | None:
        """Return the places for a step that makes the optimizer's state."""
        ...


class StepMemory:
    """The memory of a step's calls.

    Args:
        arena: serves the calls; without one torch's allocator does.
        optimizer: the step's, if calls run one: its first step makes its state, so that the second requests other
            memory.
        served: says which memory that is.
        device: of the calls.
    """

    def __init__(
        self, arena: Arena | None, optimizer: torch.optim.Optimizer | None, served: Served, device: torch.device
    ) -> None:
        self.arena = arena
        self.served = served
        self._device = device
        self._last = LastStream(self._device)
        self._optimizer = optimizer
        self._expected: dict[Hashable, HasPlaces] = {}  # by the key of the memory

    @property
    def held_bytes(self) -> int:
        """The bytes that are held between calls, beside the step's residents."""
        return 0 if self.arena is None else self.arena.held_bytes

    @property
    def stranded_bytes(self) -> int:
        """What torch's allocator keeps for other streams, and calls on this one cannot use."""
        return 0 if self.arena is not None else self._last.stranded_bytes

    @property
    def is_settled(self) -> bool:
        """Whether the next call will take what the last one took. A call that an arena only records is no such call."""
        return self.arena is None or self.arena.last_step.recorded == 0

    def key(self, signature: Hashable) -> tuple[Hashable, int]:
        """Return what calls of this signature have in common that request the same memory."""
        return signature, 0 if self._optimizer is None else len(self._optimizer.state)

    def expect(self, signature: Hashable, program: HasPlaces) -> None:
        """Give the next calls of this signature the places of their plan, and take the memory for them.

        Args:
            signature: of the calls.
            program: that they run.
        """
        key = self.key(signature)
        if self.arena is None or self._expected.get(key) is program:
            return
        places = program.first_places() if self._makes_state() else program.places
        if places is not None:
            self.arena.expect(key, places)
        self._expected[key] = program

    def _makes_state(self) -> bool:
        """Return whether the next call may make some of the optimizer's state."""
        optimizer = self._optimizer
        return optimizer is not None and not all(map(optimizer.state.get, parameters_of(optimizer)))

    def call(self, signature: Hashable) -> AbstractContextManager[Any]:
        """Return the `with` block in which a call of this signature runs, on the current stream."""
        self.follow_stream(follows_thread=False)
        return nullcontext() if self.arena is None else self.arena.step(key=self.key(signature))

    def vacate(self) -> None:
        """Free what is held between calls, until the next one."""
        if self.arena is not None:
            self.arena.vacate()
        empty_cache(self._device)

    def follow_stream(self, *, follows_thread: bool = True) -> bool:
        """Let the current stream wait for that of the last call, if it is another one.

        What is kept for the other one is freed: torch's allocator serves each stream from memory of its own, and cuBLAS
        has workspaces for each stream of each thread. Return whether these were freed, so that the next call takes them
        anew.

        Args:
            follows_thread: do so if the last call was on another thread, too. Not for the half of a compiled part:
                autograd runs the backward on a thread of its own.
        """
        return self._last.follow(follows_thread=follows_thread, waits=True)

    def forget(self, signature: Hashable) -> None:
        """Drop the layouts of a signature, whose calls will request other memory from now on."""
        if self.arena is None:
            return
        self._expected = {
            key: kept for key, kept in self._expected.items() if cast("tuple[Any, int]", key)[0] != signature
        }
        for key in tuple(self.arena.plans):
            if cast("tuple[Hashable, int]", key)[0] == signature:
                self.arena.forget(key)


def memory_for(
    settings: Settings, device: torch.device, optimizer: torch.optim.Optimizer | None, *, refused: str = ""
) -> tuple[StepMemory, Settings]:
    """Return the memory that the settings ask for, and the settings with `arena` resolved.

    Args:
        settings: with `arena` True, False, or None for the best that there is.
        device: of the step.
        optimizer: as for `StepMemory`.
        refused: why this step is served from no arena unless it is asked for; empty if it may be.

    Raises:
        ArenaUnavailableError: an arena is asked for, and there can be none.
    """
    if settings.arena or (settings.arena is None and device.type == "cuda" and not refused):
        try:
            arena = Arena(device=device, seed=settings.seed)
            return StepMemory(arena, optimizer, Served(by=ARENA), device), replace(settings, arena=True)
        except ArenaUnavailableError as error:
            if settings.arena:
                raise
            refused = str(error).removeprefix("no arena: ")
    served = Served(by=DEFAULT)
    if settings.arena is None and device.type == "cuda":
        is_expandable = prepare_allocator(device)
        served = Served(by=EXPANDABLE if is_expandable else DEFAULT, why=f"no arena: {refused}")
        _log.info("memfit: the step is served from %s", served)
    return StepMemory(None, optimizer, served, device), replace(settings, arena=False)
