"""Plans, each made from one lean pass: the storages that are kept and recomputed within a budget. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from memfit.checkpointing.calls import chains_of, choices_by_call
from memfit.checkpointing.choices import FULL, NONE, Choice, Prices, Rule, choice_of_rules, full_choice
from memfit.checkpointing.groups import CHAINS, HOSTED, Group, Hosted, groups_of_chains
from memfit.checkpointing.knapsack import Moments, solve
from memfit.checkpointing.seen import LeanPass, MomentSeen, equalize_seconds
from memfit.errors import InvalidOptionError

Division = Sequence[Group | Hosted]
"""Groups of calls whose inputs are not kept; the input of a call in none of them is."""

_UNBOUNDED_BYTES = 1 << 60
_LEAST_HOSTED_BYTES = 1 << 16  # of an input that goes to the host
_PASSES = 3  # forward, forward again, backward: about so many times the seconds of a forward pass run beside copies


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan.

    Attributes:
        rules: name of a module -> what is done with it.
        predicted_bytes: the most that is live, of a pass that begins with as many bytes as it was planned for.
        seconds: for what is recomputed.
        bound_seconds: no plan of these choices takes fewer.
        is_least, is_most: whether no plan takes less, or none is faster.
        has_mode: whether a dispatch mode is on in a block.
        peak_is_in: the part of the pass that takes the most.
        more_bytes: that it allows for, beyond what was live at the beginning of the lean pass.
        start_bytes, kept_bytes, inputs_bytes: of the most: live before the pass; held by blocks; inputs of blocks.
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
    start_bytes: int = 0
    kept_bytes: int = 0
    inputs_bytes: int = 0


class HostTerms(Protocol):
    """What a plan has to know of a host.

    Attributes:
        budget_bytes: of all copies together.
    """

    budget_bytes: int

    def aligned_bytes(self, size_bytes: int) -> int:
        """Return what a copy of so many bytes takes of the budget."""
        ...

    def seconds(self, size_bytes: int) -> float:
        """Return the seconds of a copy to the host and back."""
        ...


class Planner:
    """Plans of one lean pass.

    Args:
        lean: the pass.
        prices: of what is no kernel.
        may_chain: whether the input of a block may be recomputed.
        is_shared: whether the ranks of collectives in blocks follow the same plan.
        host: where inputs of blocks may go; None if nowhere.
    """

    def __init__(
        self,
        lean: LeanPass,
        prices: Prices | None = None,
        *,
        may_chain: bool = True,
        is_shared: bool = False,
        host: HostTerms | None = None,
    ) -> None:
        self._host = host
        self._lean, self._prices, self._is_shared = lean, prices or Prices(), is_shared
        equalize_seconds(lean.calls)
        self._plain = choices_by_call(lean, self._prices, leaner=False, is_shared=is_shared)
        self._leaner: list[list[Choice]] | None = None
        self._chains = chains_of(lean.calls) if may_chain else [0] * len(lean.calls)

    def plan(self, limit_bytes: int, more_bytes: int, *, with_modes: bool = True) -> Planned:
        """Return the fastest plan within a limit; if none fits, the one that takes the least.

        Args:
            limit_bytes: that the plan may be predicted to take.
            more_bytes: that are live at the beginning beyond what was live at that of the lean pass.
            with_modes: whether storages of blocks may be kept, which needs a dispatch mode.
        """
        plain = [[c for c in choices if with_modes or not c.has_mode] for choices in self._plain]
        divisions = [[], *([hosted] for hosted in self._hosted())]
        found = self._fastest(plain, divisions, limit_bytes, more_bytes) or self._below(limit_bytes, more_bytes)
        if found.is_least:  # what takes as little in fewer seconds: an update, say, may take most, whatever is kept
            as_little = self._within(plain, [], found.predicted_bytes, more_bytes)
            as_little = as_little or self._below(found.predicted_bytes, more_bytes)
            found = replace(as_little, is_least=True)
        return found

    def everything_kept(self, more_bytes: int) -> Planned:
        """Return the plan that recomputes nothing, which predicts the peak of the bare loop."""
        chosen = [min(choices, key=lambda c: c.seconds) for choices in self._plain]
        return self._planned(chosen, [], more_bytes, bound_seconds=0.0, is_least=False)

    def as_seen(self, more_bytes: int) -> Planned:
        """Return the plan that the lean pass carried out, so that its prediction is what was measured."""
        rules = {call.block: NONE if call.is_kept else FULL for call in self._lean.calls}
        return self.of_rules(rules, more_bytes)

    def of_rules(self, rules: Mapping[str, Rule], more_bytes: int) -> Planned:
        """Return the plan that given rules make.

        Args:
            rules: name of a module -> rule; a block without one is recomputed.
            more_bytes: as for `plan`.

        Raises:
            InvalidOptionError: results that cannot be kept without others.
        """
        chosen = [choice_of_rules(call, rules, self._prices) for call in self._lean.calls]
        groups = list[Group | Hosted]()
        groups += [Hosted((number,)) for number, call in enumerate(self._lean.calls) if rules.get(call.block) == HOSTED]
        if groups and self._host is None:
            raise InvalidOptionError(
                "policy: inputs are on the host, which has no budget: give host_budget='64GiB', say"
            )
        for number, call in enumerate(self._lean.calls):
            rule = rules.get(call.block)
            if rule in CHAINS and number:
                is_next = bool(groups) and groups[-1].calls[-1] == number - 1 and isinstance(groups[-1], Group)
                first = groups.pop().calls[0] if is_next else number - 1
                groups.append(Group(range(first, number + 1), rule))
        return self._planned(chosen, groups, more_bytes, bound_seconds=0.0, is_least=False)

    def least(self, more_bytes: int) -> Planned:
        """Return the plan that takes the least."""
        return self._below(0, more_bytes)

    def _below(self, limit_bytes: int, more_bytes: int) -> Planned:
        """Return a plan that takes less than whole blocks that are checkpointed."""
        if self._leaner is None:
            self._leaner = choices_by_call(self._lean, self._prices, leaner=True, is_shared=self._is_shared)
        lengths = range(2, max(self._chains, default=0) + 2)
        chained, halved = ([groups_of_chains(self._chains, length, rule) for length in lengths] for rule in CHAINS)
        hosted = [[each] for each in self._hosted()]
        best = self._fastest(self._leaner, [[], *chained], limit_bytes, more_bytes)
        best = best or self._fastest(self._leaner, halved, limit_bytes, more_bytes)  # which only take longer
        other = self._fastest(self._leaner, hosted, limit_bytes, more_bytes)
        if best is not None or other is not None:
            return min(filter(None, (best, other)), key=_seconds_of)
        leanest = [self._leanest(groups, more_bytes) for groups in ([], *chained, *halved, *hosted)]
        return min(leanest, key=lambda planned: planned.predicted_bytes)

    def _fastest(
        self, choices: Sequence[Sequence[Choice]], divisions: Sequence[Division], limit_bytes: int, more_bytes: int
    ) -> Planned | None:
        """Return the fastest plan within a limit of several divisions of the calls into groups; None if none fits."""
        found = (self._within(choices, groups, limit_bytes, more_bytes) for groups in divisions)
        return min(filter(None, found), key=_seconds_of, default=None)

    def _leanest(self, groups: Division, more_bytes: int) -> Planned:
        assert self._leaner is not None
        allowed = self._allowed(self._leaner, groups)
        chosen = [min(choices, key=lambda c: (c.held_bytes, c.more_bytes, c.seconds)) for choices in allowed]
        return self._planned(chosen, groups, more_bytes, bound_seconds=0.0, is_least=True)

    def _within(
        self, choices: Sequence[Sequence[Choice]], groups: Division, limit_bytes: int, more_bytes: int
    ) -> Planned | None:
        allowed = self._allowed(choices, groups)
        found = solve(allowed, self._limits(groups, limit_bytes - more_bytes))
        if found is None:
            return None
        chosen = [options[index] for options, index in zip(allowed, found.chosen, strict=True)]
        again = self._seconds_of_inputs(groups)
        planned = self._planned(chosen, groups, more_bytes, bound_seconds=found.bound_seconds + again, is_least=False)
        return planned if planned.predicted_bytes <= limit_bytes else None

    def _allowed(self, choices: Sequence[Sequence[Choice]], groups: Division) -> list[list[Choice]]:
        """Return the choices that groups leave: calls in them are whole checkpoints, even where that frees nothing."""
        allowed = [list(options) for options in choices]
        for number in (number for group in groups for number in group.calls):
            call = self._lean.calls[number]
            whole = [choice for choice in allowed[number] if choice.rules.get(call.block) == FULL]
            allowed[number] = whole or [full_choice(call, self._prices)]
        return allowed

    def _limits(self, groups: Division, free_bytes: int) -> Moments:
        count = len(self._lean.calls)
        after, within, forward = ([_UNBOUNDED_BYTES] * count for _ in range(3))
        for moment in self._lean.moments:
            left = free_bytes - moment.peak_bytes + self._relief(groups, moment)
            if moment.forward is not None:
                forward[moment.forward] = min(forward[moment.forward], left)
            elif moment.own is not None and moment.last < moment.own:
                within[moment.own] = min(within[moment.own], left)
            elif moment.last >= 0:
                after[moment.last] = min(after[moment.last], left)
        return Moments(after=after, within=within, forward=forward)

    def _relief(self, groups: Division, moment: MomentSeen) -> int:
        """Return the bytes of inputs that are not there at a moment since they are recomputed later."""
        return sum(
            self._lean.calls[call].input_bytes for group in groups for call in group.absent(moment.own, moment.last)
        )

    def _seconds_of_inputs(self, groups: Division) -> float:
        """Return the seconds of computing inputs again, and of copies that take longer than what runs beside them."""
        runs = (pair for group in groups for pair in group.runs.items())
        seconds = sum(self._forward_seconds(call) * count for call, count in runs)
        copied = [call for group in groups if isinstance(group, Hosted) for call in group.calls]
        return seconds + sum(self._seconds_of_copy(call) for call in copied)

    def _seconds_of_copy(self, call: int) -> float:
        assert self._host is not None
        beside = _PASSES * self._forward_seconds(call)
        return self._prices.checkpoint + max(0.0, self._host.seconds(self._lean.calls[call].input_bytes) - beside)

    def _hosted(self) -> list[Hosted]:
        """Return the first calls whose inputs may go to the host: as many as there is room for, half as many, ..."""
        if self._host is None:
            return []
        calls, left_bytes = list[int](), self._host.budget_bytes
        for number, call in enumerate(self._lean.calls):
            left_bytes -= self._host.aligned_bytes(call.input_bytes)
            if left_bytes < 0:
                break
            if self._may_have_rule(number) and call.input_bytes >= _LEAST_HOSTED_BYTES:
                calls.append(number)
        counts = sorted({len(calls) >> halving for halving in range(len(calls).bit_length())}, reverse=True)
        return [Hosted(tuple(calls[:count])) for count in counts]

    def _may_have_rule(self, number: int) -> bool:
        call = self._lean.calls[number]
        is_alone = sum(other.block == call.block for other in self._lean.calls) == 1
        return call.follows and is_alone and not call.must_stay and not call.has_collectives

    def _planned(
        self,
        chosen: Sequence[Choice],
        groups: Division,
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
                (moment.peak_bytes + _beyond_lean(moment, chosen, held) - self._relief(groups, moment), moment)
                for moment in self._lean.moments
            ),
            key=lambda pair: pair[0],
        )
        rules = {name: rule for choice in chosen for name, rule in choice.rules.items()}
        rules |= {self._lean.calls[call].block: group.rule for group in groups for call in group.ruled}
        again = self._seconds_of_inputs(groups)
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
            start_bytes=self._lean.start_bytes + more_bytes,
            kept_bytes=_beyond_lean(moment, chosen, held),
            inputs_bytes=sum(call.input_bytes for call in self._lean.calls[: _last(moment) + 1])
            - self._relief(groups, moment),
        )

    def _place_of(self, moment: MomentSeen) -> str:
        if moment.own is not None:
            return f"the backward pass of {self._lean.calls[moment.own].block}"
        if moment.forward is not None:
            return f"the forward pass of {self._lean.calls[moment.forward].block}"
        if moment.last >= 0:
            return f"the forward pass from {self._lean.calls[moment.last].block} on"
        if not self._lean.calls:
            return "the model, none of whose blocks was called where it can be recomputed"
        is_begin = moment == self._lean.moments[0]
        return "what comes before the first block" if is_begin else _AFTER

    def _forward_seconds(self, call: int) -> float:
        return sum(op.seconds for op in self._lean.calls[call].ops)


_AFTER = (
    "what follows backward, such as the optimizer's update, or a backward pass through it (create_graph=True), which "
    "holds what was recomputed"
)


def _seconds_of(planned: Planned) -> float:
    return planned.seconds


def _last(moment: MomentSeen) -> int:
    """Return the last call whose input is live."""
    return moment.last if moment.own is None else moment.own


def _beyond_lean(moment: MomentSeen, chosen: Sequence[Choice], held: Sequence[int]) -> int:
    """Return the bytes of a moment beyond what it took in the lean pass.

    Args:
        moment: of the pass.
        chosen: for each call.
        held: by the number of calls, what the first ones hold together.
    """
    if moment.forward is not None:
        return held[moment.forward] + chosen[moment.forward].forward_bytes
    is_in_order = moment.own is not None and moment.last < moment.own  # else the block is called again, and holds it
    return held[moment.last + 1] + (chosen[moment.own].more_bytes if moment.own is not None and is_in_order else 0)
