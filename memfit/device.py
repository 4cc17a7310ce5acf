"""Device: the rates and sizes that predictions depend on. Profiles of known devices are in `memfit.cost`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from memfit.graph import Graph

Rate = Annotated[float, msgspec.Meta(gt=0)]
Bytes = Annotated[int, msgspec.Meta(ge=0)]


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device as the simulator and the rooflines see it.

        >>> Device(name="mine", alignment_bytes=512, to_host_bytes_per_second=12e9).aligned(1000)
        1024

    Attributes:
        name: of the device.
        alignment_bytes: every allocation is rounded up to a multiple.
        memory_bytes, host_memory_bytes: sizes; None if unknown.
        flops_per_second: by dtype name (`float32`, `bfloat16`, ...).
        memory_bytes_per_second: bandwidth of the device's memory.
        to_host_bytes_per_second, to_device_bytes_per_second: the link's rates; None without a link.
        to_host_shared_bytes_per_second, to_device_shared_bytes_per_second: the rates while both directions copy; None
            where they do not slow each other down.
        copy_latency_seconds: the time of a copy of nothing.
        copy_compute_seconds_per_byte: the seconds of compute that each copied byte takes away; 0 where copies have
            engines of their own.
        launch_seconds: the least time of an op.
        source: where the figures are from.
    """

    name: str
    alignment_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)] = 1
    memory_bytes: Bytes | None = None
    host_memory_bytes: Bytes | None = None
    flops_per_second: dict[str, Rate] = {}
    memory_bytes_per_second: Rate | None = None
    to_host_bytes_per_second: Rate | None = None
    to_device_bytes_per_second: Rate | None = None
    to_host_shared_bytes_per_second: Rate | None = None
    to_device_shared_bytes_per_second: Rate | None = None
    copy_latency_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    copy_compute_seconds_per_byte: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    launch_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    source: str = ""

    def aligned(self, size_bytes: int) -> int:
        """Return `size_bytes` rounded up to the allocator's alignment."""
        return -(-size_bytes // self.alignment_bytes) * self.alignment_bytes

    def resident_bytes(self, graph: Graph) -> int:
        """Return what the residents of a graph take, each rounded up."""
        return sum(self.aligned(storage.bytes) for storage in graph.storages if storage.resident)

    @property
    def has_link(self) -> bool:
        """Whether storages can be copied to the host and back."""
        return self.to_host_bytes_per_second is not None and self.to_device_bytes_per_second is not None


GENERIC = Device(name="generic", source="no device named: exact sizes, no host link")
