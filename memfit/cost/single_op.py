"""Running one op by itself: its seconds, its workspace bytes, and the check of its results."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from memfit.binding import Call, values_in
from memfit.cost.collectives import is_collective
from memfit.cost.environment import free_bytes
from memfit.cost.gpu_timing import dispatch_seconds, kernel_seconds
from memfit.cost.observations import Observation
from memfit.cost.op_inputs import InputMaker
from memfit.cost.result_check import check_memory, check_results, result_bytes
from memfit.errors import BY_CHECKPOINT, CaptureError, NotOneGraphError
from memfit.graph import Graph, Op
from memfit.system.recorder import record
from memfit.torch_private.ranks import groups_inside

Clock = Callable[[], float]

_MOST_RUNS = 15
_ENOUGH_SECONDS = 0.03  # the shortest run times the number of runs, so that delays by other processes do not count
_MOST_SECONDS = 0.3


@contextmanager
def undisturbed(device: torch.device) -> Generator[None]:
    """Disable gradients and autocast inside the block, and restore the caller's random generators at its end."""
    generators = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=generators), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def uncollected() -> Generator[None]:
    """Collect no garbage inside the block: bytes freed there would hide bytes that the block takes."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurer:
    """Measures single ops of one graph.

    Attributes:
        graph: the ops' graph.
        device: where they run.
        inputs: makes their inputs.
        clock: gives seconds; CUDA devices are timed by events.
        most_runs: how often an op is run at most; 1 gives its workspace and results, and rough seconds.
        free_bytes: free on the device; None to ask before each op.
    """

    graph: Graph
    device: torch.device
    inputs: InputMaker
    clock: Clock
    most_runs: int = _MOST_RUNS
    free_bytes: int | None = None

    def measure(self, op: Op, call: Call) -> Observation | str:
        """Return the observation of `op`, or the reason why it cannot be run by itself.

        The reason is empty for an op that is never run by itself: an optimizer's update, or a collective.

        Args:
            op: of the graph.
            call: its call.

        Raises:
            CaptureError: its results differ from the captured ones in number, shape or offset.
            NotOneGraphError: its code runs collectives.
        """
        if not getattr(call.target, "measurable", True) or is_collective(call.target):
            return ""
        if not self.has_room(op, call):
            return f"its inputs and results take {self._needed_bytes(op, call)} bytes, more than {self.device} has free"
        try:
            return self._cost(op, call, *self.inputs.make(call, self.graph.storages))
        except (CaptureError, NotOneGraphError):
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            return f"it refuses inputs made for it: {str(error).strip().splitlines()[0]}"

    def run_once(self, op: Op, call: Call) -> None:
        """Run `op` on inputs made for it, if it can be run by itself and has room.

        Args:
            op: of the graph.
            call: its call.
        """
        runs_alone = getattr(call.target, "measurable", True) and not is_collective(call.target)
        if not runs_alone or not self.has_room(op, call):
            return
        args, kwargs = self.inputs.make(call, self.graph.storages)
        with suppress(RuntimeError, ValueError, IndexError):
            call.target(*args, **kwargs)

    def has_room(self, op: Op, call: Call) -> bool:
        """Return whether the inputs and results of `call` fit into the memory that is free on the device.

        Inputs are copies even of residents. The workspace, which only running the op tells, is not counted.

        Args:
            op: of the graph; gives the storages that are written.
            call: its call; gives the inputs.
        """
        free = free_bytes(self.device) if self.free_bytes is None else self.free_bytes
        return free is None or self._needed_bytes(op, call) <= free

    def _needed_bytes(self, op: Op, call: Call) -> int:
        touched = {value.storage for value in values_in((call.args, call.kwargs))} | set(op.writes)
        return sum(self.graph.storages[storage].bytes for storage in touched)

    def _cost(self, op: Op, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Observation:
        if self.device.type == "cuda":
            call.target(*args, **kwargs)  # libraries take workspaces of their own at their first call, and keep them
        with uncollected(), record(self.device) as usage:
            started = self.clock()
            with groups_inside(call.target, self.device) as groups:
                returned = call.target(*args, **kwargs)
            first_seconds = self.clock() - started
        if groups:
            raise NotOneGraphError(
                f"operator {call.target} runs collectives in its own code; a planned step runs no collectives but its "
                f"own (process_group): {BY_CHECKPOINT}"
            )
        storage_bytes, results = check_results(op, call, returned, self.graph.storages, self.device)
        check_memory(op, call, returned, args, kwargs)
        workspace_bytes = max(0, usage.peak_bytes - result_bytes(returned, args, kwargs, self.device))
        del returned
        run = partial(call.target, *args, **kwargs)
        return Observation(
            seconds=self._seconds(run, first_seconds),
            dispatch_seconds=dispatch_seconds(run, self.device) if self.device.type == "cuda" else 0.0,
            workspace_bytes=workspace_bytes,
            storage_bytes=storage_bytes,
            results=results,
        )

    def _seconds(self, run: Callable[[], object], first_seconds: float) -> float:
        """Return the median of several runs; of two, the shorter one. A long first run counts alone."""
        is_cuda = self.device.type == "cuda"
        timed = (lambda: kernel_seconds(run, self.device)) if is_cuda else (lambda: self._cpu_run(run))
        seconds = [timed()] if is_cuda else [first_seconds]
        while len(seconds) < self.most_runs and sum(seconds) < _MOST_SECONDS:
            if len(seconds) > 1 and min(seconds) * len(seconds) >= _ENOUGH_SECONDS:
                break
            seconds.append(timed())
        return statistics.median_low(seconds)

    def _cpu_run(self, run: Callable[[], object]) -> float:
        started = self.clock()
        run()
        return self.clock() - started
