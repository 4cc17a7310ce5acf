"""Memory of a device in which the requests of steps have planned addresses: a plan for each kind of step."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Mapping

import torch

from memfit.errors import MemfitError
from memfit.memory.arena.devices import ALIGNMENT_BYTES, library_for
from memfit.memory.arena.layout import ArenaPlan, make_arena_plan
from memfit.memory.arena.places import Places, make_places
from memfit.simulate.cuda_allocator import whole_segments_bytes

MOST_PLANS = 256  # of one memory: plans for shapes that are never used again must not fill it


class PlannedMemory:
    """The memory of an arena, and its plans by key.

    Attributes:
        device: the device of the memory.
        reoptimizations: how often a layout was replaced because a step differed.
        solver_seconds: how long all searches for layouts took together.
        moves: how often the arena got other memory.

    Args:
        device: see above.
        packer: one of `memfit packers`.
        time_limit_seconds: how long the packer may search for the first plan of a key.
        seed: of all that is random in the packer.
    """

    def __init__(self, device: torch.device, *, packer: str, time_limit_seconds: float, seed: int) -> None:
        self.device = device
        self._library = library_for(device)
        self._handle: int | None = self._library.create()
        self._packer, self._time_limit_seconds, self._seed = packer, time_limit_seconds, seed
        self._plans: OrderedDict[Hashable, _Numbered] = OrderedDict()
        self._numbers = itertools.count()
        self._height_bytes = self._slab_bytes = 0
        self._runs = False
        self.moves = self.reoptimizations = 0
        self.solver_seconds = 0.0

    def expect(self, key: Hashable, places: Places) -> None:
        """Give the steps with a key their places before the first of them runs, and take the memory for them.

        Such a step has to say at which position it is (`ArenaLibrary.at`).

        Args:
            key: of the steps.
            places: of a planned step.
        """
        self._require_rest("a step cannot be given places while the arena's step runs")
        self._set(key, places, changes=0)

    def forget(self, key: Hashable) -> None:
        """Drop the plan of a key, if there is one; for a step that will request other memory from now on.

        The next step with that key is recorded. The memory shrinks to what the other plans need, unless a tensor lies
        in it.
        """
        self._require_rest("a plan cannot be dropped while the arena's step runs")
        numbered = self._plans.pop(key, None)
        if numbered is not None:
            self._library.drop_plan(self._require_open(), numbered.number)
            self._note_height()

    def vacate(self) -> None:
        """Free the memory until the next step, unless a tensor lies in it; the plans stay."""
        self._require_rest("the memory cannot be freed while the arena's step runs")
        if self._slab_bytes and self.is_empty:
            self._resize(0)

    def close(self) -> None:
        """Free the memory, or, while tensors lie in it, let it be freed with the last of them. Figures stay."""
        self._require_rest("the arena cannot be closed while its step runs")
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

    def _learn(self, key: Hashable, requests: int) -> None:
        """Make a plan for the requests of the last step, and for those that the present plan was made for.

        Args:
            key: of the step.
            requests: how many it made.
        """
        known = self._plans.get(key)
        recording = self._library.seen(self._require_open(), requests)
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
        self._set(key, plan, changes)

    def _correct_places(self, key: Hashable, requests: int) -> None:
        """Lay the last step out again if it requests more, or in another order, than its places were made for.

        Args:
            key: of the step, which has places.
            requests: how many it made.
        """
        known = self._plans[key]
        assert isinstance(known.plan, Places)
        corrected = known.plan.corrected(self._library.seen_places(self._require_open(), requests))
        if corrected is None:
            return
        self.reoptimizations += 1
        seconds = self._time_limit_seconds / (2 + known.changes)
        again = make_places(corrected, packer=self._packer, time_limit_seconds=seconds, seed=self._seed)
        self._set(key, again, known.changes + 1)

    def _set(self, key: Hashable, plan: ArenaPlan | Places, changes: int) -> None:
        """Let the steps with a key have a plan, and take the memory for them."""
        handle, known = self._require_open(), self._plans.get(key)
        number = next(self._numbers) if known is None else known.number
        set_plan = self._library.set_places if isinstance(plan, Places) else self._library.set_plan
        set_plan(handle, number, plan)  # pyright: ignore[reportArgumentType]
        self.solver_seconds += plan.seconds
        self._plans[key] = _Numbered(number, plan, changes)
        if len(self._plans) > MOST_PLANS:
            self._library.drop_plan(handle, self._plans.popitem(last=False)[1].number)
        self._note_height()

    def _note_height(self) -> None:
        """Note what the plans need, which have changed, and resize the memory."""
        height_bytes = max((each.plan.height_bytes for each in self._plans.values()), default=0)
        self._height_bytes = whole_segments_bytes(height_bytes) if self.device.type == "cuda" else height_bytes
        self._settle()

    def _settle(self) -> None:
        """Resize the memory to what the plans need; it shrinks only while no tensor lies in it."""
        more = self._height_bytes - self._slab_bytes
        if more > 0 or (more < 0 and self.is_empty):
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

    def _require_rest(self, refused: str) -> None:
        if self._runs:
            raise MemfitError(f"{refused}; leave the step first")


class _Numbered:
    """A plan or places, its number in the library, how often it was replaced, and how many steps with it were seen."""

    __slots__ = ("changes", "looked_at", "number", "plan")

    def __init__(self, number: int, plan: ArenaPlan | Places, changes: int) -> None:
        self.number, self.plan, self.changes, self.looked_at = number, plan, changes, 0
