"""Streams of a GPU that is not here: a copy on one is made as late as its order allows, by bare addresses.

Compute runs at once. A copy waits in its stream until somebody waits for it. One that was not waited for is so missed,
and one whose memory was freed, and overwritten, too early takes the wrong bytes along.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memfit.torch_private.autograd import TorchDispatchMode


class Event:
    """The state of a stream when it was recorded."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.count = stream, len(stream.copies)


class Stream:
    """A queue of copies; the compute stream's is empty."""

    cuda_stream = 0  # the arena's only one

    def __init__(self, device: object = None) -> None:
        self.device = device
        self.copies: list[tuple[int, int, int] | None] = []
        self.done = 0

    def wait_stream(self, other: Stream) -> None:
        other.synchronize()

    def wait_event(self, event: Event) -> None:
        event.stream.reach(event.count)

    def record_event(self) -> Event:
        return Event(self)

    def synchronize(self) -> None:
        self.reach(len(self.copies))

    def reach(self, count: int) -> None:
        """Make the copies up to this number."""
        while self.done < count:
            copy = self.copies[self.done]
            assert copy is not None
            ctypes.memmove(*copy)
            self.copies[self.done] = None
            self.done += 1


class _Late(TorchDispatchMode):
    """Enters copies into a stream in place of making them."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        target, source = args[:2]
        assert target.dtype == source.dtype == torch.uint8 and target.is_contiguous() and source.is_contiguous()
        self.stream.copies.append((target.data_ptr(), source.data_ptr(), target.numel()))
        return target


COMPUTE = Stream()
made: list[Stream] = []


class CopyStream(Stream):
    """A stream that memfit has made."""

    def __init__(self, device: object = None) -> None:
        super().__init__(device)
        made.append(self)


@contextmanager
def _on(stream: Stream) -> Iterator[None]:
    with _Late(stream):
        yield


devices: list[object] = [None]  # the current one, and those before it


@contextmanager
def _device(device: object) -> Iterator[None]:
    devices.append(device)
    yield
    devices.pop()


class _Runtime:
    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size_bytes: int, _flags: int) -> int:  # noqa: N802 - CUDA's name
        assert devices[-1] is not None, "pinned for whatever device is the current one"
        self.pinned[address] = size_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - likewise
        assert devices[-1] is not None
        del self.pinned[address]
        return 0


def install() -> None:
    """Let memfit's pinned slabs work on these streams, for tensors that are a CPU's in truth."""
    cuda: Any = torch.cuda
    runtime = _Runtime()
    cuda.Stream, cuda.stream, cuda.device, cuda.cudart = CopyStream, _on, _device, lambda: runtime
    cuda.current_stream = lambda _device=None: COMPUTE
    from memfit.memory.host import slab, store
    from memfit.memory.host.slab import PinnedSlab

    store.make_slab = lambda device, size_bytes, _directory: PinnedSlab(size_bytes, device)  # pyright: ignore
    slab.alignment_bytes = lambda _device: 512  # pyright: ignore
