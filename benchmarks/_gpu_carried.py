"""What one run of `make gpu` leaves for the next: times of ops, compiled libraries, the code of Inductor and Triton."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path

from _record import FOLDER

MOST_BYTES = 15 << 20  # of one archive; what is larger does not come home
ARCHIVES = {"carried.tar.gz": ("memfit/costs", "memfit/links"), "inductor.tar.gz": ("inductor", "triton")}
"""The folders of each archive, below the folder of the caches. Plans are left out: each run times a first fit."""
LIBRARIES = "memfit/torch-*"  # in the first archive, too
_VARIABLES = {
    "MEMFIT_CACHE": "memfit",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
}
_WARM = """
from memfit.memory.arena.library import LIBRARIES
LIBRARIES["cuda"].file()
import torch
import memfit
torch.set_num_threads(1)
layers = [each for _ in range(8) for each in (torch.nn.Linear(64, 64), torch.nn.GELU())]
model, batch = torch.nn.Sequential(*layers), (torch.randn(512, 64), torch.randint(64, (512,)))
loss = lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
optimizer = torch.optim.AdamW(model.parameters())
for how in ({}, {"planner": "offload", "host_budget": "1GiB", "arena": False}):
    memfit.fit(model, loss, batch, optimizer=optimizer, budget="70%", time_limit_seconds=0.5, **how)
"""


def use_caches(folder: Path) -> None:
    """Let this process and its children keep what they compile and measure below a folder."""
    for variable, below in _VARIABLES.items():
        (folder / below).mkdir(parents=True, exist_ok=True, mode=0o700)
        os.environ[variable] = str(folder / below)


def unpack(folder: Path, places: Iterable[Path]) -> list[str]:
    """Unpack the archives that the first place has which has any; return their names.

    Args:
        folder: of the caches.
        places: folders, the best first.
    """
    for place in places:
        there = [name for name in ARCHIVES if (place / name).exists()]
        for name in there:
            with tarfile.open(place / name) as archive:
                archive.extractall(folder, filter="data")
        if there:
            return there
    return []


def pack(folder: Path, place: Path) -> list[str]:
    """Write the archives into `place`; return a line for each one that is too large and was left out."""
    left_out: list[str] = []
    place.mkdir(parents=True, exist_ok=True)
    for name, below in ARCHIVES.items():
        parts = [folder / each for each in below if (folder / each).exists()]
        parts += sorted(folder.glob(LIBRARIES)) if name == "carried.tar.gz" else []
        unfinished = place / f"{name}.unfinished"
        with tarfile.open(unfinished, "w:gz", compresslevel=6) as archive:
            for part in parts:
                archive.add(part, arcname=str(part.relative_to(folder)))
        if unfinished.stat().st_size > MOST_BYTES:
            left_out.append(f"{name} has {unfinished.stat().st_size:,} bytes, more than {MOST_BYTES:,}")
            unfinished.unlink()
        else:
            unfinished.replace(place / name)
    return left_out


def compile_ahead() -> subprocess.Popen[bytes]:
    """Let numba compile the planners on a core that nobody needs; whoever plans first waits for the process."""
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": _with_root()}
    command = [sys.executable, "-c", _WARM]
    return subprocess.Popen(command, env=hidden, stdout=sys.stderr, start_new_session=True)


def _with_root() -> str:
    return os.pathsep.join([str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
