"""Runs functions on several ranks: processes of this machine, joined by gloo over a file."""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

JOIN_SECONDS = 240.0


def on_ranks(
    functions: Sequence[Callable[[int, int], Any]],
    count: int,
    folder: Path,
    *,
    seconds: float = JOIN_SECONDS,
    timeout_seconds: float = JOIN_SECONDS,
) -> list[dict[str, Any]]:
    """Run functions one after another on `count` ranks; return what each rank's returned, by the function's name.

    Args:
        functions: of a module that a new process can import; called with the rank and the count.
        count: of ranks.
        folder: for the files by which the ranks meet, and their results.
        seconds: until all have to be done; processes that are not are killed.
        timeout_seconds: how long a rank waits for another.

    Raises:
        AssertionError: a rank raised, or was not done in time; has its traceback.
    """
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_rank, args=(functions, rank, count, folder, timeout_seconds)) for rank in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds)
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join(10)
    results: list[dict[str, Any]] = []
    for rank in range(count):
        path = folder / f"result-{rank}"
        assert path.exists(), f"rank {rank} left no result; late: {late}"
        result = pickle.loads(path.read_bytes())
        assert isinstance(result, dict), f"rank {rank} raised: {result}"
        results.append(result)
    assert not late
    return results


def _rank(
    functions: Sequence[Callable[[int, int], Any]], rank: int, count: int, folder: Path, timeout_seconds: float
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), count)
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timeout)
    result: Any = {}
    try:
        for function in functions:
            result[function.__name__] = function(rank, count)
    except BaseException:  # noqa: BLE001 (the parent raises it)
        result = traceback.format_exc()
    (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
    if isinstance(result, dict):
        dist.destroy_process_group()
