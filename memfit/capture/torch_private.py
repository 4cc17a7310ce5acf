"""Every private name of torch that memfit uses, in one place; tests/test_torch_private.py has a test for each.

memfit runs on torch 2.11 to the newest. When a release moves one of these names, this file and its test say so at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)


def is_fake(tensor: object) -> bool:
    """Return whether `tensor` is one of FakeTensorMode's: metadata without data."""
    return isinstance(tensor, FakeTensor)


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that two tensors share exactly when they share their storage (while both are alive)."""
    return tensor.untyped_storage()._cdata


def next_sequence_number() -> int:
    """Return the number that autograd will give to the next node it makes on this thread."""
    return torch.autograd._get_sequence_nr()


def backward_node() -> tuple[str, int] | None:
    """Return (name, sequence number) of the autograd node that runs now, or None outside of a backward pass."""
    node = torch._C._current_autograd_node()
    return None if node is None else (node.name(), node._sequence_nr())


def backward_keeps_graph() -> bool:
    """Return whether the backward pass that runs now was asked to retain its graph."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


class _Inlined:
    """Stands in for `CheckpointFunction` while a step is captured: calls the region, checkpoints nothing."""

    @staticmethod
    def apply(function: Any, _preserve: bool, *args: Any) -> Any:
        return function(*args)


def _inlined_region(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield


@contextmanager
def checkpoints_inlined() -> Iterator[None]:
    """Run the regions of `torch.utils.checkpoint` inline: a plan decides what is rematerialized, not the region."""
    module = torch.utils.checkpoint
    kept = module._checkpoint_without_reentrant_generator, module.CheckpointFunction
    module._checkpoint_without_reentrant_generator = _inlined_region
    module.CheckpointFunction = _Inlined  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        module._checkpoint_without_reentrant_generator, module.CheckpointFunction = kept
