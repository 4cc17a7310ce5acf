"""The state of torch's random generators: saved before a random op, replayed when the op is rematerialized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# Bytes of `get_rng_state()`: the Mersenne twister of the CPU, Philox's seed and offset on CUDA.
STATE_BYTES = {"cpu": 5056, "cuda": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveGeneratorState:
    """Returns the state of the default generator of a device type, as a uint8 tensor on the CPU."""

    device_type: str

    @property
    def __name__(self) -> str:
        return "save_generator_state"

    def __call__(self) -> torch.Tensor:
        return torch.cuda.get_rng_state() if self.device_type == "cuda" else torch.get_rng_state()


def replay(state: torch.Tensor, device_type: str, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `target` with the default generator in `state`, and leave the generator as it was before."""
    is_cuda = device_type == "cuda"
    get_state = torch.cuda.get_rng_state if is_cuda else torch.get_rng_state
    set_state = torch.cuda.set_rng_state if is_cuda else torch.set_rng_state
    now = get_state()
    set_state(state)
    try:
        return target(*args, **kwargs)
    finally:
        set_state(now)
