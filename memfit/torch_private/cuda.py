"""CUDA's allocator and workspaces."""

from __future__ import annotations

import logging
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


def has_captured_graphs(device: torch.device) -> bool:
    """Return whether CUDA graphs were captured, which may have the address of a workspace in them."""
    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "native":
        return False
    return any(tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0) for segment in torch.cuda.memory_snapshot())


def turn_on_expandable_segments(device: torch.device) -> bool:
    """Let torch's caching allocator take expandable segments from now on; return whether it does.

    The other settings stay. Those that say whether segments are expandable are left as they are. A driver may allow the
    setting, and fail at the first segment (on WSL2, pytorch#192330): one is taken here, and if it fails, the setting is
    off from then on.

    Args:
        device: that they are for.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return False
    text = allocator_settings_text()
    if "expandable_segments" not in text:
        text = ",".join(filter(None, [text, _EXPANDABLE]))
        try:
            _set_allocator_settings(text)
        except (RuntimeError, ValueError):  # the settings, or the driver, do not allow it
            return False
    if text in _set_text and _EXPANDABLE in text and device not in _tried:
        _tried.add(device)
        try:
            _take_small_segment(device)
        except RuntimeError as error:
            _set_allocator_settings(text.replace(_EXPANDABLE, "expandable_segments:False"))
            _log.warning("memfit: expandable segments fail on %s, and are turned off again: %s", device, error)
            return False
    return _EXPANDABLE.lower() in allocator_settings_text().replace(" ", "").lower()


def _take_small_segment(device: torch.device) -> None:
    """Request memory until torch's allocator takes a segment for it, and free it again; what is free serves first."""
    reserved_bytes = torch.cuda.memory_reserved(device)
    taken: list[int] = []
    try:
        while torch.cuda.memory_reserved(device) == reserved_bytes:
            taken.append(torch.cuda.caching_allocator_alloc(_SMALL_REQUEST_BYTES, device))
    finally:
        for pointer in taken:
            torch.cuda.caching_allocator_delete(pointer)


_log = logging.getLogger("memfit")
_EXPANDABLE = "expandable_segments:True"
_SMALL_REQUEST_BYTES = 1 << 20  # the largest that gets a segment of 2 MiB
_tried: set[torch.device] = set()  # devices of which a segment was taken, or failed
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
