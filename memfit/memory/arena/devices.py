"""The devices that can have an arena."""

from __future__ import annotations

import torch

from memfit.errors import InvalidDeviceError
from memfit.memory.arena.cuda import library_on
from memfit.memory.arena.library import ArenaLibrary, load_arena_library

ALIGNMENT_BYTES = {"cpu": 64, "cuda": 512}


def library_for(device: torch.device) -> ArenaLibrary:
    """Return the library of arenas on a device.

    Raises:
        ArenaUnavailableError, InvalidDeviceError: as `arena`.
    """
    if device.type not in ALIGNMENT_BYTES:
        raise InvalidDeviceError(f"there is no arena on device '{device}': expected cpu or cuda")
    if device.type == "cuda":
        return library_on(device)
    return load_arena_library("cpu")
