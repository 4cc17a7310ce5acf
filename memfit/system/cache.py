"""The cache on disk: one file for each environment. A file that cannot be written causes a warning, not an error."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from memfit.errors import InvalidFileError
from memfit.system.files import cache_folder, decode, read_bytes, write_atomically

T = TypeVar("T")

_log = logging.getLogger(__name__)


def environment_path(folder: str, environment: Mapping[str, str]) -> Path:
    """Return the path of the file in the cache's `folder` for one environment.

    >>> environment_path("costs", {"device": "cpu"}).name
    'cpu-ccf684aec15a9dbc.json'

    Args:
        folder: a name below the cache.
        environment: everything that the content depends on; has a key `device`.
    """
    digest = hashlib.sha256(repr(sorted(environment.items())).encode()).hexdigest()[:16]
    return cache_folder() / folder / f"{environment['device']}-{digest}.json"


def is_kept(path: Path) -> bool:
    """Return whether a file of the cache can be seen; a folder that may not be searched holds none."""
    try:
        return path.exists()
    except OSError:
        return False


def read_kept(path: Path, kind: type[T], warning: str) -> T | None:
    """Return a file of the cache, or None if it does not exist; one that cannot be read gives a warning, and None.

    Args:
        path: of the file.
        kind: the msgspec type of its content.
        warning: with `%s` in the place of the error.
    """
    if not is_kept(path):
        return None
    try:
        return decode(read_bytes(path), kind, path)
    except InvalidFileError as error:
        _log.warning(warning, error)
        return None


def keep(document: msgspec.Struct, path: Path, what: str) -> None:
    """Write `document` to `path`, or warn.

    Args:
        document: written as JSON.
        path: of the file; its folder is made if it is missing.
        what: plural noun for the warning, such as "measured costs".
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.format(msgspec.json.encode(document), indent=1))
    except (InvalidFileError, OSError) as error:
        reason = f"{path.parent}: {error.strerror}" if isinstance(error, OSError) else error
        _log.warning("%s are not kept: %s; MEMFIT_CACHE names another folder", what, reason)
