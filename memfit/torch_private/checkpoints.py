"""What `torch.utils.checkpoint` does inside of a checkpoint of which some results are kept."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils.checkpoint import SAC_IGNORED_OPS

IGNORED_OPS: frozenset[Any] = frozenset(SAC_IGNORED_OPS)
"""Operators of which a checkpoint's second forward pass may call another number than its first."""


def detached(value: Any) -> Any:
    """Return a tensor as it is kept for the second forward pass, which may return it as a view."""
    if isinstance(value, torch.Tensor):
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            return value.detach()
    return value


def schema_of(operator: Any) -> Any:
    """Return the schema of an operator's overload: its arguments, and which of them it writes to."""
    return operator._schema


def saved_node_names(tensor: torch.Tensor, most: int) -> set[str]:
    """Return the names of the autograd nodes that a tensor was made by, at most so many of them."""
    seen, waiting, names = set[Any](), [tensor.grad_fn], set[str]()
    while waiting and len(seen) < most:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.add(node.name())
            waiting += [following for following, _ in node.next_functions]
    return names
