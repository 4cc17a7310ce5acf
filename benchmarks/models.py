"""Models of many architectures through each door of memfit, within shares of what the bare loop takes.

Each of `_models.py` (tiny, random weights) is trained by AdamW for eight steps, big and small batches in turn: bare,
which gives its peak and its bits, and then by each door within 70% and 90% of that peak, in a process of its own and
from the same seeds. A run ends as `held`; `over`, if a step from the third on took more than the budget; `other bits`,
if a loss, a parameter or a buffer is not the bare loop's (of Inductor's kernels: if a loss is not finite); `refused`,
with memfit's message; `slow`; or `error`, which is any other exception. What memfit says of a step over its budget is
stored beside it: a step that is over without a word is `unsaid`.

    python benchmarks/models.py                                 # what is not stored yet, stored model by model: hours
    python benchmarks/models.py "vit*" --doors fit --shares 0.7 # some
    python benchmarks/models.py NEW --fifth 3 --one 3           # a fifth of the new ones, one door each; nothing stored
    python benchmarks/models.py --counts                        # of what is stored
    python benchmarks/models.py --state                         # store beside each what no plan can let go
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import logging
import math
import os
import random
import re
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from fnmatch import fnmatch
from typing import Any

import numpy as np
import torch
from _models import MODELS, NEW
from _models_kit import Tried
from _process import fresh_cache, in_forked_child
from _record import load, result_path, store, write_document
from torch import Tensor
from torch.utils._pytree import tree_leaves

import memfit
from memfit.errors import MemfitError
from memfit.memory.uncounted import Uncounted
from memfit.system.recorder import record

DOORS = ("fit", "checkpoint", "compile", "backend", "inductor", "eager")
QUICK = ("fit", "checkpoint", "compile", "backend", "eager")  # the others compile kernels
SHARES = (0.7, 0.9)
STEPS, THIRD, FIFTHS = 8, 2, 5
SEARCH_SECONDS = 0.5
RUN_SECONDS = 75.0
ONE_SECONDS = 120.0
_PRELOADED = [  # which each child would import otherwise
    *("torch._inductor.compile_fx", "transformers", "memfit.doors.checkpoint", "memfit.doors.fit"),
    *("memfit.dynamo.model", "memfit.eager_mode.eager"),
]
_MESSAGE_LENGTH, _MOST_WORDS = 700, 4

Step = Callable[[Any], Tensor]


def train(name: str, door: str, budget_bytes: int) -> dict[str, Any]:
    """Return what a training in one way took and left, in this process, or why it ended."""
    words = _Words()
    row: dict[str, Any] = {"peaks_bytes": [], "losses": []}
    try:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            with record("cpu"):  # from here on all is counted
                pass
            older = Uncounted(torch.device("cpu"))
            _seed(0)
            tried = MODELS[name]()
            for peak_bytes, loss in _steps(tried, _enter(stack, tried, door, budget_bytes), older):
                row["peaks_bytes"].append(peak_bytes)
                row["losses"].append(loss)
            row["left"] = {key: _digest(each) for key, each in tried.model.state_dict().items()}
    except MemfitError as error:
        row |= {"refused": f"{type(error).__name__}: {error}"[:_MESSAGE_LENGTH], "lines": str(error).count("\n") + 1}
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a row
        row["error"] = f"{type(error).__name__}: {error}"[:_MESSAGE_LENGTH]
    return row | {"said": words.said}


class _Words(logging.Handler):
    """What memfit logs: its first words."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []
        logger = logging.getLogger("memfit")
        logger.addHandler(self)
        logger.propagate = False

    def emit(self, line: logging.LogRecord) -> None:
        if len(self.said) < _MOST_WORDS:
            self.said.append(line.getMessage()[:_MESSAGE_LENGTH])


def _seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)  # models of transformers that mask audio draw from it
    random.seed(number)


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _steps(tried: Tried, step: Step, older: Uncounted) -> Iterator[tuple[int, str]]:
    """Yield the peak bytes and the loss of one step after another."""
    for number in range(STEPS):
        _seed(number + 1)
        batch = tried.batch(tried.rows if number % 2 == 0 else tried.rows // 2)
        with record("cpu") as usage:
            loss = step(batch)
            tried.after(tried.model)
        value = float(loss.detach().double()).hex()
        del loss, batch
        yield usage.start_bytes + usage.peak_bytes + older.live_bytes(), value


def _enter(stack: ExitStack, tried: Tried, door: str, budget_bytes: int) -> Step:
    """Return the step of a door."""
    model, loss = tried.model, tried.loss
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    if door == "fit":
        _seed(0)
        batch = tried.batch(tried.rows)
        return memfit.fit(
            model, loss, batch, optimizer=optimizer, budget=budget_bytes, time_limit_seconds=SEARCH_SECONDS
        )
    called = model
    if door == "checkpoint":
        stack.callback(memfit.checkpoint(model, budget_bytes).close)
    elif door == "eager":
        stack.enter_context(memfit.eager(model, budget=budget_bytes))
    elif door == "backend":
        state_bytes = sum(2 * each.nbytes + 64 for each in model.parameters() if each.requires_grad)
        options = {"budget": budget_bytes, "reserve": state_bytes, "time_limit_seconds": SEARCH_SECONDS}
        called = torch.compile(model, backend="memfit", options=options)  # type: ignore[arg-type]
    elif door in ("compile", "inductor"):
        kernels = "inductor" if door == "inductor" else "eager"
        memfit.compile(
            model, optimizer=optimizer, budget=budget_bytes, kernels=kernels, time_limit_seconds=SEARCH_SECONDS
        )

    def step(batch: Any) -> Tensor:
        value = loss(called, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


def judge(row: dict[str, Any], bare: dict[str, Any], budget_bytes: int, *, has_bits: bool) -> dict[str, Any]:
    """Return how a run ended, beside what it took.

    Args:
        row: what `train` gave.
        bare: what the bare loop gave.
        budget_bytes: of the run.
        has_bits: whether it is to have the bare loop's; else its losses are finite.
    """
    over = {step: peak / budget_bytes for step, peak in enumerate(row.get("peaks_bytes", [])) if peak > budget_bytes}
    other = _other(row, bare) if has_bits else _not_finite(row)
    judged: dict[str, Any] = {"most_share": max(row.get("peaks_bytes") or [0]) / budget_bytes}
    if over:
        is_said = "refused" in row or any("more than" in each for each in row.get("said", []))
        judged |= {"over": over, "unsaid": not is_said}
    if row.get("said"):
        judged["said"] = row["said"]
    if "error" in row:
        ended = "slow" if row.get("timed_out") else "error"
        judged["message"] = row["error"]
    elif other:
        ended, judged["other"] = "other bits", other
    elif "refused" in row:
        ended = "refused"
        judged |= {"message": row["refused"], "lines": row["lines"], "steps": len(row["losses"])}
    else:
        ended = "over" if any(step >= THIRD for step in over) else "held"
    return {"ended": ended, **judged}


def _other(row: dict[str, Any], bare: dict[str, Any]) -> str:
    for step, (ours, theirs) in enumerate(zip(row.get("losses", []), bare["losses"], strict=False)):
        if ours != theirs:
            return f"loss of step {step}: {float.fromhex(ours)} and not {float.fromhex(theirs)}"
    found = [key for key, digest in row.get("left", {}).items() if digest != bare["left"][key]]
    return f"{len(found)} of {len(bare['left'])} tensors, the first: {found[0]}" if found else ""


def _not_finite(row: dict[str, Any]) -> str:
    bad = [step for step, loss in enumerate(row.get("losses", [])) if not math.isfinite(float.fromhex(loss))]
    return f"losses that are not finite: {bad}" if bad else ""


def bare_of(name: str) -> dict[str, Any]:
    """Return what the bare loop takes and leaves."""
    bare = in_forked_child(lambda: train(name, "bare", 0), timeout_seconds=RUN_SECONDS)
    if "error" in bare:
        raise SystemExit(f"{name}: {bare['error']}")
    return bare | {"peak_bytes": max(bare["peaks_bytes"])}


def measure(name: str, door: str, share: float, bare: dict[str, Any]) -> dict[str, Any]:
    """Return how one run ended; where it has other bits, also whether a second bare loop has the first one's."""
    budget_bytes, began = int(bare["peak_bytes"] * share), time.monotonic()
    row = in_forked_child(lambda: train(name, door, budget_bytes), timeout_seconds=RUN_SECONDS)
    judged = judge(row, bare, budget_bytes, has_bits=door != "inductor")
    if judged["ended"] == "other bits":
        judged["eager_repeats"] = not _other(bare_of(name), bare)
    return {"door": door, "share": share, "seconds": round(time.monotonic() - began, 1), **judged}


def result_name(name: str) -> str:
    """Return the name of the file of a model."""
    return f"models/{re.sub('[^a-z0-9]+', '_', name)}"


def _stored(name: str) -> dict[str, Any]:
    path = result_path(result_name(name))
    return load(path)["payload"] if path.exists() else {"model": name, "is_new": name in NEW, "rows": {}}


def run(names: list[str], doors: list[str], shares: list[float], *, again: bool) -> None:
    """Measure what is not stored yet, and store it: of all models one door and one share, then the next."""
    bares: dict[str, dict[str, Any]] = {}
    for share in shares:
        for door in doors:
            for name in names:
                payload, key = _stored(name), f"{door} {share:.0%}"
                if key in payload["rows"] and not again:
                    continue
                if name not in bares:
                    bares[name] = bare_of(name)
                bare = bares[name]
                payload |= {"bare_bytes": bare["peak_bytes"], "state_bytes": state_bytes(name)}
                payload["rows"][key] = row = measure(name, door, share, bare)
                store(result_name(name), payload)
                _show(name, row)


def run_one(names: list[str], number: int) -> None:
    """Measure each of some models by one door, another one with each number; print a line of JSON for each.

    It begins at another model with each number, and begins none after `ONE_SECONDS`.
    """
    ends, first = time.monotonic() + ONE_SECONDS, number % len(names)
    for place, name in enumerate(names[first:] + names[:first]):
        if time.monotonic() > ends:
            break
        turn = place + number
        row = measure(name, QUICK[turn % len(QUICK)], SHARES[turn // len(QUICK) % len(SHARES)], bare_of(name))
        print(json.dumps({"model": name, **row}), flush=True)


def _show(name: str, row: dict[str, Any]) -> None:
    more = row.get("other") or row.get("message", "")
    unsaid = " UNSAID" if row.get("unsaid") else ""
    print(
        f"{row['door']} {row['share']:.0%} {name}: {row['ended']}{unsaid}, {row['most_share']:.3f}, "
        f"{row['seconds']} s {more}",
        flush=True,
    )


def state_bytes(name: str) -> int:
    """Return what is there at the end of a backward pass, whatever is recomputed.

    That is parameters, their gradients and AdamW's two moments of each, buffers and the larger batch.
    """
    tried = MODELS[name]()
    mine = sum(each.nbytes * (4 if each.requires_grad else 1) for each in tried.model.parameters())
    batch = [each for each in tree_leaves(tried.batch(tried.rows)) if isinstance(each, Tensor)]
    return mine + sum(each.nbytes for each in (*tried.model.buffers(), *batch))


def store_states() -> None:
    """Store the bytes of the state of each model that has rows."""
    for name in MODELS:
        path = result_path(result_name(name))
        if path.exists():
            found = load(path)
            write_document(path, found["name"], found["payload"] | {"state_bytes": state_bytes(name)}, found["machine"])


def counts() -> None:
    """Print the counts of what is stored."""
    found: dict[str, Counter[str]] = {}
    for name in MODELS:
        for key, row in _stored(name)["rows"].items():
            kind = row["ended"] + (", unsaid" if row["ended"] == "over" and row["unsaid"] else "")
            found.setdefault(key, Counter())[kind] += 1
    for key, kinds in sorted(found.items()):
        print(f"{key}: {sum(kinds.values())} models, " + ", ".join(f"{n} {kind}" for kind, n in kinds.most_common()))


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="or patterns; NEW are those of no other test")
    parser.add_argument("--doors", nargs="+", default=list(DOORS), choices=DOORS)
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES))
    parser.add_argument("--again", action="store_true", help="measure again what is stored already")
    parser.add_argument("--fifth", type=int, help="of the models, those of this fifth only (any number)")
    parser.add_argument("--one", type=int, help="one door and share for each, by this number; nothing is stored")
    parser.add_argument("--counts", action="store_true", help="print the counts of what is stored")
    parser.add_argument("--state", action="store_true", help="store each model's state, in bytes, beside its rows")
    options = parser.parse_args()
    if options.counts:
        counts()
        return
    if options.state:
        store_states()
        return
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    for module in _PRELOADED:
        importlib.import_module(module)
    patterns = options.names or ["*"]
    found = [
        name for each in patterns for name in (NEW if each == "NEW" else MODELS) if each == "NEW" or fnmatch(name, each)
    ]
    names = list(dict.fromkeys(found))
    if options.fifth is not None:
        names = [name for name in names if zlib.crc32(name.encode()) % FIFTHS == options.fifth % FIFTHS]
    with fresh_cache():
        if options.one is not None:
            run_one(names, options.one)
        else:
            run(names, options.doors, options.shares, again=options.again)


if __name__ == "__main__":
    main()
