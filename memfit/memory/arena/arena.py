"""`Arena`: one block of memory in which the requests of a step have fixed addresses.

The first step is recorded, and its requests are packed. Later steps get their addresses by counting requests (Sekiyama
et al. 2018, "Profile-guided memory optimization for deep neural networks", section 4). A request that the recorded step
did not make, and memory that outlives the step, is ordinary memory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from memfit.errors import InvalidOptionError, MemfitError
from memfit.memory.arena.library import ArenaUnavailableError, Counts
from memfit.memory.arena.places import Places
from memfit.memory.arena.planned_memory import PlannedMemory
from memfit.memory.arena.spilling import Spilling
from memfit.memory.arena.with_blocks import ArenaStep, call_signature
from memfit.packing import make_packer
from memfit.system.spill_file import parse_host_dir

DEFAULT_SOLVER_SECONDS = 2.0
_STEPS_LOOKED_AT = 3  # with places: later ones only if a request had none
_MOST_CORRECTIONS = 8  # of the places of a key: ops that request other memory in each step end nowhere

_step_runs = threading.Lock()  # a process has one allocator, so that only one step can run in it


def _release_in_child() -> None:
    global _step_runs
    _step_runs = threading.Lock()


os.register_at_fork(after_in_child=_release_in_child)


class Arena(PlannedMemory):
    """The memory of a step that is called once for each batch, and its calls: `memfit.arena`.

        >>> import torch, memfit
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
        >>> def step(batch):
        ...     model.zero_grad()
        ...     loss = model(batch).square().mean()
        ...     loss.backward()
        ...     return loss.detach()
        >>> with memfit.arena(step) as arena:
        ...     for batch in torch.randn(4, 32, 64):
        ...         loss = arena(batch)
        >>> arena.last_step.not_served, arena.height_bytes == arena.lower_bound_bytes
        (0, True)

    Or, around code of any form:

        >>> arena = memfit.arena()
        >>> for batch in torch.randn(4, 32, 64):
        ...     with arena.step():
        ...         loss = step(batch)

    Args:
        step: any function; the arena is called in its place. Calls whose tensors have other shapes are recorded apart.
        device: the CPU, or a CUDA device.
        packer: one of `memfit packers`.
        time_limit_seconds: how long the packer may search after the first step. It may search for less after later
            ones.
        seed: of all that is random in the packer.
        spill: whether a step that is recorded keeps what autograd saves elsewhere, for steps that only fit once their
            memory is packed: a CPU's in files, CUDA's in the host's memory. That step is slower; its recording and its
            results are the same.
        host_dir: the directory of these files; by default the system's temporary one.

    Attributes:
        counts: the requests of all steps, by how they were answered.
        last_step: the requests of the last step.

    Raises:
        ArenaUnavailableError: there is no C++ compiler, or an arena cannot stand in front of torch's allocator.
        InvalidDeviceError, InvalidOptionError: no such device, packer, limit or directory.

    Guarantees: results have the same bits as without an arena. Two live tensors never overlap, whatever the step does:
    a request whose address is still taken, an unexpected request, and requests of other threads get ordinary memory.
    """

    def __init__(
        self,
        step: Callable[..., Any] | None = None,
        *,
        device: torch.device | str = "cpu",
        packer: str = "auto",
        time_limit_seconds: float = 2.0,
        seed: int = 0,
        spill: bool = False,
        host_dir: Path | str | None = None,
    ) -> None:
        make_packer(packer)
        if not time_limit_seconds > 0:
            raise InvalidOptionError(f"time_limit_seconds is {time_limit_seconds}, expected more than 0")
        if host_dir is not None and not spill:
            raise InvalidOptionError(f"host_dir is {str(host_dir)!r} and spill is False, so that nothing goes there")
        super().__init__(torch.device(device), packer=packer, time_limit_seconds=time_limit_seconds, seed=seed)
        self._call = step
        self._spills, self._host_dir = spill, parse_host_dir(host_dir)
        self._spilling: Spilling | None = None
        self._key: Hashable = None
        self._interrupted = False
        self.counts = self.last_step = Counts()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step that the arena was made with, inside the arena."""
        if self._call is None:
            raise MemfitError(
                "this arena was made without a step; call memfit.arena(step), or use `with arena.step():`"
            )
        with self.step(key=call_signature(args, kwargs)):
            return self._call(*args, **kwargs)

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None and not self._runs:
            self.close()

    def __repr__(self) -> str:
        return (
            f"<memfit.arena of {self.height_bytes} bytes, bound {self.lower_bound_bytes}: "
            f"{self.counts.served} requests served, {self.counts.not_served} not, "
            f"{self.reoptimizations} reoptimizations>"
        )

    def step(self, key: Hashable = None) -> ArenaStep[Arena]:
        """Return a `with` block that is one step of the calling thread.

        Args:
            key: steps with the same key are expected to request the same memory. Give one where shapes differ from
                step to step, or training and evaluation alternate: under one key each change needs a new layout.

        Raises:
            ArenaUnavailableError: on entering, while another step runs in this process.
        """
        return ArenaStep(self, partial(self._begin, key), self._end)

    def interrupt(self) -> None:
        """Serve requests from ordinary memory until `resume`: for a part of the step that differs from step to step."""
        if not self._runs or self._interrupted:
            raise MemfitError("interrupt() needs a running step that is not interrupted; see `with arena.step():`")
        self._interrupted = True
        self._library.interrupt()

    def resume(self) -> None:
        """End the part that `interrupt` began."""
        if not self._interrupted:
            raise MemfitError("resume() without interrupt(); interrupt the running step first")
        self._interrupted = False
        self._library.resume()

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Interrupt the step while the block runs."""
        self.interrupt()
        try:
            yield
        finally:
            self.resume()

    @property
    def served(self) -> int:
        """Requests answered from the arena."""
        return self.counts.served

    @property
    def not_served(self) -> int:
        """Requests that got ordinary memory although a plan had an address for them, or had not expected them."""
        return self.counts.not_served

    def _begin(self, key: Hashable) -> None:
        handle = self._require_open()
        if not _step_runs.acquire(blocking=False):
            raise ArenaUnavailableError(
                "another step already runs in an arena of this process, and steps cannot be nested; end that one first"
            )
        with ExitStack() as on_error:
            on_error.callback(_step_runs.release)
            numbered = self._plans.get(key)
            if numbered is None and not self._library.live_blocks(handle):
                self._resize(0)  # a recorded step uses ordinary memory: both together would exceed either
            if numbered is not None:
                self._plans.move_to_end(key)
                self._settle()
            self._library.begin_step(
                handle,
                None if numbered is None else numbered.number,
                of_this_thread=numbered is not None and isinstance(numbered.plan, Places),
            )
            if numbered is None and self._spills:
                self._spilling = Spilling(self._library, self.device, self._host_dir)
                self._spilling.__enter__()
            on_error.pop_all()  # begun: `_end` releases the lock
        self._key, self._runs = key, True

    def _end(self, completed: bool) -> None:
        handle = self._require_open()
        was_interrupted, self._interrupted = self._interrupted, False
        if self._spilling is not None:
            self._spilling.__exit__(None, None, None)
            self._spilling = None
        counts, requests = self._library.end_step(handle)
        self._runs = False
        _step_runs.release()
        self.last_step = counts
        self.counts += counts
        if not completed:
            return
        if was_interrupted:
            raise MemfitError("the step ended interrupted; call resume(), or use `with arena.interrupted():`")
        known = self._plans.get(self._key)
        if known and isinstance(known.plan, Places):
            known.looked_at += 1
            if known.changes < _MOST_CORRECTIONS and (counts.not_served or known.looked_at <= _STEPS_LOOKED_AT):
                self._correct_places(self._key, requests)
            return
        if known and requests <= len(known.plan.recording.ends) and not counts.not_served and not counts.kept:
            return
        self._learn(self._key, requests)


arena = Arena
"""What users call: `memfit.arena(step)`."""
