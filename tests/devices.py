"""Devices with a link to their host, for plans that offload."""

from __future__ import annotations

import msgspec

from memfit.device import Device


def linked(to_host_bytes_per_second: float, to_device_bytes_per_second: float, *, alignment_bytes: int = 1) -> Device:
    """Return a device whose copies run at these rates, one in each direction at a time."""
    return Device(
        name="linked",
        alignment_bytes=alignment_bytes,
        to_host_bytes_per_second=to_host_bytes_per_second,
        to_device_bytes_per_second=to_device_bytes_per_second,
    )


# For drawn graphs: a copy of a few hundred bytes takes as long as an op.
LINKED = linked(1000.0, 700.0, alignment_bytes=64)
# As a disk's: copies take a while to begin, share a rate, and take some of compute's away.
COSTLY_COPIES = msgspec.structs.replace(
    LINKED,
    to_host_shared_bytes_per_second=600.0,
    to_device_shared_bytes_per_second=300.0,
    copy_latency_seconds=0.01,
    copy_compute_seconds_per_byte=2e-4,
)
