"""Real tensors in the place of gathered parameters, for an eager run whose values do not matter.

No rank waits for another in such a run: each repeats its own part in the place of the others'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from memfit.capture.across import Across
from memfit.capture.fully_sharded import FullySharded
from memfit.torch_private.sharding import GroupFacts, ShardedFacts, groups_shown, whole_part
from memfit.torch_private.tensors import real_tensors


@contextmanager
def stand_ins_shown(across: Across | None, made: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Let modules find stand-ins inside the block, where `fully_shard` would show gathered parameters.

    A module's stand-ins have memory while `fully_shard` would keep its parameters gathered.

    Args:
        across: the ranks of a step; without a sharded model there is nothing to do.
        made: called with each stand-in.
    """
    if not isinstance(across, FullySharded):
        yield
        return
    made_for: dict[torch.Tensor, torch.Tensor] = {}
    size = across.size

    def show(facts: GroupFacts) -> None:
        for each in facts.parameters:
            if each.parameter not in made_for:
                made_for[each.parameter] = _stand_in(each, size)
                made(made_for[each.parameter])
            _fill(made_for[each.parameter], each, size)
            each.show(made_for[each.parameter])

    def hide(facts: GroupFacts) -> None:
        for each in facts.parameters:
            each.show(each.parameter)
            made_for[each.parameter].untyped_storage().resize_(0)

    with groups_shown([group.facts for group in across.groups], show, hide):
        yield


def _stand_in(each: ShardedFacts, size: int) -> torch.Tensor:
    with real_tensors():
        return each.gathered(size).requires_grad_(each.parameter.requires_grad)


def _fill(stand_in: torch.Tensor, each: ShardedFacts, size: int) -> None:
    with real_tensors():
        part = whole_part(each.parameter)
        stand_in.untyped_storage().resize_(size * part.numel() * stand_in.element_size())
        stand_in.detach().as_strided((size, part.numel()), (part.numel(), 1), 0).copy_(part.expand(size, -1))
