"""A cap on what a process may take of a GPU while a step runs: an allocation beyond the budget fails, whoever asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from memfit.errors import InvalidOptionError
from memfit.planning import Settings
from memfit.system.budget import format_bytes
from memfit.system.recorder import allocated_bytes


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
