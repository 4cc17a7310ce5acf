"""Parts: compiled blocks of a model whose other code runs in eager, or under FSDP2; they share one budget.

The calls of a step are identified by their order, so that equal blocks, which are one graph, may have different plans.
In the first steps each call keeps its inputs alone, and is recomputed. What the budget then leaves is given to
calls from the last one on, whose backward passes are the first: to keep all, or half of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from memfit.capture.joint import JointCapture
from memfit.dynamo.account import Account
from memfit.dynamo.compiled_graph import CompiledGraph
from memfit.dynamo.outside import HEADROOM, Outside, taken_by
from memfit.errors import InvalidOptionError, NoPlanError
from memfit.graph import Graph
from memfit.papers.planners.mirror import Mirror, MirrorPlan
from memfit.planners.registry import MIRROR_OPTION
from memfit.planning import Settings
from memfit.step.prepare import Prepared

if TYPE_CHECKING:
    from memfit.dynamo.backend import PlannedGraph

_LEAST, _HALF, _MOST = range(3)  # what a call keeps for its backward pass
_MOST_WITHOUT_UPDATES = 16  # steps

_updates = 0  # of any optimizer


def are_of_part(inputs: Sequence[Any]) -> bool:
    """Return whether other code comes before a graph in the same step: it was given what that has computed."""
    return any(isinstance(each, torch.Tensor) and each.grad_fn is not None for each in inputs)


class Part(CompiledGraph):
    """A part at concrete sizes, planned to keep something.

    Args:
        graph: where it is from.
        inputs: of the graph.
        known: the plans that keep the least and the most; none when these are made.
        is_most: whether it keeps the most, where nothing is known.

    Attributes:
        kept_bytes: between its halves.
    """

    def __init__(
        self, graph: PlannedGraph, inputs: Sequence[Any], known: Sequence[Part] = (), *, is_most: bool = False
    ) -> None:
        self._known, self._is_most = known, is_most
        self._computes_all = not known and not is_most
        super().__init__(graph, inputs, None)
        self._known = ()
        self.kept_bytes = 0
        if self.plan is not None:
            self.kept_bytes = taken_by(self.plan).between_bytes

    def _left_bytes(self, graph: Graph) -> int:
        left_bytes = super()._left_bytes(graph)
        self.outside, self._is_outside_estimated = Outside(between_bytes=0, held_bytes=0), not self._computes_all
        if self._known:
            return max(self._least_bytes, sum(each.kept_bytes for each in self._known) // 2)
        return 2 * graph.all_bytes if self._is_most else left_bytes

    def prepare(self, capture: JointCapture) -> Prepared:
        """Plan to compute all again; where that takes too much at once, or nothing can be, the graph is no part."""
        if self._computes_all:
            with suppress(NoPlanError, InvalidOptionError):
                return super().prepare(capture)
            self._computes_all, self.graph.sharing = False, None
        return super().prepare(capture)

    def settings(self, graph: Graph) -> Settings:
        """Return how the graph is planned."""
        settings = super().settings(graph)
        if self._computes_all:
            return replace(settings, planner=MirrorPlan.name, options={MIRROR_OPTION: Mirror(where="", count=1)})
        return settings

    def should_plan_again(self) -> bool:
        """Return whether the graph is no part any more; the step as a whole says what its parts may keep."""
        return self.graph.sharing is None


@dataclass(slots=True, kw_only=True)
class _Steps:
    """Steps that begin with the same graph at the same sizes.

    Attributes:
        calls: of a step, in order.
        levels: of these calls.
        most_bytes: that one of these steps took since the levels were looked at.
        ran: how many there were since then.
        updates: of optimizers until then.
        are_known: whether levels were looked at.
        is_over: whether some were lowered.
    """

    calls: list[Levels] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    most_bytes: int = 0
    updates: int = field(default_factory=lambda: _updates)
    ran: int = 0
    are_known: bool = False
    is_over: bool = False


class Levels:
    """The plans of a graph at some sizes, from the one that keeps the least.

    Args:
        graph: of which they are.

    Attributes:
        parts: the plans.
        steps: that begin with it.
    """

    def __init__(self, graph: PlannedGraph) -> None:
        self._graph = graph
        self.parts: list[Part] = []
        self.steps = _Steps()

    def make(self, inputs: Sequence[Any], *, are_all: bool) -> None:
        """Make the first plan, or all, unless they are there.

        Args:
            inputs: of the call.
            are_all: whether to make all plans, and not the leanest alone.
        """
        if not self.parts:
            self.parts = [self._made(inputs)]
        (least, *others) = self.parts
        if are_all and not others and least.plan is not None:
            most = self._made(inputs, is_most=True)
            self.parts = [least, self._made(inputs, (least, most)), most]

    def _made(self, inputs: Sequence[Any], known: Sequence[Part] = (), *, is_most: bool = False) -> Part:
        with self._graph.account.compiling():
            return self._graph.compile(partial(Part, self._graph, inputs, known, is_most=is_most))

    def leave(self) -> None:
        """Let the graph be planned by itself from now on, for exactly what is left: no other part shares it."""
        self._graph.sharing = None

    def more_bytes(self, level: int, than: int) -> int:
        """Return by how much more a level keeps than another one; 0 where there is no such plan.

        Args:
            level, than: numbers of plans; 0 keeps the least.
        """
        has_all = len(self.parts) > max(level, than)
        return self.parts[level].kept_bytes - self.parts[than].kept_bytes if has_all else 0


class Sharing:
    """Chooses the plan of each call of a step.

    Args:
        budget_bytes: of the parts, for everything on their device.
        device: theirs.
        budget_is: `firm` or `soft`.

    Attributes:
        account: measures their steps.
    """

    def __init__(self, budget_bytes: int, device: torch.device, budget_is: str) -> None:
        self.account = Account(budget_bytes, device, budget_is)
        self._step = -1
        self._place = 0
        self._now = _Steps()
        self.account.ended = self._settle
        _count_updates()

    def part(self, levels: Levels, inputs: Sequence[Any]) -> Part:
        """Return what runs the next call of the present step.

        Args:
            levels: of the graph that is called, at its sizes.
            inputs: of the call.
        """
        if self._step != self.account.steps:
            self._step, self._place = self.account.steps, 0
            self._now = levels.steps
        now, place = self._now, self._place
        self._place += 1
        if now.calls[place : place + 1] != [levels]:
            del now.calls[place:], now.levels[place:]
            now.calls.append(levels)
            now.levels.append(_LEAST)
        levels.make(inputs, are_all=now.are_known)
        level = now.levels[place]
        more_bytes = levels.more_bytes(level, _LEAST)
        if more_bytes and self.account.live_bytes + more_bytes > self.account.budget_bytes:  # it was other code's
            level = _LEAST
        return levels.parts[level]

    def _settle(self, taken_bytes: int) -> None:
        """Give calls what was left since the optimizer's last update, or take it from them."""
        now = self._now
        if self._step != self.account.steps:
            return
        now.most_bytes = max(now.most_bytes, taken_bytes)
        now.ran += 1
        if now.updates == _updates and now.ran < _MOST_WITHOUT_UPDATES:
            return
        spare_bytes = int((1 - HEADROOM) * self.account.budget_bytes) - self.account.excess_bytes - now.most_bytes
        now.updates, now.ran, now.most_bytes = _updates, 0, 0
        del now.calls[self._place :], now.levels[self._place :]  # of another step: a forward pass alone came first
        if len(now.calls) == 1:
            now.calls[0].leave()
            return
        if spare_bytes < 0:
            now.is_over = True
            self._lower(-spare_bytes)
        elif now.are_known and not now.is_over:
            self._raise(spare_bytes)
        now.are_known = True

    def _raise(self, spare_bytes: int) -> None:
        for place, levels in reversed([*enumerate(self._now.calls)]):
            for level in range(_MOST, self._now.levels[place], -1):
                more_bytes = levels.more_bytes(level, self._now.levels[place])
                if 0 < more_bytes <= spare_bytes:
                    self._now.levels[place] = level
                    spare_bytes -= more_bytes
                    break

    def _lower(self, over_bytes: int) -> None:
        for place, levels in enumerate(self._now.calls):
            if over_bytes > 0:
                over_bytes -= levels.more_bytes(self._now.levels[place], _LEAST)
                self._now.levels[place] = _LEAST


@cache
def sharing_of(budget_bytes: int, device: torch.device, budget_is: str) -> Sharing:
    """Return the sharing of all parts that were given a budget, which is for everything on their device.

    Args:
        budget_bytes: for everything on the device.
        device: of the parts.
        budget_is: `firm` or `soft`.
    """
    return Sharing(budget_bytes, device, budget_is)


@cache
def _count_updates() -> None:
    def count(*_: Any) -> None:
        global _updates
        _updates += 1

    register_optimizer_step_post_hook(count)
