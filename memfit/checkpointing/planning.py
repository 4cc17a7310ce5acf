"""A plan of what is kept and what is computed again, from one lean pass, within so many bytes. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from memfit.checkpointing.choices import (
    FULL,
    NONE,
    Choice,
    Prices,
    Rule,
    choice_of_rules,
    choices_of,
    full_choice,
    none_choice,
)
from memfit.checkpointing.knapsack import Moments, solve
from memfit.checkpointing.seen import CallSeen, equalize_seconds

CHAINED = "full, input too"
"""Rule of a block that is computed again, and whose input is computed again, too, from the block before it."""

_DUMMY = Choice(seconds=0.0, held_bytes=0, more_bytes=0)
_UNBOUNDED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentSeen:
    """A part of a lean pass.

    Attributes:
        last: the last call that is live: whose forward pass has begun, and whose backward pass has not; -1 if none is.
        own: the call whose backward pass it is; None outside of backward passes of calls.
        peak_bytes: the most that was live in it.
    """

    last: int
    own: int | None
    peak_bytes: int


@dataclass(slots=True, kw_only=True)
class LeanPass:
    """A pass in which all blocks were computed again.

    Attributes:
        calls: of blocks, in the order of the forward pass.
        moments: of the pass, in order.
        start_bytes: that were live when it began.
    """

    calls: list[CallSeen] = field(default_factory=list[CallSeen])
    moments: list[MomentSeen] = field(default_factory=list[MomentSeen])
    start_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan.

    Attributes:
        rules: name of a module -> what is done with it.
        predicted_bytes: the most that is live, of a pass that begins with as many bytes as it was planned for.
        seconds: for what is computed again.
        bound_seconds: no plan of these choices takes fewer.
        is_least, is_most: whether no plan takes less, or none is faster.
        has_mode: whether a dispatch mode is on in a block.
        peak_is_in: the part of the pass that takes the most.
        more_bytes: that it allows for, beyond what was live at the beginning of the lean pass.
    """

    rules: Mapping[str, Rule]
    predicted_bytes: int
    seconds: float
    bound_seconds: float
    is_least: bool
    is_most: bool
    has_mode: bool
    peak_is_in: str
    more_bytes: int


class Planner:
    """Plans of one lean pass.

    Args:
        lean: the pass.
        prices: of what is no kernel.
        may_chain: whether the input of a block may be computed again.
    """

    def __init__(self, lean: LeanPass, prices: Prices | None = None, *, may_chain: bool = True) -> None:
        self._lean, self._prices = lean, prices or Prices()
        equalize_seconds(lean.calls)
        self._plain = _choices(lean.calls, self._prices, leaner=False)
        self._leaner: list[list[Choice]] | None = None
        self._chains = _chains(lean.calls) if may_chain else [0] * len(lean.calls)

    def plan(self, limit_bytes: int, more_bytes: int, *, with_modes: bool = True) -> Planned:
        """Return the fastest plan within a limit; if none fits, the one that takes the least.

        Args:
            limit_bytes: that the plan may be predicted to take.
            more_bytes: that are live at the beginning beyond what was live at that of the lean pass.
            with_modes: whether storages of blocks may be kept, which needs a dispatch mode.
        """
        plain = [[c for c in choices if with_modes or not c.has_mode] for choices in self._plain]
        found = self._within(plain, [], limit_bytes, more_bytes)
        if found is None:
            found = self._below(limit_bytes, more_bytes)
        if found.is_least:  # what takes as little in fewer seconds: an update, say, may take most, whatever is kept
            as_little = self._within(plain, [], found.predicted_bytes, more_bytes)
            as_little = as_little or self._below(found.predicted_bytes, more_bytes)
            found = replace(as_little, is_least=True)
        return found

    def everything_kept(self, more_bytes: int) -> Planned:
        """Return the plan that recomputes nothing, which predicts the peak of the bare loop."""
        chosen = [min(choices, key=lambda c: c.seconds) for choices in self._plain]
        return self._planned(chosen, [], more_bytes, bound_seconds=0.0, is_least=False)

    def of_rules(self, rules: Mapping[str, Rule], more_bytes: int) -> Planned:
        """Return the plan that given rules make.

        Args:
            rules: name of a module -> rule; a block without one is computed again.
            more_bytes: as for `plan`.

        Raises:
            InvalidOptionError: results that cannot be kept without others.
        """
        chosen = [choice_of_rules(call, rules, self._prices) for call in self._lean.calls]
        chained = [rules.get(call.block) == CHAINED for call in self._lean.calls]
        groups: list[range] = []
        for number, is_chained in enumerate(chained):
            if is_chained and groups:
                groups[-1] = range(groups[-1].start, number + 1)
            else:
                groups.append(range(number, number + 1))
        return self._planned(chosen, groups, more_bytes, bound_seconds=0.0, is_least=False)

    def least(self, more_bytes: int) -> Planned:
        """Return the plan that takes the least."""
        return self._below(0, more_bytes)

    def _below(self, limit_bytes: int, more_bytes: int) -> Planned:
        """Return a plan that takes less than whole blocks that are checkpointed."""
        if self._leaner is None:
            self._leaner = _choices(self._lean.calls, self._prices, leaner=True)
        best, least = self._within(self._leaner, [], limit_bytes, more_bytes), None
        for length in range(2, max(self._chains, default=0) + 2):
            groups = _groups(self._chains, length)
            found = self._within(self._leaner, groups, limit_bytes, more_bytes)
            if found is not None and (best is None or found.seconds < best.seconds):
                best = found
            leanest = self._leanest(groups, more_bytes)
            if least is None or leanest.predicted_bytes < least.predicted_bytes:
                least = leanest
        plain = self._leanest([], more_bytes)
        if least is None or plain.predicted_bytes <= least.predicted_bytes:
            least = plain
        return best or least

    def _leanest(self, groups: Sequence[range], more_bytes: int) -> Planned:
        assert self._leaner is not None
        chosen = [min(choices, key=lambda c: (c.held_bytes, c.more_bytes, c.seconds)) for choices in self._leaner]
        return self._planned(chosen, groups, more_bytes, bound_seconds=0.0, is_least=True)

    def _within(
        self, choices: Sequence[Sequence[Choice]], groups: Sequence[range], limit_bytes: int, more_bytes: int
    ) -> Planned | None:
        chained = {call for group in groups for call in group}
        allowed = [
            [c for c in options if call not in chained or c.held_bytes == 0] for call, options in enumerate(choices)
        ]
        found = solve(allowed, self._limits(groups, limit_bytes - more_bytes))
        if found is None:
            return None
        chosen = [options[index] for options, index in zip(allowed, found.chosen, strict=True)]
        again = sum(self._forward_seconds(call) for group in groups for call in group[:-1])
        planned = self._planned(chosen, groups, more_bytes, bound_seconds=found.bound_seconds + again, is_least=False)
        return planned if planned.predicted_bytes <= limit_bytes else None

    def _limits(self, groups: Sequence[range], free_bytes: int) -> Moments:
        count = len(self._lean.calls)
        after, within = [_UNBOUNDED_BYTES] * count, [_UNBOUNDED_BYTES] * count
        for moment in self._lean.moments:
            left = free_bytes - moment.peak_bytes + self._relief(groups, moment)
            if moment.own is not None and moment.last < moment.own:
                within[moment.own] = min(within[moment.own], left)
            elif moment.last >= 0:
                after[moment.last] = min(after[moment.last], left)
        return Moments(after=after, within=within)

    def _relief(self, groups: Sequence[range], moment: MomentSeen) -> int:
        """Return the bytes of inputs that are not there at a moment since they are computed again later."""
        return sum(
            self._lean.calls[call].input_bytes
            for group in groups
            if moment.own is None or moment.own not in group
            for call in group[1:]
            if call < (moment.last if moment.own is None else moment.own)
        )

    def _planned(
        self,
        chosen: Sequence[Choice],
        groups: Sequence[range],
        more_bytes: int,
        *,
        bound_seconds: float,
        is_least: bool,
    ) -> Planned:
        held = [0]
        for choice in chosen:
            held.append(held[-1] + choice.held_bytes)
        predicted, moment = max(
            (
                (
                    moment.peak_bytes
                    + held[moment.last + 1]
                    + (chosen[moment.own].more_bytes if moment.own is not None else 0)
                    - self._relief(groups, moment),
                    moment,
                )
                for moment in self._lean.moments
            ),
            key=lambda pair: pair[0],
        )
        rules = {name: rule for choice in chosen for name, rule in choice.rules.items()}
        rules |= {self._lean.calls[call].block: CHAINED for group in groups for call in group[1:]}
        again = sum(self._forward_seconds(call) for group in groups for call in group[:-1])
        seconds = sum(choice.seconds for choice in chosen) + again
        return Planned(
            rules=rules,
            predicted_bytes=predicted + more_bytes,
            seconds=seconds,
            bound_seconds=bound_seconds,
            is_least=is_least,
            is_most=seconds == 0,
            has_mode=any(choice.has_mode for choice in chosen),
            peak_is_in=self._place_of(moment),
            more_bytes=more_bytes,
        )

    def _place_of(self, moment: MomentSeen) -> str:
        if moment.own is not None:
            return f"the backward pass of {self._lean.calls[moment.own].block}"
        if moment.last >= 0:
            return f"the forward pass from {self._lean.calls[moment.last].block} on"
        is_begin = moment == self._lean.moments[0]
        return (
            "what comes before the first block" if is_begin else "what follows backward, such as the optimizer's update"
        )

    def _forward_seconds(self, call: int) -> float:
        return sum(op.seconds for op in self._lean.calls[call].ops)


def _choices(calls: Sequence[CallSeen], prices: Prices, *, leaner: bool) -> list[list[Choice]]:
    """Return the choices of each call; a block that is called several times has them at its first call."""
    of: dict[str, list[CallSeen]] = {}
    for call in calls:
        of.setdefault(call.block, []).append(call)
    known: dict[object, list[Choice]] = {}
    found: list[list[Choice]] = []
    seen: set[str] = set()
    for call in calls:
        if call.block in seen:
            found.append([_DUMMY])
        elif any(each.must_stay for each in of[call.block]):
            found.append([_staying(of[call.block])])
        elif any(each.has_collectives for each in of[call.block]):  # of which all ranks call as many
            found.append([_always_full(of[call.block], prices)])
        elif len(of[call.block]) > 1:
            found.append(_repeated(of[call.block], prices))
        else:
            found.append(_like(known, call, prices, leaner=leaner))
        seen.add(call.block)
    return found


def _like(known: dict[object, list[Choice]], call: CallSeen, prices: Prices, *, leaner: bool) -> list[Choice]:
    """Return the choices of a call, made from those of a call of the same form if there was one."""
    form = call.form
    if form not in known:
        known[form] = [_renamed(c, call.block, "") for c in choices_of(call, prices, leaner=leaner)]
    return [_renamed(choice, "", call.block) for choice in known[form]]


def _renamed(choice: Choice, before: str, after: str) -> Choice:
    return Choice(
        seconds=choice.seconds,
        held_bytes=choice.held_bytes,
        more_bytes=choice.more_bytes,
        rules={after + name.removeprefix(before): rule for name, rule in choice.rules.items()},
        has_mode=choice.has_mode,
    )


def _staying(calls: Sequence[CallSeen]) -> Choice:
    held = sum(none_choice(call).held_bytes for call in calls)
    return Choice(seconds=0.0, held_bytes=held, more_bytes=0, rules={calls[0].block: NONE})


def _always_full(calls: Sequence[CallSeen], prices: Prices) -> Choice:
    seconds = sum(full_choice(call, prices).seconds for call in calls)
    return Choice(seconds=seconds, held_bytes=0, more_bytes=0, rules={calls[0].block: FULL})


def _repeated(calls: Sequence[CallSeen], prices: Prices) -> list[Choice]:
    """Return the two choices of a block that is called several times: at its first call it counts for all of them."""
    found: list[Choice] = []
    for rule in (FULL, NONE):
        each = [full_choice(call, prices) if rule == FULL else none_choice(call) for call in calls]
        found.append(
            Choice(
                seconds=sum(c.seconds for c in each),
                held_bytes=sum(c.held_bytes for c in each),
                more_bytes=0,
                rules={calls[0].block: rule},
            )
        )
    return found


def _chains(calls: Sequence[CallSeen]) -> list[int]:
    """Return for each call how many in a row, up to it, got what the one before returned, each of another block."""
    repeated = {call.block for call in calls if sum(other.block == call.block for other in calls) > 1}
    lengths: list[int] = []
    for number, call in enumerate(calls):
        may_follow = not any(each.must_stay for each in calls[max(0, number - 1) : number + 1])
        follows = call.follows and call.block not in repeated and not call.has_collectives and may_follow
        lengths.append(lengths[-1] + 1 if lengths and follows else 0)
    return lengths


def _groups(chains: Sequence[int], length: int) -> list[range]:
    """Return the calls in groups of at most `length`, each a chain."""
    groups: list[range] = []
    for call, position in enumerate(chains):
        if position == 0 or len(groups[-1]) == length:
            groups.append(range(call, call + 1))
        else:
            groups[-1] = range(groups[-1].start, call + 1)
    return [group for group in groups if len(group) > 1]
