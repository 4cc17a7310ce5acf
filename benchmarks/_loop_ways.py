"""A training loop in one way, in a process of its own, which trains some steps at a time: peaks, seconds, bits.

The ways: `bare`; `by hand`, with `torch.utils.checkpoint` around every block; `checkpoint`, `fit`, `compile` and
`eager`, which are memfit's doors; `torch`, its `activation_memory_budget` with eager's kernels. All train from the same
seed. A way that refuses a loop, or breaks off, says so in one line.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from _loop_cases import CASES, Case
from torch import Tensor
from torch.utils.checkpoint import checkpoint as stock_checkpoint

import memfit
from memfit.checkpointing.blocks import find_blocks
from memfit.errors import MemfitError
from memfit.memory.contract import SOFT
from memfit.memory.uncounted import Uncounted
from memfit.system.recorder import record
from memfit.torch_private.dynamo import compile_with_budget

THIRD, FIFTH = 2, 4
"""Places of the third and the fifth step, from which on a budget is to be kept, and to be used."""
TORCHS_SHARE = 0.7
TORCHS_SOLVER = "dp"  # torch's default
_MESSAGE_LENGTH = 300
_PRELOADED = [
    *("torch._dynamo", "transformers", "memfit.doors.checkpoint", "memfit.doors.fit"),
    *("memfit.dynamo.model", "memfit.eager_mode.eager", "memfit.workloads"),
]

Step = Callable[[Any], Tensor]


class Child:
    """A process that trains in one way. It is there once it has settled.

    Args:
        name: of the case.
        way: see above.
        budget_bytes: of memfit's doors.
        settle: steps until what a way plans stays.
        search_seconds: of each plan that is searched.
        timeout_seconds: that an answer is waited for.

    Attributes:
        error: why it has ended early; None if it has not.
        settled: `peak_bytes` of the steps so far, from the third on, and `seconds` until then.
        seconds: of each step since.
    """

    def __init__(
        self, name: str, way: str, budget_bytes: int = 0, *, settle: int, search_seconds: float, timeout_seconds: float
    ) -> None:
        self.seconds: list[float] = []
        self.error: str | None = None
        self.settled: dict[str, Any] = {}
        self._timeout_seconds = timeout_seconds
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, name, way, budget_bytes, settle, search_seconds)
        self._process = context.Process(target=_train, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self.settled = self._answer()

    def turn(self, steps: int) -> None:
        """Train for some steps."""
        if self.error is None:
            self._pipe.send(steps)
            self.seconds += self._answer().get("seconds", [])

    def end(self) -> dict[str, Any]:
        """Return what the way took, and its bits; or the error."""
        if self.error is None:
            self._pipe.send(0)
            found = self._answer()
            self._process.join()
        else:
            found = {"error": self.error}
        return found

    def _answer(self) -> dict[str, Any]:
        try:
            answer = self._pipe.recv() if self._pipe.poll(self._timeout_seconds) else None
        except EOFError:
            self._process.join()
            answer = {"error": f"its process ended with {self._process.exitcode}"}
        if answer is None:
            answer = {"error": f"took more than {self._timeout_seconds:.0f} s"}
        if "error" in answer:
            self.error = answer["error"]
            self._process.kill()
            self._process.join()
            return {}
        return answer


def in_turns(children: dict[str, Child], budgets: dict[str, int], *, turns: int, steps: int) -> list[dict[str, Any]]:
    """Train all children in turns, in one order and then in the other; return a row for each.

    Args:
        children: by label; one is called `bare`.
        budgets: in bytes, by label, of those that have one.
        turns: of each.
        steps: in a turn.
    """
    for turn in range(turns):
        for child in children.values() if turn % 2 == 0 else reversed(children.values()):
            child.turn(steps)
    ends = {label: child.end() for label, child in children.items()}
    if "error" in ends["bare"]:
        raise SystemExit(f"bare: {ends['bare']['error']}")
    return [_row(label, child, ends[label], children, ends["bare"], budgets) for label, child in children.items()]


def _row(
    label: str,
    child: Child,
    end: dict[str, Any],
    children: dict[str, Child],
    bare_end: dict[str, Any],
    budgets: dict[str, int],
) -> dict[str, Any]:
    bare_bytes = max(bare_end["peaks_bytes"])
    row: dict[str, Any] = {"way": label}
    if label in budgets:
        row["budget_share"] = budgets[label] / bare_bytes
    if "error" in end:
        return row | end
    peaks_bytes = end["peaks_bytes"]
    row |= {"peak_share": max(peaks_bytes[THIRD:]) / bare_bytes, **_ratios(child, children["bare"])}
    row |= {"settled_seconds": child.settled["seconds"], "same_bits": end["bits"] == bare_end["bits"]}
    if label in budgets:
        row |= _use_of(peaks_bytes, budgets[label])
    return row | {key: value for key, value in end.items() if key not in ("peaks_bytes", "bits")}


def _ratios(child: Child, bare: Child) -> dict[str, Any]:
    """Return the median over steps of a way's seconds to the bare loop's of the same step, and of all together."""
    found = sorted(mine / its for mine, its in zip(child.seconds, bare.seconds, strict=True))
    return {
        "time_ratio": statistics.median(found),
        "time_ratio_quartiles": [found[len(found) // 4], found[-1 - len(found) // 4]],
        "whole_time_ratio": sum(child.seconds) / sum(bare.seconds),
    }


def _use_of(peaks_bytes: list[int], budget_bytes: int) -> dict[str, Any]:
    """Return how a budget was used and kept: shares of it from the fifth step on, steps over it from the third on."""
    shares = [peak / budget_bytes for peak in peaks_bytes[FIFTH:]]
    return {
        "use": [min(shares), max(shares)],
        "over": sum(peak > budget_bytes for peak in peaks_bytes[THIRD:]),
        "over_at_first": sum(peak > budget_bytes for peak in peaks_bytes[:THIRD]),
    }


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print the rows of one case."""
    print(title)
    for row in rows:
        budget = f"{row['budget_share']:.3f}" if "budget_share" in row else ""
        if "error" in row:
            print(f"  {row['way']:28} budget {budget:5} {row['error']}")
            continue
        low, high = row["time_ratio_quartiles"]
        use = "use {:.3f} to {:.3f}, over {over}".format(*row["use"], over=row["over"]) if "use" in row else ""
        print(
            f"  {row['way']:28} budget {budget:5} peak {row['peak_share']:.3f} time {row['time_ratio']:.3f} "
            f"({low:.2f} to {high:.2f}; all {row['whole_time_ratio']:.2f}) "
            f"bits {'same' if row['same_bits'] else 'OTHER'} {use} {row.get('kinds', '')}"
            f"{' without a graph' if row.get('has_no_graph') else ''}, settled in {row['settled_seconds']:.0f} s"
        )
    print(flush=True)


def _train(pipe: Connection, name: str, way: str, budget_bytes: int, settle: int, search_seconds: float) -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        with ExitStack() as stack:
            began = time.perf_counter()
            with record("cpu"):  # from here on all is counted; what libraries made on import is counted beside
                pass
            older = Uncounted(torch.device("cpu"))
            _train_in_turns(pipe, _enter(stack, name, way, budget_bytes, search_seconds), settle, began, older)
    except Exception as error:  # noqa: BLE001 - a way that fails is a row
        kind = "refused" if isinstance(error, MemfitError) else "broke off"
        text = f"{kind}: {type(error).__name__}: {error}".splitlines()[0]
        pipe.send({"error": text[:_MESSAGE_LENGTH]})


def _train_in_turns(
    pipe: Connection,
    entered: tuple[Case, Step, Callable[[], dict[str, Any]]],
    settle: int,
    began: float,
    older: Uncounted,
) -> None:
    case, step, notes = entered
    torch.manual_seed(0)
    np.random.seed(0)  # models of transformers that mask audio draw from it
    digest = hashlib.sha256()
    steps = _steps(case, step, digest, older)
    peaks_bytes = [next(steps)[1] for _ in range(settle)]
    seconds = time.perf_counter() - began
    pipe.send({"peak_bytes": max(peaks_bytes[THIRD:]), "seconds": seconds})
    while count := pipe.recv():
        took = [next(steps) for _ in range(count)]
        peaks_bytes += [peak for _, peak in took]
        pipe.send({"seconds": [seconds for seconds, _ in took]})
    for tensor in case.model.state_dict().values():
        digest.update(tensor.detach().numpy().tobytes())
    pipe.send({"peaks_bytes": peaks_bytes, "bits": digest.hexdigest()} | notes())


def _steps(case: Case, step: Step, digest: Any, older: Uncounted) -> Iterator[tuple[float, int]]:
    """Yield (seconds of this thread, peak bytes) of one step after another."""
    while True:
        batch = case.batch()
        with record("cpu") as usage:
            began = time.thread_time()
            loss = step(batch)
            seconds = time.thread_time() - began
        digest.update(loss.detach().numpy().tobytes())
        del loss, batch
        yield seconds, usage.start_bytes + usage.peak_bytes + older.live_bytes()


def _enter(
    stack: ExitStack, name: str, way: str, budget_bytes: int, search_seconds: float
) -> tuple[Case, Step, Callable[[], dict[str, Any]]]:
    """Return a case, its step in one way, and what tells more about it in the end."""
    torch.manual_seed(1)
    case = CASES[name]()
    step: Step = case.step

    def nothing() -> dict[str, Any]:
        return {}

    notes = nothing
    if way == "by hand":
        for _, block in find_blocks(case.model):
            _checkpoint_by_hand(block)
    elif way == "checkpoint":
        handle = memfit.checkpoint(case.model, budget_bytes, budget_is=SOFT)
        stack.callback(handle.close)
        notes = lambda: _notes_of(handle)  # noqa: E731
    elif way == "fit":
        planned = step = memfit.fit(
            case.model, case.loss, case.batch(), optimizer=case.optimizer, budget=budget_bytes, budget_is=SOFT,
            time_limit_seconds=search_seconds,
        )  # fmt: skip
        notes = lambda: {"has_no_graph": not isinstance(planned, memfit.PlannedStep)}  # noqa: E731
    elif way == "compile":
        memfit.compile(
            case.model, optimizer=case.optimizer, budget=budget_bytes, budget_is=SOFT, time_limit_seconds=search_seconds
        )
    elif way == "eager":
        stack.enter_context(memfit.eager(case.model, budget=budget_bytes))
    elif way == "torch":
        compiled = compile_with_budget(case.model, TORCHS_SHARE, TORCHS_SOLVER)
        step = lambda batch: case.step(batch, compiled)  # noqa: E731
    return case, step, notes


def _checkpoint_by_hand(block: torch.nn.Module) -> None:
    forward = block.forward
    block.forward = lambda *args, **kwargs: stock_checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _notes_of(handle: Any) -> dict[str, Any]:
    report = handle.report()
    if not report.sizes:
        return {"plans": 0}
    last = report.sizes[-1]
    return {
        "plans": last.plans,
        "predicted_bytes": last.planned.predicted_bytes,
        "kinds": str(last).split(";")[0],
    }
