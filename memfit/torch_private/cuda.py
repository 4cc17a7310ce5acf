"""CUDA's allocator and workspaces."""

from __future__ import annotations

import os

import torch
import torch._guards
import torch._subclasses
import torch.utils.checkpoint


def release_cublas_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps for each thread and stream; its next call allocates them anew."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # a build without CUDA has none
    if clear is not None:
        clear()


def turn_on_expandable_segments() -> bool:
    """Let torch's caching allocator take expandable segments from now on; return whether it does.

    The other settings stay. Those that say whether segments are expandable are left as they are.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return False
    text = allocator_settings_text()
    if "expandable_segments" not in text:
        try:
            _set_allocator_settings(",".join(filter(None, [text, _EXPANDABLE])))
        except (RuntimeError, ValueError):  # the settings, or the driver, do not allow it
            return False
    return _EXPANDABLE.lower() in allocator_settings_text().replace(" ", "").lower()


_EXPANDABLE = "expandable_segments:True"
_set_text: list[str] = []  # the settings that were made here last


def _set_allocator_settings(text: str) -> None:
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    change = change or torch.cuda.memory._set_allocator_settings
    change(text)
    _set_text[:] = [text]


def allocator_settings_text() -> str:
    """Return the settings of torch's caching allocator, in the form of `PYTORCH_CUDA_ALLOC_CONF`.

    torch 2.11 does not tell them: there they are those that were made here, or else those of the environment.
    """
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if read is not None:
        return read()
    if _set_text:
        return _set_text[0]
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF", "")
