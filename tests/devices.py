"""Devices with a link to their host, for plans that offload."""

from __future__ import annotations

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
