"""Offload intervals: when a storage is on the host, and what that costs."""
