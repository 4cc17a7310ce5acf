"""The state of torch's random generators: saved before a random op, replayed when the op is rematerialized."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memfit.graph import SAVE_GENERATOR_STATE

# Bytes of a generator's state: the Mersenne Twister on the CPU, the seed and offset of Philox on CUDA.
STATE_BYTES = {"cpu": 5056, "cuda": 16}

Replayer = Callable[[torch.Tensor, str, Callable[..., Any], Any, Any], Any]
"""Runs a target again: given the state, the generator's device, the target, and its arguments by position and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveGeneratorState:
    """Returns the state of a device's default generator, as a uint8 tensor on the CPU."""

    device: str

    @property
    def __name__(self) -> str:
        return SAVE_GENERATOR_STATE

    def __call__(self) -> torch.Tensor:
        return get_state(self.device) if _saved is None else _saved()


def replay(state: torch.Tensor, device: str, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return `target(*args, **kwargs)`, run with the default generator in `state`; the generator is reset afterwards.

    The generator's own state waits outside of torch's memory; only while it is read does the device hold it.

    Args:
        state: what `get_state` returned.
        device: of the generator, such as "cpu" or "cuda:1".
        target: may have a keyword `device` of its own, as torch.rand has.
    """
    return _replayer(state, device, target, args, kwargs)


def replay_now(state: torch.Tensor, device: str, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """As `replay`, whatever `replayed_by` says.

    Args:
        state, device, target: as for `replay`.
        args, kwargs: of `target`, by position and by name.
    """
    now = get_state(device).numpy().copy()
    set_state(device, state)
    try:
        return target(*args, **kwargs)
    finally:
        set_state(device, torch.from_numpy(now))


_replayer: Replayer = replay_now
_saved: Callable[[], torch.Tensor] | None = None


@contextmanager
def replayed_by(replayer: Replayer, saved: Callable[[], torch.Tensor] | None = None) -> Iterator[None]:
    """Let random ops be recomputed, in the block, by another function, for CUDA graphs.

    Args:
        replayer: takes the place of `replay_now`.
        saved: returns what is saved as a state; None saves the generator's.
    """
    global _replayer, _saved
    before = _replayer, _saved
    _replayer, _saved = replayer, saved
    try:
        yield
    finally:
        _replayer, _saved = before


def without_generator(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments for a fake kernel: some refuse a generator, and none draws from it."""
    return {name: None if isinstance(value, torch.Generator) else value for name, value in kwargs.items()}


def get_state(device: str) -> torch.Tensor:
    """Return the state of the default generator of a device, such as "cpu" or "cuda:1"."""
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(device)


def set_state(device: str, state: torch.Tensor) -> None:
    """Set the default generator of a device, such as "cpu" or "cuda:1".

    Args:
        device: of the generator.
        state: uint8, as `get_state` of that generator gave it.
    """
    if device == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


def all_states() -> dict[str, torch.Tensor]:
    """Return the states of the default generators of all devices in use, by device."""
    names = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []
    return {device: get_state(device) for device in ("cpu", *names)}


def set_states(states: Mapping[Any, torch.Tensor]) -> None:
    """Set generators, each given by itself, or by its device where it is the default one."""
    for owner, state in states.items():
        if isinstance(owner, torch.Generator):
            owner.set_state(state)
        else:
            set_state(owner, state)


@contextmanager
def states_kept(handed: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Leave the default generators of all devices in use where they are, and those that are handed to a step's ops."""
    states = {**all_states(), **{generator: generator.get_state() for generator in handed}}
    try:
        yield
    finally:
        set_states(states)
