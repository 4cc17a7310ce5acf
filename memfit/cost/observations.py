"""Observations: what single ops were seen to do on a device, kept on disk in one file for each environment.

A file is always read whole and replaced whole. If two processes write at the same time, one of them may lose what it
added, but the file stays intact. A cache that cannot be read or written causes one warning; the ops are then measured.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from memfit.binding import Call, Value, map_values
from memfit.graph import Bytes, Seconds
from memfit.system.cache import environment_path, keep, read_kept
from memfit.system.load import BUSY

FORMAT = "memfit-costs"
VERSION = 2  # 1 counted the bytes that were asked for, 2 counts what the allocator takes
_AGREEING = 1.1  # two measurements of one op under load, whose seconds differ by less, are taken to be right
PRIVATE = "op "  # begins the key of an op that cannot be recognized in another graph
_VECTOR_BYTES = 64  # kernels are chosen by the distance of a tensor's start from a multiple of this, not by its address

_log = logging.getLogger(__name__)
_GENERATOR = re.compile(r"<torch\._C\.Generator object at 0x[0-9a-f]+>")


class RealResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a kernel returned where its fake returned something else.

    Attributes:
        dtype: its name in torch, such as `float32`.
        stride: in elements, one for each dimension.
    """

    dtype: str
    stride: tuple[int, ...]


Corrections = Mapping[str, Mapping[int, RealResult | None]]
"""Key of a call (`call_key`) -> position of a result -> what the real kernel returned there; None is no tensor."""


class Observation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one op was seen to do when it was run by itself.

    Attributes:
        seconds: the median of its runs; on a GPU, of its kernels alone.
        dispatch_seconds: that the host takes to launch it on a GPU.
        workspace_bytes: the peak of its first run beyond the results.
        storage_bytes: position of a result -> real bytes of its storage, where they differ from the fake's.
        overwrites: position of a tensor argument -> whether the form that writes over it gave the same bits
            (`memfit.cost.in_place_trials`).
        results: position of a result -> what the kernel returned, where its fake returned another dtype, other strides,
            or a tensor in the place of None.
        load: share of the processors that others took meanwhile, where that was too much; another process then measures
            the op again, until a moment is quiet, or two agree.
    """

    seconds: Seconds
    workspace_bytes: Bytes
    dispatch_seconds: Seconds = 0.0
    storage_bytes: dict[int, Bytes] = {}
    overwrites: dict[int, bool] = {}
    results: dict[int, RealResult | None] = {}
    load: float = 0.0

    def after(self, before: Observation | None, load: float) -> Observation:
        """Return what is kept of this observation: that of a quiet moment, or of two of busy ones the shorter.

        Args:
            before: of the same op; None if there is none.
            load: share of the processors that others took during this one.
        """
        if before is None:
            return msgspec.structs.replace(self, load=round(load, 3) if load > BUSY else 0.0)
        seconds = sorted((self.seconds, before.seconds))
        is_settled = load <= BUSY or seconds[1] <= _AGREEING * seconds[0]
        kept = self.seconds if load <= BUSY else before.seconds if is_settled else seconds[0]
        overwrites = {**before.overwrites, **self.overwrites}
        return msgspec.structs.replace(
            self, seconds=kept, overwrites=overwrites, load=0.0 if is_settled else round(load, 3)
        )


class _Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: str
    version: int
    environment: dict[str, str]
    costs: dict[str, Observation]


@dataclass(kw_only=True)
class Observations:
    """The observations of one environment, by the key of the call; those that do not last are not added on disk."""

    environment: Mapping[str, str]
    path: Path
    is_lasting: bool = True
    by_key: dict[str, Observation] = field(default_factory=dict[str, Observation])

    @staticmethod
    def load(environment: Mapping[str, str], *, is_lasting: bool = True) -> Observations:
        """Return the observations that the disk holds for this environment: none if the file is missing or damaged.

        Args:
            environment: of the device.
            is_lasting: whether what is added is written to the disk.
        """
        path = environment_path("costs", environment)
        return Observations(environment=environment, path=path, is_lasting=is_lasting, by_key=_read(path))

    def add(self, new: Mapping[str, Observation]) -> None:
        """Add `new`, on disk as well if it lasts. Entries that another process has written in the meantime are kept."""
        self.by_key.update(new)
        if not self.is_lasting or all(key.startswith(PRIVATE) for key in new):
            return
        lasting = {key: seen for key, seen in self.by_key.items() if not key.startswith(PRIVATE)}
        everything = _read(self.path) | lasting
        document = _Document(
            format=FORMAT, version=VERSION, environment=dict(self.environment), costs=dict(sorted(everything.items()))
        )
        keep(document, self.path, "measured costs")


def _read(path: Path) -> dict[str, Observation]:
    document = read_kept(path, _Document, "measured costs cannot be read and are measured again: %s")
    if document is None:
        return {}
    if (document.format, document.version) != (FORMAT, VERSION):
        _log.warning("%s holds %s version %s; its ops are measured again", path, document.format, document.version)
        return {}
    return document.costs


def call_key(call: Call) -> str | None:
    """Return a text that two calls share exactly if they do the same work, or None if no text describes the call.

    The text holds the target, and for each tensor argument dtype, shape, strides, alignment and which other arguments
    share its storage.
    """
    numbers: dict[int, int] = {}

    def described(value: Value) -> _Text:
        number = numbers.setdefault(value.storage, len(numbers))
        dtype = str(value.dtype).removeprefix("torch.")
        shape, stride = "x".join(map(str, value.shape)), "x".join(map(str, value.stride))
        misaligned_bytes = value.offset * value.dtype.itemsize % _VECTOR_BYTES
        lazily = "*" * value.conjugated + "-" * value.negated
        return _Text(f"{lazily}{dtype}[{shape}]({stride})+{misaligned_bytes}@{number}")

    args, kwargs = map_values(call.args, described), map_values(call.kwargs, described)
    named = [f"{name}={value!r}" for name, value in sorted(kwargs.items())]
    text = f"{_target_name(call.target)}({', '.join([*map(repr, args), *named])})"
    text = _GENERATOR.sub("generator", text)  # the user's own; which one it is does not matter
    return None if " at 0x" in text else text  # an object whose text is its address


def _target_name(target: Any) -> str:
    if hasattr(target, "overloadpacket"):  # an operator of torch
        return str(target)
    if hasattr(target, "__qualname__"):
        return f"{target.__module__}.{target.__qualname__}"
    return f"{type(target).__module__}.{target!r}"


class _Text(str):
    """A text without quotes among the representations of other arguments."""

    def __repr__(self) -> str:
        return str(self)
