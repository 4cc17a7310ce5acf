"""Casts of operators: whether autocast is on, where a dispatch mode cannot ask, and how it is switched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memfit.errors import UnsupportedStepError
from memfit.torch_private.patching import replaced

_CASTING = ("cpu", "cuda")


def without_autocast() -> Any:
    """Return a context in which no operator is cast, whatever autocast is on."""
    return torch._C._DisableAutocast()


def any_autocast() -> bool:
    """Return whether autocast is on for any device."""
    return torch._C._is_any_autocast_enabled()


def autocast_here() -> Callable[[str], bool]:
    """Return a function that says whether autocast is on here, to be asked by calls that nothing switches it for."""
    enabled = {device_type: torch.is_autocast_enabled(device_type) for device_type in _CASTING}
    nesting = autocast_nesting()

    def is_on(device_type: str) -> bool:
        if autocast_nesting() != nesting:
            raise UnsupportedStepError(
                "nn.Bilinear, whose kernel calls operators that autocast casts, is called where autocast was switched "
                "on or off inside of a block, which memfit cannot see there: put torch.autocast around the model's "
                "call, or use memfit.fit"
            )
        return enabled.get(device_type, False)

    return is_on


def is_cast_itself(name: str, device_type: str) -> bool:
    """Return whether autocast treats an operator of aten, and not what its kernel calls.

    Args:
        name: of the operator, such as `linear`.
        device_type: whose autocast it is.
    """
    overloads = getattr(torch.ops.aten, name).overloads() if hasattr(torch.ops.aten, name) else []
    names = [f"aten::{name}" if each == "default" else f"aten::{name}.{each}" for each in overloads]
    is_known: Any = torch._C._dispatch_has_kernel  # pyright: ignore
    has_kernel: Any = torch._C._dispatch_has_kernel_for_dispatch_key  # pyright: ignore
    return any(is_known(each) and has_kernel(each, f"Autocast{device_type.upper()}") for each in names)


def autocast_nesting() -> int:
    """Return in how many `with torch.autocast` this thread is; a dispatch mode may ask."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return nesting


@contextmanager
def casting(device_type: str, dtype: torch.dtype) -> Iterator[None]:
    """Switch autocast on in the block, which a dispatch mode runs, so that `autocast_watched` does not see it."""
    was_enabled, former = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    keeps_casts = torch.is_autocast_cache_enabled()
    set_enabled: Any = torch._C.set_autocast_enabled  # pyright: ignore
    set_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(keeps_casts)
        torch.set_autocast_dtype(device_type, former)
        set_enabled(device_type, was_enabled)


@contextmanager
def autocast_watched() -> Iterator[Callable[[str], bool]]:
    """Give the block a function that says whether the step's code has autocast on for a device type.

    A dispatch mode cannot ask torch: while it handles a call, autocast is off.
    """
    enabled = {device_type: torch.is_autocast_enabled(device_type) for device_type in _CASTING}
    set_enabled = torch.set_autocast_enabled

    def watched(*args: Any) -> None:
        set_enabled(*args)
        device_type, enabled[device_type] = args if len(args) > 1 else ("cuda", args[0])

    with replaced(torch, "set_autocast_enabled", watched):
        yield lambda device_type: enabled.get(device_type, False)
