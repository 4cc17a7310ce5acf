"""Ranks whose blocks run collectives together: what is kept of such a block must be the same on all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch.distributed as dist

from memfit.checkpointing.passes import Pass, Ruling, Spot
from memfit.checkpointing.plans import Plans
from memfit.checkpointing.reached import OR_EAGER_MODE
from memfit.checkpointing.shapes import Shape
from memfit.errors import UnsupportedStepError
from memfit.memory.contract import Contract, Usage, WindowKind
from memfit.step.agreement import agreement_of
from memfit.torch_private.ranks import groups_talked_to, has_ranks

_WHAT = "agreeing on a policy of memfit.checkpoint"
_SHARES_IN_ONE = 1_000_000  # a share of the budget is agreed on as an integer


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A window that is to be judged.

    Attributes:
        shape: of its pass.
        usage: of it.
        predicted_bytes: what its plan was predicted to take.
    """

    shape: Shape
    usage: Usage
    predicted_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What all ranks take a window for that begins.

    Attributes:
        numel: elements of the batch.
        kind: of the window.
        form: what needs a gradient in it.
        now_bytes: that are live.
        may_wait: whether plans may wait for an optimizer's first step.
        judged: the window before; None if it is not to be judged.
    """

    numel: int
    kind: WindowKind
    form: int
    now_bytes: int
    may_wait: bool
    judged: Judged | None = None


class FirstTalks:
    """The first collectives of each block: the ranks compare there what they recompute of it, by these groups.

    A block may begin to run collectives when the ranks have made plans of their own, and one of them may hold several
    models by one plan that another one holds apart. Ranks with the same blocks share a policy from the next pass on;
    others compute blocks with collectives again from then on.

    Args:
        plans: of this rank.

    Attributes:
        groups: process groups of the collectives so far.
        are_alike: whether all ranks hold the same blocks; None until that was compared.
    """

    def __init__(self, plans: Plans) -> None:
        self._plans = plans
        self._new, self._known = set[str](), set[str]()  # blocks with collectives, of this window and of earlier ones
        self._gathers = defaultdict[str, set[Any]](set)
        self.groups: list[Any] = []
        self.are_alike: bool | None = None

    def end_of_window(self) -> None:
        """Note that plans know the blocks that were compared in the window."""
        self._known |= self._new
        self._new.clear()

    @contextmanager
    def looking(self, spot: Spot, present: Pass, ruling: Ruling | None) -> Iterator[None]:
        """Look for collectives in a call of a block.

        Args:
            spot: the block.
            present: the pass.
            ruling: of the call.

        Raises:
            UnsupportedStepError: the ranks would not recompute the same; on all of them.
        """
        if spot.name in self._known or not has_ranks():
            yield
            return
        gathers = self._gathers[spot.name]  # a block that is compiled by itself gathers its parameters inside
        with groups_talked_to(self._plans.device, gathers) as groups:
            yield
        if not groups:
            return
        self._new.add(spot.name)
        self.groups += [group for group in groups if group not in self.groups]
        self._plans.has_collectives = True
        digests = *_digests(self._plans.blocks), *_digests(present.form(spot, ruling))
        *of_blocks, most, least = _most(groups, digests)
        self.are_alike = sum(of_blocks) == 0
        if most + least != 0:
            raise UnsupportedStepError(
                f"block {spot.name!r} runs collectives for the first time since the ranks have made plans of their "
                "own, which differ, so that they would wait for each other in backward: call memfit.checkpoint where "
                f"these collectives begin (close() of the handle ends the one before){OR_EAGER_MODE}"
            )


class SharedPolicy:
    """One policy of several ranks, by the maximum of what each of them has seen.

    Args:
        groups: the process groups of the collectives, in the order in which they were first seen.
        plans: of this rank.
        contract: the budget of this rank; None with a given policy.

    Attributes:
        judged: a window that ended, and is judged when the next one begins.
        shift_bytes: added to levels of bytes that are agreed on, for what other ranks' budgets have more.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], plans: Plans, contract: Contract | None) -> None:
        self._groups, self._plans, self._contract = tuple(groups), plans, contract
        self._is_budget_agreed = contract is None
        self.judged: Judged | None = None
        self.shift_bytes = 0

    def agree(self, own: Agreed) -> Agreed | None:
        """Agree on a window that begins, on the one that ended, and on all else that decides about plans.

        Args:
            own: what this rank takes it for.

        Returns:
            What was agreed on; None if the ranks cannot follow one policy, which is so on all of them.

        Raises:
            RankError: a rank does not answer.
        """
        last, self.judged = self.judged, None
        usage = Usage(taken_bytes=0, live_bytes=0) if last is None else last.usage
        predicted_bytes = 0 if last is None else last.predicted_bytes
        rules = last.shape.planned.rules if last is not None and last.shape.planned is not None else {}
        levels = [level + self.shift_bytes for level in (own.now_bytes, usage.taken_bytes, usage.live_bytes)]
        digest = _digests(sorted(map(str, rules.items())))
        first = [own.numel, own.kind is WindowKind.LATER, own.form, not own.may_wait]
        given = [*first, *levels, usage.taken_bytes - predicted_bytes, *digest]
        numel, is_later, form, plans_now, now_bytes, taken_bytes, live_bytes, error_bytes, *digest = self._most(given)
        if sum(digest) != 0 or not self._share():
            return None
        if last is not None:
            usage = Usage(taken_bytes=taken_bytes, live_bytes=live_bytes, kind=usage.kind)
            last = Judged(shape=last.shape, usage=usage, predicted_bytes=taken_bytes - error_bytes)
        kind = WindowKind.LATER if is_later else WindowKind.FIRST
        may_wait = not plans_now
        return Agreed(numel=numel, kind=kind, form=form, now_bytes=now_bytes, may_wait=may_wait, judged=last)

    def _share(self) -> bool:
        """Let lean passes and the budget be those of all ranks; return whether they can be."""
        plans, contract = self._plans, self._contract
        if contract is not None and not self._is_budget_agreed:
            own_bytes = 0 if contract.is_share else contract.budget_bytes
            if not self._is_same((contract.share_text, plans.host_budget_bytes)):
                return False
            (most_bytes,) = self._most([own_bytes])
            self.shift_bytes = most_bytes - own_bytes
            if not contract.is_share:
                plans.contract = contract.of_budget(most_bytes)
            self._is_budget_agreed = True
        for shape in plans.shapes.values():
            if shape.lean is None or shape.is_shared:
                continue
            if not self._is_same(shape.lean.form):
                return False
            shape.lean.put(self._most(shape.lean.values(self.shift_bytes)))
            (share,) = self._most([int(shape.unused_share * _SHARES_IN_ONE)])
            plans.share(shape, share / _SHARES_IN_ONE)
        return True

    def _most(self, values: Sequence[int]) -> list[int]:
        return _most(self._groups, values)

    def _is_same(self, thing: object) -> bool:
        """Return whether a thing is the same on all ranks, by the digest of its `repr`; all of them call it."""
        return sum(self._most(_digests(thing))) == 0


def _most(groups: Sequence[Any], values: Sequence[int]) -> list[int]:
    """Return the maximum of each value over all ranks; all of them call it.

    Groups that are the rows and the columns of a mesh talk one after the other, which covers the mesh.
    """
    for group in groups:
        values = [max(given) for given in zip(*agreement_of(group).numbers(_WHAT, *values), strict=True)]
    return list(values)


def _digests(thing: object) -> tuple[int, int]:
    """Return a digest of a thing's `repr`, and the same negative: the maxima add up to zero if no rank differs."""
    digest = int.from_bytes(sha256(repr(thing).encode()).digest()[:7], "little")
    return digest, -digest
