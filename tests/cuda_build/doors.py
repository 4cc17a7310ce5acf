"""Ten steps of a small network through each door: what the process took from the device in each of them.

For a fork of a process that has not touched CUDA, over the GPU that is not there. The driver itself counts the bytes.
"""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

import memfit

STEPS = 10
MICRO_BATCHES = 4
WIDTH, ROWS = 512, 4096
# by iterations and not by seconds: the same bytes on a busy machine
SEARCH = {"planner": "search", "options": {"iterations": 300}, "time_limit_seconds": 60.0}

Batch = tuple[torch.Tensor, torch.Tensor]
Run = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A door, and what is special about its use.

    Attributes:
        door: one of DOORS.
        loop: one of LOOPS; `fit` has the update in its step.
        is_broken: the model branches on a value of a tensor.
        device: where it trains.
        percent: give the budget as a percentage of the peak of the step, and not in bytes.
        place: one of PLACES; None is the main thread and the usual stream.
        vmm_fails: the driver maps no expandable segments, as under WSL2.
        options: of the door.
        environment: of the process.
    """

    door: str
    loop: str = "plain"
    is_broken: bool = False
    device: str = "cuda"
    percent: bool = False
    place: str | None = None
    vmm_fails: bool = False
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    environment: dict[str, str] = field(default_factory=dict[str, str])


class Broken(torch.nn.Module):
    """Two networks with a branch on a value between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = network(depth=3)[:-1], network(depth=3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Branch on a sum."""
        hidden = self.first(inputs)
        if hidden.sum() > 1e30:
            hidden = hidden * 2
        return self.second(hidden)


def network(depth: int = 6) -> torch.nn.Sequential:
    """Blocks of two linear layers; 48 MiB of parameters at depth 6."""
    layers: list[torch.nn.Module] = []
    for _ in range(depth):
        layers += [torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Dropout(0.1)]
        layers += [torch.nn.Linear(4 * WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 16))


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    """Cross entropy of a batch."""
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


class Driver:
    """The counters of the driver that is not there."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["FAKE_GPU"])
        ctypes.c_int.in_dll(self._library, "fake_devices").value = 2

    def counts(self, name: str) -> list[int]:
        """Return a counter's value on each of the first two devices."""
        return list((ctypes.c_uint64 * 8).in_dll(self._library, f"fake_{name}_on"))[:2]

    def let_segments_fail(self) -> None:
        """Map no expandable segments from here on."""
        ctypes.c_int.in_dll(self._library, "fake_vmm_fails").value = 1

    def forget_peak(self) -> None:
        """Let the peaks start at what is held."""
        peaks = (ctypes.c_uint64 * 8).in_dll(self._library, "fake_peak_on")
        peaks[:] = list((ctypes.c_uint64 * 8).in_dll(self._library, "fake_held_on"))


class World:
    """A model, its optimizer and its batch, on the device of a case."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.device = torch.device(case.device)
        self.model = (Broken() if case.is_broken else network()).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        labels = torch.zeros(ROWS, dtype=torch.long)
        self.budget_bytes = 0
        self.batch = (torch.randn(ROWS, WIDTH).to(self.device), labels.to(self.device))

    def train(self, model: Any) -> None:
        """One step of an own loop."""
        loss_of(model, self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def accumulate(self, model: Any) -> None:
        """Gradients of some micro-batches, and an update."""
        for _ in range(MICRO_BATCHES):
            loss_of(model, self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _plain(world: World, model: Any) -> Run:
    return lambda: world.train(model)


def _accumulating(world: World, model: Any) -> Run:
    return lambda: world.accumulate(model)


def _scaled(world: World, model: Any) -> Run:
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)

    def run() -> None:
        scaler.scale(loss_of(model, world.batch)).backward()
        scaler.step(world.optimizer)
        scaler.update()
        world.optimizer.zero_grad()

    return run


LOOPS = {"plain": _plain, "accumulation": _accumulating, "scaler": _scaled}


def _eager(case: Case, world: World, budget: int | str) -> Run:  # noqa: ARG001 - the yardstick has no budget
    return LOOPS[case.loop](world, world.model)


def _backend(case: Case, world: World, budget: int | str) -> Run:
    options = {"budget": budget} | SEARCH | case.options
    return LOOPS[case.loop](world, torch.compile(world.model, backend="memfit", options=options))


def _compile(case: Case, world: World, budget: int | str) -> Run:
    compiled = memfit.compile(world.model, budget=budget, optimizer=world.optimizer, **SEARCH | case.options)
    return LOOPS[case.loop](world, compiled)


def _eager_mode(case: Case, world: World, budget: int | str) -> Run:
    inside = memfit.eager(world.model, budget=budget, **case.options)
    inside.__enter__()  # until the process ends
    return LOOPS[case.loop](world, world.model)


def _fit(case: Case, world: World, budget: int | str) -> Run:
    has_update = case.loop != "accumulation"
    options = {"optimizer": world.optimizer} if has_update else {}
    if case.loop == "scaler":
        options["scaler"] = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    step = memfit.fit(world.model, loss_of, world.batch, budget=budget, **options, **SEARCH | case.options)
    world.budget_bytes = int(step.settings.budget)  # which a percentage came to

    def run() -> None:
        if has_update:
            step(world.batch)
            return
        world.model.zero_grad(set_to_none=True)
        for _ in range(MICRO_BATCHES):
            step(world.batch)

    return run


DOORS = {"none": _eager, "fit": _fit, "compile": _compile, "backend": _backend, "eager": _eager_mode}


def on_another_stream(run: Run) -> Run:
    """From the fourth step on, a new stream for each, as `torch.cuda.stream` gives it."""
    count = 0

    def on_a_stream() -> None:
        nonlocal count
        count += 1
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream) if count > 3 else nullcontext():
            run()
        torch.cuda.current_stream().wait_stream(stream)

    return on_a_stream


def on_another_thread(run: Run) -> Run:
    """Each step on a new thread."""

    def on_a_thread() -> None:
        failed: list[BaseException] = []

        def body() -> None:
            try:
                run()
            except BaseException as error:  # noqa: BLE001 - raised below
                failed.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]

    return on_a_thread


PLACES: dict[str, Callable[[Run], Run]] = {"stream": on_another_stream, "thread": on_another_thread}


def ten_steps(case: Case, share: float, whole_bytes: int) -> Iterator[dict[str, Any]]:
    """Yield, after each step, the bytes that each took; `budget_bytes` is a share of `whole_bytes`, or of the peak.

    Args:
        case: what is run.
        share: of the whole, which is the budget.
        whole_bytes: what the loop takes without memfit.
    """
    warnings.simplefilter("default")  # pytest makes errors of them, and torch warns as it compiles
    driver = Driver()
    if case.vmm_fails:
        driver.let_segments_fail()
    world = World(case)
    world.budget_bytes = int(share * whole_bytes)
    run = DOORS[case.door](case, world, f"{share:.0%}" if case.percent else world.budget_bytes)
    run = PLACES[case.place](run) if case.place else run
    index = world.device.index or 0
    taken: list[int] = []
    for _ in range(STEPS):
        driver.forget_peak()
        run()
        taken.append(driver.counts("peak")[index])
        yield {
            "taken_bytes": taken,
            "budget_bytes": world.budget_bytes,
            "retries": torch.cuda.memory_stats(world.device)["num_alloc_retries"],
            **{name: driver.counts(name) for name in ("mallocs", "streams", "registers", "contexts")},
        }
