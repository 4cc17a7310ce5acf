"""The state of torch's random generators: saved before a random op, replayed when the op is rematerialized."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memfit.graph import SAVE_GENERATOR_STATE

# Bytes of a generator's state: the Mersenne Twister on the CPU, the seed and offset of Philox on CUDA.
STATE_BYTES = {"cpu": 5056, "cuda": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveGeneratorState:
    """Returns the state of a device's default generator, as a uint8 tensor on the CPU."""

    device: str

    @property
    def __name__(self) -> str:
        return SAVE_GENERATOR_STATE

    def __call__(self) -> torch.Tensor:
        return get_state(self.device)


def replay(state: torch.Tensor, device: str, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return `target(*args, **kwargs)`, run with the default generator in `state`; the generator is reset afterwards.

    The generator's own state waits outside of torch's memory; only while it is read does the device hold it.

    Args:
        state: what `get_state` returned.
        device: of the generator, such as "cpu" or "cuda:1".
        target: may have a keyword `device` of its own, as torch.rand has.
    """
    now = get_state(device).numpy().copy()
    set_state(device, state)
    try:
        return target(*args, **kwargs)
    finally:
        set_state(device, torch.from_numpy(now))


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
