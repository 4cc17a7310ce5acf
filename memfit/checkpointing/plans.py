"""The plans of a loop: one for each size and kind of pass, made from its lean pass, renewed by what windows show."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from memfit.checkpointing.choices import NONE
from memfit.checkpointing.compiled_calls import CompiledCalls
from memfit.checkpointing.passes import Pass, rulings_of
from memfit.checkpointing.planning import Planned, Planner
from memfit.checkpointing.policy import Policy, rules_for
from memfit.checkpointing.recording import LeanRecorder
from memfit.checkpointing.seen import LeanPass
from memfit.checkpointing.shapes import Race, Shape, bucket_of
from memfit.memory.contract import MOST_PLANS, WINDOWS_BEFORE_LARGER, Contract, Standing, Usage, WindowKind
from memfit.memory.host.room import Host
from memfit.system.recorder import empty_cache, page_bytes
from memfit.torch_private.ranks import has_ranks

_MOST_LEAN_PASSES = 8  # of one shape
_MOST_FORMS = 16  # of passes of one size and kind
_LEAST_UNUSED_SHARE = 1 / 8  # of the budget, in pages: a plan leaves more gaps than a lean pass
_HOPELESS = 2.0  # a plan that is predicted to take so many times the seconds is not tried
_RIVALS_SLACK = 7  # what no window has shown leaves 1/2**7
_COMPILERS_SLACK = 4  # 1/2**4 of the budget is left to what the compiler keeps more than eager mode
_SLACK, _RANKS_SLACK = 9, 6  # a plan leaves 1/2**9 of the budget to what grows between steps, or threads free late


class Plans:
    """The plans of a loop.

    Args:
        contract: the budget; None with a given policy.
        given: a policy in the place of plans.
        compiled: the model's compiled calls.
        device: of the model.
        may_chain: whether inputs of blocks may be recomputed.
        blocks: names.
        host: where inputs of blocks may go; None if nowhere.

    Attributes:
        blocks: names of the present blocks.
        device: of the model.
        shapes: what is known, by size and kind of pass.
        steered: names of modules that a plan was made for.
        has_transforms: whether transformations of torch.func have called blocks, which they do not let recompute.
        has_collectives: whether blocks have run collectives.
    """

    def __init__(
        self,
        contract: Contract | None,
        given: Policy | None,
        compiled: CompiledCalls,
        device: torch.device,
        *,
        may_chain: bool,
        blocks: Sequence[str],
        host: Host | None = None,
    ) -> None:
        self._host, self.blocks = host, tuple(blocks)
        self._called: set[str] = set()  # of the blocks, in any pass so far
        self.contract, self.given = contract, given
        self._compiled, self.device, self._may_chain = compiled, device, may_chain
        self._is_shared = self.has_transforms = self.has_collectives = False
        self.shapes: dict[tuple[int, WindowKind, int], Shape] = {}
        self.steered: set[str] = set()

    @property
    def host_budget_bytes(self) -> int:
        """What inputs of blocks may take on the host."""
        return 0 if self._host is None else self._host.budget_bytes

    @property
    def has_any(self) -> bool:
        """Whether a plan was made."""
        return any(shape.planned is not None for shape in self.shapes.values())

    def least_bytes(self) -> int:
        """Return what a pass takes at least, with the optimizer's state, if all that were measured are like it.

        Returns:
            0 where passes differ, or one was planned.
        """
        if self.has_any or len({(size, form) for size, _, form in self.shapes}) != 1:
            return 0
        least = [
            shape.planner.plan(0, shape.lean.created_bytes).predicted_bytes
            for shape in self.shapes.values()
            if shape.planner is not None and shape.lean is not None
        ]
        return max(least, default=0)

    def shape_of(self, numel: int, kind: WindowKind, form: int) -> Shape:
        """Return what is known of passes of a size, kind and form: nothing, if none was as large.

        Args:
            numel: elements of the batch.
            kind: of the window.
            form: what needs a gradient: see `Updates.form`. A loop that freezes at random has too many to know each.
        """
        key = bucket_of(numel), kind, form
        if key not in self.shapes and sum(each[:2] == key[:2] for each in self.shapes) >= _MOST_FORMS:
            key = *key[:2], 0
        found = self.shapes.get(key)
        if found is None or numel > found.numel:
            found = self.shapes[key] = Shape(numel=numel, kind=kind, form=key[2])
        return found

    def of_rest_again(self, rest: Sequence[str], shape: Shape) -> list[str]:
        """Return the modules beside the blocks that a given policy recomputes; none if no policy was given.

        Args:
            rest: names of the modules beside the blocks, which may be checkpoints too.
            shape: of the pass; the rules are those for its size and kind.
        """
        if self.given is None:
            return []
        rules = rules_for(self.given, shape.numel, shape.kind)
        return [name for name in rest if rules.get(name, NONE) != NONE]

    def forget(self, blocks: Sequence[str]) -> None:
        """Forget all shapes: the model has other blocks.

        Args:
            blocks: their names.
        """
        self.blocks = tuple(blocks)
        self._called.clear()
        self.shapes.clear()

    def compare(self, shape: Shape, ended: Pass) -> None:
        """Want another lean pass of a shape whose plans are made from one that had less than the pass that ended.

        Data may choose what is called, and a pipeline tries its stages with one micro-batch.

        Args:
            shape: of the pass.
            ended: the pass.
        """
        self._called.update(ended.calls)
        self.has_transforms |= ended.has_transforms
        if shape.lean is None:
            return
        if ended.given_bytes > shape.lean.given_bytes and shape.lean_passes < _MOST_LEAN_PASSES:
            shape.wants_lean = True

    def learn(self, shape: Shape, recorder: LeanRecorder, lean: LeanPass, usage: Usage) -> None:
        """Take in a lean pass, unless another one had more.

        Args:
            shape: of the pass.
            recorder: of it.
            lean: what it recorded.
            usage: of its window.
        """
        shape.lean_passes += 1
        shape.wants_lean = False
        if shape.lean is not None and shape.lean.given_bytes >= lean.given_bytes:
            return
        if shape.planned is not None:
            new = Shape(numel=shape.numel, kind=shape.kind, form=shape.form, lean_passes=shape.lean_passes)
            self.shapes[bucket_of(shape.numel), shape.kind, shape.form] = shape = new
        least_share = _LEAST_UNUSED_SHARE if page_bytes(self.device) else 0.0
        shape.unused_share = max(least_share, 1 - usage.live_bytes / max(1, usage.taken_bytes))
        if recorder.is_complete:
            shape.lean, shape.overloads = lean, recorder.overloads
            shape.planner = Planner(lean, may_chain=self._may_chain, host=self._host)

    def share(self, shape: Shape, unused_share: float) -> None:
        """Make plans of a shape from a lean pass that holds the most that any rank has seen in it.

        Args:
            shape: whose lean pass it is.
            unused_share: the most of any rank.
        """
        assert shape.lean is not None
        self._is_shared, shape.is_shared = True, True
        shape.unused_share = unused_share
        shape.planner = Planner(shape.lean, may_chain=self._may_chain, is_shared=True, host=self._host)

    def stop_sharing(self, contract: Contract | None) -> None:
        """Compute all blocks that run collectives again from now on: their ranks cannot agree on plans.

        Args:
            contract: the budget of this rank.
        """
        self._is_shared, self.contract = False, contract
        self.shapes.clear()

    # -- renewal

    def renew(self, shape: Shape, now_bytes: int) -> None:
        """Make the plan of a pass that begins, if there is none or a new one is due.

        Args:
            shape: of the pass.
            now_bytes: that are live.
        """
        planner, lean, contract = shape.planner, shape.lean, self.contract
        assert planner is not None and lean is not None
        more_bytes = now_bytes - lean.start_bytes
        if self.given is not None:
            if shape.planned is None:
                rules = rules_for(self.given, shape.numel, shape.kind)
                self._take(shape, planner.of_rules(rules, more_bytes))
            return
        assert contract is not None
        if not contract.is_resolved:
            contract.resolve(max(planner.everything_kept(more_bytes).predicted_bytes, lean.undivided_bytes))
        shape.standing.expected_error_bytes = int(contract.budget_bytes * shape.unused_share)
        aim_bytes = contract.aim_bytes(shape.standing) if shape.aim_bytes is None else shape.aim_bytes
        rival, shape.next_plan = shape.next_plan, None
        if rival is not None and rival.predicted_bytes + more_bytes - rival.more_bytes <= aim_bytes:
            self._take(shape, rival)
            return
        if rival is not None and shape.race is not None:
            shape.race.is_over = True  # the other plan has no room any more
        grown = now_bytes - shape.start_bytes
        has_grown = shape.planned is not None and shape.planned.predicted_bytes + grown > aim_bytes and grown > 0
        if not shape.wants_plan and (not has_grown or shape.standing.is_least):
            return
        limit_bytes = aim_bytes - (contract.budget_bytes >> (_RANKS_SLACK if has_ranks() else _SLACK))
        uncalled_bytes = self._uncalled_bytes(lean, self._called if shape.standing.plans else self.blocks)
        limit_bytes -= uncalled_bytes
        with_modes = shape.race is None or not shape.race.is_over or shape.planned_has_mode
        planned = planner.plan(limit_bytes, more_bytes, with_modes=with_modes and not self._is_shared)
        if planned.is_least and uncalled_bytes:  # what it keeps takes no more in this pass alone
            planned = planner.least(more_bytes)
        seen = planner.as_seen(more_bytes)
        if seen.predicted_bytes <= aim_bytes and seen.seconds < planned.seconds:  # it needs no slack
            planned = seen
        is_held = shape.standing.worst_bytes <= contract.budget_bytes
        if shape.planned is not None and planned.rules == shape.planned.rules and is_held:  # it is the largest
            shape.wants_plan, shape.aim_bytes, shape.standing.plans = False, None, MOST_PLANS
            return
        self._take(shape, planned)
        if self._compiled.compilations and not self._compiled.is_new:
            self._compiled.note_compilation()

    def _uncalled_bytes(self, lean: LeanPass, blocks: Collection[str]) -> int:
        """Return what blocks take that data may choose, and did not in a lean pass: they are recomputed.

        That is their inputs, and all of one of them, while other blocks are kept.
        """
        uncalled = len(set(blocks) - {call.block for call in lean.calls})
        if not uncalled or not lean.calls:
            return 0
        most_bytes = max(sum(storage.size_bytes for storage in call.storages) for call in lean.calls)
        return uncalled * max(call.given_bytes for call in lean.calls) + most_bytes

    def _take(self, shape: Shape, planned: Planned) -> None:
        assert shape.lean is not None
        shape.planned, shape.start_bytes = planned, shape.lean.start_bytes + planned.more_bytes
        shape.wants_plan, shape.aim_bytes, shape.next_plan = False, None, None
        shape.rulings = rulings_of(planned.rules, shape.lean.calls, shape.overloads)
        self.steered |= shape.rulings.keys()
        shape.standing.replace_plan(is_least=planned.is_least, is_most=planned.is_most)
        if self.device.type == "cuda":  # memory in pieces that fitted the last plan would be held beside this one's
            empty_cache(self.device)

    def has_settled(self, shape: Shape) -> bool:
        """Return whether the present plan has held for some windows."""
        standing, contract = shape.standing, self.contract
        is_held = standing.is_least or contract is None or standing.worst_bytes <= contract.budget_bytes
        return standing.windows >= WINDOWS_BEFORE_LARGER and is_held

    def leave_to_compiler(self, shape: Shape) -> None:
        """Want a plan that leaves the compiler what it keeps more than eager mode."""
        before, contract = shape.standing, self.contract
        assert contract is not None
        shape.wants_plan = not before.is_least
        shape.aim_bytes = contract.budget_bytes - (contract.budget_bytes >> _COMPILERS_SLACK)
        shape.standing = Standing(is_least=before.is_least, is_most=before.is_most, plans=1)

    def wants_race(self, shape: Shape) -> bool:
        """Return whether the present pass is to be timed."""
        if self._compiled or self._is_shared:  # a compiler takes the mode's decisions into its graph
            return False
        return shape.race is not None or shape.planned_has_mode

    def race(self, shape: Shape, seconds: float) -> None:
        """Measure the present plan, if a dispatch mode is on in it, against the best one without.

        Args:
            shape: of the pass.
            seconds: that it took.
        """
        planner, planned, contract = shape.planner, shape.planned, self.contract
        if planner is None or planned is None or contract is None:
            return
        if shape.race is None:
            limit_bytes = min(contract.aim_bytes(shape.standing), contract.budget_bytes)
            limit_bytes -= max(contract.margin_bytes, contract.budget_bytes >> _RIVALS_SLACK)
            rival = planner.plan(limit_bytes, planned.more_bytes, with_modes=False)
            shape.race = Race((planned, rival))
            shape.race.is_over = rival.is_least or rival.seconds > _HOPELESS * planned.seconds
        if not shape.race.is_over:
            shape.next_plan = shape.race.note(seconds)
