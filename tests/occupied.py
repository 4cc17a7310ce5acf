"""What the process holds on a device, for budgets of tests: what other tests have left counts, as in an account."""

from __future__ import annotations

import gc

import torch

from memfit.memory.uncounted import Uncounted
from memfit.system.recorder import allocated_bytes


def bytes_now(device: torch.device) -> int:
    """Return all bytes on `device`, but for those of tensors without a Python object from before the recorder."""
    gc.collect()
    return Uncounted(device).live_bytes() + allocated_bytes(device)
