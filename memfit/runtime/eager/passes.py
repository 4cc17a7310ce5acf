"""The passes of a loop, one after the other: which structure each has, what a plan says about it, how it went."""

from __future__ import annotations

import enum
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.runtime.eager.contents import Contents
from memfit.runtime.eager.needs import Need
from memfit.runtime.eager.pass_graph import Key
from memfit.runtime.eager.sources import Source
from memfit.runtime.eager.structures import MOST_CALLS, Structure, Structures
from memfit.runtime.eager.trace import Trace, TracedCall, aliases_of
from memfit.torch_private.autograd import in_backward

_NOT_YET = -1  # number of a call that was never seen


class Way(enum.StrEnum):
    """How a pass ran.

    - calm: memory was plentiful, and nothing was noted.
    - policy: what had to go was decided call by call.
    - plan: a plan of the same structure was followed.
    - left: a plan was followed up to a call that differed, and the policy decided from there.
    """

    CALM = "calm"
    POLICY = "policy"
    PLAN = "plan"
    LEFT = "left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The passes that ran in one way.

    Attributes:
        passes: how many.
        seconds: they took, with all that the loop did.
        again_seconds: of it, for calls that were made again and copies to the host and back.
    """

    passes: int = 0
    seconds: float = 0.0
    again_seconds: float = 0.0

    @property
    def overhead(self) -> float:
        """The seconds of calls that were made again and of copies, as a share of the others."""
        rest_seconds = self.seconds - self.again_seconds
        return self.again_seconds / rest_seconds if rest_seconds > 0 else 0.0


@dataclass(slots=True, kw_only=True)
class _Pass:
    """The pass that runs now.

    Attributes:
        way: so far.
        began, again_seconds: clock and seconds of calls made again at its begin.
        is_whole: whether all of its calls were noted.
        numbers: of the needs of its calls.
        followed: the structure whose plan is followed.
        made: its contents.
        trace: if it is written down.
        has_backward: whether its backward pass has begun.
    """

    way: Way
    began: float
    again_seconds: float
    is_whole: bool
    numbers: list[int] = field(default_factory=list[int])
    followed: Structure | None = None
    made: dict[Key, weakref.ref[Source]] = field(default_factory=dict[Key, "weakref.ref[Source]"])
    trace: Trace | None = None
    has_backward: bool = False


class Passes:
    """All passes of a loop.

    Attributes:
        ran: the passes that have ended, by how they ran.

    Args:
        contents: of the device; what a plan says is done to them.
        device: that has the budget.
    """

    def __init__(self, contents: Contents, device: torch.device) -> None:
        self.ran = {way: Ran() for way in Way}
        self._contents = contents
        self._structures = Structures(device, contents.budget_bytes, contents.copies.host)
        self._has_plans = False

    def begin(self, *, is_noted: bool) -> None:
        """Begin a pass.

        Args:
            is_noted: whether its calls are noted from the first one on.
        """
        contents, structures = self._contents, self._structures
        contents.held.clear()
        self._pass = now = _Pass(
            way=Way.POLICY if is_noted else Way.CALM,
            began=time.perf_counter(),
            again_seconds=contents.counts.again_seconds,
            is_whole=is_noted,
        )
        if is_noted:
            self._has_plans = structures.has_plans
            now.followed = structures.expected()
            now.way = Way.POLICY if now.followed is None else Way.PLAN
            now.trace = Trace(contents.sources, contents.live_bytes()) if structures.wants_trace else None

    def note_from_here(self) -> None:
        """Note that the calls of a calm pass are noted from here on."""
        self._pass.way = Way.POLICY

    def before_call(self, need: Need | None) -> None:
        """Compare a call with the structure that is followed, and do what its plan says before the call.

        Args:
            need: of the call; None if there was none like it.
        """
        now = self._pass
        if not now.is_whole:
            return
        position = len(now.numbers)
        now.numbers.append(_NOT_YET if need is None else need.number)
        if position == MOST_CALLS:  # too long to be planned
            now.is_whole, now.trace = False, None
        if now.followed is None:
            return
        expected = now.followed.numbers
        if position >= len(expected) or expected[position] != now.numbers[-1]:
            now.followed = self._structures.beginning_with(now.numbers)
            if now.followed is None:
                self._leave()
                return
            for earlier in range(position):
                self._let_go(now, earlier)
        self._let_go(now, position)

    def learned(self, need: Need) -> None:
        """Note what a call took that was made for the first time."""
        if self._pass.is_whole and self._pass.numbers:
            self._pass.numbers[-1] = need.number

    def made(self, sources: Iterable[Source]) -> None:
        """Note contents that the last call made, and hold those that the plan has longer than the loop."""
        now = self._pass
        if not self._has_plans or not now.is_whole:
            return
        position = len(now.numbers) - 1
        for source in sources:
            key = source.key = (position, source.place)
            now.made[key] = weakref.ref(source)
            self.hold(source)

    def hold(self, source: Source) -> None:
        """Hold contents that were just made, or made again, where the plan has them longer than the loop."""
        now = self._pass
        if now.followed is None or now.followed.decisions is None or source.key is None:
            return
        position = len(now.numbers) - 1
        spans = now.followed.decisions.held.get(source.key, ())
        storage = source.live
        if storage is not None and any(begin <= position < end for begin, end in spans):
            self._contents.held[source] = storage

    def begin_backward(self) -> None:
        """Note, at the first node of each backward pass, what code holds besides autograd."""
        now = self._pass
        if not now.has_backward:
            now.has_backward = True
            if now.trace is not None:
                now.trace.begin_backward(aliases_of(self._contents.kept))

    @property
    def trace(self) -> Trace | None:
        """Where the calls of this pass are written down, if they are."""
        return self._pass.trace

    def traced(
        self, name: str, need: Need, seconds: float, read: Any, written: list[torch.Tensor], returned: Any
    ) -> None:
        """Write down a call; the arguments are those of `Trace.add` and `TracedCall`."""
        now = self._pass
        if now.trace is None:
            return
        if len(now.trace.calls) != len(now.numbers) - 1:  # a call before this one raised an error
            now.trace = None
            return
        now.trace.add(TracedCall(name, need, seconds, is_backward=in_backward()), read, written, returned)

    def end(self) -> None:
        """End the pass: count it, and learn its structure."""
        now, contents = self._pass, self._contents
        if now.followed is not None and len(now.numbers) < len(now.followed.numbers):
            self._leave()
        self.ran[now.way] = self.with_present()[now.way]
        contents.held.clear()
        if now.is_whole and now.way is not Way.CALM:
            if now.trace is not None:
                now.trace.end()
            again_seconds = contents.counts.again_seconds - now.again_seconds
            by_plan = now.way is Way.PLAN
            self._structures.ended(now.numbers, again_seconds, by_plan=by_plan, trace=now.trace)

    def with_present(self) -> dict[Way, Ran]:
        """Return the passes that ran in each way, the present one included."""
        now, so_far = self._pass, self.ran[self._pass.way]
        ran = Ran(
            passes=so_far.passes + 1,
            seconds=so_far.seconds + time.perf_counter() - now.began,
            again_seconds=so_far.again_seconds + self._contents.counts.again_seconds - now.again_seconds,
        )
        return {**self.ran, now.way: ran}

    def close(self) -> None:
        """End what runs in the background."""
        self._structures.stop()

    def _let_go(self, now: _Pass, position: int) -> None:
        decisions = now.followed.decisions if now.followed is not None else None
        if decisions is None:
            return
        for key in decisions.released.get(position, ()):
            source = now.made[key]() if key in now.made else None
            if source is not None:
                self._contents.held.pop(source, None)
        for keys, act in (
            (decisions.to_host, self._contents.begin_to_host),
            (decisions.let_go, self._contents.let_go),
            (decisions.to_device, self._contents.begin_to_device),
        ):
            for key in keys.get(position, ()):
                source = now.made[key]() if key in now.made else None
                if source is not None:
                    act(source)

    def _leave(self) -> None:
        """Let the policy decide from here on; at the first call nothing has been done by the plan."""
        self._pass.followed, self._pass.way = None, Way.LEFT if len(self._pass.numbers) > 1 else Way.POLICY
        self._contents.held.clear()
