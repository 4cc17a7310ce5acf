"""One model, several ways to run its whole step: what each takes alone, then the seconds of all of them in turns."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch
from _gpu_doors import told
from _gpu_measure import TURNS, Way, alone, each_step, in_turns, let_go, line_of_ways, over, peaks
from _gpu_models import Model, make_model
from _measure import GIB
from _planned import eager_run

import memfit
from memfit.errors import InvalidOptionError, VerificationError
from memfit.options import FitOptions, help_texts
from memfit.torch_private.dynamo import compile_with_budget

HARD_STEPS = 50
PLANNING_STEPS = 5  # of memfit.checkpoint, which plans in the second step after the first update
TIME_LIMIT_SECONDS = 1.5
SOLVER = "dp"  # torch's default for its activation memory budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A way as a row asks for it.

    Attributes:
        name: in tables.
        kind: a key of `KINDS`.
        share: of the bytes that the first way reserves, as the budget; or torch's own budget, from 0 to 1.
        bytes_of: the way whose reserved bytes are the budget, in the place of a share.
        given: more arguments of `memfit.fit`.
        may_fail: whether it is no failure if no plan fits: of published planners, which are rivals here.
    """

    name: str
    kind: str
    share: float = 1.0
    bytes_of: str = ""
    given: dict[str, Any] = field(default_factory=dict[str, Any])
    may_fail: bool = False


EAGER = Ask(name="eager", kind="eager")
CHECKPOINTS = Ask(name="checkpoints", kind="checkpoints")
THERE = Ask(name="memfit at their bytes", kind="fit", bytes_of="checkpoints")
HALF = Ask(name="memfit at 50%", kind="fit", share=0.5)
SIXTY = Ask(name="memfit at 60%", kind="fit", share=0.6)
TORCHS = Ask(name="torch's budget 0.5", kind="torch", share=0.5)
BY_MEMFIT = Ask(name="memfit.checkpoint at their bytes", kind="memfit.checkpoint", bytes_of="checkpoints")
# memfit.checkpoint counts all that the process holds: it plans before others have arenas
USUAL = (EAGER, CHECKPOINTS, BY_MEMFIT, THERE, HALF)


def compare(
    *,
    model: str,
    options: dict[str, Any],
    optimizer: dict[str, Any] | None = None,
    asks: Sequence[Ask] = USUAL,
    turns: int = TURNS,
    hard: bool = False,
    hard_steps: int = HARD_STEPS,
    computed: bool = True,
    seconds: float = 60.0,
) -> Iterator[dict[str, Any]]:
    """Yield what is known of the ways after each stage: under `ways` by name, under `hard` what `hard_cap` finds.

    Args:
        model, options, optimizer: see `make_model`.
        asks: the ways; the first is what others are compared with, in bytes and seconds.
        turns: how often each is timed.
        hard: whether steps run under a hard cap in the end.
        hard_steps: how many.
        computed: whether kernels compute anything: memfit compares replays of a CUDA graph, and finds what lies there.
        seconds: that all of it should take.
    """
    until = time.monotonic() + seconds * (0.5 if hard else 0.8)
    began = time.monotonic()
    made = make_model(model, options, optimizer=optimizer)
    found: dict[str, Any] = {"options": options, "make_seconds": time.monotonic() - began, "ways": {}, "failures": []}
    ways: list[Way] = []
    for ask in asks:
        began = time.monotonic()
        known = {way.name: way.found["reserved_bytes"] for way in ways}
        try:
            way = KINDS[ask.kind](ask, made, _budget_bytes(ask, known))
            way.found |= alone(way, ways) | way.tell()
        except NotThereYetError as error:
            found["ways"][ask.name] = {"not_there": str(error)}
            continue
        except InvalidOptionError as error:  # options that do not go together, so far
            found["ways"][ask.name] = {"not_there": str(error)}
            continue
        except (memfit.MemfitError, torch.OutOfMemoryError) as error:  # the other ways are measured all the same
            found["ways"][ask.name] = {"error": f"{type(error).__name__}: {error}"}
            if not ask.may_fail and (computed or not isinstance(error, VerificationError)):
                found["failures"].append(f"{model}, {ask.name}: {type(error).__name__}: {error}")
            continue
        ways.append(way)
        way.found["ready_seconds"] = time.monotonic() - began
        if "budget_bytes" in way.found:
            found["failures"] += over(f"{model}, {ask.name}", way.found["steps"], way.found["budget_bytes"])
        found["ways"][ask.name] = way.found
        yield found | {"line": line_of_ways(found["ways"])}
    for found["turns"] in in_turns(ways, turns, until=until):
        if found["turns"] == 1 or found["turns"] % 4 == 0:
            yield found | {"line": line_of_ways(found["ways"])}
    for way in ways:
        way.found |= way.tell()  # with the corrections since
    found["line"] = line_of_ways(found["ways"])
    yield found
    if hard:
        budget_bytes = found["ways"][THERE.name]["budget_bytes"]
        del ways, way
        yield found | {"hard": hard_cap(made, budget_bytes, hard_steps)}


def hard_cap(made: Model, budget_bytes: int, steps: int) -> dict[str, Any]:
    """Steps under `hard=True`: retries of the allocator, bytes as the driver counts them, seconds of `fit`.

    The driver counts what the process had before as well, its context among it: that is `before_bytes`, when nothing is
    allocated by torch but model and optimizer.
    """
    step = made.step
    step.model.zero_grad(set_to_none=True)
    let_go()  # of the arenas of other ways
    whole = torch.cuda.mem_get_info()
    outside_bytes = whole[1] - whole[0] - torch.cuda.memory_reserved()  # the context, and whatever else runs there
    before, began = torch.cuda.memory_stats(), time.monotonic()
    planned = memfit.fit(
        step.model,
        step.loss,
        step.batch,
        optimizer=step.optimizer,
        budget=budget_bytes,
        hard=True,
        time_limit_seconds=TIME_LIMIT_SECONDS,
    )
    found: dict[str, Any] = {"budget_bytes": budget_bytes, "fit_seconds_whole": time.monotonic() - began}
    torch.cuda.empty_cache()
    driver: list[int] = []
    with peaks() as read:
        for _ in range(steps):
            planned(step.batch)
            free_bytes, all_bytes = torch.cuda.mem_get_info()
            driver.append(all_bytes - free_bytes - outside_bytes)
    after = torch.cuda.memory_stats()
    found |= read() | told(planned) | {"driver_bytes": max(driver), "outside_bytes": outside_bytes, "steps": steps}
    found["retries"] = after["num_alloc_retries"] - before["num_alloc_retries"]
    held = f"{found['driver_bytes'] / GIB:.2f} of {budget_bytes / GIB:.2f} GiB"
    found["line"] = f"hard {held}, {found['retries']} retries"
    found["failures"] = over("hard cap", [{"reserved_bytes": each} for each in driver], budget_bytes)
    found["failures"] += [f"hard cap: {found['retries']} retries of the allocator"] if found["retries"] else []
    return found


class NotThereYetError(Exception):
    """A way that this version of memfit does not have."""


def _budget_bytes(ask: Ask, known: dict[str, int]) -> int:
    """What the way may reserve: the bytes of another way, or a share of those of the first."""
    if ask.bytes_of and ask.bytes_of not in known:
        raise NotThereYetError(f"the way {ask.bytes_of!r} did not run, whose bytes are the budget")
    if ask.bytes_of:
        return known[ask.bytes_of]
    return int(ask.share * next(iter(known.values()), 0))


def _eager(_ask: Ask, made: Model, _budget_bytes: int) -> Way:
    return Way(name="eager", run=eager_run(made.step))


def _checkpoints(ask: Ask, made: Model, _budget_bytes: int) -> Way:
    return Way(name=ask.name, run=eager_run(made.step), entered=made.checkpoints)


def _torch(ask: Ask, made: Model, _budget_bytes: int) -> Way:
    """torch's own budget over eager's kernels, as its partitioner does it without Inductor."""
    return Way(name=ask.name, run=_compiled_run(made, compile_with_budget(made.step.model, ask.share, SOLVER)))


def _inductor(ask: Ask, made: Model, _budget_bytes: int) -> Way:
    """torch.compile, with torch's own budget where the share is below 1."""
    from torch._inductor.compile_fx import compile_fx  # seconds; `make gpu` imports it before it forks

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:  # one of its own: Dynamo keeps code by its backend
        return compile_fx(module, inputs)

    compiled = torch.compile(made.step.model, backend=backend)
    budget = partial(functorch.patch, activation_memory_budget=ask.share, activation_memory_budget_solver=SOLVER)
    return Way(name=ask.name, run=_compiled_run(made, compiled), entered=budget)


def _compiled_run(made: Model, compiled: Any) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        made.step.model.zero_grad(set_to_none=True)
        return made.step.run_eager(made.step.batch, model=compiled)

    return run


def _fit(ask: Ask, made: Model, budget_bytes: int) -> Way:
    step = made.step
    step.model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    given = {"time_limit_seconds": TIME_LIMIT_SECONDS} | ask.given
    unknown = given.keys() - inspect.signature(memfit.fit).parameters.keys() - help_texts(FitOptions).keys()
    if unknown:
        raise NotThereYetError(f"memfit.fit has no option {', '.join(sorted(unknown))}")
    optimizer = step.optimizer
    if given.get("kernels") == "inductor":  # memfit follows its steps, and refuses those of the other ways
        own = {name: value for name, value in step.optimizer.defaults.items() if name != "decoupled_weight_decay"}
        optimizer = torch.optim.AdamW(step.model.parameters(), **own)
        optimizer.state = step.optimizer.state
    with peaks() as read:
        planned = memfit.fit(step.model, step.loss, step.batch, optimizer=optimizer, budget=budget_bytes, **given)
        if given.get("kernels") == "inductor":
            planned(step.batch)  # in which ops are measured and the graph is planned, as by `fit` with eager's kernels
    return Way(
        name=ask.name,
        run=lambda: planned(step.batch),
        held_bytes=lambda: getattr(planned, "held_bytes", 0),  # with Inductor's kernels nothing is held between steps
        tell=lambda: told(planned),
        found={"budget_bytes": budget_bytes, "fit_reserved_bytes": read()["reserved_bytes"]},
    )


def _by_memfit(ask: Ask, made: Model, budget_bytes: int) -> Way:
    """Checkpoints that memfit places, in eager's own loop: it plans in some first steps, and the policy is kept."""
    place: Any = getattr(memfit, "checkpoint", None)
    if place is None:
        raise NotThereYetError("this memfit has no memfit.checkpoint")
    run = eager_run(made.step)
    let_go()
    handle = place(made.step.model, budget_bytes)
    try:
        first_steps = each_step(run, PLANNING_STEPS)
        policy = handle.policy()
    finally:
        handle.close()

    @contextmanager
    def placed() -> Iterator[None]:
        with closing(place(made.step.model, policy=policy)):
            yield

    found = {"budget_bytes": budget_bytes, "first_steps": first_steps, "policy": policy}
    return Way(name=ask.name, run=run, entered=placed, found=found)


KINDS: dict[str, Callable[[Ask, Model, int], Way]] = {
    "eager": _eager,
    "checkpoints": _checkpoints,
    "torch": _torch,
    "inductor": _inductor,
    "fit": _fit,
    "memfit.checkpoint": _by_memfit,
}
"""Makes a way ready to run, within a budget where it has one."""
