"""`memfit.checkpoint` on two and four ranks: peak, time and bits, beside the bare loop and checkpoints by hand.

Each way of training has processes of its own, one a rank, joined by gloo: bare, `torch.utils.checkpoint` around every
block, and `memfit.checkpoint` within 90%, 70%, 50% of the rank's bare peak (four ranks: 70%), and within the peak that
it had with checkpoints by hand, which also stands for a share that is smaller. Of some rows graphs are planned, too,
within two of these budgets: by `memfit.compile` under DDP, by the backend of each block under FSDP2. All train from the
same seed, first until plans stay, then in turns of two steps. Seconds are of the processor, of all threads of a rank,
of which one computes: waiting for other ranks costs nothing. The ratio is the median over turns of a way's seconds to
those of the bare loop, or of the checkpoints by hand, in the same turn. Peaks are all that torch takes, residents
included. Bits are those of losses and parameters. A row tells what was worst on any rank:

- over: steps of all ranks that took more than the budget, from the third on.
- peak: the most that such a step took of the budget.
- use: the least that a step took of the budget from the fifth on, of the largest batches.

    python benchmarks/checkpoint_ranks.py                                    # all rows, stored one by one: 90 minutes
    python benchmarks/checkpoint_ranks.py fsdp2 --ranks 2                    # rows whose name has `fsdp2`, stored, too
    python benchmarks/checkpoint_ranks.py ddp --turns 2                      # nothing stored
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _rank_cases import FOUR_RANKS_ONLY, TIMED
from _rank_kit import Way
from _record import load, result_path, store

from memfit.memory.uncounted import Uncounted
from memfit.system.recorder import record

SHARES = {2: (0.9, 0.7, 0.5), 4: (0.7,)}  # four ranks on two cores take more than twice the seconds
SETTLE = 12  # steps until plans stay
TURN = 2  # steps
PLANNED = {"ddp": "compile", "ddp, accumulation": "compile", "fsdp2": "backend"}  # the door of planned graphs
PLANNED_SHARE = 0.7
TOKENS, WIDTH = 256, 128  # of a sequence; of layers
TURNS = {2: 6, 4: 4}
FIRST_JUDGED, FIRST_USED = 2, 4  # steps before the third, and before the fifth
_LIBRARIES = ("transformers", "accelerate", "pytorch_lightning", "trl", "peft", "datasets")
_ANSWER_SECONDS = 240.0


class RowError(Exception):
    """A rank raised, or did not answer."""


class Turns:
    """A rank's steps, in turns with other ways of training.

    Args:
        pipe: tells when a turn begins, and takes what it took.
        older_bytes: returns the bytes of tensors that are older than the recorder: libraries make some on import.

    Attributes:
        are_over: whether no step follows.
        tokens: of a sequence.
    """

    tokens = TOKENS

    def __init__(self, pipe: Connection, older_bytes: Callable[[], int]) -> None:
        self._pipe, self._older_bytes = pipe, older_bytes
        self.are_over = False
        self.peaks: list[int] = []
        self.largest: list[bool] = []
        self.digest = hashlib.sha256()
        self._seconds = 0.0

    @property
    def step(self) -> int:
        """The number of steps so far."""
        return len(self.peaks)

    def begin(self) -> None:
        """Begin a step."""
        self._began = time.process_time()
        self._record = record("cpu")
        self._usage = self._record.__enter__()

    def end(self, losses: Iterable[torch.Tensor], *, is_largest: bool = True) -> None:
        """End a step, and wait for the next turn after the last one of this turn."""
        self._record.__exit__(None, None, None)
        self._seconds += time.process_time() - self._began
        self.peaks.append(self._usage.start_bytes + self._usage.peak_bytes + self._older_bytes())
        self.largest.append(is_largest)
        for loss in losses:
            self.digest.update(loss.detach().numpy().tobytes())
        if self.step >= SETTLE and (self.step - SETTLE) % TURN == 0:
            self._pipe.send({"seconds": self._seconds, "peak_bytes": max(self.peaks[FIRST_JUDGED:])})
            self.are_over = not self._pipe.recv()
            self._seconds = 0.0


def _run(pipe: Connection, row: str, way: Way, rank: int, count: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        with record("cpu"):
            pass
        store = dist.FileStore(str(Path(folder) / "store"), count)
        timeout = timedelta(seconds=_ANSWER_SECONDS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timeout)
        dist.barrier()
        pipe.send(_trained(Turns(pipe, Uncounted(torch.device("cpu")).live_bytes), row, way))
        pipe.recv()  # until the others are done, too
    except BaseException as error:  # noqa: BLE001 - it is raised in the parent
        pipe.send({"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})
        pipe.recv()


def _trained(turns: Turns, row: str, way: Way) -> dict[str, Any]:
    for parameter in TIMED[row](way, turns):
        whole: Any = parameter.detach()
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        turns.digest.update(whole.contiguous().view(torch.uint8).numpy().tobytes())
    found: dict[str, Any] = {"bits": turns.digest.hexdigest(), "peaks": turns.peaks}
    if way.has_budget:
        report = way.handle.report() if way.handle is not None else None
        judged = turns.peaks[FIRST_JUDGED:]
        used = [peak for peak, largest in zip(turns.peaks, turns.largest, strict=True) if largest]
        used = used[-max(1, sum(turns.largest[FIRST_USED:])) :]
        found |= {
            "over": sum(peak > way.budget_bytes for peak in judged),
            "peak": max(judged) / way.budget_bytes,
            "use": min(used) / way.budget_bytes,
            "kinds": "; ".join(f"{size.kinds_text()}, plan {size.plans}" for size in report.sizes) if report else "",
            "is_most": report is not None and all(size.planned.is_most for size in report.sizes),
        }
    return found


class Ranks:
    """Processes that train in one way, one a rank.

    Args:
        row: what they train.
        way: its name.
        budgets: of the ranks, in bytes.
        door: that holds them.
    """

    def __init__(self, row: str, way: str, budgets: Sequence[int], door: str = "checkpoint") -> None:
        self.way, self.budgets = way, budgets
        self.seconds: list[list[float]] = []  # by turn, then by rank
        context = multiprocessing.get_context("forkserver")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank, budget in enumerate(budgets):
            ours, theirs = context.Pipe()
            given = theirs, row, Way(way, budget, WIDTH, door), rank, len(budgets), self._folder.name
            self._processes.append(context.Process(target=_run, args=given, daemon=True))
            self._processes[-1].start()
            theirs.close()
            self._pipes.append(ours)
        self.peaks = [each["peak_bytes"] for each in self._answers()]  # settled

    def turn(self) -> None:
        """Train for some steps."""
        self._tell(True)
        self.seconds.append([each["seconds"] for each in self._answers()])

    def end(self) -> list[dict[str, Any]]:
        """Return what each rank found."""
        self._tell(False)
        found = self._answers()
        self._tell(False)
        for process in self._processes:
            process.join(_ANSWER_SECONDS)
        self._folder.cleanup()
        return found

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def _tell(self, goes_on: bool) -> None:
        for pipe in self._pipes:
            pipe.send(goes_on)

    def _answers(self) -> list[dict[str, Any]]:
        until = time.monotonic() + _ANSWER_SECONDS
        found: dict[int, dict[str, Any]] = {}
        while len(found) < len(self._pipes):
            left = [pipe for rank, pipe in enumerate(self._pipes) if rank not in found]
            ready = wait(left, max(0.0, until - time.monotonic()))
            if not ready:
                missing = sorted(set(range(len(self._pipes))) - found.keys())
                raise RowError(f"{self.way}: ranks {missing} did not answer for {_ANSWER_SECONDS:.0f} s")
            for pipe in ready:
                rank = self._pipes.index(pipe)  # pyright: ignore
                try:
                    found[rank] = pipe.recv()  # pyright: ignore
                except EOFError:
                    raise RowError(f"{self.way}: rank {rank} died") from None
                if "error" in found[rank]:
                    print(found[rank]["traceback"], file=sys.stderr)
                    raise RowError(f"{self.way}: rank {rank}: {found[rank]['error']}")
        return [found[rank] for rank in range(len(self._pipes))]


def measure(row: str, count: int, turns: int) -> dict[str, Any]:
    """Return what one row took on so many ranks."""
    ways: dict[str, Ranks] = {}
    try:
        ways = _settled(row, count)
        for turn in range(turns):
            for way in ways.values() if turn % 2 == 0 else reversed(ways.values()):
                way.turn()
        ends = {name: way.end() for name, way in ways.items()}
    finally:
        for way in ways.values():
            way.stop()
    bare = ways["bare"]
    found: dict[str, Any] = {
        "row": row,
        "ranks": count,
        "bare_bytes": max(bare.peaks),
        "bare_seconds": max(statistics.median(turn[rank] for turn in bare.seconds) for rank in range(count)) / TURN,
    }
    return found | {"ways": [_way(ways, ends, name) for name in ways]}


def _settled(row: str, count: int) -> dict[str, Ranks]:
    ways: dict[str, Ranks] = {}
    try:
        for name in ("bare", "by hand"):
            ways[name] = Ranks(row, name, [0] * count)
        bare, hand = ways["bare"].peaks, ways["by hand"].peaks
        for share in SHARES[count]:
            budgets = [max(int(share * whole), least) for whole, least in zip(bare, hand, strict=True)]
            if budgets != hand:
                ways[f"memfit {share:.0%}"] = Ranks(row, f"memfit {share:.0%}", budgets)
                if row in PLANNED and share == PLANNED_SHARE:
                    name = f"planned {share:.0%}"
                    ways[name] = Ranks(row, name, budgets, PLANNED[row])
        ways["memfit as by hand"] = Ranks(row, "memfit as by hand", hand)
        if row in PLANNED:
            ways["planned as by hand"] = Ranks(row, "planned as by hand", hand, PLANNED[row])
    except BaseException:
        for way in ways.values():
            way.stop()
        raise
    return ways


def _way(ways: dict[str, Ranks], ends: dict[str, list[dict[str, Any]]], name: str) -> dict[str, Any]:
    way, bare, hand = ways[name], ways["bare"], ways["by hand"]
    ranks = range(len(way.budgets))
    ratios = [_ratios(way, bare, rank) for rank in ranks]
    worst = max(ratios, key=statistics.median)
    found: dict[str, Any] = {
        "way": name,
        "same_bits": all(ends[name][rank]["bits"] == ends["bare"][rank]["bits"] for rank in ranks),
        "peak_share": max(max(ends[name][rank]["peaks"][FIRST_JUDGED:]) / bare.peaks[rank] for rank in ranks),
        "time_ratio": statistics.median(worst),
        "time_ratio_quartiles": [worst[len(worst) // 4], worst[-1 - len(worst) // 4]],
        "time_by_hand_ratio": max(statistics.median(_ratios(way, hand, rank)) for rank in ranks),
    }
    if not any(way.budgets):
        return found
    of_ranks = ends[name]
    return found | {
        "budget_share": [round(way.budgets[rank] / bare.peaks[rank], 4) for rank in ranks],
        "over": sum(each["over"] for each in of_ranks),
        "peak": max(each["peak"] for each in of_ranks),
        "use": min(each["use"] for each in of_ranks),
        "keeps_all": all(each["is_most"] for each in of_ranks),
        "kinds": max(of_ranks, key=lambda each: -each["use"])["kinds"],
        "peaks": [
            [round(peak / budget, 4) for peak in each["peaks"]]
            for each, budget in zip(of_ranks, way.budgets, strict=True)
        ],
    }


def _ratios(one: Ranks, other: Ranks, rank: int) -> list[float]:
    return sorted(mine[rank] / its[rank] for mine, its in zip(one.seconds, other.seconds, strict=True))


def show(found: dict[str, Any]) -> None:
    """Print one row."""
    head = f"{found['row']}, {found['ranks']} ranks"
    if "error" in found:
        print(f"{head}: {found['error']}", flush=True)
        return
    print(f"{head}: bare {found['bare_bytes'] / 2**20:.1f} MiB, {found['bare_seconds'] * 1e3:.0f} ms")
    for way in found["ways"]:
        low, high = way["time_ratio_quartiles"]
        print(
            f"  {way['way']:17} bits {'same' if way['same_bits'] else 'OTHER'} of bare: peak {way['peak_share']:.3f} "
            f"time {way['time_ratio']:.3f} ({low:.2f} to {high:.2f}), {way['time_by_hand_ratio']:.3f} of by hand",
            end="",
        )
        if "over" in way:
            budget = " ".join(f"{share:.2f}" for share in sorted(set(way["budget_share"])))
            every = ", keeps all" if way["keeps_all"] else ""
            print(
                f"; of the budget ({budget}): peak {way['peak']:.3f} use {way['use']:.3f}{every}, over {way['over']}; "
                f"{way['kinds']}",
                end="",
            )
        print(flush=True)


def main() -> None:
    """Measure, print, and store row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of names; default: " + "; ".join(TIMED))
    parser.add_argument("--ranks", type=int, nargs="+", choices=SHARES, default=list(SHARES))
    parser.add_argument("--turns", type=int, help=f"others than {TURNS} are not stored")
    parser.add_argument("--peaks", action="store_true", help="print the share of the budget of each step and rank, too")
    options = parser.parse_args()
    names = [row for row in TIMED if not options.names or any(name in row for name in options.names)]
    here = ["torch", "torch.distributed.fsdp", "memfit", *(name for name in _LIBRARIES if find_spec(name))]
    multiprocessing.get_context("forkserver").set_forkserver_preload(here)
    path = result_path("checkpoint_ranks")
    stored: list[dict[str, Any]] = []
    with suppress(Exception):
        stored = load(path)["payload"]["rows"]
    failed = False
    for count, row in ((count, row) for count in options.ranks for row in names):
        if row in FOUR_RANKS_ONLY and count < 4:
            continue
        try:
            found = measure(row, count, options.turns or TURNS[count])
        except RowError as error:
            found, failed = {"row": row, "ranks": count, "error": str(error)}, True
        show(found)
        if options.peaks:
            for way in found.get("ways", []):
                for each in way.get("peaks", []):
                    print(f"    {way['way']:17}", *(f"{share:.3f}" for share in each))
        stored = [each for each in stored if (each["row"], each["ranks"]) != (row, count)] + [found]
        if options.turns is None:
            store("checkpoint_ranks", {"turns": TURNS, "rows": json.loads(json.dumps(stored))})
    sys.exit(failed)


if __name__ == "__main__":
    main()
