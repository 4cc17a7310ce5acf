"""Signatures: what of a batch decides which program a call of a planned step runs."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from memfit.capture.placement import is_dense, require_dense
from memfit.capture.training_step import plain, same_objects
from memfit.torch_private.tensors import tree_flatten


def batch_signature(batch: Any) -> Hashable:
    """Return the signature of a call with `batch`: two calls of equal signatures can run the same program.

    The batch counts by its structure, the metadata of its tensors, which of them are the same object, and the values
    of everything else. What else a step depends on is held by its guards.

    Raises:
        UnsupportedStepError: the batch holds sparse, nested or quantized tensors.
    """
    leaves, structure = tree_flatten(batch)
    if not all(is_dense(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)):
        require_dense(batch, "batch")
    return structure, tuple(map(_leaf_signature, leaves)), same_objects(leaves)


def tensor_signature(tensor: torch.Tensor) -> Hashable:
    """Return all that a program depends on of a tensor that it takes; its values do not count."""
    lazy = tensor.is_conj(), tensor.is_neg()
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, lazy


def _leaf_signature(leaf: Any) -> Hashable:
    return tensor_signature(leaf) if isinstance(leaf, torch.Tensor) else (type(leaf), repr(plain(leaf)))
