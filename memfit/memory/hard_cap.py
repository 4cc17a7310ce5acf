"""A GPU's own limit: whether a budget fits beside what is on the card, and a cap on the process while a step runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from memfit.cost.calibration import memory_bytes
from memfit.cost.environment import bytes_beside
from memfit.errors import InvalidOptionError
from memfit.planning import Settings
from memfit.system.budget import format_bytes
from memfit.system.recorder import allocated_bytes

_log = logging.getLogger("memfit")


def require_cap(settings: Settings, device: torch.device) -> None:
    """Refuse `hard=True` where nothing can cap the process.

    Args:
        settings: say whether the budget is hard.
        device: that the step runs on.

    Raises:
        InvalidOptionError: on a CPU.
    """
    if settings.hard and device.type != "cuda":
        raise InvalidOptionError(
            f"hard=True caps what a process takes of a GPU, and the step runs on {device}; leave it out: each step on "
            "a CPU is measured"
        )


def tell_of_card(device: torch.device, needed_bytes: int, door: str) -> None:
    """Warn of a step that does not fit beside what is on the card already: before it runs.

    Args:
        device: that the step runs on; nothing is said of a CPU.
        needed_bytes: what the step may take, residents included.
        door: begins the message.
    """
    beside_bytes = bytes_beside(device)
    left_bytes = memory_bytes(device) - beside_bytes
    if device.type != "cuda" or needed_bytes <= left_bytes:
        return
    _log.warning(
        "memfit: %s: steps may take %s, and %s of the card's %s are taken beside them (CUDA's context, communicators, "
        "other processes), so that an allocation may fail; give a budget of at most %s, or '95%% of the card'",
        door,
        format_bytes(needed_bytes),
        format_bytes(beside_bytes),
        format_bytes(memory_bytes(device)),
        format_bytes(max(0, left_bytes)),
    )


@contextmanager
def capped(device: torch.device, budget_bytes: int, bytes_before: int) -> Iterator[None]:
    """Cap the process while the block runs, and put its cap before back.

    Args:
        device: a CUDA device.
        budget_bytes: what the step may take, residents included.
        bytes_before: of these, what is there already; all else that is allocated is not the step's.
    """
    others_bytes = max(0, allocated_bytes(device) - bytes_before)
    whole_bytes = torch.cuda.get_device_properties(device).total_memory
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(min(before, (budget_bytes + others_bytes) / whole_bytes), device)
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.add_note(f"memfit: the step was capped at its budget of {format_bytes(budget_bytes)} (hard=True)")
        raise
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
