"""Training steps at other batch sizes: built-in workloads and steps of users."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from memfit.capture.training_step import TrainingStep
from memfit.errors import InvalidTargetError
from memfit.torch_private.tensors import tree_flatten, tree_map
from memfit.workloads.building import build_workload
from memfit.workloads.registry import WORKLOADS, OptionValue

if TYPE_CHECKING:
    from memfit.step.distributed.across import AbsentRanks


def batch_size(step: TrainingStep) -> int:
    """Return the size of the first dimension, which all tensors of the batch must share.

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


def at_batch_size(
    target: str,
    settings: Mapping[str, OptionValue],
    step: TrainingStep,
    size: int,
    ranks: AbsentRanks | None = None,
) -> TrainingStep:
    """Return the step of `target` with another batch size.

    A built-in workload is built anew. Other targets get a batch of zeros, which take no memory until they are written.

    Args:
        target: as on the command line.
        settings: options of a built-in workload.
        step: the step at its own batch size.
        size: the new batch size, in samples.
        ranks: that are not there, one of which the step is made for.

    Raises:
        InvalidTargetError, InvalidOptionError: as `memfit.workloads.build`.
    """
    if target in WORKLOADS:
        make = partial(build_workload, target, {**settings, "batch": size})
        return make() if ranks is None else ranks.step(make)

    def resized(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.zeros((size, *leaf.shape[1:]), dtype=leaf.dtype, device=leaf.device)

    return dataclasses.replace(step, batch=tree_map(resized, step.batch))
