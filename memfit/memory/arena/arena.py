"""`Arena`: one block of memory in which the requests of a step have fixed addresses.

The first step is recorded, and its requests are packed. Later steps get their addresses by counting requests (Sekiyama
et al. 2018, "Profile-guided memory optimization for deep neural networks", section 4). A request that the recorded step
did not make, and memory that outlives the step, is ordinary memory.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from memfit.errors import InvalidOptionError, MemfitError
from memfit.memory.arena.devices import ALIGNMENT_BYTES, library_for
from memfit.memory.arena.layout import ArenaPlan, make_arena_plan
from memfit.memory.arena.library import ArenaUnavailableError, Counts
from memfit.memory.arena.places import Places, make_places
from memfit.memory.arena.spilling import Spilling
from memfit.memory.arena.with_blocks import ArenaStep, Interruption, call_signature
from memfit.packing import make_packer
from memfit.simulate.cuda_allocator import whole_segments_bytes
from memfit.system.spill_file import parse_host_dir

DEFAULT_SOLVER_SECONDS = 2.0
MOST_PLANS = 256  # of one arena: plans for shapes that are never used again must not fill the memory
_STEPS_LOOKED_AT = 3  # with places: later ones only if a request had none
_MOST_CORRECTIONS = 8  # of the places of a key: ops that request other memory in each step end nowhere

_step_runs = threading.Lock()  # a process has one allocator, so that only one step can run in it


def _release_in_child() -> None:
    global _step_runs
    _step_runs = threading.Lock()


os.register_at_fork(after_in_child=_release_in_child)


def arena(
    step: Callable[..., Any] | None = None,
    *,
    device: torch.device | str = "cpu",
    packer: str = "auto",
    time_limit_seconds: float = DEFAULT_SOLVER_SECONDS,
    seed: int = 0,
    spill: bool = False,
    host_dir: Path | str | None = None,
) -> Arena:
    """Return an arena for a step that is called once for each batch.

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

    Raises:
        ArenaUnavailableError: there is no C++ compiler, or an arena cannot stand in front of torch's allocator.
        InvalidDeviceError, InvalidOptionError: no such device, packer, limit or directory.

    Guarantees: results have the same bits as without an arena. Two live tensors never overlap, whatever the step does:
    a request whose address is still taken, an unexpected request, and requests of other threads get ordinary memory.
    """
    return Arena(
        step,
        device=device,
        packer=packer,
        time_limit_seconds=time_limit_seconds,
        seed=seed,
        spill=spill,
        host_dir=host_dir,
    )


class Arena:
    """The memory of a step; see `arena`.

    Attributes:
        device: the device of the memory.
        counts: the requests of all steps, by how they were answered.
        last_step: the requests of the last step.
        reoptimizations: how often a layout was replaced because a step differed.
        solver_seconds: how long all searches for layouts took together.
        moves: how often the arena got other memory.
    """

    def __init__(
        self,
        step: Callable[..., Any] | None = None,
        *,
        device: torch.device | str = "cpu",
        packer: str = "auto",
        time_limit_seconds: float = DEFAULT_SOLVER_SECONDS,
        seed: int = 0,
        spill: bool = False,
        host_dir: Path | str | None = None,
    ) -> None:
        make_packer(packer)
        if not time_limit_seconds > 0:
            raise InvalidOptionError(f"time_limit_seconds is {time_limit_seconds}, expected more than 0")
        if host_dir is not None and not spill:
            raise InvalidOptionError(f"host_dir is {str(host_dir)!r} and spill is False, so that nothing goes there")
        self.device = torch.device(device)
        self._library = library_for(self.device)
        self._handle: int | None = self._library.create()
        self._call = step
        self._packer, self._time_limit_seconds, self._seed = packer, time_limit_seconds, seed
        self._spills, self._host_dir = spill, parse_host_dir(host_dir)
        self._spilling: Spilling | None = None
        self._plans: OrderedDict[Hashable, _Numbered] = OrderedDict()
        self._next_number = 0
        self._height_bytes = self._slab_bytes = 0
        self.moves = 0
        self._key: Hashable = None
        self._runs = False
        self._interrupted = False
        self.counts = self.last_step = Counts()
        self.reoptimizations = 0
        self.solver_seconds = 0.0

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

    def interrupted(self) -> Interruption:
        """Return a `with` block that is interrupted."""
        return Interruption(self.interrupt, self.resume)

    def expect(self, key: Hashable, places: Places) -> None:
        """Give the steps with a key their places before the first of them runs, and take the memory for them.

        Such a step has to say at which position it is (`ArenaLibrary.at`).

        Args:
            key: of the steps.
            places: of a planned step.
        """
        if self._runs:
            raise MemfitError("a step cannot be given places while the arena's step runs; leave the step first")
        handle = self._require_open()
        self._set_places(handle, key, places, changes=0)
        self._settle(handle)

    def forget(self, key: Hashable) -> None:
        """Drop the plan of a key, if there is one; for a step that will request other memory from now on.

        The next step with that key is recorded. The memory shrinks to what the other plans need, unless a tensor lies
        in it.
        """
        if self._runs:
            raise MemfitError("a plan cannot be dropped while the arena's step runs; leave the step first")
        numbered = self._plans.pop(key, None)
        if numbered is not None:
            handle = self._require_open()
            self._library.drop_plan(handle, numbered.number)
            self._height_bytes = self._needed_bytes()
            self._settle(handle)

    def vacate(self) -> None:
        """Free the memory until the next step, unless a tensor lies in it; the plans stay."""
        if self._runs:
            raise MemfitError("the memory cannot be freed while the arena's step runs; leave the step first")
        if self._slab_bytes and self.is_empty:
            self._resize(0)

    def close(self) -> None:
        """Free the memory, or, while tensors lie in it, let it be freed with the last of them. Figures stay."""
        if self._runs:
            raise MemfitError("the arena cannot be closed while its step runs; leave the step first")
        if self._handle is not None:
            self._library.destroy(self._handle)
            self._handle, self._slab_bytes = None, 0

    @property
    def plans(self) -> Mapping[Hashable, ArenaPlan | Places]:
        """The plan of each key, or its places."""
        return {key: numbered.plan for key, numbered in self._plans.items()}

    @property
    def height_bytes(self) -> int:
        """The greatest height of the plans; 0 before the first step has ended."""
        return self._height_bytes

    @property
    def held_bytes(self) -> int:
        """The bytes of device memory that the arena holds now; 0 before the first step has ended, and after `close`."""
        return self._slab_bytes

    @property
    def is_empty(self) -> bool:
        """Whether no tensor lies in the arena's memory."""
        return not self._library.live_blocks(self._require_open())

    @property
    def lower_bound_bytes(self) -> int:
        """A lower bound in bytes on the height of any arena for these steps."""
        return max((plan.lower_bound_bytes for plan in self.plans.values()), default=0)

    @property
    def peak_bytes(self) -> int:
        """The greatest number of live bytes of a recorded step, without memory that outlives it."""
        return max((plan.peak_bytes for plan in self.plans.values()), default=0)

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
                self._settle(handle)
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
                self._correct_places(handle, known, known.plan, requests)
            return
        if known and requests == len(known.plan.recording.ends) and not counts.not_served and not counts.kept:
            return
        self._learn(handle, known, requests)

    def _learn(self, handle: int, known: _Numbered | None, requests: int) -> None:
        """Make a plan for the requests of the last step, and for those that the present plan was made for."""
        recording = self._library.seen(handle, requests)
        if known is not None:
            assert isinstance(known.plan, ArenaPlan)
            recording = known.plan.recording.merged(recording)
            if recording.equals(known.plan.recording):
                return  # memory of an earlier step is in the way, and no other plan would be better
        changes = 0 if known is None else known.changes + 1
        plan = make_arena_plan(
            recording,
            alignment_bytes=ALIGNMENT_BYTES[self.device.type],
            packer=self._packer,
            time_limit_seconds=self._time_limit_seconds / (1 + changes),
            seed=self._seed,
        )
        self.reoptimizations += known is not None
        number = self._number_of(self._key)
        self._library.set_plan(handle, number, plan)
        self._keep(handle, self._key, _Numbered(number, plan, changes))
        self._settle(handle)

    def _correct_places(self, handle: int, known: _Numbered, places: Places, requests: int) -> None:
        """Lay the step out again if it requests more, or in another order, than its places were made for."""
        corrected = places.corrected(self._library.seen_places(handle, requests))
        if corrected is None:
            return
        self.reoptimizations += 1
        seconds = self._time_limit_seconds / (2 + known.changes)
        again = make_places(corrected, packer=self._packer, time_limit_seconds=seconds, seed=self._seed)
        self._set_places(handle, self._key, again, known.changes + 1)
        self._settle(handle)

    def _set_places(self, handle: int, key: Hashable, places: Places, changes: int) -> None:
        number = self._number_of(key)
        self._library.set_places(handle, number, places)
        self._keep(handle, key, _Numbered(number, places, changes))

    def _number_of(self, key: Hashable) -> int:
        """Return the library's number for a key: the one that it has, or a new one."""
        if key in self._plans:
            return self._plans[key].number
        self._next_number += 1
        return self._next_number - 1

    def _keep(self, handle: int, key: Hashable, numbered: _Numbered) -> None:
        self.solver_seconds += numbered.plan.seconds
        self._plans[key] = numbered
        if len(self._plans) > MOST_PLANS:
            self._library.drop_plan(handle, self._plans.popitem(last=False)[1].number)
        self._height_bytes = self._needed_bytes()

    def _needed_bytes(self) -> int:
        """Return the bytes for any of the plans."""
        height_bytes = max((each.plan.height_bytes for each in self._plans.values()), default=0)
        return whole_segments_bytes(height_bytes) if self.device.type == "cuda" else height_bytes

    def _settle(self, handle: int) -> None:
        """Resize the memory to what the plans need; it shrinks only while no tensor lies in it."""
        more = self._height_bytes - self._slab_bytes
        if more > 0 or (more < 0 and not self._library.live_blocks(handle)):
            self._resize(self._height_bytes)

    def _resize(self, needed_bytes: int) -> None:
        self._slab_bytes = 0
        self.moves += 1
        if not self._library.resize(self._require_open(), needed_bytes):
            raise MemfitError(
                f"there is no memory for an arena of {needed_bytes} bytes; go without, or use less memory"
            )
        self._slab_bytes = needed_bytes

    def _require_open(self) -> int:
        if self._handle is None:
            raise MemfitError("this arena was closed; make another one with memfit.arena()")
        return self._handle


class _Numbered:
    """A plan or places, its number in the library, how often it was replaced, and how many steps with it were seen."""

    __slots__ = ("changes", "looked_at", "number", "plan")

    def __init__(self, number: int, plan: ArenaPlan | Places, changes: int) -> None:
        self.number, self.plan, self.changes, self.looked_at = number, plan, changes, 0
