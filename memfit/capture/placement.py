"""Where a step runs."""

from __future__ import annotations

from typing import Any

import torch

from memfit.capture.torch_private import tree_flatten
from memfit.errors import InvalidDeviceError


def step_device(model: torch.nn.Module, batch: Any) -> torch.device:
    """Return the one device that model and batch are on.

    Raises:
        InvalidDeviceError: the model is on several devices, or a tensor of the batch is on another one.
    """
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    leaves = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor)]
    if len(devices) > 1:
        raise InvalidDeviceError(
            f"the model is on several devices ({', '.join(sorted(map(str, devices)))}); memfit plans for one: move it"
        )
    device = devices.pop() if devices else (leaves[0].device if leaves else torch.device("cpu"))
    for number, leaf in enumerate(leaves):
        if leaf.device != device:
            raise InvalidDeviceError(
                f"tensor {number} of the batch is on {leaf.device}, the model is on {device}; move the batch"
            )
    return device
