"""The walk of each door at two commits: files and functions of memfit that are handed the first argument.

python benchmarks/walks.py fefffff HEAD       # prints the table and stores it
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from _record import store

_ROWS, _FEATURES, _WIDTH = 512, 64, 256
_SETTLED_AFTER = 4  # steps, until none is proved any more


class Walk:
    """Notes the functions of a package that are called with an object, on all threads, while the block runs.

    Args:
        package: the folder of its files.
        handed: the object.
    """

    def __init__(self, package: Path, handed: object) -> None:
        self._root = f"{package}/"
        self._handed = handed
        self.functions: set[tuple[str, str]] = set()

    def __enter__(self) -> Walk:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self._root):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(frame.f_locals.get(name) is self._handed for name in names):
            self.functions.add((code.co_filename.removeprefix(self._root), code.co_qualname))

    @property
    def counts(self) -> dict[str, Any]:
        """How many files and functions; and the files."""
        files = sorted({file for file, _ in self.functions})
        return {"files": len(files), "functions": len(self.functions), "in": files}


def measure() -> dict[str, Any]:
    """Return the walks of the memfit that is imported: `fit`, a later step, `memfit.compile`, a later call of it."""
    import torch

    import memfit

    package = Path(memfit.__file__).parent
    walks: dict[str, Any] = {}

    def walked(name: str, handed: Any, run: Callable[[], Any]) -> Any:
        with Walk(package, handed) as walk:
            returned = run()
        walks[name] = walk.counts
        return returned

    def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        linear = torch.nn.Linear
        model = torch.nn.Sequential(linear(_FEATURES, _WIDTH), torch.nn.ReLU(), linear(_WIDTH, 2))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def made_batch() -> Any:
        return torch.randn(_ROWS, _FEATURES), torch.randint(0, 2, (_ROWS,))

    model, optimizer = model_and_optimizer()
    batch = made_batch()
    step = walked("fit", model, lambda: memfit.fit(model, loss_of, batch, optimizer=optimizer, budget="5MiB"))
    for _ in range(_SETTLED_AFTER):
        step(made_batch())
    later = made_batch()
    walked("a later step", later, lambda: step(later))

    model, optimizer = model_and_optimizer()
    compiled = walked("compile", model, lambda: memfit.compile(model, budget="64MiB", optimizer=optimizer))
    for _ in range(_SETTLED_AFTER):
        loss_of(compiled, made_batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    later = made_batch()
    walked("a later call of compile", later[0], lambda: loss_of(compiled, later).backward())
    return walks


def walks_at(revision: str) -> dict[str, Any]:
    """Return the walks of a commit, by a process that imports its files."""
    archive = subprocess.run(["git", "archive", revision, "memfit"], capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
        code = f"import sys; sys.path[:0] = [{folder!r}, {str(Path(__file__).parent)!r}]; import json, walks; "
        code += "print(json.dumps(walks.measure()))"
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True, cwd=folder)
    return json.loads(ran.stdout.splitlines()[-1])


def main() -> None:
    """Print and store the walks of two commits."""
    before, after = sys.argv[1:3] if len(sys.argv) > 2 else ("fefffff", "HEAD")
    walks = {"before": walks_at(before), "after": walks_at(after)}
    for door in walks["after"]:
        told = [f"{walks[when][door]['files']} files, {walks[when][door]['functions']} functions" for when in walks]
        print(f"{door}: {' -> '.join(told)}")
    store("walks", walks)


if __name__ == "__main__":
    main()
