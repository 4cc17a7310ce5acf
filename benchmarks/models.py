"""Models of many architectures: captured or not, bits over three steps, and the least budget beside eager's peak.

Each model (`_models.py`: tiny, random weights) is trained by AdamW in a process of its own, in eager and within two
budgets: 100% of the unplanned peak, and the least that memfit says it found. It ends as captured `whole`, in `parts`
around a line that depends on a tensor's value, or `refused`, with the message. Nothing is skipped.

    python benchmarks/models.py                     # all of them: about half an hour
    python benchmarks/models.py --only bert "vit*"  # these, nothing stored
    python benchmarks/models.py --only bert --again # these, in the place of their stored rows
"""

from __future__ import annotations

import argparse
import copy
import logging
import multiprocessing
import sys
import warnings
from collections import Counter
from fnmatch import fnmatch
from typing import Any

import torch
from _models import MODELS, Tried
from _record import load, result_path, store
from fuzz_steps import first_difference

import memfit
from memfit.errors import MemfitError, NoPlanError
from memfit.step.measure import resident_bytes
from memfit.system.recorder import record

STEPS, MOVES = 3, 5_000
ROOM = 1.01  # over the least budget found: ops are timed anew, and other plans come first


def try_model(name: str) -> dict[str, Any]:
    """Return what becomes of a model."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tried = MODELS[name]()
    row: dict[str, Any] = {"model": name, "class": type(tried.model).__name__}
    try:
        wanted, row["eager_peak_bytes"] = train_eager(copy.deepcopy(tried))
        row["eager_repeats"] = first_difference(wanted, train_eager(copy.deepcopy(tried))[0]) or "same bits"
        row |= train_planned(copy.deepcopy(tried), "100%", wanted)
        if row["captured"] == "whole":
            row["least_budget_found_bytes"] = least_bytes = least_budget(copy.deepcopy(tried), row)
            row["at_least"] = train_planned(copy.deepcopy(tried), int(ROOM * least_bytes), wanted)
    except MemfitError as error:
        row |= {"captured": "refused", "message": f"{type(error).__name__}: {error}".splitlines()[0]}
    except Exception as error:  # noqa: BLE001 - one model must not end the others
        row |= {"captured": "error", "message": f"{type(error).__name__}: {error}".splitlines()[0]}
    return row


def least_budget(tried: Tried, row: dict[str, Any]) -> int:
    """Return the least budget that a search finds a plan for, in bytes: what the refusal of the proved least names."""
    bound_bytes: int = row["least_budget_bound_bytes"]
    optimizer = torch.optim.AdamW(tried.model.parameters(), lr=1e-3)
    try:
        memfit.fit(
            tried.model, tried.loss, tried.batch, optimizer=optimizer, budget=bound_bytes, options={"iterations": MOVES}
        )
    except NoPlanError as error:
        return error.least_budget_found_bytes or row["budget_bytes"]
    return bound_bytes


def train_eager(tried: Tried) -> tuple[dict[str, Any], int]:
    """Train in eager; return what it leaves, and the measured peak of the last step, residents included."""
    optimizer = torch.optim.AdamW(tried.model.parameters(), lr=1e-3)
    losses: list[torch.Tensor] = []
    for number in range(STEPS):
        torch.manual_seed(number)
        held_bytes = _bytes(tried, optimizer)
        with record("cpu") as usage:
            loss = tried.loss(tried.model, tried.batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            del loss
    return _left(tried, losses), held_bytes + usage.peak_bytes


def train_planned(tried: Tried, budget: str | int, wanted: dict[str, Any]) -> dict[str, Any]:
    """Train within a budget; return how it went."""
    optimizer = torch.optim.AdamW(tried.model.parameters(), lr=1e-3)
    step = memfit.fit(
        tried.model, tried.loss, tried.batch, optimizer=optimizer, budget=budget, options={"iterations": MOVES}
    )
    is_whole = isinstance(step, memfit.PlannedStep)
    losses: list[torch.Tensor] = []
    peaks_bytes: list[int] = []
    for number in range(STEPS):
        torch.manual_seed(number)
        held_bytes = resident_bytes(step, tried.batch) if is_whole else 0
        with record("cpu") as usage:
            losses.append(step(tried.batch))
        peaks_bytes.append(held_bytes + usage.peak_bytes)
    row: dict[str, Any] = {
        "captured": "whole" if is_whole else "parts",
        "difference": first_difference(wanted, _left(tried, losses)) or "same bits",
    }
    if is_whole:
        bounds = step.plan.bounds
        row |= {
            "budget_bytes": step.plan.budget_bytes,
            "peak_bytes": max(peaks_bytes),
            "corrections": len(step.corrections),
            "overhead": step.plan.overhead,
            "least_budget_bound_bytes": bounds.least_budget_bound_bytes,
            "ops": len(step.captured.graph.ops),
        }
    return row


def _bytes(tried: Tried, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of parameters, buffers, optimizer state and batch."""
    held = [*tried.model.parameters(), *tried.model.buffers()]
    held += [value for state in optimizer.state.values() for value in state.values()]
    batch = tried.batch.values() if isinstance(tried.batch, dict) else tried.batch
    held += batch if isinstance(tried.batch, dict | tuple) else [tried.batch]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held}
    return sum(storages.values())


def _left(tried: Tried, losses: list[torch.Tensor]) -> dict[str, Any]:
    """Return what training left, by name."""
    left: dict[str, Any] = {f"loss {number}": loss for number, loss in enumerate(losses)}
    left |= {f"parameter {name}": each.detach() for name, each in tried.model.named_parameters()}
    return left | {f"buffer {name}": each for name, each in tried.model.named_buffers()}


def main() -> None:
    """Try the models, print a line for each, and store them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="names, or patterns of names; nothing is stored")
    parser.add_argument("--again", action="store_true", help="replace the stored rows of these names")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args()
    names = [name for name in MODELS if not options.only or any(fnmatch(name, each) for each in options.only)]
    rows: list[dict[str, Any]] = []
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=1) as pool:
        for row in pool.imap(try_model, names, chunksize=1):
            rows.append(row)
            print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    counts = Counter(row["captured"] for row in rows)
    print(f"{len(rows)} models: {dict(counts)}", file=sys.stderr)
    if options.again:
        again = {row["model"]: row for row in rows}
        rows = [again.get(row["model"], row) for row in load(result_path("models"))["payload"]["models"]]
        counts = Counter(row["captured"] for row in rows)
    if options.again or not options.only:
        print(store("models", {"steps": STEPS, "counts": dict(counts), "models": rows}))


if __name__ == "__main__":
    main()
