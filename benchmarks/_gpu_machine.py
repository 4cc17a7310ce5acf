"""Where results of `make gpu` lie, and the machine that gave them, which only a child may ask CUDA for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from _process import in_forked_child
from _record import FOLDER, RESULTS, load, machine, machine_name, write_document

NAME = "gpu"
REHEARSED = FOLDER.parent / "build" / "gpu-rehearsal"
_SECONDS = 60.0


def machine_of_child() -> dict[str, Any]:
    """Describe the machine, with its folder of results; an `error` where there is no CUDA device."""

    def ask() -> dict[str, Any]:
        return machine("cuda") | {"folder": machine_name("cuda")}

    return in_forked_child(ask, timeout_seconds=_SECONDS)


def payload_path(folder: str, *, rehearsal: bool) -> Path:
    """Return the file of results: under $OUT, or in the machine's folder; a rehearsal's is never among results."""
    if "OUT" in os.environ:
        return Path(os.environ["OUT"]) / f"{NAME}.json"
    return (REHEARSED if rehearsal else RESULTS / folder) / f"{NAME}.json"


def read_stored(path: Path, folder: str, *, rehearsal: bool) -> dict[str, Any]:
    """Return the payload of earlier runs on the same machine, from where this run writes or from the results."""
    earlier = [path] if rehearsal else [path, RESULTS / folder / f"{NAME}.json"]
    return next((load(each)["payload"] for each in earlier if each.exists()), {})


def write(path: Path, payload: dict[str, Any], found: dict[str, Any]) -> None:
    """Write a payload with the machine that gave it."""
    write_document(path, NAME, payload, found)
