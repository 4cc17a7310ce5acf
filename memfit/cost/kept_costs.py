"""Measured costs kept on disk, a file for each environment, so that the same op is measured once on a machine.

The file is read whole and replaced whole: of two processes that finish at once, one may lose what it added, never the
file. A cache that cannot be read or written is said in one warning and does without.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from memfit.binding import Call, Value
from memfit.cost.disk import environment_path, keep
from memfit.cost.made_inputs import mapped
from memfit.errors import InvalidFileError
from memfit.files import decode, read_bytes
from memfit.graph import Bytes, Seconds

FORMAT = "memfit-costs"
VERSION = 1
_VECTOR_BYTES = 64  # kernels choose by how far a tensor's start is from such a multiple, not by where it stands
PRIVATE = "op "  # begins the key of an op that no op of another graph can be known to equal

_log = logging.getLogger(__name__)


class OpCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What was measured of one op.

    `storage_bytes` are those of the results, by position, whose storages are not what their fakes said. `overwrites`
    are those of the tensors it takes, by position, that its result was tried to be written over, and whether that gave
    the same bits (`memfit.cost.overwriting`).
    """

    seconds: Seconds
    workspace_bytes: Bytes
    storage_bytes: dict[int, Bytes] = {}
    overwrites: dict[int, bool] = {}


class _Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: str
    version: int
    environment: dict[str, str]
    costs: dict[str, OpCost]


@dataclass(kw_only=True)
class KeptCosts:
    """The costs known for one environment. `path` is None where nothing is to be kept."""

    environment: Mapping[str, str]
    path: Path | None
    costs: dict[str, OpCost] = field(default_factory=dict[str, OpCost])

    @staticmethod
    def load(environment: Mapping[str, str], *, use_disk: bool = True) -> KeptCosts:
        """Return what is known on disk for this environment; nothing where there is no file or it is damaged."""
        if not use_disk:
            return KeptCosts(environment=environment, path=None)
        path = environment_path("costs", environment)
        return KeptCosts(environment=environment, path=path, costs=_read(path))

    def add(self, new: Mapping[str, OpCost]) -> None:
        """Add `new` to what is known, on disk as well; what another process added meanwhile stays."""
        self.costs.update(new)
        if self.path is None or all(key.startswith(PRIVATE) for key in new):
            return
        lasting = {key: cost for key, cost in self.costs.items() if not key.startswith(PRIVATE)}
        everything = _read(self.path) | lasting
        document = _Document(
            format=FORMAT, version=VERSION, environment=dict(self.environment), costs=dict(sorted(everything.items()))
        )
        keep(document, self.path, "measured costs")


def _read(path: Path) -> dict[str, OpCost]:
    if not path.exists():
        return {}
    try:
        document = decode(read_bytes(path), _Document, path)
    except InvalidFileError as error:
        _log.warning("measured costs cannot be read and are measured again: %s", error)
        return {}
    if (document.format, document.version) != (FORMAT, VERSION):
        _log.warning("%s holds %s version %s; its ops are measured again", path, document.format, document.version)
        return {}
    return document.costs


def cost_key(call: Call) -> str | None:
    """Return a text that two calls share exactly when they cost the same, or None for a call that no text describes.

    It holds the target and, for each argument, dtype, shape, strides and alignment, and which of them share a storage.
    """
    numbers: dict[int, int] = {}

    def described(value: Value) -> _Text:
        number = numbers.setdefault(value.storage, len(numbers))
        dtype = str(value.dtype).removeprefix("torch.")
        shape, stride = "x".join(map(str, value.shape)), "x".join(map(str, value.stride))
        misaligned_bytes = value.offset * value.dtype.itemsize % _VECTOR_BYTES
        lazily = "*" * value.conjugated + "-" * value.negated
        return _Text(f"{lazily}{dtype}[{shape}]({stride})+{misaligned_bytes}@{number}")

    args, kwargs = mapped(call.args, described), mapped(call.kwargs, described)
    named = [f"{name}={value!r}" for name, value in sorted(kwargs.items())]
    text = f"{_target_name(call.target)}({', '.join([*map(repr, args), *named])})"
    return None if " at 0x" in text else text  # an object that only has an address


def _target_name(target: Any) -> str:
    if hasattr(target, "overloadpacket"):  # an operator of torch
        return str(target)
    if hasattr(target, "__qualname__"):
        return f"{target.__module__}.{target.__qualname__}"
    return f"{type(target).__module__}.{target!r}"


class _Text(str):
    """A text that stands for itself among the representations of other arguments."""

    def __repr__(self) -> str:
        return str(self)
