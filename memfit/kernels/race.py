"""A race: compiled code of one graph that takes turns in the first steps of training, until the fastest is known.

What generated code takes is known before it runs, how long it runs is not. So code that fits the budget is timed where
it is used, and no step more is run than training asks for.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import truediv
from typing import Any

import torch

from memfit.cost.gpu_timing import now
from memfit.plan import Plan
from memfit.torch_private.inductor import InductorHalf

_log = logging.getLogger("memfit")
RUNS = 12
"""Of each entrant's halves; the first of each does not count."""
_MOST_CALLS = 10 * RUNS  # of one entrant: forward passes without a backward pass end no race


class Clock:
    """Times the halves of compiled code while it races.

    Args:
        device: that the code runs on; a GPU is waited for before and after a half.

    Attributes:
        is_on: whether halves are timed.
        seconds: of the halves so far; those of the backward half are under True.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_on = False
        self.seconds: dict[bool, list[float]] = {False: [], True: []}
        self._device = device

    def timed(self, half: Callable[[], Any], *, is_backward: bool) -> Any:
        """Return what a half returns.

        Args:
            half: runs it.
            is_backward: which one it is.
        """
        if not self.is_on:
            return half()
        began = now(self._device)
        returned = half()
        self.seconds[is_backward].append(now(self._device) - began)
        return returned

    @property
    def runs(self) -> list[float] | None:
        """The seconds of both halves together, run by run; None before each has run often enough."""
        if min(map(len, self.seconds.values())) < RUNS:
            return None
        return [forward + backward for forward, backward in zip(*self.seconds.values(), strict=False)][1:RUNS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A compiled graph.

    Attributes:
        function: what runs it.
        plan: its plan.
        left_bytes: what the budget leaves for the graph.
        peak_bytes: of its generated code, residents and what is outside of the graph included.
        peak_with: returns that peak, given the most that is outside of the graph between its halves, and by how much
            more is live when the backward half begins than when the forward half has ended (None: as planned).
        is_own: whether it is what Inductor makes without a budget.
        halves: as Inductor generated them.
        clock: times them.
    """

    function: Callable[..., Any]
    plan: Plan
    left_bytes: int
    peak_bytes: int
    peak_with: Callable[[int, int | None], int]
    is_own: bool = False
    halves: tuple[InductorHalf, ...] = ()
    clock: Clock = field(default_factory=lambda: Clock(torch.device("cpu")))


class Race:
    """Calls entrants in turns, and the fastest from then on.

    Args:
        entrants: all fit the budget; the first one wins if no backward pass comes.
        decided: called with the one that has won.
    """

    def __init__(self, entrants: Sequence[Compiled], decided: Callable[[Compiled], None]) -> None:
        self._entrants = list(entrants)
        self._calls = [0] * len(entrants)
        self._decided = decided
        for entrant in entrants:
            entrant.clock.is_on = True

    def __call__(self, *inputs: Any) -> Any:
        """Call the entrant whose turn it is."""
        if len(self._entrants) > 1:
            self._decide()
        turn = min(range(len(self._entrants)), key=self._calls.__getitem__)
        self._calls[turn] += 1
        return self._entrants[turn].function(*inputs)

    def _decide(self) -> None:
        runs = [entrant.clock.runs for entrant in self._entrants]
        found = [each for each in runs if each is not None]
        if len(found) < len(runs) and min(self._calls) < _MOST_CALLS:
            return
        winner = self._entrants[0]
        if len(found) == len(runs):  # pairs of turns are as long as each other, whatever else the machine does
            ratios = [statistics.median(map(truediv, each, found[0])) for each in found]
            winner = self._entrants[ratios.index(min(ratios))]
            _log.info("memfit: compiled graphs that fit take %s of the first one's time; the fastest is kept", ratios)
        for entrant in self._entrants:
            entrant.clock.is_on = False
        self._entrants, self._calls = [winner], [0]
        self._decided(winner)
