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
        again_seconds: for calls that were recomputed, and copies, in all passes so far.
    """

    def __init__(self) -> None:
        self.ran = {way: Ran() for way in Way}
        self.again_seconds = 0.0
        self.begin(is_noted=True)

    def begin(self, *, is_noted: bool) -> None:
        """Begin a pass.

        Args:
            is_noted: whether its calls are noted from the first one on.
        """
        self.way = Way.POLICY if is_noted else Way.CALM
        self._began, self._again_seconds = time.perf_counter(), self.again_seconds

    def end(self) -> None:
        """End the pass, and count it."""
        self.ran = self.with_present()

    def with_present(self) -> dict[Way, Ran]:
        """Return the passes that ran in each way, the present one included."""
        so_far = self.ran[self.way]
        ran = Ran(
            passes=so_far.passes + 1,
            seconds=so_far.seconds + time.perf_counter() - self._began,
            again_seconds=so_far.again_seconds + self.again_seconds - self._again_seconds,
        )
        return {**self.ran, self.way: ran}
