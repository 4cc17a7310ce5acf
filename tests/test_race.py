"""The race of compiled graphs: turns until each has run often enough, then the fastest alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from memfit.kernels import race
from memfit.kernels.race import RUNS, Clock, Race


@dataclass
class Hand:
    """Moves the clock that races read."""

    now: float = 0.0


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    hand = Hand()
    monkeypatch.setattr(race, "now", lambda _device: hand.now)
    return hand


@dataclass
class Runner:
    """Code whose halves take so many seconds."""

    hand: Hand
    forward: float
    backward: float
    first: float = 0.0  # of the first forward pass, beside
    calls: int = 0
    clock: Clock = field(default_factory=lambda: Clock(torch.device("cpu")))

    @property
    def function(self) -> Callable[..., Any]:
        def run(number: int) -> Any:
            self.calls += 1
            self._timed(self.forward + (self.first if self.calls == 1 else 0.0), is_backward=False)
            return number, lambda: self._timed(self.backward, is_backward=True)

        return run

    def _timed(self, seconds: float, *, is_backward: bool) -> None:
        def half() -> None:
            self.hand.now += seconds

        self.clock.timed(half, is_backward=is_backward)


def race_of(runners: list[Runner], won: list[Runner]) -> Race:
    return Race(cast("Any", runners), cast("Any", won.append))


def test_the_fastest_in_both_halves_is_kept(hand: Hand) -> None:
    slow, fast = Runner(hand, 1.0, 3.0), Runner(hand, 2.0, 1.5, first=100.0)
    won: list[Runner] = []
    run = race_of([slow, fast], won)
    for number in range(2 * RUNS):
        result, backward = run(number)
        assert result == number
        backward()
        assert not won
    assert slow.calls == fast.calls == RUNS
    for number in range(5):
        run(number)[1]()
    assert won == [fast]
    assert (slow.calls, fast.calls) == (RUNS, RUNS + 5)
    assert not fast.clock.is_on and len(fast.clock.seconds[False]) == RUNS


def test_calls_without_backward_passes_go_to_the_first_in_the_end(hand: Hand) -> None:
    first, second = Runner(hand, 2.0, 1.0), Runner(hand, 1.0, 1.0)
    won: list[Runner] = []
    run = race_of([first, second], won)
    for number in range(30 * RUNS):
        run(number)
    assert won == [first]


def test_several_calls_before_their_backward_passes_are_timed(hand: Hand) -> None:
    first, second = Runner(hand, 2.0, 1.0), Runner(hand, 1.0, 1.0)
    won: list[Runner] = []
    run = race_of([first, second], won)
    while not won:
        for _, backward in [run(number) for number in range(4)]:
            backward()
    assert won == [second]


def test_a_machine_that_is_slow_for_half_of_the_turns_counts_for_neither(hand: Hand) -> None:
    first, second = Runner(hand, 1.0, 1.0), Runner(hand, 1.05, 1.0)
    won: list[Runner] = []
    run = race_of([first, second], won)
    for turn in range(2 * RUNS + 1):
        times = 3.0 if turn <= RUNS else 1.0  # of what count, six turns of the first, and five of the second
        first.forward, second.forward = times, times * 1.05
        run(0)[1]()
    assert won == [first]


def test_a_half_that_fails_is_not_counted(hand: Hand) -> None:
    clock = Clock(torch.device("cpu"))
    clock.is_on = True

    def fails() -> None:
        hand.now += 1.0
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        clock.timed(fails, is_backward=False)
    assert clock.seconds == {False: [], True: []} and clock.runs is None
