"""CUDA's allocator and workspaces."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from memfit.errors import UnsupportedStepError
from memfit.system.instruments import instrument_of, note_cuda_peaks
from memfit.system.recorder import empty_cache


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


class LastStream:
    """The CUDA stream and thread of the last call on a device.

    Args:
        device: any; where it is no CUDA device there is nothing to follow.

    Attributes:
        stranded_bytes: that the last call cannot use: what torch's allocator holds for other streams in segments that
            are in use in part.
        workspace_bytes: that the last call takes anew, of cuBLAS's workspaces that were freed before it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = self._now()
        self.stranded_bytes = self.workspace_bytes = 0

    def follow(self, *, follows_thread: bool = True, waits: bool = False) -> bool:
        """Free what torch keeps for the last call, if this one is on another stream.

        Torch's allocator serves each stream from memory of its own, and cuBLAS has workspaces for each stream of each
        thread.

        Args:
            follows_thread: do so if the last call was on another thread, too.
            waits: let the current stream wait for the last one.

        Returns:
            Whether cuBLAS takes its workspaces anew.

        Raises:
            UnsupportedStepError: a CUDA graph is being captured of the call, and gradients are on.
        """
        if self._is_captured():
            return False
        before, now = self._last, self._now()
        if before is None or now is None:
            self._last = now
            return False
        if not follows_thread:
            now = now[0], before[1]
        self._last = now
        self.workspace_bytes = 0
        if before == now:
            if self.stranded_bytes:
                self.stranded_bytes = self._stranded_bytes(now[0])
            return False
        if waits:
            now[0].wait_stream(before[0])
        is_free_to = not has_captured_graphs(self._device)
        live_bytes = torch.cuda.memory_allocated(self._device)
        if is_free_to:
            release_cublas_workspaces()
        self.workspace_bytes = live_bytes - torch.cuda.memory_allocated(self._device)
        empty_cache(self._device)
        self.stranded_bytes = self._stranded_bytes(now[0])
        return is_free_to

    @property
    def lost_bytes(self) -> int:
        """What is not live when a call begins, and cannot be planned with."""
        return self.stranded_bytes + self.workspace_bytes

    def _stranded_bytes(self, stream: torch.cuda.Stream) -> int:
        device, number = torch.cuda._get_device_index(self._device, optional=True), stream.cuda_stream
        segments = torch.cuda.memory_snapshot() if torch.cuda.get_allocator_backend() == "native" else []
        return sum(
            segment["total_size"] - segment["allocated_size"]
            for segment in segments
            if segment["device"] == device and segment["stream"] != number
        )

    def _is_captured(self) -> bool:
        if self._device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            return False
        if torch.is_grad_enabled():
            raise UnsupportedStepError(_CAPTURED)
        return True

    def _now(self) -> tuple[torch.cuda.Stream, int] | None:
        if self._device.type != "cuda" or not torch.cuda.is_initialized():  # nothing was kept before
            return None
        return torch.cuda.current_stream(self._device), threading.get_native_id()


_CAPTURED = (
    "a CUDA graph is being captured of a training step that memfit holds to a budget: what it measures and recomputes "
    "is decided on the host, which a graph does not run; memfit.fit(..., cuda_graph=True) captures a step by itself"
)


def prepare_allocator(device: torch.device) -> bool:
    """Let torch's allocator serve a budget; return whether its segments can grow.

    Expandable segments are turned on, and records note the peaks that a training loop sets back.

    Args:
        device: that has the budget; nothing is done for a CPU.

    Raises:
        InvalidDeviceError: torch counts none of its bytes.
    """
    if device.type != "cuda":
        return True
    instrument_of(device)  # or it is refused
    note_resets_of_peaks()
    return turn_on_expandable_segments(device)


@functools.cache
def note_resets_of_peaks() -> None:
    """Let open records note the peaks of CUDA's statistics before anybody else sets them back, from now on."""
    for name in _RESETS:
        reset = getattr(torch._C, name, None)
        if reset is not None:
            setattr(torch._C, name, functools.partial(_reset_noted, reset))


def _reset_noted(reset: Callable[..., None], *args: Any) -> None:
    note_cuda_peaks()
    reset(*args)


_RESETS = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")


def turn_on_expandable_segments(device: torch.device) -> bool:
    """Let torch's caching allocator take expandable segments from now on; return whether it does.

    The other settings stay. Those that say whether segments are expandable are left as they are, and so are those that
    say from which size on blocks are not split: what is freed in a segment that has grown beyond it serves no smaller
    request. A driver may allow the setting, and fail at the first segment (on WSL2, pytorch#192330): one is taken here,
    and if it fails, the setting is off from then on.

    Args:
        device: that they are for.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return False
    text = allocator_settings_text()
    if not any(name in text for name in ("expandable_segments", "max_split_size_mb")):
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
