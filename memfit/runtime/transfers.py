"""Copies between device and host, for the Offload, Wait and Prefetch instructions of a program.

On CUDA each direction has a stream of its own, and the host's copy is pinned. The compute stream waits for events; the
host waits for nothing. On a CPU a copy has ended when the call returns.
"""

from __future__ import annotations

from functools import cache

import torch


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


class HostCopy:
    """A storage's copy on the host, and the transfers to and from it that are under way."""

    __slots__ = ("_done", "_host", "_returned", "_source", "device")

    def __init__(self, source: torch.Tensor) -> None:
        self.device = source.device
        self._source: torch.Tensor | None = source  # kept until `wait`: its memory must not be reused under the copy
        self._returned: torch.cuda.Event | None = None
        self._done: torch.cuda.Event | None = None
        pinned = source.is_cuda
        self._host = torch.empty_strided(
            source.shape, source.stride(), dtype=source.dtype, device="cpu", pin_memory=pinned
        )
        if not source.is_cuda:
            self._host.copy_(source)
            return
        to_host, _ = _streams(self.device)
        to_host.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(to_host):
            self._host.copy_(source, non_blocking=True)
            self._done = to_host.record_event()

    def wait(self) -> None:
        """Make the compute stream wait for the copy to the host, and release the device's tensor."""
        if self._done is not None:
            torch.cuda.current_stream(self.device).wait_event(self._done)
        self._source = None

    def prefetch(self) -> torch.Tensor:
        """Allocate on the device, start the copy back, and return the tensor, to be read after `arrived` only."""
        tensor = torch.empty_strided(self._host.shape, self._host.stride(), dtype=self._host.dtype, device=self.device)
        if not tensor.is_cuda:
            return tensor.copy_(self._host)
        _, to_device = _streams(self.device)
        to_device.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(to_device):
            tensor.copy_(self._host, non_blocking=True)
            self._returned = to_device.record_event()
        return tensor

    def arrived(self) -> None:
        """Make the compute stream wait for the copy back."""
        if self._returned is not None:
            torch.cuda.current_stream(self.device).wait_event(self._returned)


def offload(source: torch.Tensor) -> HostCopy:
    """Start the copy of a storage to the host, and return that copy."""
    return HostCopy(source)
