"""The same training step at another batch size: what `memfit batch` tries one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from memfit.capture.torch_private import tree_flatten, tree_map
from memfit.capture.training_step import TrainingStep
from memfit.errors import InvalidTargetError
from memfit.workloads.registry import WORKLOADS, OptionValue
from memfit.workloads.target import resolve


def batch_size(step: TrainingStep) -> int:
    """Return the size of the first dimension, which all tensors of the batch have to share.

        >>> from memfit.workloads import build
        >>> batch_size(build("unet", size=16, width=4, batch=3))
        3

    Raises:
        InvalidTargetError: the batch has no tensors, or their first dimensions differ.
    """
    tensors = [leaf for leaf in tree_flatten(step.batch)[0] if isinstance(leaf, torch.Tensor)]
    sizes = {tensor.shape[0] if tensor.dim() else None for tensor in tensors}
    if len(sizes) != 1 or None in sizes:
        found = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "none"
        raise InvalidTargetError(
            f"{step.name}: cannot tell the batch size from tensors of shapes {found}; expected one first dimension "
            "that all of them share"
        )
    return int(next(iter(sizes)) or 0)


def at_batch_size(target: str, settings: Mapping[str, OptionValue], step: TrainingStep, size: int) -> TrainingStep:
    """Return the step of `target` with a batch of `size`: built anew, or with tensors of zeros in the batch's place.

    Zeros are enough to plan with, and take no memory before somebody writes to them.
    """
    if target in WORKLOADS:
        built: Any = resolve(target, {**settings, "batch": str(size)})
        return built

    def resized(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.zeros((size, *leaf.shape[1:]), dtype=leaf.dtype, device=leaf.device)

    return dataclasses.replace(step, batch=tree_map(resized, step.batch))
