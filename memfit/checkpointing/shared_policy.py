"""Ranks whose blocks run collectives together: what is kept of such a block must be the same on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch.distributed as dist

from memfit.checkpointing.plans import Plans
from memfit.checkpointing.shapes import Shape
from memfit.memory.contract import Contract, Usage, WindowKind
from memfit.step.agreement import agreement_of

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
        now_bytes: that are live.
        judged: the window before; None if it is not to be judged.
    """

    numel: int
    kind: WindowKind
    now_bytes: int
    judged: Judged | None = None


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

    def agree(self, numel: int, kind: WindowKind, now_bytes: int) -> Agreed | None:
        """Agree on a window that begins, on the one that ended, and on all else that decides about plans.

        Args:
            numel: elements of this rank's batch.
            kind: of this rank's window.
            now_bytes: that are live on this rank.

        Returns:
            What was agreed on; None if the ranks cannot follow one policy, which is so on all of them.

        Raises:
            RankError: a rank does not answer.
        """
        last, self.judged = self.judged, None
        usage = Usage(taken_bytes=0, live_bytes=0) if last is None else last.usage
        predicted_bytes = 0 if last is None else last.predicted_bytes
        rules = last.shape.planned.rules if last is not None and last.shape.planned is not None else {}
        levels = [level + self.shift_bytes for level in (now_bytes, usage.taken_bytes, usage.live_bytes)]
        is_later = kind is WindowKind.LATER
        digest = _digests(sorted(map(str, rules.items())))
        own = [numel, is_later, *levels, usage.taken_bytes - predicted_bytes, *digest]
        numel, is_later, now_bytes, taken_bytes, live_bytes, error_bytes, *digest = self._most(own)
        if sum(digest) != 0 or not self._share():
            return None
        if last is not None:
            usage = Usage(taken_bytes=taken_bytes, live_bytes=live_bytes, kind=usage.kind)
            last = Judged(shape=last.shape, usage=usage, predicted_bytes=taken_bytes - error_bytes)
        kind = WindowKind.LATER if is_later else WindowKind.FIRST
        return Agreed(numel=numel, kind=kind, now_bytes=now_bytes, judged=last)

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
        """Return the maximum of each value over all ranks; all of them call it.

        Groups that are the rows and the columns of a mesh talk one after the other, which covers the mesh.
        """
        for group in self._groups:
            values = [max(given) for given in zip(*agreement_of(group).numbers(_WHAT, *values), strict=True)]
        return list(values)

    def _is_same(self, thing: object) -> bool:
        """Return whether a thing is the same on all ranks, by the digest of its `repr`; all of them call it."""
        return sum(self._most(_digests(thing))) == 0


def _digests(thing: object) -> tuple[int, int]:
    """Return a digest of a thing's `repr`, and the same negative: the maxima add up to zero if no rank differs."""
    digest = int.from_bytes(sha256(repr(thing).encode()).digest()[:7], "little")
    return digest, -digest
