"""What is kept on disk between runs: a file for each environment. A disk that refuses costs a warning, never a run."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from memfit.errors import InvalidFileError
from memfit.files import cache_folder, write_atomically

_log = logging.getLogger(__name__)


def environment_path(folder: str, environment: Mapping[str, str]) -> Path:
    """Return the file in the cache's `folder` that is for this environment alone."""
    digest = hashlib.sha256(repr(sorted(environment.items())).encode()).hexdigest()[:16]
    return cache_folder() / folder / f"{environment['device']}-{digest}.json"


def keep(document: msgspec.Struct, path: Path, what: str) -> None:
    """Write `document` to `path`; where that cannot be done, say in one warning that `what` is not kept."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.format(msgspec.json.encode(document), indent=1))
    except (InvalidFileError, OSError) as error:
        reason = f"{path.parent}: {error.strerror}" if isinstance(error, OSError) else error
        _log.warning("%s are not kept: %s; MEMFIT_CACHE names another folder", what, reason)
