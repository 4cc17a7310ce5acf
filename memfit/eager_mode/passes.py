"""How the passes of a loop ran, and in which time."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass


class Way(enum.StrEnum):
    """How a pass ran.

    - calm: memory was plentiful, and nothing was noted.
    - policy: what had to go was decided call by call.
    """

    CALM = "calm"
    POLICY = "policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The passes that ran in one way.

    Attributes:
        passes: how many.
        seconds: they took, with all that the loop did.
        again_seconds: of it, for calls that were recomputed and copies to the host and back.
    """

    passes: int = 0
    seconds: float = 0.0
    again_seconds: float = 0.0

    @property
    def overhead(self) -> float:
        """The seconds of calls that were recomputed and of copies, as a share of the others."""
        rest_seconds = self.seconds - self.again_seconds
        return self.again_seconds / rest_seconds if rest_seconds > 0 else 0.0


class Passes:
    """All passes of a loop.

    Attributes:
        ran: the passes that have ended, by how they ran.
        way: of the pass that runs now, so far.
    """

    def __init__(self) -> None:
        self.ran = {way: Ran() for way in Way}
        self.begin(0.0, is_noted=True)

    def begin(self, again_seconds: float, *, is_noted: bool) -> None:
        """Begin a pass.

        Args:
            again_seconds: for calls recomputed, and copies, in all passes so far.
            is_noted: whether its calls are noted from the first one on.
        """
        self.way = Way.POLICY if is_noted else Way.CALM
        self._began, self._again_seconds = time.perf_counter(), again_seconds

    def end(self, again_seconds: float) -> None:
        """End the pass, and count it; `again_seconds` as for `begin`."""
        self.ran = self.with_present(again_seconds)

    def with_present(self, again_seconds: float) -> dict[Way, Ran]:
        """Return the passes that ran in each way, the present one included; `again_seconds` as for `begin`."""
        so_far = self.ran[self.way]
        ran = Ran(
            passes=so_far.passes + 1,
            seconds=so_far.seconds + time.perf_counter() - self._began,
            again_seconds=so_far.again_seconds + again_seconds - self._again_seconds,
        )
        return {**self.ran, self.way: ran}
