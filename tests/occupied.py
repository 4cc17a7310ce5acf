"""What the process holds on a device, for budgets of tests: what other tests have left counts, as in an account."""

from __future__ import annotations

import torch

from memfit.memory.footprint import bytes_from_before
from memfit.system.recorder import allocated_bytes


def bytes_now(device: torch.device) -> int:
    """Return all bytes on `device`, but for those of tensors without a Python object from before the recorder."""
    before = bytes_from_before(device)  # collects garbage
    return before + allocated_bytes(device)
