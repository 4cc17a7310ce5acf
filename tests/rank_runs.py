"""Runs functions on several ranks: processes of this machine, joined by gloo over a file."""

from __future__ import annotations

import faulthandler
import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

JOIN_SECONDS = 480.0  # a busy machine takes ten times as long as an idle one
_NEARLY = 0.9  # of these seconds: then a late process says where it is


def on_ranks(
    functions: Sequence[Callable[[int, int], Any]],
    count: int,
    folder: Path,
    *,
    seconds: float = JOIN_SECONDS,
    timeout_seconds: float = JOIN_SECONDS,
    dies: int | None = None,
) -> list[dict[str, Any]]:
    """Run functions one after another on `count` ranks; return what each rank's returned, by the function's name.

    Args:
        functions: of a module that a new process can import; called with the rank and the count.
        count: of ranks.
        folder: for the files by which the ranks meet, and their results.
        seconds: until all have to be done; processes that are not are killed.
        timeout_seconds: how long a rank waits for another.
        dies: a rank that ends without results.

    Raises:
        AssertionError: a rank raised, or was not done in time; has its traceback.
    """
    context = multiprocessing.get_context("spawn")
    given = functions, count, folder, seconds, timeout_seconds
    processes = [context.Process(target=_rank, args=(rank, *given)) for rank in range(count)]
    for process in processes:
        process.start()
    until = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join(10)
    paths = [folder / f"result-{rank}" for rank in range(count)]
    nothing = [{} if rank == dies else "nothing" for rank in range(count)]
    results = [pickle.loads(path.read_bytes()) if path.exists() else nothing[rank] for rank, path in enumerate(paths)]
    failed = [f"rank {rank} raised: {result}" for rank, result in enumerate(results) if not isinstance(result, dict)]
    stacks = [f"rank {rank} was late: {(folder / f'stack-{rank}').read_text()}" for rank in late]
    assert not failed and not stacks, "\n".join([*failed, *stacks])
    return results


def _rank(
    rank: int,
    functions: Sequence[Callable[[int, int], Any]],
    count: int,
    folder: Path,
    seconds: float,
    timeout_seconds: float,
) -> None:
    torch.set_num_threads(1)
    stack = open(folder / f"stack-{rank}", "w")  # noqa: SIM115 (until the process ends)
    faulthandler.dump_traceback_later(seconds * _NEARLY, file=stack)
    store = dist.FileStore(str(folder / "store"), count)
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timeout)
    dist.barrier()  # all are connected before one may end
    result: Any = {}
    try:
        for function in functions:
            result[function.__name__] = function(rank, count)
    except BaseException:  # noqa: BLE001 (the parent raises it)
        result = traceback.format_exc()
    (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
    if isinstance(result, dict):
        dist.destroy_process_group()
