"""A budget under torchrun, as people train: a table of (wrapper, loop, habit), each beside its stock loop.

Every case trains twice on the same ranks, processes of this machine that gloo joins: bare, and within a share of what
the rank took bare. A case holds if all losses, norms of gradients and parameters have the bits of the bare loop on all
ranks, and no step of any rank took more than its budget, the first ones included.

    python benchmarks/rank_loops.py                                # all cases on two and four ranks, stored
    python benchmarks/rank_loops.py --ranks 2 Trainer              # cases whose name has `Trainer`, stored, too
    python benchmarks/rank_loops.py --ranks 2 FSDP2 --dry          # nothing stored
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _rank_cases import CASES, Case
from _rank_kit import Way
from _record import load, machine, result_path, write_document

from memfit.memory.uncounted import Uncounted
from memfit.system.recorder import allocated_bytes, record

STEPS = 8
TOKENS, WIDTH = 128, 64  # of a sequence; of layers
ANSWER_SECONDS = 400.0  # of a case, on a busy machine; then its ranks are killed


class Steps:
    """The steps of one run of a case on a rank.

    Args:
        uncounted: tensors that are older than the recorder: libraries make some on import.

    Attributes:
        half: the number of steps after which a run that resumes is resumed.
        tokens: of a sequence.
        peaks: the most that each step took.
    """

    half, tokens = STEPS // 2, TOKENS

    def __init__(self, uncounted: Uncounted) -> None:
        self._uncounted, self._is_stopped = uncounted, False
        self.peaks: list[int] = []
        self.largest: list[bool] = []
        self.losses: list[bytes] = []

    @property
    def step(self) -> int:
        """The number of steps so far."""
        return len(self.peaks)

    @property
    def are_over(self) -> bool:
        """Whether no step follows."""
        return self.step >= STEPS or self._is_stopped

    def stop(self) -> None:
        """Let no step follow."""
        self._is_stopped = True

    def begin(self) -> None:
        """Begin a step."""
        self._record = record("cpu")
        self._usage = self._record.__enter__()

    def end(self, losses: Iterable[torch.Tensor], *, is_largest: bool = True) -> None:
        """End a step."""
        self._record.__exit__(None, None, None)
        self.peaks.append(self._usage.start_bytes + self._usage.peak_bytes + self._uncounted.live_bytes())
        self.largest.append(is_largest)
        self.losses.append(b"".join(loss.detach().float().numpy().tobytes() for loss in losses))


def run(case: Case) -> dict[str, Any]:
    """Run a case on this rank: bare, then within its budget; return what was found."""
    uncounted = Uncounted(torch.device("cpu"))
    before = _live_bytes(uncounted)
    bare, bare_bits, _ = _run(case, Way("bare", 0, WIDTH), uncounted)
    after = _live_bytes(uncounted)  # more, if a library has left something behind
    budget = int(case.share * (max(bare.peaks) - before)) + after
    if case.door == "fit":  # ranks have one budget, while their peaks may differ by what gloo still holds
        budgets = torch.tensor(budget)
        dist.all_reduce(budgets, dist.ReduceOp.MAX)
        budget = int(budgets)
    held, held_bits, kinds = _run(case, Way("memfit", budget, WIDTH, case.door), uncounted)
    used = [peak for peak, largest in zip(held.peaks, held.largest, strict=True) if largest]
    return {
        "same_losses": bare.losses == held.losses,
        "same_weights": bare_bits == held_bits,
        "over": sum(peak > budget for peak in held.peaks),
        "most": max(held.peaks) / budget,
        "use": used[-1] / budget,
        "bare_bytes": max(bare.peaks),
        "bare_spread": _spread(bare),
        "lean": held.peaks[0] / max(bare.peaks),
        "left_bytes": after - before,
        "kinds": kinds,
    }


def _spread(steps: Steps) -> float:
    """Return by how much equal steps differ, as a share of the smallest: those that follow the first update."""
    equal = [peak for peak, largest in list(zip(steps.peaks, steps.largest, strict=True))[2:] if largest]
    return max(equal, default=1) / min(equal, default=1) - 1


def _live_bytes(uncounted: Uncounted) -> int:
    gc.collect()
    return allocated_bytes("cpu") + uncounted.live_bytes()


def _run(case: Case, way: Way, uncounted: Uncounted) -> tuple[Steps, str, str]:
    steps = Steps(uncounted)
    digest = hashlib.sha256()
    for parameter in case.row(way, steps):
        whole: Any = parameter.detach()
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        digest.update(whole.contiguous().view(torch.uint8).numpy().tobytes())
    report = way.handle.report() if way.handle is not None else None
    sizes = getattr(report, "sizes", ())
    kinds = "; ".join(f"{size.kinds_text()}, plan {size.plans}" for size in sizes)
    way.let_go()
    torch._dynamo.reset()
    gc.collect()
    return steps, digest.hexdigest(), kinds


def _rank(pipe: Any, numbers: Sequence[int], rank: int, count: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with record("cpu"):
        pass
    store = dist.FileStore(str(Path(folder) / "store"), count)
    timeout = timedelta(seconds=ANSWER_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timeout)
    dist.barrier()
    for number in numbers:
        began = time.monotonic()
        try:
            found = run(CASES[number])
        except BaseException as error:  # noqa: BLE001 (it is sent to the parent)
            found = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        pipe.send((number, {**found, "seconds": time.monotonic() - began}))
        if "error" in found:
            break
        dist.barrier()
    pipe.recv()
    os._exit(0)  # groups that libraries made are not ended one by one


def on_ranks(numbers: Sequence[int], count: int) -> Iterable[tuple[int, list[dict[str, Any]]]]:
    """Run cases, one after another, on so many ranks; yield (number, what each rank found).

    After an error, or no answer, the cases that are left run on new processes.
    """
    left = list(numbers)
    while left:
        context = multiprocessing.get_context("spawn")
        with tempfile.TemporaryDirectory() as folder:
            pipes, processes = [], []
            for rank in range(count):
                ours, theirs = context.Pipe()
                given = theirs, left, rank, count, folder
                processes.append(context.Process(target=_rank, args=given, daemon=True))
                processes[-1].start()
                theirs.close()
                pipes.append(ours)
            while left:
                found = _answers(pipes, left[0])
                yield left.pop(0), found
                if any("error" in each for each in found):
                    break
            for process in processes:
                process.kill()
                process.join()


def _answers(pipes: list[Any], number: int) -> list[dict[str, Any]]:
    until = time.monotonic() + ANSWER_SECONDS
    found: dict[int, dict[str, Any]] = {}
    while len(found) < len(pipes):
        waited = [pipe for rank, pipe in enumerate(pipes) if rank not in found]
        failed = any("error" in each for each in found.values())
        ready = wait(waited, max(0.0, min(until - time.monotonic(), 5.0 if failed else ANSWER_SECONDS)))
        if not ready:
            missing = set(range(len(pipes))) - found.keys()
            found |= {rank: {"error": "did not answer", "traceback": ""} for rank in missing}
        for rank in (pipes.index(each) for each in ready):
            try:
                told, found[rank] = pipes[rank].recv()
                assert told == number
            except EOFError:
                found[rank] = {"error": "died", "traceback": ""}
    return [found[rank] for rank in range(len(pipes))]


def summary(case: Case, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a row of the table: what was worst on any rank."""
    row: dict[str, Any] = {"wrapper": case.wrapper, "loop": case.loop, "habit": case.habit, "ranks": len(ranks)}
    row |= {"share": case.share, "door": case.door}
    errors = [each["error"] for each in ranks if "error" in each]
    if errors:
        first = next((each for each in errors if each not in ("did not answer", "died")), errors[0])
        return row | {"error": first.splitlines()[0][:300]}
    return row | {
        "same_bits": all(each["same_losses"] and each["same_weights"] for each in ranks),
        "over": sum(each["over"] for each in ranks),
        "most": max(each["most"] for each in ranks),
        "use": min(each["use"] for each in ranks),
        "bare_bytes": max(each["bare_bytes"] for each in ranks),
        "bare_spread": max(each["bare_spread"] for each in ranks),
        "lean": max(each["lean"] for each in ranks),
        "left_bytes": max(each["left_bytes"] for each in ranks),
        "kinds": ranks[0]["kinds"],
        "seconds": max(each["seconds"] for each in ranks),
    }


def _text(row: dict[str, Any]) -> str:
    if "error" in row:
        return row["error"]
    return (
        f"bits {'same' if row['same_bits'] else 'OTHER'}, over {row['over']}, most {row['most']:.3f}, use "
        f"{row['use']:.3f}, lean {row['lean']:.3f}, {row['bare_bytes'] / 2**20:.0f} MiB (steps differ by "
        f"{row['bare_spread']:.1%}, left "
        f"{row['left_bytes'] / 2**20:.1f}), {row['seconds']:.0f} s; {row['kinds']}"
    )


def is_held(row: dict[str, Any]) -> bool:
    """Return whether a row has stock's bits and no step over its budget."""
    return "error" not in row and row["same_bits"] and row["over"] == 0


def main() -> None:
    """Run, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of cases: those that have all of these texts")
    parser.add_argument("--ranks", type=int, action="append", help="2, 4; by default both")
    parser.add_argument("--missing", action="store_true", help="only those that are not stored as held")
    parser.add_argument("--dry", action="store_true", help="store nothing")
    parser.add_argument("--trace", action="store_true", help="print tracebacks")
    options = parser.parse_args()
    path = result_path("rank_loops")
    stored = load(path) if path.exists() else {"machine": machine(), "payload": {"rows": []}}
    rows = stored["payload"]["rows"]
    processors = {*stored["machine"]["cpu"].split(", "), machine()["cpu"]}  # of the rows that stay, too
    failed = False
    for count in options.ranks or (2, 4):
        known = {_key(row) for row in rows if options.missing and is_held(row)}
        wanted = [
            number
            for number, case in enumerate(CASES)
            if count in case.ranks
            and all(name.lower() in case.name.lower() for name in options.names)
            and (count, case.loop, case.wrapper, case.habit, case.door) not in known
        ]
        for number, ranks in on_ranks(wanted, count):
            row = summary(CASES[number], ranks)
            failed |= not is_held(row)
            rows = [each for each in rows if _key(each) != _key(row)] + [row]
            print(f"{'ok  ' if is_held(row) else 'FAIL'} {count} {CASES[number].name}: {_text(row)}", flush=True)
            if not options.dry:
                found = machine() | {"cpu": ", ".join(sorted(processors))}
                write_document(path, "rank_loops", {"steps": STEPS, "rows": sorted(rows, key=_key)}, found)
            if options.trace:
                print(*{each["traceback"] for each in ranks if "traceback" in each}, sep="\n", flush=True)
    sys.exit(failed)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["ranks"], row["loop"], row["wrapper"], row["habit"], row["door"]


if __name__ == "__main__":
    main()
