"""What `torch.utils.checkpoint` does inside of a checkpoint of which some results are kept."""

from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import SAC_IGNORED_OPS

from memfit.torch_private.autograd import default_saved_hooks, has_modes

IGNORED_OPS: frozenset[Any] = frozenset(SAC_IGNORED_OPS)
"""Operators of which a checkpoint's second forward pass may call another number than its first."""


def is_cached_cast(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operator is a cast that autocast's cache may leave out in one of two forward passes.

    The cache holds what parameters, and other leaves of autograd, were cast to, until the outermost block of autocast
    ends: a second call of a module in the same block, and a backward pass inside of one, find it there.

    Args:
        func, args, kwargs: of a call, as a dispatch mode sees it.
    """
    if func is not torch.ops.aten._to_copy.default or (kwargs or {}).get("dtype") not in _HALF:
        return False
    return args[0].dtype is torch.float32 and args[0].requires_grad and args[0].is_leaf


_HALF = (torch.bfloat16, torch.float16)


def in_selective_checkpoint() -> bool:
    """Return whether a checkpoint that keeps some results, by `create_selective_checkpoint_contexts`, is running."""
    return has_modes() and any(isinstance(mode, _SELECTIVE) for mode in _get_current_dispatch_mode_stack())


_SELECTIVE = (torch.utils.checkpoint._CachingTorchDispatchMode, torch.utils.checkpoint._CachedTorchDispatchMode)


def tell_mismatch(told: Callable[[Exception], Exception]) -> None:
    """Replace the error of a checkpoint whose second forward pass begins here and saves other tensors than the first.

    Torch compares after the pass, where it is no longer known whose pass it was.

    Args:
        told: returns an error for torch's.
    """
    hooks = default_saved_hooks()
    pack: Any = unwrap(hooks[0]) if hooks is not None else tell_mismatch
    cells = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True))
    reference = cells["target_frame_ref"].cell_contents if "target_frame_ref" in cells else None
    if reference is None:
        return
    frame = reference()

    def check(gid: Any) -> None:
        frame = reference()  # held by a name, it would hold itself
        try:
            type(frame).check_recomputed_tensors_match(frame, gid)
        except torch.utils.checkpoint.CheckpointError as error:
            raise told(error) from error

    frame.check_recomputed_tensors_match = check


def ends_early(error: BaseException) -> bool:
    """Return whether an error is none: torch ends a second forward pass by it that has saved all."""
    return isinstance(error, torch.utils.checkpoint._StopRecomputationError)


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
