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


def allocator_settings_text() -> str:
    """Return the settings of torch's caching allocator, in the form of `PYTORCH_CUDA_ALLOC_CONF`.

    torch 2.11 does not tell them: there they are those of the environment.
    """
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if read is not None:
        return read()
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF", "")
