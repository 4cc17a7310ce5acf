"""A loop of `eager_mode.py` in several ways, in turns: bare, in eager mode, with checkpoints, and in a plain DTR.

Eager mode has the budget of the loop, and once more the bytes that checkpoints take.

Each way has a process of its own, which trains from the same seed on one thread; seconds are the processor's. A turn is
a few steps of one; the others wait.
"""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from _eager_loops import LOOPS, made, train
from _plain_dtr import make_plain

import memfit
from memfit.eager_mode.eager import Report, bytes_of_tensors
from memfit.system.recorder import allocated_bytes, record

WAYS = ("bare", "eager", "checkpoints", "eager, as checkpoints", "plain DTR")
SHARE = 0.6  # of the peak of the largest step, which is the budget
TURN = 10  # steps
_CPU = torch.device("cpu")
_BLOCKS = ("eager", "eager, as checkpoints", "plain DTR")
_STEP_SECONDS = 120.0  # that a step is waited for


def largest_bytes(name: str, *, checkpoints: bool) -> int:
    """Return what the largest step of a loop takes, with parameters, momenta and gradients."""
    loop = LOOPS[name]
    model = made(loop, checkpoints=checkpoints)
    allocated_bytes(_CPU)
    loop.whole(model).backward()  # what libraries keep from their first call is not counted
    model.zero_grad(set_to_none=True)
    gc.collect()
    with record(_CPU) as usage:
        loop.whole(model).backward()
    held = [*model.parameters(), *model.buffers(), *model.parameters()]  # and momenta
    return sum(each.nbytes for each in held) + usage.peak_bytes


def in_turns(name: str, steps: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Train in all ways; return bits, peaks, and seconds.

    Args:
        name: of the loop.
        steps: of each way.
        sizes: what the largest step takes, by way: bare, and with checkpoints.
    """
    budget_bytes = int(SHARE * sizes["bare"])
    budgets = {way: sizes["checkpoints"] if way == "eager, as checkpoints" else budget_bytes for way in WAYS}
    children = {way: _Child(name, way, budgets[way]) for way in WAYS}
    try:
        for child in children.values():
            child.wait()
        for turn, begin in enumerate(range(0, steps, TURN)):
            for way in WAYS if turn % 2 == 0 else reversed(WAYS):
                children[way].run(min(TURN, steps - begin))
        ends = {way: child.end() for way, child in children.items()}
    finally:
        for child in children.values():
            child.stop()
    bare = children["bare"]
    rows: list[dict[str, Any]] = []
    for way, child in children.items():
        ratios = [mine / its for mine, its in zip(child.seconds, bare.seconds, strict=True)]
        rows.append(
            {
                "way": way,
                "peak_bytes": sizes.get(way, 0),
                "budget_bytes": budgets[way] if way in _BLOCKS else None,
                "same_bits": child.losses == bare.losses and ends[way]["parameters"] == ends["bare"]["parameters"],
                "same_buffers": ends[way]["buffers"] == ends["bare"]["buffers"],
                "median_seconds": statistics.median(child.seconds),
                "median_ratio": statistics.median(ratios),
                "later_ratio": statistics.median(ratios[steps // 3 :]),
                "whole_ratio": (sum(child.seconds) + child.waited_seconds) / sum(bare.seconds),
            }
            | ends[way].get("report", {})
        )
    return {
        "loop": name,
        "steps": steps,
        "share": SHARE,
        "whole_bytes": sizes["bare"],
        "budget_bytes": budget_bytes,
        "placed": LOOPS[name].placed,
        "rows": rows,
    }


class _Child:
    """A process that trains in one way, some steps at a time.

    Attributes:
        losses, seconds: of the steps so far.
        waited_seconds: after turns, until what eager mode planned in the background was planned.
    """

    def __init__(self, name: str, way: str, budget_bytes: int) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.waited_seconds = 0.0
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_train, args=(theirs, name, way, budget_bytes), daemon=True)
        self._process.start()
        theirs.close()

    def wait(self) -> None:
        """Wait until the process is ready."""
        self._answer()

    def run(self, steps: int) -> None:
        """Run some steps, and wait for them."""
        self._pipe.send(steps)
        losses, seconds, waited_seconds = self._answer(steps)
        self.losses += losses
        self.seconds += seconds
        self.waited_seconds += waited_seconds

    def end(self) -> dict[str, Any]:
        """End the block, and return what is known then."""
        self._pipe.send(0)
        return self._answer()

    def stop(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join()

    def _answer(self, steps: int = 1) -> Any:
        if not self._pipe.poll(_STEP_SECONDS * max(1, steps)):
            raise SystemExit("a step takes too long")
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise SystemExit(answer)
        return answer


def _train(pipe: Connection, name: str, way: str, budget_bytes: int) -> None:
    try:
        _train_in_turns(pipe, name, way, budget_bytes)
    except Exception as error:  # noqa: BLE001 (it is raised in the parent)
        pipe.send(f"{name}, {way}: {type(error).__name__}: {error}")


def _train_in_turns(pipe: Connection, name: str, way: str, budget_bytes: int) -> None:
    loop = LOOPS[name]
    torch.set_num_threads(1)  # or what else the machine runs would count
    before_bytes = bytes_of_tensors(_CPU)
    model = made(loop, checkpoints=way == "checkpoints")
    block = memfit.eager(model, budget=before_bytes + budget_bytes) if way in _BLOCKS else None
    if block is not None:
        block.__enter__()
        if way == "plain DTR":
            make_plain(block._mode.contents)  # pyright: ignore
    steps = train(loop, model, 1 << 30)
    pipe.send(None)
    while (count := pipe.recv()) > 0:
        pipe.send(_turn(lambda: next(steps), count))
    answer: dict[str, Any] = {"parameters": _digest(model.parameters()), "buffers": _digest(model.buffers())}
    if block is not None:
        steps.close()
        block.__exit__(None, None, None)
        answer["report"] = _numbers(block.report(), before_bytes)
    pipe.send(answer)


def _turn(step: Callable[[], float], count: int) -> tuple[list[float], list[float], float]:
    losses: list[float] = []
    seconds: list[float] = []
    for _ in range(count):
        began = time.process_time()
        losses.append(step())
        seconds.append(time.process_time() - began)
    began = time.perf_counter()
    for thread in threading.enumerate():
        if thread.name == "memfit-eager":
            thread.join()
    return losses, seconds, time.perf_counter() - began


def _numbers(report: Report, before_bytes: int) -> dict[str, Any]:
    return {
        "peak_bytes": report.peak_bytes - before_bytes,
        "passes": {
            "calm": report.calm.passes,
            "by policy": report.by_policy.passes,
        },
        "calls": report.calls,
        "made_again": report.made_again,
        "again_seconds": report.again_seconds,
        "bounded": report.bounded,
        "exceeded": report.exceeded,
    }


def _digest(tensors: Any) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()
