"""What fits under a cap of the process: the most tokens of a language model, by each way to run it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from _gpu_measure import Way, alone, let_go, peaks
from _gpu_models import Model, make_model
from _measure import GIB
from _planned import eager_run

import memfit
from memfit.errors import MemfitError

BY = 256  # tokens are rounded down to a multiple of this
STEPS = 2
TRIES = 4
LESS = 0.92  # of the tokens, where a try ran out of memory
SHARE_OF_CAP = 0.98  # what is aimed at: the allocator rounds, and libraries take their workspaces
TIME_LIMIT_SECONDS = 1.0
WAYS = ("eager", "checkpoints", "memfit")


def most_tokens(
    *, model: str, options: dict[str, Any], caps_bytes: Sequence[int], probes: Sequence[int], ways: Sequence[str] = WAYS
) -> Iterator[dict[str, Any]]:
    """Yield the most tokens of one sample with which two steps ran under each cap.

    Two probes of each way say how bytes grow with tokens; from there it is extrapolated, and less is tried where that
    runs out of memory.

    Args:
        model, options: see `make_model`; `batch` is 1.
        caps_bytes: of the process, as torch's allocator counts.
        probes: two numbers of tokens.
        ways: of `WAYS`.
    """
    made = make_model(model, options | {"batch": 1, "tokens": max(probes)})
    found: dict[str, Any] = {"caps": {str(cap): {} for cap in caps_bytes}, "probes": {}, "failures": []}
    whole_bytes = torch.cuda.get_device_properties(0).total_memory
    for name in ways:
        bytes_at = {tokens: _PROBES[name](made, tokens) for tokens in probes}
        found["probes"][name] = bytes_at
        yield found
        for cap in caps_bytes:
            if cap > whole_bytes:
                continue
            torch.cuda.set_per_process_memory_fraction(cap / whole_bytes)
            found["caps"][str(cap)][name] = _tried(made, name, cap, bytes_at)
            torch.cuda.set_per_process_memory_fraction(1.0)
            found["line"] = "; ".join(
                f"{int(each) / GIB:.0f} GiB: " + ", ".join(f"{way} {got['tokens']:,}" for way, got in ways_at.items())
                for each, ways_at in found["caps"].items()
            )
            yield found


def extrapolated(bytes_at: dict[int, int], cap_bytes: int) -> int:
    """Return the tokens that take so many bytes, by a line through two points, rounded down; at least `BY`.

    >>> extrapolated({1024: 2_000_000, 2048: 3_000_000}, 5_000_000)
    4096
    """
    (less, less_bytes), (more, more_bytes) = sorted(bytes_at.items())
    if more_bytes <= less_bytes:  # over a device that computes nothing, or at too small probes
        return more
    tokens = less + (cap_bytes - less_bytes) * (more - less) / (more_bytes - less_bytes)
    return max(BY, math.floor(tokens / BY) * BY)


def _tried(made: Model, name: str, cap_bytes: int, bytes_at: dict[int, int]) -> dict[str, Any]:
    """Run two steps with the extrapolated tokens, or fewer until they run."""
    tokens = extrapolated(bytes_at, int(SHARE_OF_CAP * cap_bytes))
    for tries in range(1, TRIES + 1):
        let_go()
        try:
            with peaks() as read:
                _RUNS[name](made, tokens, cap_bytes)
            return {"tokens": tokens, "tries": tries} | read()
        except (torch.OutOfMemoryError, MemfitError) as error:
            why = f"{type(error).__name__}: {str(error)[:200]}"
            made.step.model.zero_grad(set_to_none=True)
        tokens = max(BY, math.floor(LESS * tokens / BY) * BY)
    return {"tokens": 0, "tries": TRIES, "error": why}


def _at(made: Model, tokens: int) -> Any:
    """The step with a sample of so many tokens."""
    config: Any = made.step.model.config
    identifiers = torch.randint(config.vocab_size, (1, tokens), device="cuda")
    return replace(made.step, batch={"input_ids": identifiers, "labels": identifiers.clone()})


def _probe(made: Model, tokens: int, checkpointed: bool) -> int:
    entered = made.checkpoints if checkpointed else nullcontext
    way = Way(name="probe", run=eager_run(_at(made, tokens)), entered=entered)
    return alone(way, steps=STEPS)["reserved_bytes"]


def _run(made: Model, tokens: int, _cap_bytes: int, checkpointed: bool) -> None:
    run = eager_run(_at(made, tokens))
    with made.checkpoints() if checkpointed else nullcontext():
        for _ in range(STEPS):
            run()
    torch.cuda.synchronize()


def _fitted(made: Model, tokens: int, budget: int | str) -> Any:
    step = _at(made, tokens)
    return step, memfit.fit(
        step.model,
        step.loss,
        step.batch,
        optimizer=step.optimizer,
        budget=budget,
        time_limit_seconds=TIME_LIMIT_SECONDS,
    )


def _probe_memfit(made: Model, tokens: int) -> int:
    """The least budget for which a plan was found, beside one for all that eager takes."""
    let_go()
    _, planned = _fitted(made, tokens, "100%")
    return planned.plan.bounds.least_budget_found_bytes or planned.plan.predicted.peak_bytes


def _run_memfit(made: Model, tokens: int, cap_bytes: int) -> None:
    step, planned = _fitted(made, tokens, int(SHARE_OF_CAP * cap_bytes))
    for _ in range(STEPS):
        planned(step.batch)
    torch.cuda.synchronize()


_PROBES: dict[str, Callable[[Model, int], int]] = {
    "eager": lambda made, tokens: _probe(made, tokens, False),
    "checkpoints": lambda made, tokens: _probe(made, tokens, True),
    "memfit": _probe_memfit,
}
_RUNS: dict[str, Callable[[Model, int, int], None]] = {
    "eager": lambda made, tokens, cap: _run(made, tokens, cap, False),
    "checkpoints": lambda made, tokens, cap: _run(made, tokens, cap, True),
    "memfit": _run_memfit,
}
