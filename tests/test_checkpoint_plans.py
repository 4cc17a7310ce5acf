"""Plans of checkpoints on hand-made passes: the knapsack against brute force, choices, chains, races. No torch."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memfit.checkpointing.chain import Link
from memfit.checkpointing.choices import FULL, NONE, Choice, Prices, choices_of
from memfit.checkpointing.groups import CHAINED, CHAINS, HALVED, course_of
from memfit.checkpointing.knapsack import Moments, solve
from memfit.checkpointing.planning import Planner
from memfit.checkpointing.plans import Plans
from memfit.checkpointing.policy import read_policy, rules_for, to_plain
from memfit.checkpointing.seen import CallSeen, LeanPass, MomentSeen, OpSeen, SpanSeen, StorageSeen
from memfit.checkpointing.shapes import Race, Shape
from memfit.errors import InvalidFileError
from memfit.memory.contract import Contract, WindowKind

FREE = Prices(checkpoint=0.0, saved=0.0, mode=0.0)


def choice(held: int, seconds: float, more: int = 0, forward: int = 0) -> Choice:
    return Choice(seconds=seconds, held_bytes=held, more_bytes=more, forward_bytes=forward)


CHOICES = st.lists(
    st.builds(choice, st.integers(0, 9), st.integers(0, 9).map(float), st.integers(-2, 2), st.integers(0, 9)),
    min_size=1,
    max_size=3,
)


def brute_force(choices: list[list[Choice]], moments: Moments) -> float:
    best = math.inf
    for chosen in itertools.product(*choices):
        held = [0, *itertools.accumulate(c.held_bytes for c in chosen)]
        after = all(held[n + 1] <= most for n, most in enumerate(moments.after))
        within = all(held[n] + chosen[n].more_bytes <= most for n, most in enumerate(moments.within))
        forward = all(held[n] + chosen[n].forward_bytes <= most for n, most in enumerate(moments.forward))
        if after and within and forward:
            best = min(best, sum(c.seconds for c in chosen))
    return best


@given(st.data())
def test_knapsack_is_exact_on_small_passes(data: st.DataObject) -> None:
    choices = data.draw(st.lists(CHOICES, min_size=1, max_size=4))
    most = st.lists(st.integers(0, 25), min_size=len(choices), max_size=len(choices))
    moments = Moments(after=data.draw(most), within=data.draw(most), forward=data.draw(st.just([]) | most))
    found, best = solve(choices, moments), brute_force(choices, moments)
    assert (found is None) == (best == math.inf)
    if found is not None:
        assert found.seconds == best == found.bound_seconds
        assert best == sum(options[index].seconds for options, index in zip(choices, found.chosen, strict=True))


def test_a_thinned_search_keeps_within_and_has_a_bound() -> None:
    choices = [[choice(0, 97.0 + n % 7), choice(101 + n, 40.0 + n % 5), choice(230 + 3 * n, 0.0)] for n in range(10)]
    moments = Moments(after=[1100] * 10, within=[1100] * 10)
    exact = solve(choices, moments)
    thinned = solve(choices, moments, most_states=12)
    assert exact is not None and thinned is not None
    assert thinned.bound_seconds <= exact.seconds <= thinned.seconds
    held = sum(options[index].held_bytes for options, index in zip(choices, thinned.chosen, strict=True))
    assert held <= 1100


def call(block: str = "b", *, draws: bool = False) -> CallSeen:
    """Return a block: op 0 makes 100 bytes that are saved; module `b.m` makes 400 in ops 1 and 2."""
    return CallSeen(
        block=block,
        ops=[
            OpSeen(name="mm", nth=0, storage=0, seconds=8.0, draws=False, moment=0),
            OpSeen(name="exp", nth=0, storage=1, seconds=1.0, draws=draws, moment=11),
            OpSeen(name="cos", nth=0, storage=2, seconds=1.0, draws=draws, moment=13),
            OpSeen(name="mm", nth=1, storage=3, seconds=8.0, draws=False, moment=21),
        ],
        storages=[
            StorageSeen(size_bytes=100, last_write=0, first_read=1, saves=[12]),
            StorageSeen(size_bytes=200, last_write=1, first_read=2, saves=[14]),
            StorageSeen(size_bytes=200, last_write=2, first_read=3, saves=[15, 20]),
            StorageSeen(size_bytes=50, last_write=3, is_output=True),
        ],
        spans=[SpanSeen(name=f"{block}.m", first=10, last=16, given=frozenset([0]))],
        saves=[12, 14, 15, 20],
        input_bytes=50,
        follows=True,
    )


def test_choices_of_a_block() -> None:
    prices = Prices(checkpoint=0.0, saved=0.0, mode=1.0)
    found = {
        str(dict(c.rules)): (c.seconds, c.held_bytes, c.more_bytes) for c in choices_of(call(), prices, leaner=False)
    }
    assert found[str({"b": NONE})] == (0.0, 500, 0)
    assert found[str({"b": NONE, "b.m": FULL})] == (2.0, 300, 0)  # what it was given, and what is saved after it
    assert found[str({"b": FULL})] == (10.0, 0, 0)
    assert found[str({"b": (("mm", 0),)})] == (2.0 + 4 * 1.0, 100, 0)


def dropping(block: str = "b") -> CallSeen:
    """Return the block whose forward pass, with nothing kept, has 400 of its 550 bytes at most."""
    seen = call(block)
    for number, storage in enumerate(seen.storages):
        storage.made = number
    seen.storages[0].dropped, seen.storages[1].dropped = 2, 3
    return seen


def test_a_forward_pass_that_keeps_takes_less_more_than_it_holds() -> None:
    found = {str(dict(c.rules)): c.forward_bytes for c in choices_of(dropping(), FREE, leaner=False)}
    assert found[str({"b": NONE})] == 550 - 400  # and not the 500 that are held
    assert found[str({"b": (("mm", 0),)})] == 500 - 400
    assert found[str({"b": FULL})] == 0


def test_what_forward_has_anyway_is_not_counted_twice() -> None:
    seen = lean(2)
    seen.calls = [dropping("layers.0"), dropping("layers.1")]
    most = [MomentSeen(last=n, own=None, peak_bytes=3000, forward=n) for n in range(2)]
    seen.moments[1:1] = most
    planner = Planner(seen, FREE)
    everything = planner.everything_kept(0)
    assert everything.predicted_bytes == 3000 + 500 + 150
    assert everything.peak_is_in == "the forward pass of layers.1"
    assert planner.plan(3649, 0).seconds > planner.plan(3650, 0).seconds == 0


def test_a_mode_and_a_checkpoint_have_their_price() -> None:
    prices = Prices(checkpoint=1.0, saved=0.5, mode=10.0)
    found = choices_of(call(), prices, leaner=False)
    assert not any(c.has_mode for c in found)
    assert next(c.seconds for c in found if c.rules == {"b": FULL}) == 10.0 + 1.0 + 4 * 0.5


def test_draws_are_kept_together_or_not_at_all() -> None:
    found = [c.rules["b"] for c in choices_of(call(draws=True), FREE, leaner=False) if c.has_mode]
    assert found
    assert all((("exp", 0) in rule) == (("cos", 0) in rule) for rule in found)


def test_what_is_read_before_its_last_write_is_not_kept() -> None:
    block = call()
    block.storages[0].last_write = 2
    assert all(("mm", 0) not in c.rules["b"] for c in choices_of(block, FREE, leaner=False) if c.has_mode)


def lean(count: int = 6) -> LeanPass:
    calls = [call(f"layers.{n}") for n in range(count)]
    calls[0].follows = False
    forward = [MomentSeen(last=n, own=None, peak_bytes=1000 + 50 * (n + 1)) for n in range(count)]
    backward = [MomentSeen(last=n - 1, own=n, peak_bytes=1600 + 50 * (n + 1)) for n in reversed(range(count))]
    ends = MomentSeen(last=-1, own=None, peak_bytes=1000)
    return LeanPass(calls=calls, moments=[ends, *forward, *backward, ends], start_bytes=900)


def test_everything_is_kept_where_there_is_room() -> None:
    planner = Planner(lean(), FREE)
    planned = planner.plan(1 << 40, 0)
    assert planned.is_most and planned.seconds == 0
    assert planned.predicted_bytes == planner.everything_kept(0).predicted_bytes == 1600 + 300 + 5 * 500


@pytest.mark.parametrize("limit", range(1900, 4400, 100))
def test_plans_keep_within_and_larger_ones_are_no_slower(limit: int) -> None:
    planner = Planner(lean(), FREE)
    planned, larger = planner.plan(limit, 0), planner.plan(limit + 100, 0)
    assert planned.predicted_bytes <= limit
    assert larger.seconds <= planned.seconds
    assert planned.bound_seconds <= planned.seconds


def test_inputs_are_computed_again_below_full_checkpoints() -> None:
    planner = Planner(lean(12), FREE)
    full = 1600 + 50 * 12
    planned = planner.plan(full - 150, 0)
    assert planned.predicted_bytes <= full - 150
    assert set(planned.rules.values()) >= {FULL, CHAINED}
    assert not planned.is_least
    alone = Planner(lean(12), FREE, may_chain=False).plan(1000, 0)
    assert alone.is_least and CHAINED not in alone.rules.values()


def test_inputs_by_halves_take_less_and_more_seconds() -> None:
    chained, halved = (
        Planner(lean(24), FREE).of_rules({f"layers.{n}": rule for n in range(1, 24)}, 0) for rule in (CHAINED, HALVED)
    )
    assert chained.predicted_bytes == 1600 + 50 * 24  # all inputs are there when backward begins
    course = course_of(24, HALVED)
    assert halved.predicted_bytes == max(1600 + 50 * (n + 1 - len(course.absent[n])) for n in range(24)) < 1600 + 50 * 9
    assert chained.seconds < halved.seconds < 3 * chained.seconds
    least = Planner(lean(24), FREE).least(0)
    assert HALVED in least.rules.values() and least.predicted_bytes <= halved.predicted_bytes


def test_calls_of_a_group_are_checkpoints_even_if_that_frees_nothing() -> None:
    seen = lean(12)
    for call in seen.calls:
        for storage in call.storages:
            storage.saves.clear()
        call.saves.clear()
    planned = Planner(seen, FREE).plan(1600 + 50 * 12 - 150, 0)
    assert {planned.rules["layers.0"], *planned.rules.values()} == {FULL, CHAINED}


@pytest.mark.parametrize("rule", CHAINS)
@pytest.mark.parametrize("length", [2, 3, 5, 8, 13, 24])
def test_a_group_runs_what_its_course_says(length: int, rule: str) -> None:
    ran: list[int] = []
    links: list[Link] = []
    tensor = torch.zeros(1, requires_grad=True)
    for number in range(length):

        def run(given: torch.Tensor, number: int = number) -> torch.Tensor:
            ran.append(number)
            return given + 1

        before = links[-1] if links else None
        given = None if number else tensor
        links.append(Link(run, (), {}, 0, given, before, torch.device("cpu"), is_halved=rule == HALVED))
    course = course_of(length, rule)
    for number in reversed(range(length)):
        assert links[number].take_input().item() == number
        there = {place for place in range(1, number) if links[place]._again is not None}
        assert there == set(range(1, number)) - course.absent[number]
    assert tuple(ran.count(number) for number in range(length)) == course.runs


def two_modules(block: str) -> CallSeen:
    """Return a block with two modules, each of which makes 400 bytes that are saved inside of it."""
    names = ["mm", "exp", "cos", "tan"]
    return CallSeen(
        block=block,
        ops=[
            OpSeen(name=name, nth=0, storage=n, seconds=1.0, draws=False, moment=10 * n) for n, name in enumerate(names)
        ],
        storages=[
            StorageSeen(size_bytes=100, last_write=0, saves=[12]),
            StorageSeen(size_bytes=400, last_write=1, saves=[13]),
            StorageSeen(size_bytes=100, last_write=2, saves=[14, 32]),
            StorageSeen(size_bytes=400, last_write=3, saves=[33]),
        ],
        spans=[
            SpanSeen(name=f"{block}.one", first=5, last=15, given=frozenset([0])),
            SpanSeen(name=f"{block}.two", first=25, last=35, given=frozenset([2])),
        ],
        saves=[12, 13, 14, 32, 33],
    )


def test_the_least_plan_computes_again_only_what_it_must() -> None:
    seen = lean()
    seen.calls = [two_modules(f"layers.{n}") for n in range(6)]
    seen.moments[7] = MomentSeen(last=4, own=5, peak_bytes=9000)
    planned = Planner(seen, FREE).plan(10, 0)
    assert planned.is_least and planned.predicted_bytes == 9000 - 400
    assert planned.rules["layers.5"] == FULL and planned.rules["layers.5.one"] == FULL
    assert all(f"layers.{n}.one" not in planned.rules for n in range(5))


def test_more_at_the_beginning_is_more_at_the_peak() -> None:
    planner = Planner(lean(), FREE)
    assert planner.plan(2500, 0).seconds < planner.plan(2500, 400).seconds
    assert planner.everything_kept(70).predicted_bytes == planner.everything_kept(0).predicted_bytes + 70


def test_what_follows_backward_is_named_and_costs_no_seconds() -> None:
    seen = lean()
    seen.moments[-1] = MomentSeen(last=-1, own=None, peak_bytes=9000)
    planned = Planner(seen, FREE).plan(8000, 0)
    assert planned.is_least and planned.predicted_bytes == 9000
    assert planned.seconds == 0
    assert "update" in planned.peak_is_in


def test_blocks_with_collectives_are_computed_again_everywhere() -> None:
    seen = lean()
    for each in seen.calls:
        each.has_collectives = True
    assert set(Planner(seen, FREE).plan(1 << 40, 0).rules.values()) == {FULL}


def test_a_block_that_is_called_twice_counts_twice() -> None:
    seen = lean(2)
    seen.calls[1].block = "layers.0"
    planned = Planner(seen, FREE).everything_kept(0)
    assert dict(planned.rules) == {"layers.0": NONE}
    assert planned.predicted_bytes >= 1600 + 100 + 2 * 500


def test_policies_as_plain_data() -> None:
    policy = {
        (64, WindowKind.FIRST): {"a": NONE, "b": (("mm", 0), ("mm", 12))},
        (64, WindowKind.LATER): {"a": CHAINED},
        (256, WindowKind.FIRST): {"a": FULL},
    }
    assert read_policy(to_plain(policy)) == policy
    assert rules_for(policy, 10, WindowKind.FIRST) == policy[64, WindowKind.FIRST]
    assert rules_for(policy, 10, WindowKind.LATER) == policy[64, WindowKind.LATER]
    assert rules_for(policy, 65, WindowKind.LATER) == policy[256, WindowKind.FIRST]
    assert rules_for(policy, 999, WindowKind.FIRST) == policy[256, WindowKind.FIRST]
    with pytest.raises(InvalidFileError, match="expected block -> rule"):
        read_policy({"64": ["full"]})


def test_plans_need_no_torch() -> None:
    code = "import sys, memfit.checkpointing.planning, memfit.checkpointing.policy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_races_take_the_plan_that_was_faster() -> None:
    planner = Planner(lean(), FREE)
    one, other = planner.plan(2500, 0), planner.plan(3000, 0)
    for seconds, winner in ((3.0, None), (1.0, None), (5.0, one)):
        race = Race((one, other))
        steps = [race.note(taken) for taken in (4.0, 3.0, 9.0, 7.0, seconds, 8.0)]
        assert steps[:5] == [None, None, other, None, None]
        assert steps[5] is (winner if seconds > 3.0 else one if seconds == 3.0 else None)
        assert race.is_over


def test_a_plan_of_a_race_counts_what_has_grown_since_it_was_made() -> None:
    seen = lean()
    for grown_bytes, is_taken in ((10, True), (400, False)):
        compiled: Any = SimpleNamespace(compilations=0)
        plans = Plans(Contract(3000), None, compiled, torch.device("cpu"), may_chain=True, blocks=[])
        shape = Shape(numel=1, kind=WindowKind.FIRST, lean=seen, planner=Planner(seen, FREE))
        shape.overloads = {op.name: op.name for each in seen.calls for op in each.ops}
        plans.renew(shape, seen.start_bytes)
        assert shape.planned is not None and shape.planner is not None
        rival = shape.planner.plan(2800, 0)
        shape.race, shape.next_plan = Race((shape.planned, rival)), rival
        plans.renew(shape, seen.start_bytes + grown_bytes)
        assert (shape.planned is rival) == is_taken
        assert shape.next_plan is None
        if is_taken:
            assert shape.start_bytes == seen.start_bytes  # for which it was made


def test_of_what_one_operator_makes_only_what_autograd_saves_is_held() -> None:
    norm = OpSeen(name="norm", nth=0, storage=0, seconds=1.0, draws=False, moment=0)
    storage = StorageSeen(size_bytes=1000, last_write=0, saves=[1], unsaved_bytes=990)
    seen = CallSeen(block="b", ops=[norm], storages=[storage], saves=[1])
    held = {c.held_bytes for c in choices_of(seen, FREE, leaner=False) if c.rules == {"b": NONE}}
    assert held == {10}


def test_at_the_bytes_of_checkpoints_around_all_blocks_no_input_is_computed_again() -> None:
    seen = lean(12)
    whole = Planner(seen, FREE).as_seen(0)
    assert whole.predicted_bytes == 1600 + 50 * 12 and set(whole.rules.values()) == {FULL}
