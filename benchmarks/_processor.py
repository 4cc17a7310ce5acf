"""Processor seconds of things that run in turns: what a machine that does other work besides can still tell."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence

import torch


def processor_seconds(runs: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Return the least processor seconds of each of several things that run in turns on one thread.

    A machine that does other work besides takes away wall time, but hardly processor time.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    least = [float("inf")] * len(runs)
    for _ in range(repeats):
        for which, run in enumerate(runs):
            gc.collect()
            start = time.process_time()
            run()
            least[which] = min(least[which], time.process_time() - start)
    torch.set_num_threads(threads)
    return least
